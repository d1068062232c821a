"""The norm with a gate, as a module with the parameter of FLA's, and how the layer calls what stands in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import norm_form
from ..norm import norm_gate
from .bypass import are_own, stands_for
from .plans import local


@stands_for("norm", "weight")
class RMSNormGated(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight * act(gate)`` over the last dimension: :func:`kda.norm_gate` with a weight.
    ``activation`` is ``"sigmoid"``, as in this layer, or ``"silu"`` (``"swish"``).

    >>> import torch
    >>> from kda.nn import RMSNormGated
    >>> RMSNormGated(2, eps=0.0)(torch.tensor([3.0, 3.0]), torch.zeros(2)).tolist()
    [0.5, 0.5]
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        activation: str = "sigmoid",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        norm_form(activation)  # refuses others
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor, *, mesh: Any = None) -> Tensor:
        y: Tensor = norm_gate(x, gate, local(self.weight, mesh, by_heads=False), self.eps, self.activation)
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"


def normed(norm: Any, mesh: Any, o: Tensor, gate: Tensor) -> Tensor:
    """Calls a layer's norm. Ranks that share the heads by a plan (``mesh``) use all its parameters for different heads,
    so their gradients are sums. A norm of another kind need not know that: it is called with parameters that do."""
    y: Tensor
    if mesh is None:
        y = norm(o, gate)
    elif are_own("norm", norm):
        y = norm(o, gate, mesh=mesh)
    else:
        parameters = {name: local(p, mesh, by_heads=False) for name, p in norm.named_parameters()}
        y = torch.func.functional_call(norm, parameters, (o, gate))
    return y

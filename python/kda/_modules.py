"""The small modules of the layer, with the parameters of FLA's: the short convolution, and the norm with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._recompute import check_first_run, old_state
from ._shards import own_part
from .convolution import causal_conv1d, causal_conv1d_update
from .norm import _form, norm_gate


def local(parameter: Any, mesh: Any = None, by_heads: bool = True) -> Tensor:
    """This rank's part of a parameter that tensor parallelism has distributed (see ``kda.tp``), or the parameter
    itself. Ranks use a replicated parameter for different heads: its gradient is the sum of theirs. With ``mesh``,
    its ranks share the heads, but all have the whole parameter. They use parts of it (``by_heads``), or all of it."""
    spread: Any = parameter
    if mesh is not None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        spread = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        if by_heads:
            return spread.redistribute(placements=[Shard(0)]).to_local()
    elif not hasattr(parameter, "to_local"):
        return spread
    part: Tensor = own_part(spread, [p.is_replicate() for p in spread.placements])
    return part


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    made_in: int = -1,
) -> Tensor:
    """:func:`kda.causal_conv1d` with the state held by the caller.

    Args:
        x, weight, bias, cu_seqlens: ``[B, T, D]``, ``[D, W]``, ``[D]``, ``[N + 1]``, as in :func:`kda.causal_conv1d`.
        state: ``[N, D, W - 1]``, the inputs before the first token, oldest first. It is overwritten with the last
            ``W - 1`` inputs, bit for bit, without gradients. If None, zeros are used and nothing is kept. Refused
            where backward runs a function again (``torch.utils.checkpoint``).
        initial_state: like ``state`` but never written, and with gradients; for calls without a state.
        made_in: the backward pass that made the state, see :class:`KDACache`.

    A width of 1, which remembers nothing, is accepted as well.
    """
    if state is not None:
        check_first_run("state", made_in)
        if initial_state is not None:
            raise ValueError("initial_state: expected None with a state, got a tensor")
    if weight.shape[1] == 1:
        return _pointwise(x, weight[:, 0], bias, cu_seqlens)
    if state is None:
        y: Tensor = causal_conv1d(x, weight, bias, initial_state, cu_seqlens=cu_seqlens)[0]
    elif torch.is_grad_enabled():  # backward reads the old state
        old = old_state(state, made_in)
        y, last = causal_conv1d(x, weight, bias, old, output_final_state=True, cu_seqlens=cu_seqlens)
        state.copy_(last.detach())
    else:
        y = causal_conv1d_update(x, state, weight, bias, cu_seqlens=cu_seqlens)
    return y


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) * weight.to(wide)
    y = F.silu(y if bias is None else y + bias.to(wide)).to(x.dtype)
    if cu_seqlens is None:
        return y
    return torch.where(torch.arange(x.shape[1], device=x.device)[:, None] < cu_seqlens[-1], y, 0)


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution and SiLU, with the parameters of FLA's: ``weight`` ``[D, 1, W]``, ``bias`` ``[D]``;
    ``W`` is 1 to 4.

    >>> import torch
    >>> from kda.nn import ShortConvolution
    >>> conv, x, state = ShortConvolution(8), torch.randn(2, 5, 8), torch.zeros(2, 8, 3)
    >>> y = conv(x, state)
    >>> list(y.shape), torch.equal(state, x[:, -3:].transpose(1, 2))
    ([2, 5, 8], True)
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if kernel_size not in (1, 2, 3, 4):
            raise ValueError(f"kernel_size: expected 1..4, got {kernel_size}")
        padding = kernel_size - 1
        super().__init__(
            hidden_size, hidden_size, kernel_size, 1, padding, 1, hidden_size, bias, device=device, dtype=dtype
        )

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        initial_state: Tensor | None = None,
        made_in: int = -1,
        mesh: Any = None,
    ) -> Tensor:
        """Arguments and result of :func:`causal_conv_silu`. With ``mesh``, x has the channels of this rank."""
        weight, bias = local(self.weight, mesh).squeeze(1), None if self.bias is None else local(self.bias, mesh)
        return causal_conv_silu(x, weight, bias, state, cu_seqlens, initial_state=initial_state, made_in=made_in)


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
        _form(activation)  # refuses others
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

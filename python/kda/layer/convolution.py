"""The short convolutions of the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..convolution import causal_conv1d, causal_conv1d_update
from .bypass import stands_for
from .cache import KDACache
from .parts import Modules, Rows, conv_parameters, convolutions, convolve_as_one, parts_of
from .plans import for_ranks, local
from .recompute import check_first_run, old_state


def causal_conv_silu(
    x: Tensor | tuple[Tensor, ...],
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
        x, weight, bias, cu_seqlens: ``[B, T, D]`` (or up to three tensors), ``[D, W]``, ``[D]``, ``[N + 1]``, as in
            :func:`kda.causal_conv1d`.
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
        return _pointwise(x if isinstance(x, Tensor) else torch.cat(x, 2), weight[:, 0], bias, cu_seqlens)
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
    tokens = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
    return torch.where(tokens[:, None] < cu_seqlens[-1], y, 0)


@stands_for("convolution", "weight", "bias")
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


def convolved(
    modules: Modules,
    rows: Rows,
    sizes: list[int],
    mesh: Any,
    cache: KDACache | None = None,
    cu_seqlens: Tensor | None = None,
    halo: Tensor | None = None,
    *,
    drafts: bool = False,
) -> tuple[Tensor, ...]:
    """The rows of q, k and v after the convolutions of a layer and SiLU. ``halo``: the inputs before them. ``drafts``:
    they go on from the cache and leave it as it is."""
    convs = convolutions(modules)
    if not convs:
        return parts_of(F.silu(rows) if isinstance(rows, Tensor) else tuple(map(F.silu, rows)), sizes)
    state: Tensor | None = None
    more: dict[str, Any] = {}
    if halo is not None:
        more = {"initial_state": halo}
    elif cache is not None and cache.conv is not None and drafts:
        more = {"initial_state": cache.conv}
    elif cache is not None and cache.conv is not None:
        state, more = cache.conv, {"made_in": cache.made_in}
    y: Tensor | tuple[Tensor, ...]
    if convolve_as_one(modules) and (isinstance(rows, Tensor) or len({x.dtype for x in rows}) == 1):
        y = causal_conv_silu(rows, *conv_parameters(modules, mesh), state, cu_seqlens, **more)
        if not isinstance(rows, Tensor):  # with tensor parallelism they have some of the heads
            y = y.split_with_sizes([x.shape[-1] for x in rows], -1)
    else:
        y = _convolve_each(convs, parts_of(rows, sizes), mesh, state, cu_seqlens, more)
    return parts_of(y, sizes)


def _convolve_each(
    convs: tuple[Any, ...],
    parts: tuple[Tensor, ...],
    mesh: Any,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    more: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Calls each convolution, with the arguments that there are. So a module in its place need not know the others."""
    sizes, halo = [x.shape[-1] for x in parts], more.get("initial_state")
    given = {**for_ranks(mesh), **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})}
    each: list[dict[str, Any]] = [given] * 3
    if halo is not None:
        each = [{"initial_state": x, **given} for x in halo.split_with_sizes(sizes, 1)]
    elif state is not None:
        each = [{"state": x, **more, **given} for x in state.split_with_sizes(sizes, 1)]
    return tuple(conv(x, **m) for conv, x, m in zip(convs, parts, each, strict=True))

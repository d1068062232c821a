"""What the functions of autograd share: requests of torch that are refused, autocast, and the memory of outputs."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from . import tracing
from .options import H_EVERY, Options
from .tracing import compiling, recording, refuse_batched_gradients, transform_refusal

Tensor = torch.Tensor


_NO_SECOND = "second derivatives: expected a gradient that is not differentiated again (kda has first derivatives only)"
_NO_SECOND += ", got one in another backward"


class _NoSecondDerivatives(torch.autograd.Function):
    """Returns the first ``count`` tensors as they are. Differentiating them with respect to any of the tensors raises
    an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivatives()


def refuse_second_derivatives(*_: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND)


_DEVICES = ("cpu", "cuda")  # kinds of device that kernels run on


def autocast_state() -> dict[str, torch.dtype]:
    """The dtype of autocast by kind of device, for those that have it. ``Function.forward`` keeps this as
    ``ctx.autocast``, as ``torch.amp.custom_fwd`` does for one kind of device."""
    if not tracing.any_autocast():
        return {}
    return {device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)}


def _as_in_forward(ctx: Any, backward: Callable[..., Any], kept: Sequence[Any], gradients: Sequence[Any]) -> Any:
    """Runs a backward in the autocast state of its forward, as ``torch.amp.custom_bwd`` does."""
    if ctx.autocast == autocast_state():
        return backward(ctx, kept, *gradients)
    device = next(x.device.type for x in (*gradients, *kept) if x is not None)
    dtype = ctx.autocast.get(device)
    with torch.autocast(device, dtype, dtype is not None):
        return backward(ctx, kept, *gradients)


def first_derivatives(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Makes a ``Function.backward`` from ``backward(ctx, kept, *gradients)``.

    * It runs in the autocast state of its forward, ``ctx.autocast``.
    * It also works with ``create_graph=True``: its results then refuse to be differentiated again. torch's
      ``once_differentiable`` connects the results only to the incoming gradients, and to copies of those. Where an
      input reaches the loss by another path, its error never shows.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_batched_gradients(gradients)
        kept = ctx.saved_tensors  # read once: activation checkpointing recomputes them
        if not torch.is_grad_enabled():
            results: tuple[Any, ...] = _as_in_forward(ctx, backward, kept, gradients)
            return results
        with torch.no_grad():
            results = _as_in_forward(ctx, backward, kept, gradients)
        return _NoSecondDerivatives.apply(len(results), *results, *kept, *gradients)

    return call


def refuse_forward_mode(ctx: Any, *grad_inputs: Any) -> Any:
    wanted = "expected reverse mode, by torch.autograd.grad or backward() (kda has no forward derivatives)"
    raise NotImplementedError(f"forward mode: {wanted}, got a dual tensor")


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, for reverse mode only."""
    if (refused := transform_refusal()) is not None:
        raise refused
    return function.apply(*arguments)


def needs_function(tensors: Iterable[Tensor | None]) -> bool:
    """Does even a call without gradients need a ``Function``? It refuses transforms and forward mode, and unwraps
    tensors that have outlived a transform. Other calls are half as long without."""
    if tracing.transforms_active() or tracing.forward_mode():
        return True
    wrapped = tracing.is_transformed
    return any([x is not None and wrapped(x) for x in tensors])


def chunks_between_states(inputs: Sequence[Tensor | None], disable_recompute: bool) -> int:
    """``h_every`` of a forward: 0 if its inputs can have no gradients. Must be called outside of a ``Function``:
    inside, gradients are always disabled, and ``ctx.needs_input_grad`` ignores ``torch.no_grad()``. A recording has 0,
    too: the same graph serves calls with gradients and without, whichever its example was."""
    if not torch.is_grad_enabled() or not any([x is not None and x.requires_grad for x in inputs]):
        return 0
    if not compiling() and recording():
        return 0
    return 1 if disable_recompute else H_EVERY


def _large_pages() -> Callable[[Tensor], Tensor]:
    """Requests pages of 2 MiB for a new CPU tensor, where the system grants them on request (Linux). The memory of
    outputs is new in every step: without this a tenth of a training step goes into page faults on pages of 4 KiB."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    page, hugepage = 2 << 20, 14

    def mark(x: Tensor) -> Tensor:
        size = x.numel() * x.element_size()
        if madvise is not None and size >= 2 * page and x.device.type == "cpu":
            begin = (x.data_ptr() + page - 1) // page * page
            end = (x.data_ptr() + size) // page * page
            if end > begin:  # a hint: nothing depends on the answer
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), hugepage)
        return x

    return mark


in_large_pages = _large_pages()


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def plain(x: Tensor) -> Tensor:
    """Copies a gradient where needed: gradients come as views of any kind, expanded by sum() or lazily negated by
    complex operations."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def state_shape(v: Tensor, K: int, cu: Tensor | None, options: Options) -> tuple[int, int, int, int]:
    B, _, HV, V = v.shape
    N = B if cu is None else cu.shape[0] - 1
    return (N, HV, K, V) if options.state_layout else (N, HV, V, K)

"""``kda::conv`` with autograd, ``kda::conv_backward``, and ``kda::conv_update`` in place."""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..call.derivatives import refuse_second_derivatives
from ..call.graph import LIBRARY, RUN, WRITTEN, LibraryCall, Tensor, by_schema, define, in_order, nothing

_CONV = "Tensor x, Tensor weight, Tensor? bias"
_MORE = "Tensor? x1=None, Tensor? x2=None"  # more channels; last, so that older graphs without them load


def _conv_run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    final_state: bool,
    impl: str | None,
    x1: Tensor | None = None,
    x2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    more = () if x1 is None else (x1, x2)
    y, last = autograd.run_conv(x, weight, bias, initial_state, cu_seqlens, silu, final_state, impl, more=more)
    return y, x.new_empty(0) if last is None else last


def _conv_fake(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    final_state: bool,
    x1: Tensor | None,
    x2: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    D = sum(autograd.conv_sizes(x, x1, x2))
    dtype = x.dtype if initial_state is None or not final_state else initial_state.dtype
    shape = autograd.conv_state_shape(x, weight, cu_seqlens, D) if final_state else (0,)
    return x.new_empty((*x.shape[:2], D)), x.new_empty(shape, dtype=dtype)


define(
    "conv",
    f"({_CONV}, Tensor? initial_state, Tensor? cu_seqlens, bool silu, bool final_state, str? impl, {_MORE})"
    " -> (Tensor y, Tensor final_state)",
    _conv_run,
    _conv_fake,
)


def _conv_backward_run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    dy: Tensor,
    d_final_state: Tensor | None,
    wanted: list[bool],
    x1: Tensor | None = None,
    x2: Tensor | None = None,
) -> tuple[Tensor, ...]:
    more = () if x1 is None else (x1, x2)
    grads = autograd.run_conv_backward(
        x, weight, bias, initial_state, cu_seqlens, silu, dy, d_final_state, wanted=wanted, more=more
    )
    return tuple(x.new_empty(0) if g is None else g for g in grads)


def _conv_backward_fake(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    wanted: list[bool],
    **_: Any,
) -> tuple[Tensor, ...]:
    inputs = (dy, weight, bias, initial_state)
    return tuple(
        t.new_empty(t.shape) if w and t is not None else x.new_empty(0) for t, w in zip(inputs, wanted, strict=True)
    )


define(
    "conv_backward",
    f"({_CONV}, Tensor? initial_state, Tensor? cu_seqlens, bool silu, Tensor dy, Tensor? d_final_state, bool[] wanted,"
    f" {_MORE}) -> (Tensor, Tensor, Tensor, Tensor)",
    _conv_backward_run,
    _conv_backward_fake,
)


_CONV_ARGUMENTS = by_schema(torch.ops.kda.conv.default)
_CONV_IN_ORDER = in_order(torch.ops.kda.conv.default)


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a = _CONV_ARGUMENTS(*inputs)
    leaves = {name: a[name] for name in ("x", "weight", "bias", "initial_state", "x1", "x2")}
    ctx.save_for_backward(*leaves.values(), a["cu_seqlens"])
    ctx.names, ctx.silu, ctx.final_state = tuple(leaves), a["silu"], a["final_state"]
    wanted = {name: x is not None and x.requires_grad for name, x in leaves.items()}
    wanted["x"] = wanted["x"] or wanted["x1"] or wanted["x2"]
    ctx.wanted = [wanted[name] for name in ("x", "weight", "bias", "initial_state")]
    if not ctx.final_state:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _conv_autograd(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
    *leaves, cu = ctx.saved_tensors
    a = dict(zip(ctx.names, leaves, strict=True))
    parts = (a["x"], a["x1"], a["x2"]) if a["x1"] is not None else (a["x"],)
    if dy is None:
        dy = a["x"].new_zeros((*a["x"].shape[:2], sum(autograd.conv_sizes(*parts))))
    found = torch.ops.kda.conv_backward(
        **a, cu_seqlens=cu, silu=ctx.silu, dy=dy, d_final_state=d_last if ctx.final_state else None, wanted=ctx.wanted
    )
    dx, dweight, dbias, d_state = (g if w else None for g, w in zip(found, ctx.wanted, strict=True))
    gradients = {"weight": dweight, "bias": dbias, "initial_state": d_state}
    gradients |= zip(("x", "x1", "x2"), autograd.conv_parts(dx, *parts), strict=False)
    return _CONV_IN_ORDER(gradients)


torch.library.register_autograd("kda::conv_backward", refuse_second_derivatives, lib=LIBRARY)
torch.library.register_autograd("kda::conv", _conv_autograd, setup_context=_conv_setup, lib=LIBRARY)


def conv(*, final_state: bool, **rest: Any) -> Any:
    y, last = torch.ops.kda.conv(final_state=final_state, **rest)
    return y, last if final_state else None


define(
    "conv_update",
    f"({_CONV}, Tensor? cu_seqlens, Tensor(a!) state, Tensor? state_indices, Tensor? has_initial_state,"
    f" SymInt first_valid_slot, Tensor(b!) out, bool silu, {RUN}, {WRITTEN}, Tensor(c!)? checkpoints,"
    " Tensor? checkpoint_slots, Tensor? checkpoint_offset, SymInt checkpoint_every,"
    f" {_MORE}) -> ()",
    LibraryCall(
        "conv",
        {"state": "initial_state", "out": "y", "update_state": ""},
        "final_state=state if update_state else None",
    ),
    nothing,
    "kda.causal_conv1d",
)

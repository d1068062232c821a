"""``kda::forward`` with autograd, and ``kda::backward``."""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..call.derivatives import refuse_second_derivatives, state_shape, wide_dtype
from ..call.graph import INPUTS, LIBRARY, OPTIONS, Tensor, by_schema, define, in_order, run_operator
from ..call.inputs import TrainingCall
from ..call.options import Options

_LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
_SAVED = ("h", "v_new", "Aqk", "Akk")


def _call(a: dict[str, Any]) -> TrainingCall:
    options = Options(**{name: a[name] for name in Options._fields})
    return TrainingCall(**{name: a[name] for name in _LEAVES}, cu=a["cu_seqlens"], options=options)


def _forward_run(**a: Any) -> tuple[Tensor, ...]:
    call = _call(a)
    o, hT, saved = autograd.run_forward(call, a["final_state"], a["h_every"], recurrent=a["recurrent"], impl=a["impl"])
    empty = [call.v.new_empty(0, dtype=torch.float32) for _ in range(5)]
    return (o, empty[0] if hT is None else hT, *saved, *empty[len(saved) + 1 :])


def _forward_fake(**a: Any) -> tuple[Tensor, ...]:
    call = _call(a)
    v, K = call.v, call.q.shape[3]
    none = ((0,), torch.float32)
    kinds = [
        (state_shape(v, K, call.cu, call.options), wide_dtype(call.q)) if a["final_state"] else none,
        *(() if a["recurrent"] else autograd.saved_kinds(v, K, call.cu, call.options, a["h_every"])),
    ]
    kinds += [none] * (5 - len(kinds))
    return (v.new_empty(v.shape), *(v.new_empty(shape, dtype=dtype) for shape, dtype in kinds))


define(
    "forward",
    f"({INPUTS}, Tensor? h0, Tensor? cu_seqlens, {OPTIONS}, bool final_state, int h_every, bool recurrent,"
    " str? impl)"
    " -> (Tensor o, Tensor hT, Tensor h, Tensor v_new, Tensor Aqk, Tensor Akk)",
    _forward_run,
    _forward_fake,
)


def _states_run(**a: Any) -> tuple[Tensor, ...]:
    call = _call(a)
    o, hT, h = autograd.run_states(call, a["final_state"], a["chunks"], a["impl"])
    return o, call.v.new_empty(0, dtype=torch.float32) if hT is None else hT, h


def _states_fake(**a: Any) -> tuple[Tensor, ...]:
    call = _call(a)
    v, chunks = call.v, a["chunks"]
    N, *state = state_shape(v, call.q.shape[3], call.cu, call.options)
    hT = (N, *state) if a["final_state"] else (0,)
    h = v.new_empty((chunks, *state), dtype=autograd.states_dtype(call.q))
    return v.new_empty(v.shape), v.new_empty(hT, dtype=torch.float32), h


define(
    "forward_states",
    f"({INPUTS}, Tensor? h0, Tensor? cu_seqlens, {OPTIONS}, bool final_state, SymInt chunks, str? impl)"
    " -> (Tensor o, Tensor hT, Tensor h)",
    _states_run,
    _states_fake,
    "kda.chunk_kda without return_intermediate_states",
)


def _backward_run(d_o: Tensor, dhT: Tensor | None, h_every: int, wanted: list[bool], **a: Any) -> tuple[Tensor, ...]:
    saved = [x for name in _SAVED if (x := a[name]) is not None]
    grads = autograd.run_backward(_call(a), saved, h_every, d_o, dhT, tuple(wanted))
    return tuple(a["q"].new_empty(0) if x is None else x for x in grads)


def _backward_fake(wanted: list[bool], **a: Any) -> tuple[Tensor, ...]:
    leaves, empty = (a[name] for name in _LEAVES), a["q"].new_empty
    return tuple(x.new_empty(x.shape) if w and x is not None else empty(0) for x, w in zip(leaves, wanted, strict=True))


define(
    "backward",
    f"({INPUTS}, Tensor? h0, Tensor? cu_seqlens, {OPTIONS}, Tensor? h, Tensor? v_new, Tensor? Aqk, Tensor? Akk,"
    " int h_every, Tensor d_o, Tensor? dhT, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_run,
    _backward_fake,
)

_FORWARD_ARGUMENTS = by_schema(torch.ops.kda.forward.default)
_FORWARD_IN_ORDER = in_order(torch.ops.kda.forward.default)


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = _FORWARD_ARGUMENTS(*inputs)
    call = _call(a)
    ctx.options, ctx.final_state, ctx.h_every = call.options, a["final_state"], 0 if a["recurrent"] else a["h_every"]
    _o, _hT, *intermediate = output
    kinds = autograd.saved_kinds(call.v, call.q.shape[3], call.cu, call.options, ctx.h_every)
    saved = [x for x, _ in zip(intermediate, kinds, strict=False)]
    ctx.save_for_backward(*call.leaves(), call.cu, *saved)
    ctx.wanted = [x is not None and x.requires_grad for x in call.leaves()]
    ctx.mark_non_differentiable(*intermediate)
    ctx.set_materialize_grads(False)


def _forward_backward(ctx: Any, d_o: Tensor | None, dhT: Tensor | None, *_: Any) -> tuple[Any, ...]:
    kept = ctx.saved_tensors  # read once: activation checkpointing recomputes them
    leaves = dict(zip((*_LEAVES, "cu_seqlens"), kept, strict=False))
    saved = dict.fromkeys(_SAVED) | dict(zip(_SAVED, kept[len(leaves) :], strict=False))
    grads = run_operator(
        "backward",
        **leaves,
        options=ctx.options,
        **saved,
        h_every=ctx.h_every,
        d_o=torch.zeros_like(leaves["v"]) if d_o is None else d_o,
        dhT=dhT if ctx.final_state else None,
        wanted=ctx.wanted,
    )
    found = {name: x for name, x, w in zip(_LEAVES, grads, ctx.wanted, strict=True) if w}
    return _FORWARD_IN_ORDER(found)


torch.library.register_autograd("kda::backward", refuse_second_derivatives, lib=LIBRARY)
torch.library.register_autograd("kda::forward", _forward_backward, setup_context=_forward_setup, lib=LIBRARY)


def forward_states(call: TrainingCall, final_state: bool, chunks: int, impl: str | None) -> tuple[Any, ...]:
    o, hT, h = run_operator("forward_states", **call.named(), final_state=final_state, chunks=chunks, impl=impl)
    return o, hT if final_state else None, h


def forward(
    call: TrainingCall, final_state: bool, h_every: int, *, recurrent: bool, impl: str | None
) -> tuple[Tensor, Tensor | None]:
    """What ``KDAFunction.apply`` does in eager mode."""
    o, hT, *_ = run_operator(
        "forward", **call.named(), final_state=final_state, h_every=h_every, recurrent=recurrent, impl=impl
    )
    return o, hT if final_state else None

"""Explains a call of decode, of the speculative functions or of a backward instead of running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from . import speculation
from ._lib import library
from ._refusal import refusal
from ._views import with_views
from .norm import norm_fields
from .speculation import Conv, Records

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "decode": speculation.decode_mtp,  # which has all of kda.decode's arguments
    "verify": speculation.verify_kvbuffer,
    "flush": speculation.flush_kvbuffer,
    "flush_verify": speculation.flush_verify_kvbuffer,
}
_INPUTS = (
    "q", "k", "v", "g", "beta", "state", "out", "conv", "cu_seqlens", "A_log", "dt_bias", "scale", "lower_bound",
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
)  # fmt: skip

_TRAINING = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "lower_bound", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
    "cu_seqlens", "safe_gate",
)  # fmt: skip


def explain_call(op: str, keywords: dict[str, Any]) -> str:
    """Explains a call of the operator's function with these keywords."""
    bound = inspect.signature(FUNCTIONS[op]).bind(**keywords)
    bound.apply_defaults()
    try:
        return str(getattr(library(), f"{op}_explain")(*_for_the_binding(op, bound.arguments)))
    except Exception as error:
        if views := with_views(error, bound.arguments):
            return explain_call(op, views)
        raise refusal(error, dict(bound.arguments)) from None


def explain_backward(keywords: dict[str, Any]) -> str:
    """Explains the backward of :func:`kda.chunk_kda` with these keywords: all inputs require gradients, all outputs
    have one."""
    import torch

    from . import autograd, ops

    bound = inspect.signature(ops.chunk_kda).bind(**keywords)
    bound.apply_defaults()
    a = bound.arguments
    if a["kwargs"]:
        raise TypeError(f"chunk_kda: unexpected arguments {sorted(a['kwargs'])}")
    if a["cp_context"] is not None:
        raise ValueError("cp_context: expected None, as each rank chooses for its own window, got a context")
    try:
        call = ops._training_call(*(a[name] for name in _TRAINING))
        K, h_every = call.q.shape[3], 1 if a["disable_recompute"] else autograd.H_EVERY
        kinds = autograd.saved_kinds(call.v, K, call.cu, call.options, h_every)
        saved = [call.v.new_empty(shape, dtype=dtype) for shape, dtype in kinds]
        states = autograd.state_shape(call.v, K, call.cu, call.options)
        dhT = call.v.new_empty(states, dtype=autograd.wide_dtype(call.q)) if a["output_final_state"] else None
        d_o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        _, arguments = autograd.backward_call(*call, saved, h_every, d_o, dhT, [True] * 8, a["impl"])
        return str(library().backward_explain(*arguments))
    except Exception as error:
        if views := with_views(error, a):
            return explain_backward(views)
        raise refusal(error, dict(a)) from None


def _for_the_binding(op: str, a: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments that the function would call the library with. The function does not use this itself: torch
    compiles it, and every microsecond counts there."""

    def values(*names: str) -> tuple[Any, ...]:
        return tuple(a[name] for name in names)

    def records(name: str, optional: bool = False) -> tuple[Any, ...]:
        return speculation._fields(name, a[name], Records, optional)

    last = (*values("impl", "num_threads"), None)
    behind = norm_fields(a.get("norm"))
    if op == "flush":
        options = (int(not a["state_v_first"]), a["first_valid_slot"])
        rolled = values("accept_len", "parents", "conv_x", "conv_state", "conv_indices")
        return (*values("state", "state_indices"), *records("records"), *rolled, *options, *last)

    inputs, out = speculation._arguments(*values(*_INPUTS))
    conv, state, slots = speculation._fields("conv", a["conv"], Conv), a["state"], a["state_indices"]
    if op == "decode":
        written = state if a["update_state"] else None
        before = (*inputs, state, written, slots, *values("has_initial_state", "first_valid_slot"), out)
        return (*before, *last, None, *conv, *values("snapshots", "snapshot_slots", "accepted"), *behind)
    if op == "verify":
        before = (*inputs, state, None, slots, *values("has_initial_state", "first_valid_slot"), *conv, out)
        return (*before, *records("records", optional=True), a["parents"], *last, *behind)
    before = (*inputs, state, state, slots, None, a["first_valid_slot"], *conv, out, *records("last", optional=True))
    rounds = (*values("accept_len", "last_parents", "last_conv_x"), *records("records"))
    return (*before, *rounds, *values("parents", "max_tokens"), *last, *behind)

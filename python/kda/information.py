"""What the library is, which implementation a call would run and why, and one setting of the process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from . import speculation
from .arguments import Records, check_kind, norm_fields
from .call.errors import refusal
from .call.library import OPERATORS, library
from .call.retry import retry, with_views
from .serving import forward_arguments
from .training import chunk_kda, training_call

_EXPLAINED = ("forward", "backward", "decode", "verify", "flush", "flush_verify")


def explain(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    g: Any = None,
    beta: Any = None,
    state: Any = None,
    *,
    op: str = "forward",
    **kwargs: Any,
) -> str:
    """Explains which implementation would run with these arguments, and why not the others.

    One line each, with ``*`` before the chosen one, and in brackets the file of the source tree where its code begins.
    Nothing is computed.

    Args:
        op: the kind of call: ``"forward"`` (:func:`prefill`), ``"backward"`` (of :func:`chunk_kda`, with gradients of
            all inputs and outputs), ``"decode"`` (:func:`decode` and :func:`kda.decode_mtp`), ``"verify"``
            (:func:`kda.verify_kvbuffer`), ``"flush"`` (:func:`kda.flush_kvbuffer`) or ``"flush_verify"``
            (:func:`kda.flush_verify_kvbuffer`).
        q, k, v, g, beta, state, ...: arguments of that function. Its later arguments are passed by keyword, and for a
            flush all of them. ``chunk_kda`` has no ``state``: pass ``initial_state`` there.

    >>> import kda, numpy as np
    >>> x = np.zeros((1, 70, 1, 4), np.float32)
    >>> [line for line in kda.explain(x, x, x, x, x[..., 0]).splitlines() if line[0] == "*"]
    ['* cpu_chunk: chunks of 64 tokens as matrix products, SIMD and threads [src/cpu/chunk_forward.cc]']
    >>> pool, records = np.zeros((1, 1, 4, 4), np.float32), kda.new_records(1, 3, 1, 1, 4, 4)
    >>> accept_len = np.array([2], np.int32)
    >>> text = kda.explain(state=pool, records=records, accept_len=accept_len, op="flush")
    >>> [line for line in text.splitlines() if line[0] == "*"]
    ['* cpu_flush: rank-m update in one pass over the state, SIMD and threads [src/cpu/speculation.cc]']
    """
    if op not in _EXPLAINED:
        raise ValueError(f"op: expected one of {', '.join(_EXPLAINED)}, got {op!r}")
    if op != "forward":
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if op == "backward":
            return explain_backward(inputs | ({} if state is None else {"initial_state": state}) | kwargs)
        if op == "flush":  # which has none of these
            inputs = {name: x for name, x in inputs.items() if x is not None}
        return explain_call(op, {**inputs, "state": state, **kwargs})
    try:
        return library().forward_explain(**forward_arguments(q, k, v, g, beta, state, **kwargs))
    except Exception as error:
        return retry(explain, error, locals())


def implementations(op: str) -> Sequence[str]:
    """The names of the implementations of ``op`` (forward, backward, decode, ..), in order of preference.

    >>> import kda
    >>> kda.implementations("backward")[-2:]  # a library with CUDA has its own before these
    ['cpu_chunk', 'reference']
    """
    if not isinstance(op, str) or op not in OPERATORS:
        raise ValueError(f"op: expected one of {', '.join(OPERATORS)}, got {op!a}")
    names: list[str] = []
    while name := library().implementation(op, len(names)):
        names.append(str(name))
    return names


def use_batch_invariant(enabled: bool = True) -> bool:
    """Sets whether the bits of a sequence must not depend on the rest of the call. Returns the previous setting.

    The setting holds for all threads from now on. Bits do not depend on the rest anyway, except in prefill and
    training with few heads and long sequences on Hopper, where the default splits sequences where it suits the call.
    Without these splits an H200 takes 1.2 to 2.6 times as long for such a prefill (docs/numerics.md). Workspaces need
    the size that :func:`workspace_size` returns after the change.

    >>> import kda
    >>> kda.use_batch_invariant(), kda.use_batch_invariant(False)
    (False, True)
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled: expected True or False, got {enabled!r}")
    return bool(library().use_batch_invariant(enabled))


def info() -> dict[str, str]:
    """What the library was built with and what it finds here: version, CPU instruction set, CUDA.

    >>> import kda
    >>> kda.info()["version"]
    '0.1.0'
    """
    return dict(line.split(": ", 1) for line in str(library().info()).splitlines())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "decode": speculation.decode_mtp,  # which has all of kda.decode's arguments
    "verify": speculation.verify_kvbuffer,
    "flush": speculation.flush_kvbuffer,
    "flush_verify": speculation.flush_verify_kvbuffer,
}
_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
_GATE = ("A_log", "dt_bias", "lower_bound")
_IN_KERNEL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def explain_call(op: str, keywords: dict[str, Any]) -> str:
    """Explains a call of the operator's function with these keywords."""
    bound = inspect.signature(FUNCTIONS[op]).bind(**keywords)
    bound.apply_defaults()
    try:
        return str(getattr(library(), f"{op}_explain")(**_operands(op, bound.arguments)))
    except Exception as error:
        if views := with_views(error, bound.arguments):
            return explain_call(op, views)
        raise refusal(error, dict(bound.arguments)) from None


def explain_backward(keywords: dict[str, Any]) -> str:
    """Explains the backward of :func:`kda.chunk_kda` with these keywords: all inputs require gradients, all outputs
    have one."""
    import torch

    from . import autograd
    from .call.derivatives import state_shape, wide_dtype
    from .call.options import H_EVERY

    bound = inspect.signature(chunk_kda).bind(**keywords)
    bound.apply_defaults()
    a = bound.arguments
    if a["kwargs"]:
        raise TypeError(f"chunk_kda: unexpected arguments {sorted(a['kwargs'])}")
    if a["cp_context"] is not None:
        raise ValueError("cp_context: expected None, as each rank chooses for its own window, got a context")
    try:
        tensors, gate, in_kernel = (tuple(map(a.__getitem__, names)) for names in (_TENSORS, _GATE, _IN_KERNEL))
        form = (a["allow_neg_eigval"], a["state_v_first"], a["safe_gate"])
        call = training_call(tensors, gate, a["scale"], in_kernel, *form)
        K, h_every = call.q.shape[3], 1 if a["disable_recompute"] else H_EVERY
        kinds = autograd.saved_kinds(call.v, K, call.cu, call.options, h_every)
        saved = [call.v.new_empty(shape, dtype=dtype) for shape, dtype in kinds]
        states = state_shape(call.v, K, call.cu, call.options)
        dhT = call.v.new_empty(states, dtype=wide_dtype(call.q)) if a["output_final_state"] else None
        d_o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        _, operands = autograd.backward_call(call, saved, h_every, d_o, dhT, [True] * 8, a["impl"])
        return str(library().backward_explain(**operands))
    except Exception as error:
        if views := with_views(error, a):
            return explain_backward(views)
        raise refusal(error, dict(a)) from None


def _operands(op: str, a: dict[str, Any]) -> dict[str, Any]:
    """What the function would call the library with. The function does not use this itself: torch compiles it, and
    every microsecond counts there."""
    shared = ("state_indices", "first_valid_slot", "impl", "num_threads")
    kept = {
        "decode": ("cu_seqlens", "has_initial_state", "conv", "snapshots", "snapshot_slots", "accepted"),
        "verify": ("cu_seqlens", "has_initial_state", "conv", "records", "parents"),
        "flush": ("state", "records", "accept_len", "parents", "conv_x", "conv_state", "conv_indices"),
        "flush_verify": ("cu_seqlens", "conv", "last", "last_parents", "last_conv_x", "records", "parents"),
    }[op]
    kept += ("accept_len", "max_tokens") if op == "flush_verify" else ()
    found = {name: a[name] for name in (*shared, *kept)}
    if op == "flush":
        check_kind("records", a["records"], Records, optional=False)
        return {**found, "state_layout": int(not a["state_v_first"])}
    tensors, gate, in_kernel = (tuple(map(a.__getitem__, n)) for n in ((*_TENSORS[:5], "state"), _GATE, _IN_KERNEL))
    form = (a["scale"], in_kernel, a["allow_neg_eigval"], a["state_v_first"])
    A, bias, options, out = speculation.prepare(tensors, a["out"], a["conv"], gate, *form)
    for name in ("last", "records"):
        if name in kept:
            check_kind(name, a[name], Records, optional=name == "last" or op == "verify")
    state = a["state"]
    written = {"decode": state if a.get("update_state") else None, "flush_verify": state}.get(op)
    inputs = {**{name: a[name] for name in ("q", "k", "v", "g", "beta")}, "A_log": A, "dt_bias": bias}
    states = {"h0": state, "hT": written, "o": out, "norm": norm_fields(a["norm"])}
    return {**inputs, **found, **states, "options": options}

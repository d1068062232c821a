"""The functions of FLA that our kernels take the place of: when, and how. Each has a ``why_not``, which returns the
reason to leave a call to FLA or None, and a ``run``. Both get FLA's arguments by name in a dict, ``run`` one that it
may change: passing twenty keywords on costs half a microsecond, in every layer of every step.

A call that FLA itself refuses is left to FLA, so that users see its error. FLA is not imported here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from ..autograd import run_gate_backward
from ..call.inputs import dense_last
from ..call.options import CHUNK
from ..gate import fused_kda_gate
from ..information import explain_backward
from ..recurrent import fused_recurrent_kda_fwd
from ..training import chunk_kda, fused_recurrent_kda
from .fla_given import DTYPES, MOST, Given, Take, Tensor, by_keyword, place_why_not


def _heads_why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not q.dtype == k.dtype == v.dtype:
        return "kda takes q, k and v of one dtype"
    if q.size(-1) > MOST or v.size(-1) > MOST:
        return f"kda takes K and V of at most {MOST}"
    return place_why_not(q)


def _gate_why_not(A_log: Tensor | None, lower_bound: float | None) -> str | None:
    if lower_bound is None:
        return "FLA refuses a gate without A_log and lower_bound" if A_log is None else None
    return None if lower_bound < 0 else "kda takes a negative lower_bound"


# ---- chunk_kda ----


# Of chunk_kda, and with names that FLA's takes among its ``**kwargs``.
_KEYWORDS = {*inspect.signature(chunk_kda).parameters} - {"impl", "kwargs"}
_NAMES = _KEYWORDS | {"chunk_size", "transpose_state_layout"}


def _context_why_not(context: Any, given: Given) -> str | None:
    """Every rank must come to the same answer, so it asks only what all ranks share."""
    if given.get("use_graph") or getattr(context, "pre_num_ranks_dev", None) is not None:
        return "kda captures no context parallelism into graphs"
    if given.get("initial_state") is not None or given.get("output_final_state"):
        return "FLA refuses states with a cp_context"
    if os.environ.get("KDA_IMPL"):  # it may take the tokens of one rank and not those of another
        return "kda forces no implementation (KDA_IMPL) under context parallelism"
    return "FLA refuses a cp_context without offsets" if context.cu_seqlens is None else None


_NO_CHUNKS = "on GPUs kda has chunked kernels for 16 bits and K and V of 64 and 128 alone"


def _chunk_why_not(given: Given) -> str | None:
    q, v, get = given["q"], given["v"], given.get
    if (reason := _heads_why_not(q, given["k"], v)) is not None:
        return reason
    if (context := get("cp_context")) is not None and (reason := _context_why_not(context, given)) is not None:
        return reason
    if q.is_cuda and q.size(1) > CHUNK and not _has_chunks(q, v):
        return _NO_CHUNKS
    if (state := get("initial_state")) is not None and state.dtype != torch.float32:
        return "FLA refuses initial states that are not float32"
    if get("use_gate_in_kernel"):
        bound = get("lower_bound")
        if (reason := _gate_why_not(get("A_log"), bound)) is not None:
            return reason
        if get("safe_gate") and (bound is None or bound < -5):
            return "FLA refuses safe_gate with a lower_bound outside of [-5, 0)"
    size = get("chunk_size", CHUNK)
    if size not in (32, CHUNK):
        return "FLA refuses chunks that have not 32 or 64 tokens"
    if get("return_intermediate_states") and (size != CHUNK or q.dtype == torch.float16):
        return f"kda has intermediate states before every {CHUNK} tokens, and none in float16"
    if torch.is_grad_enabled() and os.environ.get("KDA_IMPL"):
        return _forced_backward_why_not(given)
    return None


def _forced_backward_why_not(given: Given) -> str | None:
    """Whether the backward that KDA_IMPL forces takes the call: once our forward has run, FLA's backward cannot."""
    text = explain_backward({name: x for name, x in given.items() if name in _KEYWORDS})
    return None if any(line.startswith("*") for line in text.splitlines()) else "KDA_IMPL forces a backward in vain"


def _has_chunks(q: Tensor, v: Tensor) -> bool:
    return q.dtype != torch.float32 and q.size(-1) in (64, 128) and v.size(-1) in (64, 128)


def _chunk(given: Given) -> Any:
    get, pop = given.get, given.pop
    if not get("use_gate_in_kernel"):  # FLA ignores these silently
        _without_gate(pop)
    if get("cp_context") is not None:  # which has the offsets
        pop("cu_seqlens", None)
        pop("cu_seqlens_cpu", None)
    try:
        return chunk_kda(**given)
    except TypeError:
        ours = {name: x for name, x in given.items() if name in _NAMES}
        if len(ours) == len(given):
            raise
        return chunk_kda(**ours)  # FLA ignores unknown keywords, and so must we


def _without_gate(pop: Callable[..., Any]) -> None:
    pop("A_log", None)
    pop("dt_bias", None)
    pop("lower_bound", None)


# ---- fused_recurrent_kda_fwd, which is all of fused_recurrent_kda ----


def _recurrent_why_not(given: Given) -> str | None:
    q, v, get = given["q"], given["v"], given.get
    if (reason := _heads_why_not(q, given["k"], v)) is not None:
        return reason
    if given["beta"].ndim == v.ndim:
        return "kda has one beta per token and head"
    if get("use_gate_in_kernel") and (reason := _gate_why_not(get("A_log"), get("lower_bound"))) is not None:
        return reason
    if (out := get("out")) is not None and out.dtype != v.dtype:
        return "kda writes out in the dtype of v"
    in_place, slots = get("inplace_final_state", True), get("ssm_state_indices")
    if (state := get("initial_state")) is None:
        return "FLA refuses a call in place without a state" if in_place else None
    if state.dtype not in (torch.float32, torch.bfloat16):
        return f"kda takes states in float32 and bfloat16, not {state.dtype}"
    if slots is None:
        alone = get("num_accepted_tokens") is None
        return None if alone else "kda takes num_accepted_tokens with ssm_state_indices alone"
    if not in_place:
        return "kda takes ssm_state_indices in place alone"
    return _slots_why_not(q, get("cu_seqlens"), slots, get("num_accepted_tokens"))


def _slots_why_not(q: Tensor, cu: Tensor | None, slots: Tensor, accepted: Tensor | None) -> str | None:
    B, T = q.shape[:2]
    requests = B if cu is None else cu.shape[0] - 1
    if slots.ndim == 2:
        return None if cu is not None or slots.shape[1] >= T else "kda takes a slot for every token, or one token"
    one_each = slots.ndim == 1 and accepted is None and requests >= B * T
    return None if one_each else "kda takes [N] slots for one token each, and [N, S] otherwise"


_FWD_ONLY = ("inplace_final_state", "ssm_state_indices", "num_accepted_tokens", "out")


def _recurrent(given: Given) -> tuple[Tensor, Tensor | None]:
    pop = given.pop
    if not given.get("use_gate_in_kernel"):
        _without_gate(pop)
    if torch.is_grad_enabled():  # FLA's function has no gradients, whatever requires them
        with torch.no_grad():
            return _recurrent(given)
    if given.get("inplace_final_state", True) or given.get("out") is not None:
        return fused_recurrent_kda_fwd(**given)
    for name in _FWD_ONLY:
        pop(name, None)
    try:
        return fused_recurrent_kda(**given)  # from one tensor of states to another, without a copy
    except NotImplementedError:
        given["inplace_final_state"] = False  # FLA is asked with what is given here
        raise


# ---- the gate ----


def _fused_gate_why_not(
    g: Tensor,
    A_log: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    **_: Any,
) -> str | None:
    if output_dtype not in DTYPES:
        return f"kda writes bfloat16, float16 and float32, not {output_dtype}"
    return _gate_why_not(A_log, lower_bound) or place_why_not(g)


def _gate_backward_why_not(
    g: Tensor, A_log: Tensor | None = None, lower_bound: float | None = None, dyg: Tensor | None = None, **_: Any
) -> str | None:
    if dyg is None or dyg.shape != g.shape:
        return "kda takes a gradient of the shape of g"
    return _gate_why_not(A_log, lower_bound) or place_why_not(g)


def _gate_backward(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dyg: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    assert dyg is not None
    HV, K = g.shape[-2:]
    x, dy = (dense_last(t.reshape(-1, HV, K)) for t in (g, dyg))
    A = None if A_log is None else A_log.reshape(-1).float()
    bias = None if dt_bias is None else dt_bias.reshape(HV, K).float()
    form, bound = (1, 0.0) if lower_bound is None else (2, lower_bound)
    dx, dA, d_bias = run_gate_backward(x, A, bias, dy, form, bound)
    return (
        dx.view(g.shape),
        None if dA is None or A_log is None else dA.view_as(A_log).type_as(A_log),
        None if d_bias is None or dt_bias is None else d_bias.view(dt_bias.shape).type_as(dt_bias),
    )


# ---- a stage ----


def _wy_dqkg_why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK,
    use_graph: bool = False,
    **_: Any,
) -> str | None:
    if (reason := _heads_why_not(q, k, v)) is not None:
        return reason
    if cu_seqlens is not None or use_graph:
        return "kda stores the states of packed sequences in other rows"
    if chunk_size != CHUNK or q.dtype == torch.float16:
        return f"kda has this stage for chunks of {CHUNK} tokens, and not in float16"
    if q.is_cuda and not _has_chunks(q, v):
        return _NO_CHUNKS
    return None


def _wy_dqkg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    **_: Any,
) -> tuple[Tensor, ...]:
    from ..stages import bwd_wy_dqkg

    h, dh = (x.reshape(-1, *x.shape[-3:]) for x in (h, dh))
    return bwd_wy_dqkg(
        q, k, v, v_new, g, beta, A.float(), h, d_o=do, dh=dh, dv_new=dv, scale=scale, state_v_first=state_v_first
    )


KDA = {
    "chunk_kda": Take(_chunk_why_not, _chunk),
    "fused_recurrent_kda_fwd": Take(_recurrent_why_not, _recurrent),
    "fused_kda_gate": by_keyword(_fused_gate_why_not, fused_kda_gate),
    "kda_gate_fwd": by_keyword(_fused_gate_why_not, fused_kda_gate),
    "kda_gate_bwd": by_keyword(_gate_backward_why_not, _gate_backward),
    "chunk_kda_bwd_wy_dqkg_fused": by_keyword(_wy_dqkg_why_not, _wy_dqkg),
}

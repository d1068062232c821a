"""What eager functions and the registered operators share: the tensors of the stages, and calls in outputs that are
made here."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import new_like, sequences, shape_of
from .eager import mark_written
from .library import library
from .options import STATE_K_FIRST, STATE_V_FIRST, Options

# The stages' tensors by name, in the order of the args structs and of the binding: ``?`` marks optional ones, and those
# after ``->`` are written.
STAGES = {
    "cumsum": "g -> G",
    "chunk_intra": "q k v G beta -> Aqk Akk_inv w? u? qG? kg?",
    "recompute_w_u": "q? k v G beta Akk_inv -> w? u? qG? kg?",
    "delta_h": "kg w u G h0? -> h? v_new? hT?",
    "fwd_o": "q v_new G Aqk h -> o",
    "bwd_local": "v_new d_o Aqk -> dAqk dv_local",
    "bwd_delta_h": "qG kg w G d_o dv_local dhT? -> dh dv_new dh0?",
    "bwd_wy_dqkg": "q k v v_new G beta Akk_inv h dh d_o dv_new -> dq dk dv dbeta dG dAkk",
    "bwd_intra": "q k G beta dAqk dAkk -> dq dk dbeta dG",
    "cumsum_backward": "g? dG -> dg",
}


def run_prefill_f32(
    *,
    chunk_size: int,
    w: Any,
    u: Any,
    o: Any,
    initial_state: Any = None,
    final_state: Any = None,
    scale: float | None = None,
    state_v_first: bool = True,
    **rest: Any,
) -> None:
    library().prefill_f32(
        h0=initial_state,
        o=o,
        w=w,
        u=u,
        hT=final_state,
        chunk=chunk_size,
        state_layout=STATE_V_FIRST if state_v_first else STATE_K_FIRST,
        scale=0.0 if scale is None else scale,
        **rest,
    )
    mark_written(o, w, u, final_state)


class SegmentMap(NamedTuple):
    """``S_out = M @ S_in + b`` and ``dS_in = M.T @ dS_out + d``; None where not wanted."""

    M: Any
    b: Any
    d: Any


def map_shapes(q: Any, v: Any, cu: Any, v_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of M, and of b and d."""
    N, K, HV, V = sequences(q.shape[0], cu), q.shape[3], v.shape[2], v.shape[3]
    return (N, HV, K, K), (N, HV, V, K) if v_first else (N, HV, K, V)


def wide_name(x: Any) -> str:
    return "float64" if str(x.dtype).endswith("float64") else "float32"


def run_segment_map(
    *, q: Any, v: Any, cu_seqlens: Any, options: tuple[Any, ...], d_o: Any, want_M: bool, want_b: bool, **rest: Any
) -> SegmentMap:
    M_shape, state_shape = map_shapes(q, v, cu_seqlens, Options(*options).state_layout == STATE_V_FIRST)
    M = new_like(q, M_shape, wide_name(q)) if want_M else None
    b = new_like(q, state_shape, wide_name(q)) if want_b else None
    d = new_like(q, state_shape, wide_name(q)) if d_o is not None else None
    library().segment_map(q=q, v=v, cu_seqlens=cu_seqlens, options=options, d_o=d_o, M=M, b=b, d=d, **rest)
    return SegmentMap(M, b, d)


def run_segment_merge(M: Any, b: Any, h0: Any, reverse: bool, v_first: bool, impl: str | None, num_threads: int) -> Any:
    P, *state = shape_of("b", b, 4)
    states = new_like(b, (P + 1, *state), wide_name(b))
    library().segment_merge(
        M=M,
        b=b,
        h0=h0,
        states=states,
        state_layout=STATE_V_FIRST if v_first else STATE_K_FIRST,
        reverse=reverse,
        impl=impl,
        num_threads=num_threads,
    )
    return states

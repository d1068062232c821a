"""Segment maps and their merge, in outputs that are made here."""

from __future__ import annotations

from typing import Any, NamedTuple

from .call.arrays import new_like, sequences, shape_of
from .call.library import library
from .call.options import STATE_K_FIRST, STATE_V_FIRST, Options


class SegmentMap(NamedTuple):
    """``S_out = M @ S_in + b`` and ``dS_in = M.T @ dS_out + d``; None where not wanted."""

    M: Any
    b: Any
    d: Any


def map_shapes(q: Any, v: Any, cu: Any, v_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of M, and of b and d."""
    N, K, HV, V = sequences(q.shape[0], cu), q.shape[3], v.shape[2], v.shape[3]
    return (N, HV, K, K), (N, HV, V, K) if v_first else (N, HV, K, V)


def wide(x: Any) -> str:
    return "float64" if str(x.dtype).endswith("float64") else "float32"


def run_segment_map(
    *, q: Any, v: Any, cu_seqlens: Any, options: tuple[Any, ...], d_o: Any, want_M: bool, want_b: bool, **rest: Any
) -> SegmentMap:
    M_shape, state_shape = map_shapes(q, v, cu_seqlens, Options(*options).state_layout == STATE_V_FIRST)
    M = new_like(q, M_shape, wide(q)) if want_M else None
    b = new_like(q, state_shape, wide(q)) if want_b else None
    d = new_like(q, state_shape, wide(q)) if d_o is not None else None
    library().segment_map(q=q, v=v, cu_seqlens=cu_seqlens, options=options, d_o=d_o, M=M, b=b, d=d, **rest)
    return SegmentMap(M, b, d)


def run_segment_merge(M: Any, b: Any, h0: Any, reverse: bool, v_first: bool, impl: str | None, num_threads: int) -> Any:
    P, *state = shape_of("b", b, 4)
    states = new_like(b, (P + 1, *state), wide(b))
    library().segment_merge(
        M=M, b=b, h0=h0, states=states, state_layout=STATE_V_FIRST if v_first else STATE_K_FIRST, reverse=reverse,
        impl=impl, num_threads=num_threads,
    )  # fmt: skip
    return states

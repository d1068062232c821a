"""The float32 prefill into given outputs."""

from __future__ import annotations

from typing import Any

from .call.eager import mark_written
from .call.library import library
from .call.options import STATE_K_FIRST, STATE_V_FIRST


def run_prefill_f32(
    *, chunk_size: int, w: Any, u: Any, o: Any, initial_state: Any = None, final_state: Any = None,
    scale: float | None = None, state_v_first: bool = True, **rest: Any,
) -> None:  # fmt: skip
    library().prefill_f32(
        h0=initial_state, o=o, w=w, u=u, hT=final_state, chunk=chunk_size,
        state_layout=STATE_V_FIRST if state_v_first else STATE_K_FIRST, scale=0.0 if scale is None else scale, **rest,
    )  # fmt: skip
    mark_written(o, w, u, final_state)

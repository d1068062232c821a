"""The stages as registered torch operators:
``kda::stage_<name>(cu_seqlens, scale, state_layout, tensors.., impl) -> ()`` with the tensors of the args struct in
its order; the outputs are written. And ``kda::segment_map`` and ``kda::segment_merge``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..call import shared
from ..call.graph import INPUTS, OPTIONS, RUN, Tensor, define, nothing
from ..call.inputs import SEGMENTS_WITH_GRADIENTS
from ..call.library import library
from ..call.options import STATE_V_FIRST, Options


def _signature(tensors: str) -> str:
    inputs, outputs = (part.split() for part in tensors.split("->"))
    letters = iter("abcdefgh")
    declared = [f"Tensor{'?' * x.endswith('?')} {x.rstrip('?')}" for x in inputs]
    declared += [f"Tensor({next(letters)}!){'?' * x.endswith('?')} {x.rstrip('?')}" for x in outputs]
    return f"(Tensor? cu_seqlens, float scale, int state_layout, {', '.join(declared)}, str? impl) -> ()"


def _runner(stage: str) -> Callable[..., None]:
    def run(**arguments: Any) -> None:
        getattr(library(), f"stage_{stage}")(**arguments)

    return run


for _stage, _tensors in shared.STAGES.items():
    define(f"stage_{_stage}", _signature(_tensors), _runner(_stage), nothing, "kda.chunk_kda")


def _segment_map_run(**arguments: Any) -> tuple[Tensor, ...]:
    empty = arguments["q"].new_empty
    options = tuple(arguments.pop(name) for name in Options._fields)
    maps = shared.run_segment_map(options=options, **arguments)
    return tuple(empty(0, dtype=torch.float32) if x is None else x for x in maps)


def _segment_map_fake(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    state_layout: int,
    d_o: Tensor | None,
    want_M: bool,
    want_b: bool,
    **_: Any,
) -> tuple[Tensor, ...]:
    M, state = shared.map_shapes(q, v, cu_seqlens, state_layout == STATE_V_FIRST)
    wanted = ((M, want_M), (state, want_b), (state, d_o is not None))
    wide = getattr(torch, shared.wide_name(q))
    return tuple(q.new_empty(s, dtype=wide) if w else q.new_empty(0, dtype=torch.float32) for s, w in wanted)


define(
    "segment_map",
    f"({INPUTS}, Tensor? cu_seqlens, {OPTIONS}, Tensor? d_o, bool want_M, bool want_b, {RUN})"
    " -> (Tensor M, Tensor b, Tensor d)",
    _segment_map_run,
    _segment_map_fake,
    SEGMENTS_WITH_GRADIENTS,
)


def _segment_merge_fake(b: Tensor, **_: Any) -> Tensor:
    return b.new_empty((b.shape[0] + 1, *b.shape[1:]), dtype=getattr(torch, shared.wide_name(b)))


define(
    "segment_merge",
    f"(Tensor M, Tensor b, Tensor? h0, bool reverse, bool v_first, {RUN}) -> Tensor",
    shared.run_segment_merge,
    _segment_merge_fake,
    SEGMENTS_WITH_GRADIENTS,
)

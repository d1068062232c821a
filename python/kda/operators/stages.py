"""The stages as registered torch operators:
``kda::stage_<name>(cu_seqlens, scale, state_layout, tensors.., impl) -> ()`` with the tensors of the args struct in
its order; the outputs are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..call.graph import define, nothing
from ..call.library import library
from ..call.operands import STAGES


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


for _stage, _tensors in STAGES.items():
    define(f"stage_{_stage}", _signature(_tensors), _runner(_stage), nothing, "kda.chunk_kda")

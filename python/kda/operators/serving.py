"""``kda::prefill`` and ``kda::decode``, in place on a pool of states, and ``kda::prefill_workspace``, its size."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..call.graph import (
    INPUTS,
    NORM,
    OPTIONS,
    POOL,
    RUN,
    STATES,
    WRITES,
    WRITTEN,
    LibraryCall,
    define,
    norm_of,
    nothing,
)
from ..call.inputs import WITH_GRADIENTS
from ..call.library import library
from ..call.options import Options


def _workspace_run(state: Any, update_state: bool, out: Any, **a: Any) -> int:
    options = tuple(a.pop(name) for name in Options._fields)
    norm = norm_of(*(a.pop(name) for name in ("norm_gate", "norm_weight", "norm_eps", "norm_activation", "norm")))
    size: int = library().forward_workspace(
        options=options, h0=state, hT=state if update_state else None, o=out, norm=norm, **a
    )
    return size


def _workspace_fake(**_: Any) -> Any:
    """A number that the graph gets when it runs: it depends on the processor, too."""
    return torch.library.get_ctx().new_dynamic_size()


_PREFILL = (
    f"({INPUTS}, Tensor? cu_seqlens, {OPTIONS}, {STATES}, Tensor(c!)? checkpoints, Tensor? checkpoint_slots,"
    f" SymInt checkpoint_every, {RUN}, {WRITTEN}, Tensor? checkpoint_offset, {NORM})"
)

define("prefill", f"{_PREFILL} -> ()", LibraryCall("forward", POOL, WRITES), nothing, WITH_GRADIENTS)
define("prefill_workspace", re.sub(r"\(\w!\)", "", _PREFILL) + " -> SymInt", _workspace_run, _workspace_fake)
define(
    "decode",
    f"({INPUTS}, Tensor? cu_seqlens, {OPTIONS}, {STATES}, {RUN}, {WRITTEN}, {NORM}) -> ()",
    LibraryCall("decode", POOL, WRITES),
    nothing,
    WITH_GRADIENTS,
)

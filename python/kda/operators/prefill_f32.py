"""The float32 prefill as a registered torch operator.

``kda_prefill::forward(q, k, v, g, beta, chunk_size) -> (o, w, u)`` is functional. With three more arguments,
``w, u, o``, each is a buffer to write to or None. ``kda_prefill::write`` has all three and returns nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.graph import define_in, nothing
from ..call.shared import run_prefill_f32

Tensor = torch.Tensor


_prefill = torch.library.Library("kda_prefill", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_OPTIONS = "Tensor? initial_state=None, Tensor(d!)? final_state=None, float? scale=None, bool state_v_first=True"
_OPTIONS += ", str? impl=None, SymInt num_threads=0"


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size: expected 32 or 64, got {chunk_size}")
    B, HV, T, V = v.shape
    chunks = (B, HV, (T + chunk_size - 1) // chunk_size, chunk_size)
    return v.new_empty(v.shape), v.new_empty(*chunks, q.shape[3]), v.new_empty(*chunks, V)


def _forward_run(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    o, w, u = _forward_fake(**arguments)
    run_prefill_f32(w=w, u=u, o=o, **arguments)
    return o, w, u


define_in(
    _prefill,
    "forward",
    f"({_INPUTS}, SymInt chunk_size=64, *, {_OPTIONS}) -> (Tensor o, Tensor w, Tensor u)",
    _forward_run,
    _forward_fake,
    "kda.chunk_kda",
)
define_in(
    _prefill,
    "write",
    f"({_INPUTS}, SymInt chunk_size, Tensor(a!) w, Tensor(b!) u, Tensor(c!) o, *, {_OPTIONS}) -> ()",
    run_prefill_f32,
    nothing,
    "kda.chunk_kda",
)


def _forward_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int,
    w: Tensor | None,
    u: Tensor | None,
    o: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    made = _forward_fake(q, k, v, g, beta, chunk_size)
    o, w, u = (b if a is None else a for a, b in zip((o, w, u), made, strict=True))
    torch.ops.kda_prefill.write(q=q, k=k, v=v, g=g, beta=beta, chunk_size=chunk_size, w=w, u=u, o=o, **options)
    return o, w, u


# Returns tensors that it was given. An operator in a graph must not do that, so this one is decomposed before.
_prefill.define(
    f"forward.to({_INPUTS}, SymInt chunk_size, Tensor(a!)? w, Tensor(b!)? u, Tensor(c!)? o, *, {_OPTIONS})"
    " -> (Tensor(c!), Tensor(a!), Tensor(b!))"
)
_prefill.impl("forward.to", _forward_to, "CompositeImplicitAutograd")


def prefill_f32(*, initial_state: Tensor | None, final_state: Tensor | None, **rest: Any) -> None:
    if initial_state is not None and initial_state is final_state:  # in a graph a tensor has one role in a call
        initial_state = initial_state.clone()
    torch.ops.kda_prefill.write(initial_state=initial_state, final_state=final_state, **rest)

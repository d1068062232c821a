"""``kda::prefill`` and ``kda::decode``, in place on a pool of states, and ``kda::prefill_workspace``, its size."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..call.graph import INPUTS, NORM, OPTIONS, RUN, STATES, WRITTEN, define, norm_of, nothing
from ..call.inputs import WITH_GRADIENTS
from ..call.library import library
from ..call.options import Options


def _prefill_run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, gate_form: int,
    beta_form: int, qk_l2norm: bool, state_layout: int, lower_bound: float, scale: float, state: Any,
    state_indices: Any, has_initial_state: Any, first_valid_slot: int, out: Any, checkpoints: Any,
    checkpoint_slots: Any, checkpoint_every: int, impl: Any, num_threads: int, out_state_indices: Any,
    update_state: bool, checkpoint_offset: Any, norm_gate: Any = None, norm_weight: Any = None, norm_eps: float = 0.0,
    norm_activation: int = 0, norm: bool = False,
) -> None:  # fmt: skip
    options = (gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    library().forward(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options=options, h0=state, hT=state if update_state else None,
        state_indices=state_indices, has_initial_state=has_initial_state, first_valid_slot=first_valid_slot, o=out,
        checkpoints=checkpoints, checkpoint_slots=checkpoint_slots, checkpoint_every=checkpoint_every, impl=impl,
        num_threads=num_threads, out_state_indices=out_state_indices, checkpoint_offset=checkpoint_offset,
        norm=norm_of(norm_gate, norm_weight, norm_eps, norm_activation, norm),
    )  # fmt: skip


def _decode_run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, gate_form: int,
    beta_form: int, qk_l2norm: bool, state_layout: int, lower_bound: float, scale: float, state: Any,
    state_indices: Any, has_initial_state: Any, first_valid_slot: int, out: Any, impl: Any, num_threads: int,
    out_state_indices: Any, update_state: bool, norm_gate: Any = None, norm_weight: Any = None, norm_eps: float = 0.0,
    norm_activation: int = 0, norm: bool = False,
) -> None:  # fmt: skip
    options = (gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    library().decode(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options=options, h0=state, hT=state if update_state else None,
        state_indices=state_indices, has_initial_state=has_initial_state, first_valid_slot=first_valid_slot, o=out,
        impl=impl, num_threads=num_threads, out_state_indices=out_state_indices,
        norm=norm_of(norm_gate, norm_weight, norm_eps, norm_activation, norm),
    )  # fmt: skip


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

define("prefill", f"{_PREFILL} -> ()", _prefill_run, nothing, WITH_GRADIENTS)
define("prefill_workspace", re.sub(r"\(\w!\)", "", _PREFILL) + " -> SymInt", _workspace_run, _workspace_fake)
define(
    "decode",
    f"({INPUTS}, Tensor? cu_seqlens, {OPTIONS}, {STATES}, {RUN}, {WRITTEN}, {NORM}) -> ()",
    _decode_run,
    nothing,
    WITH_GRADIENTS,
)

"""``kda::prefill`` and ``kda::decode``, in place on a pool of states."""

from __future__ import annotations

from typing import Any

from ..call.graph import INPUTS, NORM, OPTIONS, RUN, STATES, WRITTEN, define, norm_of, nothing
from ..call.inputs import WITH_GRADIENTS
from ..call.library import library


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


define(
    "prefill",
    f"({INPUTS}, Tensor? cu_seqlens, {OPTIONS}, {STATES}, Tensor(c!)? checkpoints, Tensor? checkpoint_slots,"
    f" int checkpoint_every, {RUN}, {WRITTEN}, Tensor? checkpoint_offset, {NORM}) -> ()",
    _prefill_run,
    nothing,
    WITH_GRADIENTS,
)
define(
    "decode",
    f"({INPUTS}, Tensor? cu_seqlens, {OPTIONS}, {STATES}, {RUN}, {WRITTEN}, {NORM}) -> ()",
    _decode_run,
    nothing,
    WITH_GRADIENTS,
)

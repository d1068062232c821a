"""``kda::decode_mtp``, ``kda::verify``, ``kda::flush`` and ``kda::flush_verify``."""

from __future__ import annotations

from typing import Any

from ..call.graph import INPUTS, NORM, OPTIONS, RUN, STATES, define, norm_of, nothing
from ..call.inputs import WITH_GRADIENTS
from ..call.library import library

_ROWS = INPUTS.replace("Tensor q, Tensor k, Tensor v", "Tensor? q, Tensor? k, Tensor? v") + ", Tensor? cu_seqlens"


def _conv(state: str) -> str:
    return f"Tensor? conv_x, Tensor? conv_weight, Tensor? conv_bias, {state}, Tensor? conv_indices"


def _records(name: str, *alias: str) -> str:
    u, k, alpha, first, count = alias or ("Tensor?",) * 5
    return (
        f"{u} {name}_u, {k} {name}_k, {alpha} {name}_alpha, Tensor? {name}_indices, {first} {name}_first,"
        f" {count} {name}_count"
    )


def _decode_mtp_run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, gate_form: int,
    beta_form: int, qk_l2norm: bool, state_layout: int, lower_bound: float, scale: float, state: Any,
    state_indices: Any, has_initial_state: Any, first_valid_slot: int, out: Any, impl: Any, num_threads: int,
    conv_x: Any, conv_weight: Any, conv_bias: Any, conv_state: Any, conv_indices: Any, snapshots: Any,
    snapshot_slots: Any, accepted: Any, update_state: bool, norm_gate: Any = None, norm_weight: Any = None,
    norm_eps: float = 0.0, norm_activation: int = 0, norm: bool = False,
) -> None:  # fmt: skip
    options = (gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    library().decode(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options=options, h0=state, hT=state if update_state else None,
        state_indices=state_indices, has_initial_state=has_initial_state, first_valid_slot=first_valid_slot, o=out,
        impl=impl, num_threads=num_threads, conv=(conv_x, conv_weight, conv_bias, conv_state, conv_indices),
        snapshots=snapshots, snapshot_slots=snapshot_slots, accepted=accepted,
        norm=norm_of(norm_gate, norm_weight, norm_eps, norm_activation, norm),
    )  # fmt: skip


def _verify_run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, gate_form: int,
    beta_form: int, qk_l2norm: bool, state_layout: int, lower_bound: float, scale: float, state: Any,
    state_indices: Any, has_initial_state: Any, first_valid_slot: int, conv_x: Any, conv_weight: Any, conv_bias: Any,
    conv_state: Any, conv_indices: Any, out: Any, records_u: Any, records_k: Any, records_alpha: Any,
    records_indices: Any, records_first: Any, records_count: Any, parents: Any, impl: Any, num_threads: int,
    norm_gate: Any = None, norm_weight: Any = None, norm_eps: float = 0.0, norm_activation: int = 0, norm: bool = False,
) -> None:  # fmt: skip
    options = (gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    library().verify(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options=options, h0=state, state_indices=state_indices,
        has_initial_state=has_initial_state, first_valid_slot=first_valid_slot,
        conv=(conv_x, conv_weight, conv_bias, conv_state, conv_indices), o=out,
        records=(records_u, records_k, records_alpha, records_indices, records_first, records_count),
        parents=parents, impl=impl, num_threads=num_threads,
        norm=norm_of(norm_gate, norm_weight, norm_eps, norm_activation, norm),
    )  # fmt: skip


def _flush_run(
    state: Any, state_indices: Any, records_u: Any, records_k: Any, records_alpha: Any, records_indices: Any,
    records_first: Any, records_count: Any, accept_len: Any, **rest: Any,
) -> None:  # fmt: skip
    records = (records_u, records_k, records_alpha, records_indices, records_first, records_count)
    library().flush(state=state, state_indices=state_indices, records=records, accept_len=accept_len, **rest)


def _flush_verify_run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, cu_seqlens: Any, gate_form: int,
    beta_form: int, qk_l2norm: bool, state_layout: int, lower_bound: float, scale: float, state: Any,
    state_indices: Any, first_valid_slot: int, conv_x: Any, conv_weight: Any, conv_bias: Any, conv_state: Any,
    conv_indices: Any, out: Any, last_u: Any, last_k: Any, last_alpha: Any, last_indices: Any, last_first: Any,
    last_count: Any, accept_len: Any, last_parents: Any, last_conv_x: Any, records_u: Any, records_k: Any,
    records_alpha: Any, records_indices: Any, records_first: Any, records_count: Any, parents: Any, max_tokens: int,
    impl: Any, num_threads: int, norm_gate: Any = None, norm_weight: Any = None, norm_eps: float = 0.0,
    norm_activation: int = 0, norm: bool = False,
) -> None:  # fmt: skip
    options = (gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    library().flush_verify(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options=options, h0=state, hT=state, state_indices=state_indices,
        first_valid_slot=first_valid_slot, conv=(conv_x, conv_weight, conv_bias, conv_state, conv_indices), o=out,
        last=(last_u, last_k, last_alpha, last_indices, last_first, last_count), accept_len=accept_len,
        last_parents=last_parents, last_conv_x=last_conv_x,
        records=(records_u, records_k, records_alpha, records_indices, records_first, records_count),
        parents=parents, max_tokens=max_tokens, impl=impl, num_threads=num_threads,
        norm=norm_of(norm_gate, norm_weight, norm_eps, norm_activation, norm),
    )  # fmt: skip


define(
    "decode_mtp",
    f"({_ROWS}, {OPTIONS}, {STATES}, {RUN}, {_conv('Tensor(c!)? conv_state')}, Tensor(d!)? snapshots,"
    f" Tensor? snapshot_slots, Tensor? accepted, bool update_state, {NORM}) -> ()",
    _decode_mtp_run,
    nothing,
    WITH_GRADIENTS,
)
define(
    "verify",
    f"({_ROWS}, {OPTIONS}, Tensor state, Tensor? state_indices, Tensor? has_initial_state, SymInt first_valid_slot,"
    f" {_conv('Tensor? conv_state')}, Tensor(a!) out,"
    f" {_records('records', 'Tensor(b!)?', 'Tensor(c!)?', 'Tensor(d!)?', 'Tensor?', 'Tensor?')}, Tensor? parents,"
    f" {RUN}, {NORM}) -> ()",
    _verify_run,
    nothing,
    WITH_GRADIENTS,
)
define(
    "flush",
    f"(Tensor(a!) state, Tensor? state_indices, {_records('records')}, Tensor accept_len, Tensor? parents,"
    " Tensor? conv_x, Tensor(b!)? conv_state, Tensor? conv_indices, int state_layout, SymInt first_valid_slot,"
    f" {RUN}) -> ()",
    _flush_run,
    nothing,
    WITH_GRADIENTS,
)
define(
    "flush_verify",
    f"({_ROWS}, {OPTIONS}, Tensor(a!) state, Tensor? state_indices, SymInt first_valid_slot,"
    f" {_conv('Tensor(b!)? conv_state')}, Tensor(c!) out, {_records('last')}, Tensor accept_len, Tensor? last_parents,"
    f" Tensor? last_conv_x, {_records('records', *(f'Tensor({c}!)?' for c in 'defgh'))}, Tensor? parents,"
    f" SymInt max_tokens, {RUN}, {NORM}) -> ()",
    _flush_verify_run,
    nothing,
    WITH_GRADIENTS,
)

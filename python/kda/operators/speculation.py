"""``kda::decode_mtp``, ``kda::verify``, ``kda::flush`` and ``kda::flush_verify``."""

from __future__ import annotations

from ..call.graph import INPUTS, NORM, OPTIONS, POOL, RUN, STATES, WRITES, LibraryCall, define, nothing
from ..call.inputs import WITH_GRADIENTS

_ROWS = INPUTS.replace("Tensor q, Tensor k, Tensor v", "Tensor? q, Tensor? k, Tensor? v") + ", Tensor? cu_seqlens"


def _conv(state: str) -> str:
    return f"Tensor? conv_x, Tensor? conv_weight, Tensor? conv_bias, {state}, Tensor? conv_indices"


def _records(name: str, *alias: str) -> str:
    u, k, alpha, first, count = alias or ("Tensor?",) * 5
    return (
        f"{u} {name}_u, {k} {name}_k, {alpha} {name}_alpha, Tensor? {name}_indices, {first} {name}_first,"
        f" {count} {name}_count"
    )


define(
    "decode_mtp",
    f"({_ROWS}, {OPTIONS}, {STATES}, {RUN}, {_conv('Tensor(c!)? conv_state')}, Tensor(d!)? snapshots,"
    f" Tensor? snapshot_slots, Tensor? accepted, bool update_state, {NORM}) -> ()",
    LibraryCall("decode", POOL, WRITES),
    nothing,
    WITH_GRADIENTS,
)
define(
    "verify",
    f"({_ROWS}, {OPTIONS}, Tensor state, Tensor? state_indices, Tensor? has_initial_state, SymInt first_valid_slot,"
    f" {_conv('Tensor? conv_state')}, Tensor(a!) out,"
    f" {_records('records', 'Tensor(b!)?', 'Tensor(c!)?', 'Tensor(d!)?', 'Tensor?', 'Tensor?')}, Tensor? parents,"
    f" {RUN}, {NORM}) -> ()",
    LibraryCall("verify", POOL),
    nothing,
    WITH_GRADIENTS,
)
define(
    "flush",
    f"(Tensor(a!) state, Tensor? state_indices, {_records('records')}, Tensor accept_len, Tensor? parents,"
    " Tensor? conv_x, Tensor(b!)? conv_state, Tensor? conv_indices, int state_layout, SymInt first_valid_slot,"
    f" {RUN}) -> ()",
    LibraryCall("flush", {}),
    nothing,
    WITH_GRADIENTS,
)
define(
    "flush_verify",
    f"({_ROWS}, {OPTIONS}, Tensor(a!) state, Tensor? state_indices, SymInt first_valid_slot,"
    f" {_conv('Tensor(b!)? conv_state')}, Tensor(c!) out, {_records('last')}, Tensor accept_len, Tensor? last_parents,"
    f" Tensor? last_conv_x, {_records('records', *(f'Tensor({c}!)?' for c in 'defgh'))}, Tensor? parents,"
    f" SymInt max_tokens, {RUN}, {NORM}) -> ()",
    LibraryCall("flush_verify", POOL, "hT=state"),
    nothing,
    WITH_GRADIENTS,
)

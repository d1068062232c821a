"""Decode of tokens in rows, as serving engines keep them.

``kda.decode`` and ``kda.decode_mtp`` take tokens as ``[N, T, ...]``. Engines have ``[1, N*T, ...]``, joint rows of q, k
and v, flat heads, and tables with rows for more requests than a step has. A view by torch takes 1 to 2 us of the host,
and a call would need up to ten. Here the binding makes them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import Conv, Norm, arrays_of, norm_fields
from ..call.dispatch import dispatched
from ..call.eager import check_serving, is_plain_step, mark_step, mark_written
from ..call.inputs import WITH_GRADIENTS, no_gate_parameters
from ..call.library import library
from ..call.options import make_options
from .declined import Declined


def decode_rows(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    *,
    N: int,
    T: int,
    state_indices: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: float | None,
    scale: float | None = None,
    l2norm: bool = True,
    gate: bool = True,
    sigmoid: bool = True,
    first_valid_slot: int = 0,
    update_state: bool = True,
    snapshots: Any = None,
    snapshot_slots: Any = None,
    accepted: Any = None,
    conv: Conv | None = None,
    norm: Norm | None = None,
    out: Any = None,
) -> Any:
    """T tokens of each of N requests, in place on a pool of states.

    Args:
        q, k: rows ``[H, K]``, at least ``N * T`` of which the first are taken, in dimensions of any number and shape.
            With None for ``k`` and ``v``, a row of q is ``[2*H*K + HV*V]``: q, k and v.
        v, g, out: such rows of ``[HV, V]`` or ``[HV, K]``, in two dimensions or in one.
        beta: such rows of ``[HV]``.
        state: the pool ``[slots, HV, V, K]``.
        A_log, dt_bias: ``[HV]``, and ``[HV, K]`` or ``[HV * K]``, with any dimensions of 1 besides.
        state_indices: at least ``[N]``, or with ``snapshot_slots`` ``[N, S]`` of which the first column is taken.
        snapshots: a pool of states, or ``[rows, S, HV, V, K]`` with states of a row one behind another, which is read
            as a pool.
        snapshot_slots, accepted: at least ``[N, T]`` and ``[N]``.
        conv: a :class:`kda.Conv` in the place of q, k and v, with rows ``[D]`` and a weight ``[D, W]`` or
            ``[D, 1, W]``.
        norm: a :class:`kda.Norm`, whose gate has rows as v has.
        out: made if None, in the shape of v, or ``[1, N*T, HV, V]``.
        The rest as in :func:`kda.decode_mtp`.

    Returns:
        ``out``.

    Raises:
        ValueError: the call is refused, and nothing was written.
    """
    if dispatched():
        raise Declined("q: expected an eager call, got one that is traced or under a mode of torch's dispatcher")
    if state is None:
        raise Declined("state: expected a pool of states, got None")
    if out is None:
        out = _new_output(q, v, conv, N * T, state)
    if not gate:
        A_log, dt_bias = no_gate_parameters(A_log, dt_bias, lower_bound)
    unchecked = conv is None and norm is None
    if unchecked and snapshots is not None and snapshots is not state:
        unchecked = not (snapshots.is_neg() or snapshots.requires_grad)
    if not unchecked or not is_plain_step(
        q, q if k is None else k, q if v is None else v, g, beta, state, out, (A_log, dt_bias)
    ):
        arrays = (q, k, v, g, beta, A_log, dt_bias, state, out, snapshots, *(conv or ()), *arrays_of(norm))
        check_serving(WITH_GRADIENTS, arrays)
    options = make_options(A_log, scale, lower_bound, (l2norm, gate, sigmoid), neg_eigval=False, v_first=True)
    library().decode_rows(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        N=N,
        T=T,
        options=options,
        h0=state,
        hT=update_state,
        state_indices=state_indices,
        first_valid_slot=first_valid_slot,
        o=out,
        conv=conv,
        snapshots=snapshots,
        snapshot_slots=snapshot_slots,
        accepted=accepted,
        norm=norm_fields(norm),
    )
    if conv is None and not (update_state and snapshots is not None):
        mark_step(state if update_state else snapshots, out)
    else:
        mark_written(out, snapshots, state if update_state else None, None if conv is None else conv.state)
    return out


def _new_output(q: Any, v: Any, conv: Conv | None, rows: int, state: Any) -> Any:
    if v is not None:
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    _, HV, V, _ = state.shape
    return (q if conv is None else conv.x).new_empty((1, rows, HV, V))

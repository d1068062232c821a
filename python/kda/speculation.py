"""Speculative decoding: several draft tokens per request, of which the model accepts some.

Verifying reads the state and writes none. Per token it records ``u``, ``k`` and ``alpha`` (1.5 KB a head at
``K = V = 128``, against 64 KB for a state), and the flush applies the accepted ones. Requests are rows
``[N, T, ...]``, or packed by ``cu_seqlens``; ``T`` is at most 16. Names follow :func:`kda.decode`. These functions
share its arguments (``stream`` among them), in-place semantics and errors.
"""

from __future__ import annotations

from typing import Any

from .arguments import Conv, Norm, Records, arrays_of, check_kind, counts, is_on_host, norm_fields
from .call.arrays import new_like, shape_of
from .call.dispatch import dispatched
from .call.eager import check_serving, mark_written
from .call.inputs import WITH_GRADIENTS, gate_of
from .call.library import library
from .call.options import make_options
from .call.retry import in_sentences
from .call.tracing import compiling


def _value_size(v: Any, state: Any, out: Any, conv: Conv | None, v_first: bool) -> int:
    if conv is None:
        return int(shape_of("v", v, 4)[3])
    if out is not None:
        return int(shape_of("out", out, 4)[3])
    if state is None:
        raise ValueError("out: expected an array with conv and without state, which tells V otherwise, got None")
    return int(shape_of("state", state, 4)[2 if v_first else 3])


def prepare(
    inputs: tuple[Any, ...],
    out: Any,
    conv: Conv | None,
    gate: tuple[Any, Any, Any],
    scale: Any,
    in_kernel: tuple[bool, bool, bool],
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> tuple[Any, Any, tuple[Any, ...], Any]:
    """``A_log``, ``dt_bias`` and the options for the library, and ``out``. ``inputs`` end with the state; ``gate`` is
    A_log, dt_bias and lower_bound."""
    (q, k, v, g, beta, state), (A_log, dt_bias, lower_bound) = inputs, gate
    shape_of("g", g, 4)
    check_kind("conv", conv, Conv)
    V = _value_size(v, state, out, conv, state_v_first)
    A, bias = gate_of(in_kernel[1], A_log, dt_bias, lower_bound, g, g)
    options = make_options(A, scale, lower_bound, in_kernel, allow_neg_eigval, state_v_first)
    if out is None:
        out = new_like(v) if conv is None else new_like(conv.x, (*g.shape[:3], V))
    if not compiling():
        check_serving(WITH_GRADIENTS, (q, k, v, g, beta, A_log, dt_bias, state, out, *(conv or ())))
    return A, bias, options, out


@in_sentences
def decode_mtp(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any = None,
    *,
    state_indices: Any = None,
    has_initial_state: Any = None,
    cu_seqlens: Any = None,
    conv: Conv | None = None,
    update_state: bool = True,
    snapshots: Any = None,
    snapshot_slots: Any = None,
    accepted: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    first_valid_slot: int = 0,
    norm: Norm | None = None,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> Any:
    """:func:`kda.decode` with all choices of where states come from and go to, and with the convolution fused.

    Args:
        q, k, v, g, beta, state, ...: as in :func:`kda.decode`; q, k, v are None with ``conv``.
        conv: raw packed rows to convolve first; the tokens of the call advance its state.
        update_state: False leaves ``state`` as it is.
        snapshots: the state after every token: ``[N, S, HV, V, K]``, or with ``snapshot_slots`` a pool
            ``[slots, HV, V, K]`` that may be ``state`` itself.
        snapshot_slots: ``[N, S]`` int32 or int64, ``S >= T``; slots ``< first_valid_slot`` are skipped.
        accepted: ``[N]`` int32 or int64, clamped to 1..S: start from what an earlier call left as snapshot
            ``accepted[n] - 1``, in slot ``snapshot_slots[n, accepted[n] - 1]`` of ``state`` or in
            ``snapshots[n, accepted[n] - 1]``.
        norm: a :class:`kda.Norm`: the norm and gate of the output, in the same call.

    Returns:
        ``out``, ``[N, T, HV, V]``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 2, 1, 4), np.float32) / 2, np.ones((1, 2, 1), np.float32)
    >>> pool, kept = np.zeros((1, 1, 4, 4), np.float32), np.zeros((1, 2, 1, 4, 4), np.float32)
    >>> o = kda.decode_mtp(x, x, x, 0 * x, beta, pool, update_state=False, snapshots=kept)
    >>> float(pool.sum()), float(kept[0, 0].sum())
    (0.0, 4.0)
    """
    given, gate = (q, k, v, g, beta, state), (A_log, dt_bias, lower_bound)
    in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    A, bias, options, out = prepare(given, out, conv, gate, scale, in_kernel, allow_neg_eigval, state_v_first)
    behind = norm_fields(norm)
    if dispatched():
        from .call.graph import run_operator

        pool = {"state_indices": state_indices, "has_initial_state": has_initial_state}
        pool |= {"first_valid_slot": first_valid_slot}
        drafts = {"snapshots": snapshots, "snapshot_slots": snapshot_slots, "accepted": accepted, "conv": conv}
        how = {"options": options, "norm": behind, "impl": impl, "num_threads": num_threads}
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias, "cu_seqlens": cu_seqlens}
        states = {"state": state, "out": out, "update_state": update_state}
        run_operator("decode_mtp", **inputs, **states, **pool, **drafts, **how)
        return out
    indices = (state_indices, has_initial_state, cu_seqlens, snapshot_slots, accepted)
    check_serving(WITH_GRADIENTS, (snapshots, *arrays_of(norm), *indices))
    library().decode(
        q,
        k,
        v,
        g,
        beta,
        A,
        bias,
        cu_seqlens,
        options=options,
        h0=state,
        hT=state if update_state else None,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        first_valid_slot=first_valid_slot,
        o=out,
        impl=impl,
        num_threads=num_threads,
        conv=conv,
        snapshots=snapshots,
        snapshot_slots=snapshot_slots,
        accepted=accepted,
        norm=behind,
    )
    mark_written(out, snapshots, state if update_state else None, None if conv is None else conv.state)
    return out


@in_sentences
def verify_kvbuffer(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    records: Records | None = None,
    *,
    state_indices: Any = None,
    has_initial_state: Any = None,
    cu_seqlens: Any = None,
    conv: Conv | None = None,
    parents: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    first_valid_slot: int = 0,
    norm: Norm | None = None,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> Any:
    """Outputs of draft tokens from states that stay unchanged; ``records`` receives what the flush needs.

    Args:
        q, k, v, g, beta, state, ...: as in :func:`kda.decode`; q, k, v are None with ``conv``.
        records: written at entries 0..T-1 of each request's slot, or after a ring's committed entries. If None, only
            outputs are computed.
        conv: raw packed rows to convolve first. Its state is only read; the flush advances it.
        parents: ``[N, T]`` int32 or int64 for a tree of drafts: the token before t, negative for the committed text.
            If None, drafts are a chain.
        norm: a :class:`kda.Norm`: the norm and gate of the output, in the same call.

    Returns:
        ``out``, ``[N, T, HV, V]``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 3, 1, 4), np.float32) / 2, np.ones((1, 3, 1), np.float32)
    >>> pool, records = np.zeros((1, 1, 4, 4), np.float32), kda.new_records(1, 3, 1, 1, 4, 4)
    >>> o = kda.verify_kvbuffer(x, x, x, 0 * x, beta, pool, records)
    >>> kda.flush_kvbuffer(pool, records, np.array([1], np.int32))
    >>> float(pool.sum())
    4.0
    """
    given, gate = (q, k, v, g, beta, state), (A_log, dt_bias, lower_bound)
    in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    A, bias, options, out = prepare(given, out, conv, gate, scale, in_kernel, allow_neg_eigval, state_v_first)
    check_kind("records", records, Records)
    behind = norm_fields(norm)
    if dispatched():
        from .call.graph import run_operator

        pool = {"state_indices": state_indices, "has_initial_state": has_initial_state}
        pool |= {"first_valid_slot": first_valid_slot}
        drafts = {"conv": conv, "records": records, "parents": parents, "norm": behind}
        how = {"options": options, "impl": impl, "num_threads": num_threads}
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias, "cu_seqlens": cu_seqlens}
        run_operator("verify", **inputs, state=state, out=out, **pool, **drafts, **how)
    else:
        indices = (state_indices, has_initial_state, cu_seqlens, parents)
        check_serving(WITH_GRADIENTS, (*(records or ()), *arrays_of(norm), *indices))
        library().verify(
            q,
            k,
            v,
            g,
            beta,
            A,
            bias,
            cu_seqlens,
            options=options,
            h0=state,
            state_indices=state_indices,
            has_initial_state=has_initial_state,
            first_valid_slot=first_valid_slot,
            conv=conv,
            o=out,
            records=records,
            parents=parents,
            impl=impl,
            num_threads=num_threads,
            norm=behind,
        )
        mark_written(out, *((records.u, records.k, records.alpha) if records else ()))
    return out


@in_sentences
def flush_kvbuffer(
    state: Any,
    records: Records,
    accept_len: Any,
    *,
    state_indices: Any = None,
    parents: Any = None,
    conv_x: Any = None,
    conv_state: Any = None,
    conv_indices: Any = None,
    state_v_first: bool = True,
    first_valid_slot: int = 0,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> None:
    """Applies recorded tokens to ``state`` in place: a ring's committed entries, then the accepted drafts.

    Args:
        state: ``[slots, HV, V, K]`` float32 or bfloat16 (K-first with ``state_v_first=False``).
        records: as :func:`verify_kvbuffer` left them. The cursors of a ring are not written: set ``ring_count`` of
            the flushed slots to 0.
        accept_len: ``[N]`` int32 or int64, a list, or one integer for all: how many tokens of the chain to apply, or
            with ``parents`` the path to token ``accept_len[n] - 1``. Clamped to 0..R. 0 writes only a ring's entries.
        state_indices: ``[N]`` int32 or int64, the slot of each request; row n if None. Slots ``< first_valid_slot``
            are left alone.
        parents: ``[N, T]`` int32 or int64, as given to the verify.
        conv_x, conv_state, conv_indices: the drafts' raw rows ``[N, T, D]``, the convolution's state
            ``[slots, D, W - 1]``, which the accepted rows (with ``parents`` those of the path) advance, and the slot
            of each request in it, row n if None.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 3, 1, 4), np.float32) / 2, np.ones((1, 3, 1), np.float32)
    >>> pool, records = np.zeros((5, 1, 4, 4), np.float32), kda.new_records(1, 3, 1, 1, 4, 4)
    >>> slot = np.array([2], np.int32)
    >>> o = kda.verify_kvbuffer(x, x, x, 0 * x, beta, pool, records, state_indices=slot)
    >>> float(pool.sum())
    0.0
    >>> kda.flush_kvbuffer(pool, records, np.array([2], np.int32), state_indices=slot)  # two of three accepted
    >>> pool[:, 0, 0, 0].tolist()
    [0.0, 0.0, 0.25, 0.0, 0.0]
    """
    check_kind("records", records, Records, optional=False)
    if is_on_host(accept_len):
        at = records.indices if state_indices is None else state_indices
        accept_len = counts("accept_len", accept_len, state.shape[-4] if at is None else at.shape[0], state)
    if dispatched():
        from .call.graph import run_operator

        drafts = {"records": records, "accept_len": accept_len, "parents": parents}
        conv = {"conv_x": conv_x, "conv_state": conv_state, "conv_indices": conv_indices}
        pool = {"state": state, "state_indices": state_indices, "first_valid_slot": first_valid_slot}
        how = {"state_layout": int(not state_v_first), "impl": impl, "num_threads": num_threads}
        run_operator("flush", **pool, **drafts, **conv, **how)
    else:
        indices = (state_indices, accept_len, parents, conv_indices)
        check_serving(WITH_GRADIENTS, (state, *records, conv_x, conv_state, *indices))
        library().flush(
            state=state,
            state_indices=state_indices,
            records=records,
            accept_len=accept_len,
            parents=parents,
            conv_x=conv_x,
            conv_state=conv_state,
            conv_indices=conv_indices,
            state_layout=int(not state_v_first),
            first_valid_slot=first_valid_slot,
            impl=impl,
            num_threads=num_threads,
        )
        mark_written(state, conv_state)


@in_sentences
def flush_kvbuffer_all_layers(state: Any, records: Records, accept_len: Any, **kwargs: Any) -> None:
    """:func:`flush_kvbuffer` for all layers of a model in one call, with the bits of a loop over layers.

    ``state`` is ``[layers, slots, HV, V, K]``, records ``[layers, slots, R, ...]`` (``new_records(layers=...)``;
    verify takes one layer's slices), ``conv_x`` ``[layers, N, T, D]`` and ``conv_state``
    ``[layers, slots, D, W - 1]``, of any layer stride. All layers share indices, parents, lengths and ring cursors.
    Keywords are those of :func:`flush_kvbuffer`.

    >>> import kda, numpy as np
    >>> pools = np.ones((3, 1, 1, 4, 4), np.float32)
    >>> records = kda.new_records(1, 2, 1, 1, 4, 4, layers=3)  # decays of 0
    >>> kda.flush_kvbuffer_all_layers(pools, records, np.array([1], np.int32))
    >>> float(pools.sum())
    0.0
    """
    shape_of("state", state, 5)
    flush_kvbuffer(state, records, accept_len, **kwargs)


@in_sentences
def flush_verify_kvbuffer(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    records: Records,
    accept_len: Any,
    *,
    last: Records | None = None,
    last_parents: Any = None,
    last_conv_x: Any = None,
    max_tokens: int = 0,
    state_indices: Any = None,
    cu_seqlens: Any = None,
    conv: Conv | None = None,
    parents: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    first_valid_slot: int = 0,
    norm: Norm | None = None,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> Any:
    """The flush of the last round and the verify of the next, in one pass over the state.

    Without a ring, ``last`` holds the last round's records and ``records`` receives this round's: two buffers that
    take turns. The bits are those of :func:`flush_kvbuffer` and :func:`verify_kvbuffer`. With a ring
    (``records.ring_count``) accepted tokens become committed entries, and the state is written only when less room
    than for two rounds of ``max_tokens`` is left.

    Args:
        q, k, v, g, beta, ...: the new drafts, as in :func:`verify_kvbuffer`.
        state: the pool, read, and written where something is applied.
        records: of this round, or a ring of at least ``2 * max_tokens`` entries, whose cursors are advanced.
        accept_len: ``[N]`` int32 or int64, a list, or one integer for all: of the last round; 0 in the first. Clamped
            to what the records have room for.
        last: the last round's records, in memory of their own. Not with a ring.
        last_parents: ``[N, T']`` int32 or int64, the last round's tree. Not with a ring.
        last_conv_x: ``[N, T', D]``, the last round's raw rows, with ``conv``.
        max_tokens: with a ring, the most tokens in any round on it. 0 means T (not with cu_seqlens).
        norm: a :class:`kda.Norm`: the norm and gate of the output, in the same call.

    Returns:
        ``out``, ``[N, T, HV, V]``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 3, 1, 4), np.float32) / 2, np.ones((1, 3, 1), np.float32)
    >>> drafts, pool = (x, x, x, 0 * x, beta), np.zeros((1, 1, 4, 4), np.float32)
    >>> first, second = (kda.new_records(1, 3, 1, 1, 4, 4) for _ in range(2))
    >>> o = kda.verify_kvbuffer(*drafts, pool, first)
    >>> o = kda.flush_verify_kvbuffer(*drafts, pool, second, np.array([2], np.int32), last=first)
    >>> float(pool[0, 0, 0, 0])
    0.25
    """
    given, gate = (q, k, v, g, beta, state), (A_log, dt_bias, lower_bound)
    in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    A, bias, options, out = prepare(given, out, conv, gate, scale, in_kernel, allow_neg_eigval, state_v_first)
    check_kind("last", last, Records)
    check_kind("records", records, Records, optional=False)
    if is_on_host(accept_len):
        N = shape_of("g", g, 4)[0] if cu_seqlens is None else shape_of("cu_seqlens", cu_seqlens, 1)[0] - 1
        accept_len = counts("accept_len", accept_len, N, state)
    behind = norm_fields(norm)
    if dispatched():
        from .call.graph import run_operator

        before = {"last": last, "accept_len": accept_len, "last_parents": last_parents, "last_conv_x": last_conv_x}
        drafts = {"conv": conv, "records": records, "parents": parents, "max_tokens": max_tokens, "norm": behind}
        pool = {"state_indices": state_indices, "first_valid_slot": first_valid_slot}
        how = {"options": options, "impl": impl, "num_threads": num_threads}
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias, "cu_seqlens": cu_seqlens}
        run_operator("flush_verify", **inputs, state=state, out=out, **pool, **before, **drafts, **how)
    else:
        indices = (state_indices, cu_seqlens, accept_len, parents, last_parents)
        check_serving(WITH_GRADIENTS, (*records, *(last or ()), last_conv_x, *arrays_of(norm), *indices))
        library().flush_verify(
            q,
            k,
            v,
            g,
            beta,
            A,
            bias,
            cu_seqlens,
            options=options,
            h0=state,
            hT=state,
            state_indices=state_indices,
            first_valid_slot=first_valid_slot,
            conv=conv,
            o=out,
            last=last,
            accept_len=accept_len,
            last_parents=last_parents,
            last_conv_x=last_conv_x,
            records=records,
            parents=parents,
            max_tokens=max_tokens,
            impl=impl,
            num_threads=num_threads,
            norm=behind,
        )
        written = records._replace(indices=None)
        mark_written(state, out, *written, None if conv is None else conv.state)
    return out

"""Speculative decoding: several draft tokens per request, of which the model accepts some.

Verifying reads the state and writes none. Per token it records ``u``, ``k`` and ``alpha`` (1.5 KB a head at
``K = V = 128``, against 64 KB for a state), and the flush applies the accepted ones. Requests are rows
``[N, T, ...]``, or packed by ``cu_seqlens``; ``T`` is at most 16. Names follow :func:`kda.decode`. These functions
share its arguments, in-place semantics and errors.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from . import _arrays
from ._arrays import is_torch, new_like, shape_of
from ._dispatch import compiling, dispatched
from ._lib import library
from ._options import check_flag, make_options
from ._refusal import in_sentences
from ._tracking import check_serving, mark_written
from .norm import Norm, norm_fields
from .ops import _WITH_GRADIENTS, _gate_parameters, _no_gate_parameters


class Records(NamedTuple):
    """What a verify leaves for the flush: slots of ``R`` entries, one entry a token, made by :func:`new_records`.

    Entry t of a request's slot belongs to its token t. With ``ring_first`` and ``ring_count`` a slot is a ring: that
    many committed entries from ``ring_first`` on, then those of the drafts, all positions modulo ``R``. The arrays
    may not share memory with anything else in a call. Entries that no request uses are neither read nor written. Live
    requests need slots of their own; a request with a negative index records and applies nothing.

    >>> import kda, numpy as np
    >>> records = kda.new_records(slots=4, entries=8, H=1, HV=2, K=16, V=32)
    >>> batch = records._replace(indices=np.array([2, -1], np.int32))  # two requests, the second without records
    >>> list(batch.alpha.shape), batch.ring_count is None
    ([4, 8, 2, 16], True)
    """

    u: Any  #: ``[slots, R, HV, V]`` float32, corrections
    k: Any  #: ``[slots, R, H, K]`` float32, keys after the norm
    alpha: Any  #: ``[slots, R, HV, K]`` float32, decays ``exp(g)``
    indices: Any = None  #: ``[N]`` int32 or int64, the slot of each request; row n if None; negative: none
    ring_first: Any = None  #: ``[slots]`` int32: with ``ring_count``, a slot is a ring
    ring_count: Any = None  #: ``[slots]`` int32, committed entries that the state does not hold yet


class Conv(NamedTuple):
    """The causal convolution before the recurrence, fused: raw packed rows replace q, k and v, which are then None.

    The bits are those of :func:`kda.causal_conv1d_update` (with SiLU) followed by the function. In a tree the taps of
    a token are its ancestors. All are floating point arrays, each with its own dtype; ``x`` has that of q, k and v.

    >>> import kda, numpy as np
    >>> x, g, beta = np.ones((1, 2, 16), np.float32), np.zeros((1, 2, 1, 4), np.float32), np.ones((1, 2, 1), np.float32)
    >>> conv = kda.Conv(x, weight=np.ones((16, 4), np.float32), bias=None, state=np.zeros((1, 16, 3), np.float32))
    >>> o = kda.decode_mtp(None, None, None, g, beta, np.zeros((1, 1, 8, 4), np.float32), conv=conv)
    >>> o.shape, conv.state[0, 0].tolist()  # two tokens on
    ((1, 2, 1, 8), [0.0, 1.0, 1.0])
    """

    x: Any  #: ``[N, T, D]``, ``D = 2*H*K + HV*V``: q heads, then k, then v
    weight: Any  #: ``[D, W]``, ``W`` = 2..4; the last column belongs to the current token
    bias: Any  #: ``[D]`` or None
    state: Any  #: ``[slots, D, W - 1]``, the last raw rows, oldest first; any strides
    indices: Any = None  #: ``[N]`` int32 or int64, the slot of each request; row n if None; negative: it has no state


def _check_size(name: str, size: Any, low: int = 0, high: float = math.inf) -> None:
    if isinstance(size, bool) or not hasattr(size, "__index__") or not low <= size <= high:
        wanted = f"a number of at least {low}" if high == math.inf else f"{low}..{high}"
        raise ValueError(f"{name}: expected {wanted}, got {size!r}")


def _check_device(device: Any) -> None:
    if _arrays.torch is None:
        if device not in (None, "cpu"):
            raise ValueError(f"device: expected None or 'cpu' where torch is missing, got {device!r}")
        return
    try:
        _arrays.torch.empty(0, device=device)
    except Exception as error:
        got = f"{device!r}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"device: expected one that torch has here, got {got}") from None


def new_records(
    slots: int, entries: int, H: int, HV: int, K: int, V: int, *, ring: bool = False, layers: int | None = None,
    device: Any = None,
) -> Records:  # fmt: skip
    """Returns zeroed records: torch tensors, or NumPy arrays if torch is missing.

    >>> import kda
    >>> list(kda.new_records(2, 8, 1, 1, 16, 32).u.shape)
    [2, 8, 1, 32]
    """
    for name, size in {"slots": slots, "entries": entries}.items():
        _check_size(name, size)
    for name, size in {"H": H, "HV": HV}.items():
        _check_size(name, size, 1)
    for name, size in {"K": K, "V": V}.items():
        _check_size(name, size, 1, 256)
    if HV % H:
        raise ValueError(f"HV: expected a multiple of H = {H}, got {HV}")
    if layers is not None:
        _check_size("layers", layers)
    check_flag("ring", ring)
    _check_device(device)
    lead = (slots, entries) if layers is None else (layers, slots, entries)
    if _arrays.torch is not None:
        tensors = [_arrays.torch.zeros(*lead, *s, device=device) for s in ((HV, V), (H, K), (HV, K))]
        cursors = [_arrays.torch.zeros(slots, dtype=_arrays.torch.int32, device=device) for _ in range(2 * ring)]
    else:
        import numpy

        tensors = [numpy.zeros((*lead, *s), numpy.float32) for s in ((HV, V), (H, K), (HV, K))]
        cursors = [numpy.zeros(slots, numpy.int32) for _ in range(2 * ring)]
    u, k, alpha = tensors
    first, count = cursors or (None, None)
    return Records(u, k, alpha, None, first, count)


def _value_size(v: Any, state: Any, out: Any, conv: Conv | None, v_first: bool) -> int:
    if conv is None:
        return int(shape_of("v", v, 4)[3])
    if out is not None:
        return int(shape_of("out", out, 4)[3])
    if state is None:
        raise ValueError("out: expected an array with conv and without state, which tells V otherwise, got None")
    return int(shape_of("state", state, 4)[2 if v_first else 3])


def _fields(name: str, x: Any, kind: Any, optional: bool = True) -> tuple[Any, ...]:
    """The fields of a ``kind`` (:class:`Conv` or :class:`Records`), all None without one."""
    if x is None and optional:
        return (None,) * len(kind._fields)
    if not isinstance(x, kind):
        raise ValueError(f"{name}: expected kda.{kind.__name__}, got {type(x).__name__}")
    return tuple(x)


def _arguments(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, out: Any, conv: Conv | None, cu: Any, A_log: Any,
    dt_bias: Any, scale: Any, lower_bound: Any, l2norm: bool, use_gate: bool, beta_sigmoid: bool, neg_eigval: bool,
    v_first: bool,
) -> tuple[tuple[Any, ...], Any]:  # fmt: skip
    """The binding's arguments for ``kda_inputs``, and ``out``."""
    shape_of("g", g, 4)
    fields = _fields("conv", conv, Conv)
    V = _value_size(v, state, out, conv, v_first)
    if use_gate:
        A_log, dt_bias = _gate_parameters(A_log, dt_bias, g, g)
    else:
        A_log, dt_bias = _no_gate_parameters(A_log, dt_bias, lower_bound)
    options = make_options(A_log, scale, lower_bound, l2norm, use_gate, beta_sigmoid, neg_eigval, v_first)
    if out is None:
        out = new_like(v) if conv is None else new_like(conv.x, (*g.shape[:3], V))
    if not compiling():
        check_serving(_WITH_GRADIENTS, q, k, v, g, beta, A_log, dt_bias, state, out, *fields)
    return (q, k, v, g, beta, A_log, dt_bias, cu, *options), out


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
    arguments, out = _arguments(
        q, k, v, g, beta, state, out, conv, cu_seqlens, A_log, dt_bias, scale, lower_bound, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip
    rest = (first_valid_slot, out, impl, num_threads)
    more, behind = (*_fields("conv", conv, Conv), snapshots, snapshot_slots, accepted), norm_fields(norm)
    if dispatched():
        from .compiled import run_in_place

        before = (*arguments, state, state_indices, has_initial_state)
        run_in_place("decode_mtp", *before, *rest, *more, update_state, *behind)
        return out
    check_serving(_WITH_GRADIENTS, snapshots, *behind[:2])
    states = (state, state if update_state else None, state_indices, has_initial_state)
    library().decode(*arguments, *states, *rest, None, None, *more, *behind)
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
    arguments, out = _arguments(
        q, k, v, g, beta, state, out, conv, cu_seqlens, A_log, dt_bias, scale, lower_bound, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip
    rest = (
        state_indices, has_initial_state, first_valid_slot, *_fields("conv", conv, Conv), out,
        *_fields("records", records, Records), parents, impl, num_threads,
    )  # fmt: skip
    behind = norm_fields(norm)
    if dispatched():
        from .compiled import run_in_place

        run_in_place("verify", *arguments, state, *rest, *behind)
    else:
        check_serving(_WITH_GRADIENTS, *(records or ()), *behind[:2])
        library().verify(*arguments, state, None, *rest, None, *behind)
        mark_written(out, *(records or ())[:3])
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
) -> None:
    """Applies recorded tokens to ``state`` in place: a ring's committed entries, then the accepted drafts.

    Args:
        state: ``[slots, HV, V, K]`` float32 or bfloat16 (K-first with ``state_v_first=False``).
        records: as :func:`verify_kvbuffer` left them. The cursors of a ring are not written: set ``ring_count`` of
            the flushed slots to 0.
        accept_len: ``[N]`` int32 or int64: how many tokens of the chain to apply, or with ``parents`` the path that
            ends in token ``accept_len[n] - 1``. Clamped to 0..R. 0 writes nothing, unless a ring has committed entries.
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
    arguments = (
        state, state_indices, *_fields("records", records, Records, False), accept_len, parents, conv_x, conv_state,
        conv_indices, int(not state_v_first), first_valid_slot, impl, num_threads,
    )  # fmt: skip
    if dispatched():
        from .compiled import run_in_place

        run_in_place("flush", *arguments)
    else:
        check_serving(_WITH_GRADIENTS, state, *records, conv_x, conv_state)
        library().flush(*arguments, None)
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
        accept_len: ``[N]`` int32 or int64, of the last round; 0 in the first. Clamped to what is recorded.
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
    arguments, out = _arguments(
        q, k, v, g, beta, state, out, conv, cu_seqlens, A_log, dt_bias, scale, lower_bound, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip
    rest = (
        first_valid_slot, *_fields("conv", conv, Conv), out, *_fields("last", last, Records), accept_len, last_parents,
        last_conv_x, *_fields("records", records, Records, False), parents, max_tokens, impl, num_threads,
    )  # fmt: skip
    behind = norm_fields(norm)
    if dispatched():
        from .compiled import run_in_place

        run_in_place("flush_verify", *arguments, state, state_indices, *rest, *behind)
    else:
        check_serving(_WITH_GRADIENTS, *records, *(last or ()), last_conv_x, *behind[:2])
        library().flush_verify(*arguments, state, state, state_indices, None, *rest, None, *behind)
        written = records._replace(indices=None)
        mark_written(state, out, *written, None if conv is None else conv.state)
    return out


def _about_slots(error: ValueError) -> ValueError:
    return ValueError(re.sub(r"^(state_indices|records\.indices)(?=:)", "slots", str(error)))


class DraftBuffer:
    """Records and cursors for a serving loop, one ring per slot. A loop keeps only its pools and this.

    A request is identified by its slot, the same in the pool and here, whatever batch it is in. Every call takes the
    slots as an int32 or int64 array, negative for padding::

        buffer = kda.DraftBuffer(slots, max_tokens, H, HV, K, V, layers=layers, channels=D)
        ...
        buffer.reset(new_slots)                             # a request begins: its state is in the pools
        ...
        for i in range(layers):                             # the drafts of a round
            conv = kda.Conv(x, weight, bias, tails[i], slots_of_batch)
            o = buffer.step(None, None, None, g, beta, states[i], slots_of_batch, layer=i, conv=conv, **gate_options)
        buffer.accept(slots_of_batch, accept_len)           # how many of them the model took
        ...
        buffer.flush(states, slots_of_batch, conv_state=tails)  # the pools now hold the whole text

    Ring ``entries`` beyond two rounds save writes of the state: it is written about once in
    ``(entries - 2 * max_tokens) / accepted`` rounds. Drafts are chains.

    Args:
        layers: of the model. All have one buffer, and ``step`` says which it is at. If None, there is one layer, and
            ``layer`` is not given.
        channels: of the convolution, if it is fused (``conv``): then the raw rows of each slot's last drafts are kept,
            in ``dtype``, and ``last_conv_x`` is not given. A round copies them twice. None keeps none.
        entries: of a ring, ``2 * max_tokens`` if None.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 3, 1, 4), np.float32) / 2, np.ones((1, 3, 1), np.float32)
    >>> drafts, pool, slot = (x, x, x, 0 * x, beta), np.zeros((2, 1, 4, 4), np.float32), np.array([1], np.int32)
    >>> buffer = kda.DraftBuffer(2, 3, 1, 1, 4, 4, entries=16)
    >>> o = buffer.step(*drafts, pool, slot)
    >>> buffer.accept(slot, np.array([2]))  # two of the three were right
    >>> o = buffer.step(*drafts, pool, slot)
    >>> buffer.records.ring_count.tolist(), float(pool.sum())
    ([0, 2], 0.0)
    >>> buffer.accept(slot, np.array([1]))
    >>> buffer.flush(pool, slot)
    >>> buffer.records.ring_count.tolist(), float(pool[1].sum())
    ([0, 0], 4.0)
    """

    def __init__(
        self, slots: int, max_tokens: int, H: int, HV: int, K: int, V: int, *, entries: int | None = None,
        layers: int | None = None, channels: int | None = None, dtype: Any = None, device: Any = None,
    ) -> None:  # fmt: skip
        _check_size("max_tokens", max_tokens, 1, 16)
        entries = 2 * max_tokens if entries is None else entries
        _check_size("entries", entries)
        if entries < 2 * max_tokens:
            raise ValueError(f"entries: expected at least 2 * max_tokens = {2 * max_tokens}, got {entries!r}")
        if layers is not None:
            _check_size("layers", layers, 1)
        if channels is not None:
            _check_size("channels", channels, 1)
        elif dtype is not None:
            raise ValueError(f"dtype: expected None without channels, got {dtype!r}")
        self.max_tokens, self.layers = max_tokens, layers
        lead = () if layers is None else (layers,)
        records = new_records(slots, entries, H, HV, K, V, layers=layers, device=device)
        integers = "int32" if _arrays.torch is None else _arrays.torch.int32
        first, count = (_zeros((*lead, slots), integers, device) for _ in range(2))  # each layer advances its own
        self.records = records._replace(ring_first=first, ring_count=count)
        # Of each slot's last round: how many tokens are accepted, and their raw rows. One more row is for padding.
        self._accepted = _zeros((slots + 1,), integers, device)
        rows = (*lead, slots + 1, max_tokens, channels)
        self._rows = None if channels is None else _zeros(rows, dtype, device)

    def _layer(self, layer: Any) -> tuple[Records, Any]:
        """The records and raw rows of a layer."""
        if self.layers is None:
            if layer is not None:
                raise ValueError(f"layer: expected None, the buffer has one layer, got {layer!r}")
            return self.records, self._rows
        if isinstance(layer, bool) or not hasattr(layer, "__index__") or not 0 <= layer < self.layers:
            raise ValueError(f"layer: expected 0..{self.layers - 1}, got {layer!r}")
        records = Records(*(None if x is None else x[layer] for x in self.records))
        return records, None if self._rows is None else self._rows[layer]

    def step(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, accept_len: Any = None, *,
        layer: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Commits the tokens of each request's last round and verifies new drafts, ``[N, T]``. How many it commits,
        :meth:`accept` has said, or ``accept_len`` says. This is :func:`flush_verify_kvbuffer`, with its keywords."""
        shape_of("slots", slots, 1)
        records, rows = self._layer(layer)
        conv: Any = options.get("conv")
        keeps = rows is not None and conv is not None
        if keeps and options.get("cu_seqlens") is not None:
            raise ValueError("cu_seqlens: expected None where the buffer keeps raw rows, got an array")
        places = self._places(slots) if keeps or accept_len is None else None
        if keeps:
            options = {"last_conv_x": _rows_at(rows, places), **options}
        accept_len = _rows_at(self._accepted, places) if accept_len is None else accept_len
        try:
            o = flush_verify_kvbuffer(
                q, k, v, g, beta, state, records._replace(indices=slots), accept_len, state_indices=slots,
                max_tokens=self.max_tokens, **options,
            )  # fmt: skip
        except ValueError as error:
            raise _about_slots(error) from None
        if keeps:
            _put_rows(rows[:, : conv.x.shape[1]], places, conv.x)
        return o

    def accept(self, slots: Any, accept_len: Any) -> None:
        """Says how many tokens of each request's last round are committed, ``[N]`` integers. It counts until the
        next call, whatever batches come between."""
        if (got := shape_of("accept_len", accept_len, 1)) != shape_of("slots", slots, 1):
            raise ValueError(f"accept_len: expected shape {list(slots.shape)} like slots, got {list(got)}")
        _put_rows(self._accepted, self._places(slots), accept_len)

    def flush(self, state: Any, slots: Any, accept_len: Any = None, **options: Any) -> None:
        """Brings ``state`` up to date with everything committed and the last round's tokens. With ``layers`` it is
        ``[layers, slots, ...]``, like ``conv_state``, and one call does all. Then the slots may be recycled, shared or
        copied (prefix caching). Keywords are those of :func:`flush_kvbuffer`."""
        shape_of("slots", slots, 1)
        records = self.records._replace(indices=slots)
        if self.layers is not None:  # after a round all layers have the same cursors
            records = records._replace(ring_first=self.records.ring_first[0], ring_count=self.records.ring_count[0])
        if self._rows is not None and options.get("conv_state") is not None:
            conv_x = _rows_at(self._rows, self._places(slots), int(self.layers is not None))
            options = {"conv_x": conv_x, "conv_indices": slots, **options}
        accept_len = _rows_at(self._accepted, self._places(slots)) if accept_len is None else accept_len
        try:
            flush_kvbuffer(state, records, accept_len, state_indices=slots, **options)
        except ValueError as error:
            raise _about_slots(error) from None
        self._forget(slots)

    def reset(self, slots: Any) -> None:
        """Forgets what is recorded for ``slots``, where new requests begin. ``slots`` are their numbers, ``[N]``
        int32 or int64, negative for padding, or a mask ``[slots]`` bool, True where a request begins. On a GPU a
        number beyond the last slot is not detected and has no effect."""
        (N,), S = shape_of("slots", slots, 1), self._accepted.shape[0] - 1
        kind = str(slots.dtype).removeprefix("torch.")
        if kind not in ("int32", "int64", "bool"):
            raise ValueError(f"slots: expected int32 or int64 numbers of slots, or a bool mask of all {S}, got {kind}")
        if kind == "bool" and N != S:
            raise ValueError(f"slots: expected a mask of all {S} slots, or their numbers, got a mask of {N}")
        known = not is_torch(slots) or slots.device.type == "cpu"
        if kind != "bool" and N and known and not compiling() and (highest := int(slots.max())) >= S:
            raise ValueError(f"slots: expected numbers below {S}, got {highest}")
        self._forget(slots)

    def _forget(self, slots: Any) -> None:
        count, accepted = self.records.ring_count, self._accepted[:-1]
        if not is_torch(count):
            slots = _arrays.numpy.asarray(slots)
            chosen = slots if slots.dtype == bool else slots[slots >= 0]
            count[..., chosen], accepted[chosen] = 0, 0
            return
        if slots.dtype in (_arrays.numpy.bool_, _arrays.torch.bool):
            forgotten = _as_tensor(slots, count.device)
        else:
            forgotten = _arrays.torch.zeros_like(self._accepted).index_fill_(0, self._places(slots), 1)[:-1] == 1
        count.masked_fill_(forgotten, 0)
        accepted.masked_fill_(forgotten, 0)

    def _places(self, slots: Any) -> Any:
        """Where the rows of slots are in ``_accepted`` and ``_rows``. That of padding is the last one, so nothing waits
        for a GPU."""
        spare = self._accepted.shape[0] - 1
        if not is_torch(self._accepted):
            slots = _arrays.numpy.asarray(slots)
            return _arrays.numpy.where(slots < 0, spare, slots.clip(max=spare))
        slots = _as_tensor(slots, self._accepted.device)
        return _arrays.torch.where(slots < 0, spare, slots.clamp(max=spare)).long()


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    if _arrays.torch is not None:
        return _arrays.torch.zeros(shape, dtype=dtype, device=device)
    import numpy

    return numpy.zeros(shape, numpy.float32 if dtype is None else dtype)


def _as_tensor(x: Any, device: Any) -> Any:
    if not is_torch(x):
        x = _arrays.numpy.array(x)  # a copy: torch warns of read-only memory even if it only reads
    return _arrays.torch.as_tensor(x, device=device)


def _rows_at(x: Any, places: Any, axis: int = 0) -> Any:
    return x.index_select(axis, places) if is_torch(x) else x.take(places, axis)


def _put_rows(x: Any, places: Any, rows: Any) -> None:
    if is_torch(x):
        x.index_copy_(0, places, _as_tensor(rows, x.device).to(x.dtype))
    else:
        x[places] = _arrays.numpy.asarray(rows)

"""Records and cursors of speculative decoding, kept for a serving loop."""

from __future__ import annotations

import re
from typing import Any

from .arguments import Records, check_size, counts, is_on_host, new_records
from .call import arrays
from .call.arrays import is_torch, shape_of
from .call.streams import Users
from .call.tracing import compiling, is_readable
from .speculation import flush_kvbuffer, flush_verify_kvbuffer


def _check_stream(options: dict[str, Any]) -> None:
    if options.get("stream") is not None:  # all that is done here in between runs on torch's current one
        raise ValueError("stream: expected None, as a buffer is used on torch's current stream, got one")


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
        self,
        slots: int,
        max_tokens: int,
        H: int,
        HV: int,
        K: int,
        V: int,
        *,
        entries: int | None = None,
        layers: int | None = None,
        channels: int | None = None,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        check_size("max_tokens", max_tokens, 1, 16)
        entries = 2 * max_tokens if entries is None else entries
        check_size("entries", entries)
        if entries < 2 * max_tokens:
            raise ValueError(f"entries: expected at least 2 * max_tokens = {2 * max_tokens}, got {entries!r}")
        if layers is not None:
            check_size("layers", layers, 1)
        if channels is not None:
            check_size("channels", channels, 1)
        elif dtype is not None:
            raise ValueError(f"dtype: expected None without channels, got {dtype!r}")
        self.max_tokens, self.layers = max_tokens, layers
        lead = () if layers is None else (layers,)
        records = new_records(slots, entries, H, HV, K, V, layers=layers, device=device)
        first, count = (_zeros((*lead, slots), "int32", device) for _ in range(2))  # each layer advances its own
        self.records = records._replace(ring_first=first, ring_count=count)
        # Of each slot's last round at each layer: how many tokens are accepted, -1 if nobody has said it, and how many
        # are recorded. One more row is for padding. `_begun[T]` is what a round of T tokens begins with.
        self._rounds = _zeros((slots + 1, layers or 1, 2), "int32", device)
        self._begun = _zeros((max_tokens + 1, 2), "int32", device) - 1
        self._begun[:, 1] = _up_to(max_tokens, device)
        rows = (*lead, slots + 1, max_tokens, channels)
        self._rows = None if channels is None else _zeros(rows, "float32" if dtype is None else dtype, device)
        self._users = Users()

    def _tensors(self) -> list[Any]:
        """All that is kept between calls."""
        return [x for x in (*self.records, self._rounds, self._begun, self._rows) if x is not None]

    def record_stream(self, stream: Any) -> None:
        """Tells torch's allocator that this stream of a GPU uses the buffer, as ``Tensor.record_stream`` does for a
        tensor. Eager calls note the stream that they run on. For replays of a CUDA graph on another one, this has to,
        before the buffer is dropped."""
        for x in self._tensors():
            x.record_stream(stream)

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
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        state: Any,
        slots: Any,
        accept_len: Any = None,
        *,
        layer: Any = None,
        **options: Any,
    ) -> Any:
        """Commits the tokens of each request's last round and verifies new drafts, ``[N, T]``. How many it commits,
        :meth:`accept` has said, or ``accept_len`` says, in the same forms. If nobody says it, none are. This is
        :func:`flush_verify_kvbuffer`, with its keywords."""
        _check_stream(options)
        shape_of("slots", slots, 1)
        self._users.note(self._rounds, self._tensors)
        records, rows = self._layer(layer)
        conv, cu = options.get("conv"), options.get("cu_seqlens")
        keeps = rows is not None and conv is not None
        if keeps and cu is not None:
            raise ValueError("cu_seqlens: expected None where the buffer keeps raw rows, got an array")
        places, at = self._places(slots), layer or 0
        if keeps:
            options = {"last_conv_x": _rows_at(rows, places), **options}
        accept_len = self._accepted_at(at, slots, places, accept_len)
        try:
            o = flush_verify_kvbuffer(
                q,
                k,
                v,
                g,
                beta,
                state,
                records._replace(indices=slots),
                accept_len,
                state_indices=slots,
                max_tokens=self.max_tokens,
                **options,
            )
        except ValueError as error:
            raise _about_slots(error) from None
        if keeps:
            _put_rows(rows[:, : conv.x.shape[1]], places, conv.x)  # type: ignore[union-attr]
        self._begin(at, places, g.shape[1], cu)
        return o

    def _begin(self, at: int, places: Any, T: int, cu: Any) -> None:
        """Notes how many tokens a round has recorded."""
        if not is_torch(places):
            lengths = T if cu is None else arrays.numpy.diff(_on_host(cu)).clip(0, self.max_tokens)
            _on_host(self._rounds)[places, at] = _on_host(self._begun)[lengths]
            return
        if cu is None:
            begun = self._begun.select(0, T).expand(len(places), 2)
        else:
            begun = self._begun.index_select(0, _as_tensor(cu, places.device).diff().clamp(0, self.max_tokens))
        self._rounds.select(1, at).index_copy_(0, places, begun)

    def accept(self, slots: Any, accept_len: Any) -> None:
        """Says how many tokens of each request's last round are committed: ``[N]`` int32 or int64, a list, or one
        integer for all. It counts for the next call at each layer, whatever batches come between. More than the round
        had are refused; on a GPU, where values are not read, they count as all of it."""
        shape_of("slots", slots, 1)
        self._users.note(self._rounds, self._tensors)
        places = self._places(slots)
        if self._are_known(slots):
            self._check_slots(slots)
            self._check_layers(slots)
        accept_len = self._lengths(slots, accept_len)
        if self._are_known(slots, accept_len):
            self._check_lengths(slots, accept_len, _on_host(self._rounds)[places, 0, 1])
            _on_host(self._rounds)[places, :, 0] = _on_host(accept_len)[:, None]
            return
        recorded = self._rounds.select(2, 1).index_select(0, places)
        accepted = arrays.torch.minimum(accept_len[:, None], recorded)
        self._rounds.select(2, 0).index_copy_(0, places, accepted.to(recorded.dtype))

    def flush(self, state: Any, slots: Any, accept_len: Any = None, **options: Any) -> None:
        """Brings ``state`` up to date with everything committed and the last round's accepted tokens. With ``layers``
        it is ``[layers, slots, ...]``, like ``conv_state``, and one call does all. Then the slots may be recycled,
        shared or copied (prefix caching). A slot of which a layer missed a round is refused; on a GPU it is left as it
        is. Keywords are those of :func:`flush_kvbuffer`."""
        _check_stream(options)
        shape_of("slots", slots, 1)
        self._users.note(self._rounds, self._tensors)
        records, places = self.records, self._places(slots)
        if self.layers is not None:  # after a round all layers have the same cursors
            if self._are_known(slots):
                self._check_layers(slots)
            else:
                slots = arrays.torch.where(self._together()[places], _as_tensor(slots, places.device), -1)
                places = self._places(slots)
            records = records._replace(ring_first=records.ring_first[0], ring_count=records.ring_count[0])
        if self._rows is not None and options.get("conv_state") is not None:
            conv_x = _rows_at(self._rows, places, int(self.layers is not None))
            options = {"conv_x": conv_x, "conv_indices": slots, **options}
        accept_len = self._accepted_at(0, slots, places, accept_len)
        try:
            flush_kvbuffer(state, records._replace(indices=slots), accept_len, state_indices=slots, **options)
        except ValueError as error:
            raise _about_slots(error) from None
        self._forget(slots)

    def reset(self, slots: Any) -> None:
        """Forgets what is recorded for ``slots``, where new requests begin. ``slots`` are their numbers, ``[N]``
        int32 or int64, negative for padding, or a mask ``[slots]`` bool, True where a request begins. On a GPU a
        number beyond the last slot is not detected and has no effect."""
        (N,), S = shape_of("slots", slots, 1), self._rounds.shape[0] - 1
        self._users.note(self._rounds, self._tensors)
        kind = str(slots.dtype).removeprefix("torch.")
        if kind not in ("int32", "int64", "bool"):
            raise ValueError(f"slots: expected int32 or int64 numbers of slots, or a bool mask of all {S}, got {kind}")
        if kind == "bool" and N != S:
            raise ValueError(f"slots: expected a mask of all {S} slots, or their numbers, got a mask of {N}")
        if kind != "bool" and N and _are_on_the_host(slots) and (highest := int(slots.max())) >= S:
            raise ValueError(f"slots: expected numbers below {S}, got {highest}")
        self._forget(slots)

    def _forget(self, slots: Any) -> None:
        cursors, rounds = (self.records.ring_first, self.records.ring_count), self._rounds[:-1]
        if not is_torch(cursors[0]):
            slots = arrays.numpy.asarray(slots)
            chosen = slots if slots.dtype == bool else slots[slots >= 0]
            rounds[chosen] = 0
            for x in cursors:
                x[..., chosen] = 0
            return
        if slots.dtype in (arrays.numpy.bool_, arrays.torch.bool):
            forgotten = _as_tensor(slots, cursors[0].device)
        else:
            marks = arrays.torch.zeros_like(self._rounds[:, 0, 0])
            forgotten = marks.index_fill_(0, _as_index(self._places(slots), len(marks)), 1)[:-1] == 1
        rounds.masked_fill_(forgotten[:, None, None], 0)
        for x in cursors:
            x.masked_fill_(forgotten, 0)

    # ---- numbers of accepted tokens ----

    def _lengths(self, slots: Any, accept_len: Any) -> Any:
        """``accept_len`` as an array beside ``_rounds``. What is on the host is within a round."""
        N = slots.shape[0]
        if is_on_host(accept_len):
            accept_len = counts("accept_len", accept_len, N, self._rounds, self.max_tokens)
        if tuple(got := shape_of("accept_len", accept_len, 1)) != (N,):
            raise ValueError(f"accept_len: expected shape [{N}] like slots, got {list(got)}")
        if (kind := str(accept_len.dtype).removeprefix("torch.")) not in ("int32", "int64"):
            raise ValueError(f"accept_len: expected int32 or int64, got {kind}")
        return _as_tensor(accept_len, self._rounds.device) if is_torch(self._rounds) else accept_len

    def _accepted_at(self, at: int, slots: Any, places: Any, accept_len: Any) -> Any:
        """How many tokens of the last round a layer commits: what ``accept`` left, or ``accept_len``, within it."""
        if accept_len is None:
            if not is_torch(places):
                return _like(_on_host(self._rounds)[places, at, 0], self._rounds)
            return self._rounds.select(1, at).index_select(0, places).select(1, 0)
        if getattr(accept_len, "shape", slots.shape) != slots.shape:
            return accept_len  # the library says which of them does not fit the call
        accept_len = self._lengths(slots, accept_len)
        if not is_torch(places) and self._are_known(accept_len):
            self._check_lengths(slots, accept_len, _on_host(self._rounds)[places, at, 1])
            return accept_len
        recorded = self._rounds.select(1, at).index_select(0, _as_index(places, len(self._rounds))).select(1, 1)
        return arrays.torch.minimum(accept_len, recorded)

    def _are_known(self, *given: Any) -> bool:
        """May their values be checked? On a GPU that would wait for it, and graphs have none."""
        return _are_on_the_host(self._rounds) and all(_are_on_the_host(x) for x in given)

    def _check_slots(self, slots: Any) -> None:
        live, S = [s for s in slots.tolist() if s >= 0], self._rounds.shape[0] - 1
        if live and max(live) >= S:
            raise ValueError(f"slots: expected numbers below {S}, got {max(live)}")
        if len(set(live)) < len(live):
            twice = next(s for i, s in enumerate(live) if s in live[:i])
            raise ValueError(f"slots: expected every live slot once, got slot {twice} twice")

    def _check_lengths(self, slots: Any, accept_len: Any, recorded: Any) -> None:
        S = self._rounds.shape[0] - 1
        for slot, m, most in zip(slots.tolist(), accept_len.tolist(), recorded.tolist(), strict=True):
            if 0 <= slot < S and not 0 <= m <= most:
                raise ValueError(
                    f"accept_len: expected 0..{most}, the tokens of the last round of slot {slot}, got {m}"
                )

    def _together(self) -> Any:
        """``[slots + 1]``: have all layers seen the same rounds?"""
        of_rounds = (self._rounds == self._rounds[:, :1]).all(-1).all(-1)
        first, count = self.records.ring_first, self.records.ring_count
        of_rounds[:-1] &= (first == first[:1]).all(0) & (count == count[:1]).all(0)
        return of_rounds

    def _check_layers(self, slots: Any) -> None:
        if self.layers is None or (together := self._together()).all():
            return
        for slot in slots.tolist():
            if 0 <= slot < len(together) - 1 and not together[slot]:
                raise ValueError(f"layer: expected every layer to step in every round of slot {slot}, got one without")

    def _places(self, slots: Any) -> Any:
        """Where the rows of slots are in ``_rounds`` and ``_rows``. That of padding is the last one, so nothing waits
        for a GPU."""
        if (kind := str(slots.dtype).removeprefix("torch.")) not in ("int32", "int64"):
            raise ValueError(f"slots: expected int32 or int64 numbers of slots, got {kind}")
        spare = self._rounds.shape[0] - 1
        if self._are_known(slots):  # NumPy takes a third of torch's time for a few numbers
            return arrays.numpy.maximum(arrays.numpy.minimum(_on_host(slots), spare), -1)  # -1 is the last one
        return _as_tensor(slots, self._rounds.device).clamp(-1, spare).remainder(spare + 1).long()


def _are_on_the_host(x: Any) -> bool:
    return is_readable(x) if is_torch(x) else not compiling()


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    if arrays.torch is None:
        return arrays.numpy.zeros(shape, dtype)
    dtype = getattr(arrays.torch, dtype) if isinstance(dtype, str) else dtype
    return arrays.torch.zeros(shape, dtype=dtype, device=device)


def _up_to(most: int, device: Any) -> Any:
    if arrays.torch is None:
        return arrays.numpy.arange(most + 1)
    return arrays.torch.arange(most + 1, dtype=arrays.torch.int32, device=device)


def _on_host(x: Any) -> Any:
    """The same memory for NumPy."""
    return x.numpy() if is_torch(x) else arrays.numpy.asarray(x)


def _like(x: Any, other: Any) -> Any:
    return arrays.torch.from_numpy(x) if is_torch(other) else x


def _as_index(places: Any, size: int) -> Any:
    return places if is_torch(places) else arrays.torch.from_numpy(places).remainder(size).long()


def _as_tensor(x: Any, device: Any) -> Any:
    if not is_torch(x):
        x = arrays.numpy.array(x)  # a copy: torch warns of read-only memory even if it only reads
    elif x.device == device:
        return x
    return arrays.torch.as_tensor(x, device=device)


def _rows_at(x: Any, places: Any, axis: int = 0) -> Any:
    return x.index_select(axis, _as_index(places, x.shape[axis])) if is_torch(x) else x.take(places, axis)


def _put_rows(x: Any, places: Any, rows: Any) -> None:
    if is_torch(x):
        x.index_copy_(0, _as_index(places, len(x)), _as_tensor(rows, x.device).to(x.dtype))
    else:
        x[places] = arrays.numpy.asarray(rows)

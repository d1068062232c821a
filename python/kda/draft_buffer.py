"""Records and cursors of speculative decoding, kept for a serving loop."""

from __future__ import annotations

import re
from typing import Any

from .arguments import Records, check_size, new_records
from .call import arrays
from .call.arrays import is_torch, shape_of
from .call.tracing import compiling
from .speculation import flush_kvbuffer, flush_verify_kvbuffer


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
        integers = "int32" if arrays.torch is None else arrays.torch.int32
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
            slots = arrays.numpy.asarray(slots)
            chosen = slots if slots.dtype == bool else slots[slots >= 0]
            count[..., chosen], accepted[chosen] = 0, 0
            return
        if slots.dtype in (arrays.numpy.bool_, arrays.torch.bool):
            forgotten = _as_tensor(slots, count.device)
        else:
            forgotten = arrays.torch.zeros_like(self._accepted).index_fill_(0, self._places(slots), 1)[:-1] == 1
        count.masked_fill_(forgotten, 0)
        accepted.masked_fill_(forgotten, 0)

    def _places(self, slots: Any) -> Any:
        """Where the rows of slots are in ``_accepted`` and ``_rows``. That of padding is the last one, so nothing waits
        for a GPU."""
        spare = self._accepted.shape[0] - 1
        if not is_torch(self._accepted):
            slots = arrays.numpy.asarray(slots)
            return arrays.numpy.where(slots < 0, spare, slots.clip(max=spare))
        slots = _as_tensor(slots, self._accepted.device)
        return arrays.torch.where(slots < 0, spare, slots.clamp(max=spare)).long()


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    if arrays.torch is not None:
        return arrays.torch.zeros(shape, dtype=dtype, device=device)
    import numpy

    return numpy.zeros(shape, numpy.float32 if dtype is None else dtype)


def _as_tensor(x: Any, device: Any) -> Any:
    if not is_torch(x):
        x = arrays.numpy.array(x)  # a copy: torch warns of read-only memory even if it only reads
    return arrays.torch.as_tensor(x, device=device)


def _rows_at(x: Any, places: Any, axis: int = 0) -> Any:
    return x.index_select(axis, places) if is_torch(x) else x.take(places, axis)


def _put_rows(x: Any, places: Any, rows: Any) -> None:
    if is_torch(x):
        x.index_copy_(0, places, _as_tensor(rows, x.device).to(x.dtype))
    else:
        x[places] = arrays.numpy.asarray(rows)

"""Drafts on top of a cache of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..arguments import Conv, Records, counts, is_on_host, new_records
from ..call.streams import Users
from ..call.tracing import is_readable
from ..speculation import flush_kvbuffer, flush_verify_kvbuffer, verify_kvbuffer
from .cache import KDACache


class HasHeads(Protocol):
    num_heads: int
    num_v_heads: int


class DraftCache:
    """Speculative decoding over a :class:`KDACache`: tokens given to the layer with this cache are drafts.

    A call computes the outputs of all drafts and leaves the cache unchanged; it only records a few vectors per token.
    Then :meth:`accept` says how many drafts stay. Drafts that are not accepted before the next call are dropped.

    Args:
        layer: a :class:`KimiDeltaAttention`.
        cache: the layer's cache, from :meth:`KimiDeltaAttention.new_cache`. Accepted tokens go into it.
        max_tokens: the most drafts in a call, 1 to 16.
        fused: the next call applies the accepted drafts in the same pass as its own work, or :meth:`flush` does. If
            False, :meth:`accept` applies them at once.

    >>> import torch
    >>> from kda.nn import DraftCache, KimiDeltaAttention
    >>> layer, x = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32), torch.randn(1, 5, 64)
    >>> drafts, single = DraftCache(layer, layer.new_cache(1), 4), layer.new_cache(1)
    >>> with torch.no_grad():
    ...     _ = layer(x[:, :4], cache=drafts)  # four drafts, of which three are right
    ...     drafts.accept(torch.tensor([3], dtype=torch.int32))
    ...     o, _, _ = layer(x[:, 4:], cache=drafts)
    ...     expected = [layer(token, cache=single)[0] for token in x[:, [0, 1, 2, 4]].split(1, 1)]
    >>> bool(torch.allclose(o, expected[3], atol=1e-5))
    True
    """

    def __init__(self, layer: HasHeads, cache: KDACache, max_tokens: int, *, fused: bool = True) -> None:
        if not isinstance(max_tokens, int) or not 1 <= max_tokens <= 16:
            raise ValueError(f"max_tokens: expected 1..16, got {max_tokens}")
        self.cache, self.max_tokens, self.fused = cache, max_tokens, fused
        N, HV, V, K = cache.state.shape
        H = HV * layer.num_heads // layer.num_v_heads  # of this rank, if several share the heads
        # With fused, two buffers take turns: one is read while the other is written.
        self.records: list[Records] = [
            new_records(N, max_tokens, H, HV, K, V, device=cache.state.device) for _ in range(1 + fused)
        ]
        self._rows: Tensor | None = None  # raw rows of the last call, before the convolution
        # Of each sequence's last drafts: how many are accepted, and how many there are. `_begun[T]`: after T drafts.
        self._round = torch.zeros(2, N, dtype=torch.int32, device=cache.state.device)
        self._accept_len, self._drafted = self._round
        self._begun = torch.zeros(max_tokens + 1, 2, 1, dtype=torch.int32, device=cache.state.device)
        self._begun[:, 1, 0] = torch.arange(max_tokens + 1, dtype=torch.int32, device=cache.state.device)
        self._users, self._users_of_rows = Users(), Users()

    def _tensors(self) -> list[Tensor]:
        """All that is made once and kept. The rows are new in every call."""
        return [self._round, self._begun, *(x for r in self.records for x in (r.u, r.k, r.alpha))]

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells torch's allocator that this stream uses the drafts and the cache below them. The calls of this class
        and of the layer note their own streams for the drafts. For replays of a CUDA graph, this has to."""
        for x in (*self._tensors(), self._rows):
            if x is not None:
                x.record_stream(stream)
        self.cache.record_stream(stream)

    def accept(self, accept_len: Tensor | Sequence[int] | int) -> None:
        """How many of each sequence's last drafts stay: ``[N]`` int32 or int64 on the device of the cache, a list, or
        one integer for all. More than there are, are refused; on a GPU, where values are not read, they count as
        all."""
        N = len(self._accept_len)
        self._users.note(self._round, self._tensors)
        if is_on_host(accept_len):
            accept_len = counts("accept_len", accept_len, N, self._round, self.max_tokens)
        if not isinstance(accept_len, Tensor) or accept_len.dtype not in (torch.int32, torch.int64):
            got = getattr(accept_len, "dtype", type(accept_len).__name__)
            raise ValueError(f"accept_len: expected int32 or int64 of shape [{N}], got {got}")
        if accept_len.shape != self._accept_len.shape:
            raise ValueError(f"accept_len: expected shape [{N}], got {list(accept_len.shape)}")
        accept_len = accept_len.to(self._round)  # of its dtype, on its device
        if is_readable(accept_len):
            for m, most in zip(accept_len.tolist(), self._drafted.tolist(), strict=True):
                if not 0 <= m <= most:
                    raise ValueError(f"accept_len: expected 0..{most}, the drafts of the last call, got {m}")
        torch.minimum(accept_len, self._drafted, out=self._accept_len)
        if not self.fused:
            self.flush()

    def flush(self) -> None:
        """Bring the cache up to date with everything accepted."""
        self._users.note(self._round, self._tensors)
        if (rows := self._rows) is not None:
            self._users_of_rows.note(rows, lambda: [rows])
            conv: dict[str, Any] = {}
            if self.cache.conv is not None:
                conv = {"conv_x": rows, "conv_state": self.cache.conv}
            flush_kvbuffer(self.cache.state, self.records[0], self._accept_len, **conv)
        self._round.zero_()

    def memory_bytes(self) -> int:
        """Bytes of the records; those of the cache are not included."""
        return sum(x.numel() * x.element_size() for r in self.records for x in (r.u, r.k, r.alpha))

    def run(self, raw: Tensor, conv: Conv | None, inputs: tuple[Any, Any, Any, Any, Any], **options: Any) -> Tensor:
        """For the layer: the drafts' outputs, from ``raw`` and ``conv``, or from q, k, v among ``inputs``."""
        if raw.shape[1] > self.max_tokens:
            raise ValueError(
                f"hidden_states: expected at most max_tokens = {self.max_tokens} drafts, got {raw.shape[1]}"
            )
        o: Tensor
        self._users.note(self._round, self._tensors)
        if self.fused and (rows := self._rows) is not None:
            self._users_of_rows.note(rows, lambda: [rows])
            last, new = self.records
            rolled = None if conv is None else rows
            o = flush_verify_kvbuffer(
                *inputs, self.cache.state, new, self._accept_len, last=last, last_conv_x=rolled, conv=conv, **options
            )
            self.records.reverse()
        else:
            o = verify_kvbuffer(*inputs, self.cache.state, self.records[0], conv=conv, **options)
        self._round.copy_(self._begun[raw.shape[1]])
        self._rows, self._users_of_rows = raw, Users()
        return o

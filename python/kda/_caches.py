"""What :class:`kda.nn.KimiDeltaAttention` remembers of its sequences, and drafts on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._recompute import check_first_run, current_backward
from .speculation import Conv, Records, flush_kvbuffer, flush_verify_kvbuffer, new_records, verify_kvbuffer

if TYPE_CHECKING:
    from .nn import KimiDeltaAttention


class KDACache:
    """What one layer remembers of ``N`` sequences; make it with :meth:`KimiDeltaAttention.new_cache`.

    conv: ``[N, D, W - 1]``, the last raw inputs of the short convolutions, oldest first, channels in the order q, k, v
        (``D = 2 * key_dim + value_dim``), in the dtype of their weights, of any strides; None without short
        convolutions.
    state: ``[N, HV, V, K]`` float32, the recurrent state.

    Both are zero for a new sequence. The layer overwrites them in place and never allocates new ones. So a function
    that backward runs again (``torch.utils.checkpoint``) must not use a cache that was made outside of it; this is
    refused.

    ``torch.save`` writes the two tensors, and ``torch.load`` reads them with ``weights_only=True``, its default, once
    :mod:`kda.nn` is imported. ``copy.deepcopy`` makes an independent copy.
    """

    # Not a dataclass: FSDP would pass the layer a copy of one, with tensors cast to another dtype.
    def __init__(self, conv: Tensor | None, state: Tensor) -> None:
        self.conv, self.state = conv, state
        self.made_in = current_backward()

    def __repr__(self) -> str:
        return f"KDACache(conv={self.conv}, state={self.state})"

    def __getstate__(self) -> dict[str, Any]:
        return {"conv": self.conv, "state": self.state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(saved["conv"], saved["state"])  # type: ignore[misc]

    def check_first_run(self) -> None:
        check_first_run("past_key_values", self.made_in)

    def reorder(self, rows: Tensor) -> None:
        """For beam search: sequence ``i`` continues from ``rows[i]``. ``rows`` is ``[N]`` integers; a row may appear
        several times or not at all. The two tensors stay where they are. Drafts of a :class:`DraftCache` must be
        flushed first."""
        self.check_first_run()
        if rows.shape != self.state.shape[:1]:
            raise ValueError(f"rows: expected shape {list(self.state.shape[:1])}, got {list(rows.shape)}")
        chosen = self.select(rows)
        self.state.copy_(chosen.state)
        if self.conv is not None and chosen.conv is not None:
            self.conv.copy_(chosen.conv)

    def select(self, rows: Tensor) -> KDACache:
        """A new cache of the sequences at ``rows``, ``[M]`` non-negative integers, in their order."""
        if rows.ndim != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"rows: expected int32 or int64 of one dimension, got {rows.dtype} of {rows.ndim}")
        conv, rows = self.conv, rows.to(self.state.device)
        if conv is not None:  # stays as new_cache() lays it out
            conv = conv.transpose(1, 2).index_select(0, rows).transpose(1, 2)
        return KDACache(conv, self.state.index_select(0, rows))

    def repeat(self, times: int) -> KDACache:
        """A new cache in which ``times`` copies of every sequence stand side by side, as for beams of one prompt."""
        if times < 0:
            raise ValueError(f"times: expected 0 or more, got {times}")
        return self.select(torch.arange(self.state.shape[0], device=self.state.device).repeat_interleave(times))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """:meth:`reorder` under transformers' name. This method and the next two change the cache in place."""
        self.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = self.select(indices)
        self.conv, self.state = chosen.conv, chosen.state

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeated = self.repeat(repeats)
        self.conv, self.state = repeated.conv, repeated.state

    def reset(self, rows: Any = None) -> None:
        """Forget all sequences, or those at ``rows`` (an index, a slice, or an index tensor)."""
        for x in (self.conv, self.state):
            if x is not None:
                x[slice(None) if rows is None else rows] = 0

    def memory_bytes(self) -> int:
        """Bytes of the two tensors: the same after any number of tokens."""
        return sum(x.numel() * x.element_size() for x in (self.conv, self.state) if x is not None)


# Safe to load: such a file holds two tensors and no code.
torch.serialization.add_safe_globals([KDACache])


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
    >>> drafts, plain = DraftCache(layer, layer.new_cache(1), 4), layer.new_cache(1)
    >>> with torch.no_grad():
    ...     _ = layer(x[:, :4], cache=drafts)  # four drafts, of which three are right
    ...     drafts.accept(torch.tensor([3], dtype=torch.int32))
    ...     o, _, _ = layer(x[:, 4:], cache=drafts)
    ...     expected = [layer(token, cache=plain)[0] for token in x[:, [0, 1, 2, 4]].split(1, 1)]
    >>> bool(torch.allclose(o, expected[3], atol=1e-5))
    True
    """

    def __init__(self, layer: KimiDeltaAttention, cache: KDACache, max_tokens: int, *, fused: bool = True) -> None:
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
        self._accept_len = torch.zeros(N, dtype=torch.int32, device=cache.state.device)

    def accept(self, accept_len: Tensor) -> None:
        """``[N]`` int32, on the device of the cache: how many of each sequence's last drafts stay."""
        if accept_len.shape != self._accept_len.shape or accept_len.dtype != torch.int32:
            raise ValueError(
                f"accept_len: expected int32 of shape {list(self._accept_len.shape)}, got {accept_len.dtype} of shape "
                f"{list(accept_len.shape)}"
            )
        self._accept_len.copy_(accept_len)
        if not self.fused:
            self.flush()

    def flush(self) -> None:
        """Bring the cache up to date with everything accepted."""
        if self._rows is not None:
            conv: dict[str, Any] = {}
            if self.cache.conv is not None:
                conv = {"conv_x": self._rows, "conv_state": self.cache.conv}
            flush_kvbuffer(self.cache.state, self.records[0], self._accept_len, **conv)
        self._accept_len.zero_()

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
        if self.fused and self._rows is not None:
            last, new = self.records
            rolled = None if conv is None else self._rows
            o = flush_verify_kvbuffer(
                *inputs, self.cache.state, new, self._accept_len, last=last, last_conv_x=rolled, conv=conv, **options
            )
            self.records.reverse()
        else:
            o = verify_kvbuffer(*inputs, self.cache.state, self.records[0], conv=conv, **options)
        self._accept_len.zero_()
        self._rows = raw
        return o

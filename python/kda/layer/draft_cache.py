"""Drafts on top of a cache of the layer, and which cache a call means."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import Conv, Records, new_records
from ..speculation import flush_kvbuffer, flush_verify_kvbuffer, verify_kvbuffer
from .cache import KDACache
from .foreign_caches import ForeignCache, find_foreign, read_foreign

if TYPE_CHECKING:
    from ..nn import KimiDeltaAttention


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


def find_cache(
    layer: KimiDeltaAttention, held: Any, use_cache: bool, N: int, x: Tensor
) -> tuple[Any, KDACache | DraftCache | None, ForeignCache | None]:
    """Returns what to pass back as past_key_values, this layer's cache for hidden_states x, and, if that cache comes
    from another library, where to write its numbers after the call."""
    cache: KDACache | DraftCache | None
    if held is None:
        held = cache = layer.new_cache(N, like=x) if use_cache else None
    elif isinstance(held, KDACache | DraftCache):
        cache = held
    elif isinstance(held, MutableMapping):
        if layer.layer_idx is None:
            raise ValueError("layer_idx: expected a number with a dict of caches, got None")
        if use_cache and layer.layer_idx not in held:
            held[layer.layer_idx] = layer.new_cache(N, like=x)
        cache = held.get(layer.layer_idx)
    else:
        foreign = find_foreign(held, layer)
        return held, read_foreign(foreign, N, x), foreign
    kept = cache.cache if isinstance(cache, DraftCache) else cache
    if kept is not None and kept.state.shape[0] != N:
        raise ValueError(f"cache: expected one for {N} sequences, got one for {kept.state.shape[0]}")
    if kept is not None:
        if kept.state.device != x.device:
            wanted = f"expected one on {x.device} like hidden_states (new_cache has device=)"
            raise ValueError(f"cache: {wanted}, got one on {kept.state.device}")
        kept.check_first_run()
    return held, cache, None

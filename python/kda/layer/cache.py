"""What :class:`kda.nn.KimiDeltaAttention` remembers of its sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recompute import check_first_run, current_backward


class KDACache:
    """What one layer remembers of ``N`` sequences; make it with :meth:`KimiDeltaAttention.new_cache`.

    conv: ``[N, D, W - 1]``, the last raw inputs of the short convolutions, oldest first, channels in the order q, k, v
        (``D = 2 * key_dim + value_dim``), in the dtype of their weights, of any strides; None without short
        convolutions.
    state: ``[N, HV, V, K]`` float32, the recurrent state.

    Both are zero for a new sequence. The layer overwrites them in place and never allocates new ones. So a function
    that backward runs again (``torch.utils.checkpoint``) must not use a cache that was made outside of it; this is
    refused.

    On a GPU a cache may be used on any stream that waits for the one before. Torch's allocator has to know of streams
    other than that which made the cache (:meth:`record_stream`), as for any tensor: before the cache is dropped.

    ``torch.save`` writes the two tensors, and ``torch.load`` reads them with ``weights_only=True``, its default, once
    :mod:`kda.nn` is imported. ``copy.deepcopy`` makes an independent copy.
    """

    # Not a dataclass: FSDP would pass the layer a copy of one, with tensors cast to another dtype.
    def __init__(self, conv: Tensor | None, state: Tensor) -> None:
        self.conv, self.state = conv, state
        self.made_in = current_backward()
        self.step_memory: Any = None  # between the products of a decode step, made by the first one (layer/step.py)

    @classmethod
    def of(cls, conv: Tensor | None, state: Tensor, made_in: int) -> KDACache:
        """One whose tensors another cache has had, which was made in that backward pass."""
        cache = cls(conv, state)
        cache.made_in = made_in
        return cache

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
        rows = torch.arange(self.state.shape[0], dtype=torch.int64, device=self.state.device)
        return self.select(rows.repeat_interleave(times))

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

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells torch's allocator that this stream uses the cache, as ``Tensor.record_stream`` does for a tensor. The
        memory of decode steps, which belongs to the cache, too, is recorded by the steps themselves."""
        for x in (self.conv, self.state):
            if x is not None:
                x.record_stream(stream)

    def memory_bytes(self) -> int:
        """Bytes of the two tensors: the same after any number of tokens. The memory between the products of a decode
        step, a few percent more, is not included."""
        return sum(x.numel() * x.element_size() for x in (self.conv, self.state) if x is not None)


# Files name the public module. They are safe to load: such a file holds two tensors and no code.
KDACache.__module__ = "kda.nn"
torch.serialization.add_safe_globals([KDACache])

"""Adapters for the cache objects of FLA and of transformers, as far as the layer uses them. Neither package is
imported.

Both hold the content of a :class:`KDACache` in other forms. FLA has a ``recurrent_state`` ``[N, HV, V, K]`` and a
``conv_state`` ``[N, D, W]`` each for q, k and v. transformers has a state ``[N, HV, K, V]`` and one ``[N, D, W]`` for
all three. A convolution reads only ``W - 1`` of the ``W`` inputs again. Only these are kept here; the oldest column
is written as zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .cache import KDACache
from .recompute import check_first_run


class Form(NamedTuple):
    """What the caches of a layer look like."""

    layer_idx: int | None
    sizes: list[int]  # channels of q, k and v, on this rank
    width: int  # of the short convolutions, 0 without


class FLACache:
    """``past_key_values[layer_idx]`` is a dict or None, and ``update`` replaces what it holds."""

    def __init__(self, held: Any, form: Form) -> None:
        self.held, self.form, self.index = held, form, _index(form)

    def read(self) -> tuple[Tensor | None, Tensor] | None:
        entry = self.held[self.index] if len(self.held) > self.index else None
        if entry is None or entry["recurrent_state"] is None:
            return None
        # FLA replaces states and never writes into them, so other references to the old one may exist.
        state = entry["recurrent_state"].clone()
        return (torch.cat(list(entry["conv_state"]), 1) if self.form.width else None), state

    def write(self, conv: Tensor | None, state: Tensor, tokens: int) -> None:
        parts = None if conv is None else tuple(part.contiguous() for part in conv.split(self.form.sizes, 1))
        self.held.update(recurrent_state=state, conv_state=parts, layer_idx=self.index, offset=tokens)


class TransformersCache:
    """``get_conv_state`` and ``get_recurrent_state`` return None before the first call; ``update_...`` copies."""

    def __init__(self, held: Any, form: Form) -> None:
        self.held, self.form, self.index = held, form, _index(form)
        if not form.width:
            raise ValueError(
                "past_key_values: expected a KDACache for a layer without short convolutions (transformers' caches tell"
                f" by these whether there was a call before), got {type(held).__name__}"
            )
        slots = getattr(held, "layers", ())
        slot = slots[self.index] if self.index < len(slots) else None
        if not hasattr(slot, "update_recurrent_state"):
            raise ValueError(
                f"past_key_values: expected a cache whose layer {self.index} is of linear attention, as one made with a"
                f" model's config has, got {'none' if slot is None else type(slot).__name__}"
            )
        if getattr(slot, "record_past", False):
            raise NotImplementedError(
                "past_key_values: expected a cache that does not record the past (recurrent states cannot be cropped)"
            )

    def read(self) -> tuple[Tensor | None, Tensor] | None:
        conv, state = self.held.get_conv_state(self.index), self.held.get_recurrent_state(self.index)
        if conv is None or state is None:
            return None
        return conv, state.transpose(-1, -2).contiguous()

    def write(self, conv: Tensor | None, state: Tensor, tokens: int) -> None:
        self.held.update_conv_state(conv, self.index, conv_kernel_size=self.form.width)
        self.held.update_recurrent_state(state.transpose(-1, -2), self.index)


ForeignCache = FLACache | TransformersCache


def find_foreign(held: Any, form: Form) -> ForeignCache:
    """Decides by the methods of ``held``, because FLA's cache is also a cache of transformers."""
    update = getattr(held, "update", None) if hasattr(held, "__getitem__") else None
    if update is not None and "recurrent_state" in inspect.signature(update).parameters:
        return FLACache(held, form)
    if hasattr(held, "update_recurrent_state") and hasattr(held, "get_recurrent_state"):
        return TransformersCache(held, form)
    raise NotImplementedError(
        "past_key_values: expected a KDACache or a dict of them by layer_idx, or a cache with the methods of FLA's or"
        f" transformers', got {type(held).__name__}"
    )


def read_foreign(foreign: ForeignCache, zeros: Callable[[], KDACache]) -> KDACache:
    """The content of the cache, as a cache of the layer for one call; ``zeros()`` if it is empty."""
    # A cache that a recomputed function made itself cannot be told from one that its first run has advanced.
    check_first_run("past_key_values", -1)
    cache, found = zeros(), foreign.read()
    if found is None:
        return cache
    conv, state = found
    if conv is not None:
        conv = conv[..., 1:].contiguous()
    for name, old, new in (("conv_state", conv, cache.conv), ("recurrent_state", state, cache.state)):
        if old is not None and new is not None and old.shape != new.shape:
            raise ValueError(
                f"past_key_values: expected {name} of shape {list(new.shape)} in it, got {list(old.shape)}"
            )
    return KDACache(conv, state)


def write_foreign(foreign: ForeignCache, conv: Tensor | None, state: Tensor, tokens: int) -> None:
    foreign.write(None if conv is None else F.pad(conv, (1, 0)), state, tokens)


def _index(form: Form) -> int:
    if form.layer_idx is None:
        raise ValueError("layer_idx: expected a number with a cache of all layers, got None")
    return form.layer_idx

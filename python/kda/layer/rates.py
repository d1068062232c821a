"""``A_log`` and ``dt_bias``, which set the decay. Numbers of 16 bits would round the rate of a slow channel by up to
1 %, so they are float32 beside weights of any dtype, as in published checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mark(layer: nn.Module) -> None:
    """FLA's and other trainers look for the mark."""
    for parameter in (layer.A_log, layer.dt_bias):
        parameter._no_weight_decay = True  # type: ignore[union-attr]


def without_narrowing(layer: nn.Module, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, by which a module is moved or converted, but these two keep 32 bits."""
    rates = [layer._parameters.get(name) for name in ("A_log", "dt_bias")]
    kept = [x for p in rates if p is not None for x in (p, p.grad)]

    def converted(x: Tensor) -> Tensor:
        y = fn(x)
        narrower = y.dtype.itemsize < 4 <= x.dtype.itemsize
        return x.to(y.device, torch.float32) if narrower and any(x is one for one in kept) else y

    return converted

"""``A_log`` and ``dt_bias``, which set the decay. Numbers of 16 bits would round the rate of a slow channel by up to
1 %, so they are float32 beside weights of any dtype, as in published checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _parameters(layer: nn.Module) -> list[nn.Parameter]:
    """The two, or what they are computed from: the originals of parametrizations, ``A_log_orig`` of pruning, .."""
    own = [p for name, p in layer._parameters.items() if name.startswith(("A_log", "dt_bias"))]
    for name in ("A_log", "dt_bias"):
        computed = getattr(layer._modules.get("parametrizations"), name, None)
        own += [] if computed is None else computed._parameters.values()
    return [p for p in own if p is not None]


def mark(layer: nn.Module) -> None:
    """FLA's and other trainers look for the mark."""
    for parameter in _parameters(layer):
        parameter._no_weight_decay = True  # type: ignore[attr-defined]


def without_narrowing(layer: nn.Module, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, by which a module is moved or converted, but these two keep 32 bits."""
    kept = [x for p in _parameters(layer) for x in (p, p.grad)]

    def converted(x: Tensor) -> Tensor:
        y = fn(x)
        narrower = y.dtype.itemsize < 4 <= x.dtype.itemsize
        return x.to(y.device, torch.float32) if narrower and any(x is one for one in kept) else y

    return converted

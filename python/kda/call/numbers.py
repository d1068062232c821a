"""Integers and offsets that callers give, checked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor


def integer(name: str, x: Any) -> int:
    """An integer of Python, NumPy or a tensor; nothing that would have to be rounded."""
    try:
        if not isinstance(x, bool):
            return index(x)
    except TypeError:
        pass
    raise ValueError(f"{name}: expected an integer, got {x!r}")


def offsets_of(name: str, x: Tensor | Sequence[int]) -> list[int]:
    """Checks offsets, a tensor, an array of NumPy or a sequence of integers, and reads them on the host."""
    if isinstance(x, Tensor) and (x.ndim != 1 or x.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"{name}: expected [N + 1] int32 or int64, got {list(x.shape)} {x.dtype}")
    given: Any = x.tolist() if hasattr(x, "tolist") else x
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise ValueError(f"{name}: expected a tensor or a sequence of integers, got {given!r}")
    cu = [integer(f"{name}[{n}]", i) for n, i in enumerate(given)]
    if not cu or cu[0] != 0:
        raise ValueError(f"{name}: expected offsets from 0 on, got {cu[:1]}")
    for n, (a, b) in enumerate(pairwise(cu), 1):
        if b < a:
            raise ValueError(f"{name}[{n}]: expected at least {a} (never decreasing), got {b}")
    return cu

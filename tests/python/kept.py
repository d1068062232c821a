"""What an object holds."""

from __future__ import annotations

from typing import Any

import torch


def tensors_of(x: Any, without: tuple[Any, ...] = ()) -> list[torch.Tensor]:
    """All tensors that an object holds, through whatever it holds. Without those of other objects, and of modules."""
    if isinstance(x, torch.Tensor):
        return [x] if x.numel() else []
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list | tuple | set):
        return [tensor for y in x for tensor in tensors_of(y, without)]
    if any(x is y for y in without) or not hasattr(x, "__dict__") or isinstance(x, type | torch.nn.Module):
        return []
    return tensors_of(vars(x), without)

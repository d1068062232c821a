"""What the functions without autograd need of an array library: new arrays beside given ones.

Inputs are anything with DLPack. Outputs are torch tensors for torch inputs and NumPy arrays otherwise, unless the
caller brings them (``out=``).
"""

from __future__ import annotations

from typing import Any

try:
    import torch
except ImportError:  # everything but autograd works without torch
    torch = None  # type: ignore[assignment]


def is_torch(x: Any) -> bool:
    return torch is not None and isinstance(x, torch.Tensor)


def shape_of(name: str, x: Any, ndim: int) -> Any:
    try:
        shape = x.shape
    except AttributeError:
        raise ValueError(f"{name}: expected an array, got {type(x).__name__}") from None
    if len(shape) != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(shape)}")
    return shape


def new_like(x: Any, shape: Any = None, dtype: Any = None) -> Any:
    """An uninitialised array beside ``x``, of its shape and dtype unless others are named."""
    if is_torch(x):
        if shape is None:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return x.new_empty(shape, dtype=getattr(torch, dtype) if dtype else x.dtype)
    import numpy

    device = x.__dlpack_device__()[0] if hasattr(x, "__dlpack_device__") else 1
    if int(device) != 1:
        raise ValueError(
            "out: expected an array to write to, since only torch and NumPy arrays can be made here, got None"
        )
    try:
        return numpy.empty(
            x.shape if shape is None else shape, dtype=numpy.dtype(str(x.dtype)) if dtype is None else dtype
        )
    except TypeError:
        raise ValueError(f"out: expected an array to write to, since NumPy has no dtype {x.dtype}, got None") from None


def check_views(*tensors: Any) -> None:
    """torch tensors can carry a pending sign flip that DLPack does not show."""
    for t in tensors:
        if t is not None and is_torch(t) and t.is_neg():
            raise ValueError(
                "expected tensors in memory as they read, got a lazily negated view: call resolve_neg() first"
            )

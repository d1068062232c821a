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
Tensor: Any = () if torch is None else torch.Tensor  # for isinstance


def is_torch(x: Any) -> bool:
    return isinstance(x, Tensor)


def shape_of(name: str, x: Any, ndim: int) -> Any:
    shape = getattr(x, "shape", None)
    if shape is None:
        raise ValueError(f"{name}: expected an array, got {type(x).__name__}")
    if len(shape) != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(shape)}")
    return shape


def sequences(B: int, cu: Any) -> int:
    """How many there are in B rows, or packed into one."""
    if cu is None:
        return B
    if len(cu.shape) != 1 or cu.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [N+1], got {list(cu.shape)}")
    count: int = cu.shape[0] - 1
    return count


def new_like(
    x: Any, shape: Any = None, dtype: Any = None, blame: str = "out: expected an array to write to, got None"
) -> Any:
    """An uninitialised array beside ``x``, of its shape and dtype unless others are named. If none can be made here,
    ``blame`` says what the caller could have done."""
    if is_torch(x):
        if shape is None:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return x.new_empty(shape, dtype=getattr(torch, dtype) if dtype else x.dtype)
    import numpy

    wanted = str(x.dtype) if dtype is None else dtype
    device = x.__dlpack_device__()[0] if hasattr(x, "__dlpack_device__") else 1
    try:
        if int(device) != 1:
            raise TypeError
        return numpy.empty(x.shape if shape is None else shape, dtype=numpy.dtype(wanted))
    except TypeError:
        raise ValueError(f"{blame} (made here are torch tensors for torch tensors, else NumPy arrays)") from None


def check_views(*arrays: Any) -> None:
    """torch's floating point tensors can carry a pending sign flip that DLPack does not show. Part of every call, so it
    leaves to ``refusal`` to say which one does."""
    for x in arrays:
        if isinstance(x, Tensor) and x.is_neg():
            raise ValueError("expected memory as it reads, got a negated view")

"""Creates arrays like given ones, for the functions without autograd.

Inputs are any arrays with DLPack. Outputs are torch tensors for torch inputs and NumPy arrays otherwise, unless the
caller passes them (``out=``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from numpy import ndarray

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
    """The number of sequences in B rows, or packed into one row."""
    if cu is None:
        return B
    if len(cu.shape) != 1 or cu.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [N+1], got {list(cu.shape)}")
    count: int = cu.shape[0] - 1
    return count


def new_like(
    x: Any, shape: Any = None, dtype: Any = None, blame: str = "out: expected an array to write to, got None"
) -> Any:
    """An uninitialised array on the device of ``x``, with its shape and dtype unless others are given. If none can be
    made here, the error begins with ``blame``, which says what the caller could have done."""
    if is_torch(x):
        if shape is None:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return x.new_empty(shape, dtype=getattr(torch, dtype) if dtype else x.dtype)
    wanted = str(x.dtype) if dtype is None else dtype
    device = x.__dlpack_device__()[0] if hasattr(x, "__dlpack_device__") else 1
    try:
        if int(device) != 1:
            raise TypeError
        made = numpy.empty(x.shape if shape is None else shape, dtype=numpy.dtype(wanted))
    except TypeError:
        raise ValueError(f"{blame} (made here are torch tensors for torch tensors, else NumPy arrays)") from None
    if made.dtype.kind == "V":  # a dtype of ml_dtypes
        from ._views import share_numpy

        return View(made, share_numpy)
    return made


class View:
    """An array that the binding cannot read itself, with a tensor of the binding on the same memory. ``share`` makes
    that tensor (see ``_views``)."""

    def __init__(self, array: Any, share: Callable[[Any], Any]) -> None:
        self.array, self._share, self._tensor = array, share, share(array)
        self.shape, self.ndim = self._tensor.shape, self._tensor.ndim
        self.dtype = getattr(array, "dtype", self._tensor.dtype)

    def reshape(self, *shape: Any) -> View:
        if not hasattr(self.array, "reshape"):
            raise AttributeError("no reshape", name="reshape", obj=self)  # refusal names the argument
        return View(self.array.reshape(*shape), self._share)

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __tvm_ffi_object__(self) -> Any:
        return self._tensor


def without_views(result: Any) -> Any:
    """``result`` with the arrays themselves in place of their views."""
    if isinstance(result, View):
        return result.array
    if isinstance(result, tuple):
        fields = [without_views(x) for x in result]
        return type(result)(*fields) if hasattr(result, "_fields") else tuple(fields)
    return result


class Unfamiliar(ValueError):
    """The array is neither torch's nor NumPy's, and may be read-only."""


def check_views(*arrays: Any) -> None:
    """Refuses negated views: torch's floating point tensors can carry a pending sign flip that DLPack does not show.
    This runs in every call, so it leaves it to ``refusal`` to say which argument is one."""
    for x in arrays:
        if x is not None and type(x) is not ndarray:
            if isinstance(x, Tensor):
                if x.is_neg():
                    raise ValueError("expected memory as it reads, got a negated view")
            elif type(x) is not View:
                raise Unfamiliar(f"expected a torch tensor or a NumPy array, got {type(x).__name__}")

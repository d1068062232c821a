"""Creates arrays like given ones, for the functions without autograd.

Inputs are any arrays with DLPack. Outputs are torch tensors for torch inputs and NumPy arrays otherwise, unless the
caller passes them (``out=``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from itertools import pairwise
from operator import index
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
    has_numbers = torch is None or not torch.compiler.is_compiling()  # a graph may have sizes that no example tells
    if len(cu.shape) != 1 or (has_numbers and cu.shape[0] < 1):
        raise ValueError(f"cu_seqlens: expected shape [N+1], got {list(cu.shape)}")
    count: int = cu.shape[0] - 1
    return count


def integer(name: str, x: Any) -> int:
    """An integer of Python, NumPy or a tensor; nothing that would have to be rounded."""
    try:
        if not isinstance(x, bool):
            return index(x)
    except TypeError:
        pass
    raise ValueError(f"{name}: expected an integer, got {x!r}")


def offsets_of(name: str, x: Any) -> list[int]:
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
        return View(made, share_numpy)
    return made


def device_of(x: Any) -> int | None:
    """The number of the GPU on which an array is, or None: also for what is no array, which ``refusal`` names."""
    if is_torch(x):
        return x.device.index if x.is_cuda else None
    x = x.array if isinstance(x, View) else x
    try:
        kind, index = x.__dlpack_device__()
    except Exception:
        return None
    return int(index) if kind == _CUDA else None


class View:
    """An array that the binding cannot read itself, with a tensor of the binding on the same memory. ``share`` makes
    that tensor (see ``retry``)."""

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


_VERSIONED = b"dltensor_versioned"
_FLAGS_AT = 24  # in a DLManagedTensorVersioned: after its version, its context and its deleter
_DTYPE_AT = 20  # in a DLTensor: after its address, its device and the number of dimensions
_READ_ONLY = 1
_BFLOAT = 4
_CUDA = 2  # a type of device
_is_valid, _pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
_is_valid.argtypes = _pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer.restype = ctypes.c_void_p


def is_read_only(x: Any) -> bool:
    if isinstance(x, numpy.ndarray):
        return not x.flags.writeable
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):  # immutable, but its export does not say so
        return True
    capsule = _capsule(x, {} if device_of(x) is None else {"stream": -1})  # nobody waits for it
    if not _is_valid(capsule, _VERSIONED):
        return False
    return bool(ctypes.c_uint64.from_address(_pointer(capsule, _VERSIONED) + _FLAGS_AT).value & _READ_ONLY)


def share_numpy(x: Any) -> Any:
    """Shares it through the array interface: NumPy exports by DLPack only what is writeable and of a native dtype."""
    bfloat = x.dtype.name == "bfloat16"
    interface = {**x.__array_interface__, "data": (x.__array_interface__["data"][0], False)}
    if bfloat:
        interface |= {"typestr": "<u2", "descr": [("", "<u2")]}
    capsule = numpy.asarray(_Writeable(interface, x)).__dlpack__()
    if bfloat:
        ctypes.c_uint8.from_address(_pointer(capsule, b"dltensor") + _DTYPE_AT).value = _BFLOAT
    return _from_dlpack(capsule)


class _Writeable:
    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__, self.owner = interface, owner


def share_other(x: Any, stream: int | None = None) -> Any:
    """``stream`` is the handle of the one that is going to use an array on a GPU, which DLPack lets wait for the array.
    There the default stream is 1."""
    return _from_dlpack(_capsule(x, {} if stream is None else {"stream": stream or 1}))


def _capsule(x: Any, options: dict[str, Any]) -> Any:
    try:
        return x.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # an older DLPack
        return x.__dlpack__(**options)


def _from_dlpack(capsule: Any) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(capsule)

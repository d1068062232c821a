"""Decode and prefill where torch cannot be imported, with arrays in memory of CUDA's driver, or of NumPy with the
argument cpu. The numbers are compared with those of NumPy arrays. test_streams.py runs this."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

sys.modules["torch"] = None  # type: ignore[assignment]

import kda  # noqa: E402

CPU, CUDA = 1, 2
ON_CUDA = sys.argv[1] == "cuda"


class Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("dtype", Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def driver(name: str, *arguments: Any) -> None:
    status = getattr(libcuda, name)(*arguments)
    assert status == 0, f"{name}: error {status}"


if ON_CUDA:
    libcuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver("cuInit", 0)
    driver("cuDeviceGet", ctypes.byref(device), 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Array:
    """A copy of a NumPy array. Nothing of it is ever freed."""

    kept: list[Any] = []  # noqa: RUF012

    def __init__(self, x: Any) -> None:
        self.host = np.ascontiguousarray(x).copy()
        self.shape, self.ndim, self.dtype = self.host.shape, self.host.ndim, self.host.dtype
        self.address = ctypes.c_uint64(self.host.ctypes.data)
        if ON_CUDA:
            driver("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(max(self.host.nbytes, 1)))
            driver("cuMemcpyHtoD_v2", self.address, ctypes.c_void_p(self.host.ctypes.data), ctypes.c_size_t(x.nbytes))
        self.kept.append(self)

    def read(self) -> Any:
        """Waits for CUDA's default stream."""
        if ON_CUDA:
            to, size = ctypes.c_void_p(self.host.ctypes.data), ctypes.c_size_t(self.host.nbytes)
            driver("cuMemcpyDtoH_v2", to, self.address, size)
        return self.host

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA if ON_CUDA else CPU), 0

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        assert stream in ((1, -1) if ON_CUDA else (None,)), f"{stream}: not CUDA's default stream"
        sizes = ctypes.c_int64 * self.ndim
        kind = Dtype(2 if self.dtype.kind == "f" else 0, self.dtype.itemsize * 8, 1)
        strides = sizes(*(s // self.dtype.itemsize for s in self.host.strides))
        where = Device(*self.__dlpack_device__())
        tensor = Tensor(self.address.value, where, self.ndim, kind, sizes(*self.shape), strides, 0)
        managed = Managed(tensor, None, None)
        self.kept.append(managed)
        return new_capsule(ctypes.addressof(managed), b"dltensor", None)


def inputs(T: int) -> dict[str, Any]:
    random, (B, H, K) = np.random.default_rng(0), (2, 4, 128)
    x = {name: random.standard_normal((B, T, H, K)).astype(np.float16) for name in "qkv"}
    x |= {"g": -random.random((B, T, H, K)).astype(np.float32), "beta": random.random((B, T, H)).astype(np.float32)}
    return x | {"state": random.standard_normal((B, H, K, K)).astype(np.float32) / 8}


def compare(function: Any, T: int) -> None:
    x = inputs(T)
    expected = {**x, "state": x["state"].copy(), "out": np.zeros_like(x["v"])}
    function(**expected, use_qk_l2norm_in_kernel=True)
    arrays = {name: Array(y) for name, y in {**x, "out": np.zeros_like(x["v"])}.items()}
    if function is kda.prefill and ON_CUDA:
        assert kda.workspace_size(**arrays, use_qk_l2norm_in_kernel=True) > 0, "this test is about a workspace"
    assert function(**arrays, use_qk_l2norm_in_kernel=True) is arrays["out"]
    for name in ("out", "state"):
        got, wanted = (y.astype(np.float64) for y in (arrays[name].read(), expected[name]))
        error = np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean())
        assert error < 3e-3, f"{function.__name__}: an error of {error} in {name}"
    print(f"{function.__name__}: right")


compare(kda.decode, 1)
compare(kda.prefill, 1000)

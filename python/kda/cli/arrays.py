"""Arrays to call the library with: torch tensors where torch is installed, else NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..call.arrays import is_torch, torch


def cuda_device() -> bool:
    return torch is not None and torch.cuda.is_available()


class Source:
    """Makes arrays on a device: random numbers, or without a seed uninitialised memory that is never read."""

    def __init__(self, device: str = "cpu", seed: int | None = 0) -> None:
        if device == "cuda" and not cuda_device():
            raise ValueError("device: expected one that is here, got cuda, and torch finds no CUDA device")
        self.device = device
        self.random = None if seed is None else np.random.default_rng(seed)

    def normal(self, dtype: str, *shape: int) -> Any:
        if self.random is None:
            return self._empty(dtype, shape)
        return self._array(self.random.standard_normal(shape, dtype=np.float32), dtype)

    def unit(self, dtype: str, *shape: int) -> Any:
        """Numbers in (0, 1), such as activated beta."""
        return self._changed(lambda x: 1 / (1 + np.exp(-x)), dtype, shape)

    def log_unit(self, dtype: str, *shape: int) -> Any:
        """Logarithms of numbers in (0, 1), such as activated decays."""
        return self._changed(lambda x: -np.logaddexp(0, -x), dtype, shape)

    def keys(self, dtype: str, *shape: int) -> Any:
        """Rows with a length near 1."""
        return self._changed(lambda x: x / shape[-1] ** 0.5, dtype, shape)

    def nan(self, dtype: str, *shape: int) -> Any:
        if self.random is None:
            return self._empty(dtype, shape)
        return self._array(np.full(shape, np.nan, np.float32), dtype)

    def integers(self, values: Any) -> Any:
        return self._array(np.array(values, np.int32), "int32")

    def _changed(self, change: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        if self.random is None:
            return self._empty(dtype, shape)
        return self._array(change(self.random.standard_normal(shape)), dtype)

    def _empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        if torch is not None:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        return np.empty(shape, _numpy(dtype))

    def _array(self, x: Any, dtype: str) -> Any:
        if torch is not None:
            return torch.from_numpy(x).to(self.device, getattr(torch, dtype))
        return x.astype(_numpy(dtype))


class DeviceSource(Source):
    """Draws on the device itself: the host would take minutes to fill a GPU's memory."""

    def __init__(self, device: str, seed: int = 0) -> None:
        super().__init__(device, seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, dtype: str, *shape: int) -> Any:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device).to(
            getattr(torch, dtype)
        )

    def unit(self, dtype: str, *shape: int) -> Any:
        return self.normal("float32", *shape).sigmoid().to(getattr(torch, dtype))

    def keys(self, dtype: str, *shape: int) -> Any:
        return (self.normal("float32", *shape) / shape[-1] ** 0.5).to(getattr(torch, dtype))

    def log_unit(self, dtype: str, *shape: int) -> Any:
        return torch.nn.functional.logsigmoid(self.normal("float32", *shape)).to(getattr(torch, dtype))

    def slots(self, count: int, of: int) -> Any:
        """Distinct random slots, never slot 0."""
        order = torch.randperm(of - 1, generator=self.generator, dtype=torch.int64, device=self.device)
        return 1 + order[:count].int()


def _numpy(dtype: str) -> Any:
    if dtype == "bfloat16":
        raise ValueError("dtype: expected one that NumPy has, as torch is not installed, got bfloat16")
    return np.dtype(dtype)


def is_array(x: Any) -> bool:
    return is_torch(x) or isinstance(x, np.ndarray)


def copy(x: Any, device: str = "cpu") -> Any:
    return x.detach().to(device, copy=True) if is_torch(x) else x.copy() if is_array(x) else x


def widen(x: Any) -> Any:
    """A copy, in float64 if it is floating point."""
    if is_torch(x):
        return x.to(torch.float64, copy=True) if x.is_floating_point() else x.clone()
    return x.astype(np.float64) if is_array(x) and x.dtype.kind == "f" else copy(x)


def to_numpy(x: Any) -> Any:
    """As float64, for comparisons."""
    return x.detach().double().cpu().numpy() if is_torch(x) else np.asarray(x, np.float64)


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")

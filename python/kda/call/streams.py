"""Streams of a GPU. A call runs on the one that is given (``stream=``), or else on torch's current one, whosever its
arrays are; where torch is missing, on CUDA's default stream. :class:`Users` is for memory that is kept between calls.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .arrays import device_of, torch
from .tracing import compiling, modes, raw_stream

_here = threading.local()  # the handle that is given to the call of this thread


def handle_of(stream: Any) -> int:
    """The handle of a stream, as the CUDA runtime knows it."""
    handle, number = stream, -1
    try:
        if hasattr(stream, "__cuda_stream__"):  # the protocol of NVIDIA's packages: a version and the handle
            handle = stream.__cuda_stream__()[1]
        elif hasattr(stream, "cuda_stream"):  # torch
            handle = stream.cuda_stream
        elif hasattr(stream, "ptr"):  # CuPy
            handle = stream.ptr
        if not isinstance(handle, bool):
            number = operator.index(handle)
    except TypeError:  # a class of streams, or no integer
        pass
    if not 0 <= number < 1 << 63:
        wanted = "expected a handle, or an object with __cuda_stream__, cuda_stream or ptr"
        raise ValueError(f"stream: {wanted}, got {stream if isinstance(stream, int) else type(stream).__name__}")
    return number


def handle_for(index: int) -> int:
    """The handle of the stream on which a call on this device runs; 0 is CUDA's default stream."""
    given: int | None = getattr(_here, "handle", None)
    if given is not None:
        return given
    return int(raw_stream(index)) if torch is not None and torch.cuda.is_initialized() else 0


def device_among(arguments: Iterable[Any]) -> int | None:
    """The GPU of the first array that is on one, also in tuples of arrays."""
    for x in arguments:
        found = device_among(x) if isinstance(x, tuple) else device_of(x)
        if found is not None:
            return found
    return None


@contextmanager
def calls_on_their_stream(index: int) -> Iterator[None]:
    """Tells the binding the stream of calls on a GPU, for calls with no tensor of torch. Those bring it along."""
    import tvm_ffi

    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", index), handle_for(index)):
        yield


def without_stream(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arguments.items() if name != "stream"}


def on_stream(function: Callable[..., Any], stream: Any, arguments: dict[str, Any]) -> Any:
    """``function(**arguments)`` on a stream that is given. It is torch's current one meanwhile: outputs and workspaces
    that torch allocates belong to it."""
    if compiling():
        raise ValueError("stream: expected None under torch.compile (torch.cuda.stream makes one current), got one")
    handle, index = handle_of(stream), device_among(arguments.values())
    if index is None:
        raise ValueError(f"stream: expected None for arrays on the CPU, got {type(stream).__name__}")
    before = getattr(_here, "handle", None)
    _here.handle = handle
    try:
        if torch is None or not torch.cuda.is_initialized():
            return function(**arguments)
        with torch.cuda.stream(_of_torch(stream, handle, index)):
            return function(**arguments)
    finally:
        _here.handle = before


def _of_torch(stream: Any, handle: int, index: int) -> Any:
    if isinstance(stream, torch.cuda.Stream):
        if stream.device.index != index:
            raise ValueError(f"stream: expected one of cuda:{index} like the arrays, got one of {stream.device}")
        return stream
    if handle in (0, 1):  # two handles of one stream
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)


def _on_gpu(x: Any) -> bool:
    return getattr(x, "is_cuda", False)  # arrays of NumPy have no such thing


class Users:
    """The streams that have used tensors which their owner keeps between calls, and does not show to everybody.

    Once nobody holds a tensor, torch's allocator gives its memory to the next tensor of the stream that it was made on.
    Other streams may still be using it then: the allocator waits only for those that it was told of. A caller cannot
    tell it of tensors that he does not see. So the owner notes each stream here, before it uses the tensors.
    """

    def __init__(self) -> None:
        self.told: set[int] = set()  # handles of streams

    def __reduce__(self) -> tuple[Any, ...]:
        return Users, ()  # a copy of the owner has memory of its own

    def note(self, one: Any, tensors: Callable[[], Iterable[Any]]) -> None:
        """Notes the current stream. ``one`` of the tensors tells the device of all. A compiled graph notes nothing,
        since its code runs when it is compiled."""
        if _on_gpu(one) and not compiling() and not modes() and raw_stream(one.device.index) not in self.told:
            self.tell(one, tensors())

    def tell(self, one: Any, tensors: Iterable[Any]) -> None:
        stream = torch.cuda.current_stream(one.device)
        for x in tensors:
            x.record_stream(stream)
        self.told.add(stream.cuda_stream)

"""Streams of a GPU: :class:`Users` is for memory that is kept between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .arrays import torch
from .tracing import compiling, modes, raw_stream


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

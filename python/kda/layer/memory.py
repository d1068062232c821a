"""Where the parameters of a layer lie, and whether they may be moved from there.

Others may rely on the memory of a parameter: an optimizer that keeps all of them in one flat buffer (ZeRO), processes
that share it, copies to a GPU that need it pinned, a file that is mapped there. A parameter that leaves such memory
still reads the same, but what the others write does not reach it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Places:
    """The addresses of a layer's parameters."""

    def __init__(self, layer: nn.Module) -> None:
        self.addresses = {
            (id(module), name): p.data_ptr()
            for module in layer.modules()
            for name, p in module._parameters.items()
            if type(p) is nn.Parameter and p.layout is torch.strided
        }

    def still(self, layer: nn.Module) -> set[int]:
        """The addresses of those that have not moved. By name, since memory that one has left may be another's now."""
        now = Places(layer).addresses
        return {address for place, address in now.items() if self.addresses.get(place) == address}

    def __deepcopy__(self, memo: Any) -> Places:
        return self  # a copy of the layer asks what it shares with this one

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # files hold None: what is read from them lies elsewhere


def may_leave(parameters: Sequence[nn.Parameter]) -> bool:
    """May all of them leave their memory? Memory that nothing else uses is not told from memory that some tensor of
    torch shares. So ask only of what has just been moved, or of what the caller wants to be moved."""
    doubtful = []
    for p in parameters:
        if p.is_meta or p.layout is not torch.strided or not p.numel():
            return False
        storage = p.untyped_storage()
        if storage.nbytes() != p.nbytes:  # a part of something larger
            return False
        if p.device.type == "cpu" and (p.is_shared() or p.is_pinned()):
            return False
        if not storage.resizable():  # torch has not allocated it, or not only for this
            if p.device.type != "cpu":
                return False
            doubtful.append(p.data_ptr())
    return not doubtful or not _in_files(doubtful)  # torch.load may have read them, which is as good as allocated


def _in_files(addresses: Sequence[int]) -> bool:
    """Does some of this memory belong to a file? Torch does not tell this of parts of mapped files."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            maps = [line.split(maxsplit=5) for line in lines]
    except OSError:
        return True  # nobody can tell
    files = [[int(x, 16) for x in places.split("-")] for places, _, _, _, inode, *_ in maps if inode != "0"]
    return any(begin <= address < end for begin, end in files for address in addresses)

"""Linear maps of the same input as one matrix product.

The weights stay parameters of their own modules. :func:`pack` puts their memory side by side, so that together they
are one matrix. :func:`joint_linear` looks at the addresses in every call. If the weights still lie side by side, one
product with the whole matrix computes all maps. Nothing is copied, so no update of a weight can be missed: an
optimizer's step, ``load_state_dict``, or another tensor in the place of a parameter.

Every weight has a storage of its own, with its own bytes only. Whatever saves, shares or counts tensors tells them
apart by their storages, and takes slices of one storage for one tensor under several names.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Rows of the product are this many columns apart, or a multiple, so that they begin at lines of 128 bytes. On an H200
# the convolution of 8,192 rows takes 126 us with lines that two rows share, and 120 us without.
_ALIGNMENT = 64
_WHOLE = "kda_whole"  # the attribute of the storage of a packed weight


def pack(parameters: Sequence[Any], stay: Container[int] = ()) -> None:
    """Puts the memory of parameters ``[n_i, ...]``, equal but for ``n_i``, side by side. All stay as they are if they
    differ in dtype or device, or if one is not plain, may not leave its memory or lies at an address in ``stay``."""
    if any(type(p) is not nn.Parameter for p in parameters) or whole_of(parameters) is not None:
        return
    first, places = parameters[0], {p.data_ptr() for p in parameters}
    kinds = {(p.dtype, p.device, p.shape[1:]) for p in parameters}
    others = [p for p in parameters if _packed_into(p) is None]
    if len(kinds) > 1 or len(places) < len(parameters) or any(at in stay for at in places) or not may_leave(others):
        return
    with torch.no_grad():
        whole = first.new_empty((sum(p.shape[0] for p in parameters), *first.shape[1:]))
        for p, part in zip(parameters, whole.split([p.shape[0] for p in parameters]), strict=True):
            p.data = _with_own_storage(part.copy_(p), whole)


def _packed_into(p: nn.Parameter) -> Tensor | None:
    """What :func:`pack` has packed it into, if it still lies there: share_memory() gives a storage other memory."""
    kept = vars(p.untyped_storage())
    whole: Tensor | None = kept.get(_WHOLE)
    if whole is None or whole.data_ptr() <= p.data_ptr() < whole.data_ptr() + whole.nbytes:
        return whole
    del kept[_WHOLE]
    return None


def _with_own_storage(part: Tensor, whole: Tensor) -> Tensor:
    """A contiguous part of ``whole`` in the same memory. Its storage keeps that memory, and tells :func:`whole_of` of
    ``whole``: torch keeps the Python object of a storage as long as the storage."""
    at = part.data_ptr() - whole.data_ptr()
    storage = whole.untyped_storage()[at : at + part.nbytes]
    setattr(storage, _WHOLE, whole)
    return part.new_empty(0).set_(storage, 0, part.shape, part.stride())


def unpack(parameters: Iterable[Any]) -> None:
    """Gives what :func:`pack` has packed memory of its own."""
    for p in parameters:
        if type(p) is nn.Parameter and _packed_into(p) is not None:
            p.data = p.detach().clone()


def whole_of(weights: Sequence[Tensor]) -> Tensor | None:
    """``[n, ..]``, the memory of all weights as one tensor without gradients, or None if they do not lie side by
    side."""
    whole: Tensor | None = getattr(weights[0].untyped_storage(), _WHOLE, None)
    if whole is None:
        return None
    begin, dtype = whole.data_ptr(), whole.dtype
    at = begin
    for w in weights:
        if w.data_ptr() != at or w.dtype != dtype or not w.is_contiguous():
            return None
        at += w.nbytes
    return whole if at == begin + whole.nbytes else None


def filled_up(rows: int) -> int:
    return -(-rows // _ALIGNMENT) * _ALIGNMENT


def copies(joint: Tensor, rows: Sequence[int]) -> list[Tensor | None]:
    """The parts of a joint gradient, with memory of their own."""
    return [part.clone() for part in joint.split(rows)]


def product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``[M, n]``: x ``[M, k]`` times the transposed weights ``[n_i, k]``, with n the sum of all n_i, filled up to the
    alignment. Columns that belong to no weight have any values."""
    whole, rows = whole_of(weights), [w.shape[0] for w in weights]
    filled = filled_up(sum(rows))
    if whole is not None and whole.shape[0] == filled:
        return torch.mm(x, whole.t())
    y = x.new_empty(x.shape[0], filled)
    own = y[:, : sum(rows)]
    if whole is not None:
        torch.mm(x, whole.t(), out=own)
    else:
        for w, part in zip(weights, own.split(rows, 1), strict=True):
            torch.mm(x, w.detach().t(), out=part)
    return y


def gradients(
    x: Tensor, weights: Sequence[Tensor], dy: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of x and of each weight, where wanted. Each has memory of its own, so one that is kept keeps no
    others. One product and copies: products for single weights fill a GPU less well."""
    rows = [w.shape[0] for w in weights]
    dy = dy[:, : sum(rows)]
    parts = dy.split(rows, 1)
    dx = None
    if wanted[0]:
        whole = whole_of(weights)
        if whole is not None:
            dx = torch.mm(dy, whole)
        else:
            dx = torch.mm(parts[0], weights[0])
            for part, w in zip(parts[1:], weights[1:], strict=True):
                dx.addmm_(part, w)
    if all(wanted[1:]):
        return dx, copies(torch.mm(dy.t(), x), rows)
    return dx, [torch.mm(part.t(), x) if want else None for part, want in zip(parts, wanted[1:], strict=True)]


# ---- where parameters lie, and whether they may be moved from there ----
#
# Others may rely on the memory of a parameter: an optimizer that keeps all of them in one flat buffer (ZeRO), processes
# that share it, copies to a GPU that need it pinned, a file that is mapped there. A parameter that leaves such memory
# still reads the same, but what the others write does not reach it any more.


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

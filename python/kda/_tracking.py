"""What torch's autograd must be told of calls that it does not see: which tensors they write, and whose gradients would
end in them."""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from ._arrays import Tensor, check_views, torch

_grad_enabled: Any = (lambda: False) if torch is None else torch.is_grad_enabled
_increment_version: Any = (lambda tensors: None) if torch is None else torch._C._increment_version


class LostGradients(ValueError):
    """Of the first argument that requires gradients. ``refusal`` says which one that is."""

    def __init__(self, instead: str) -> None:
        wanted = f"expected torch.no_grad() or a tensor without requires_grad (for gradients there is {instead})"
        super().__init__(f"{wanted}, got one that requires gradients")


def check_serving(instead: str, *arrays: Any) -> None:
    """``check_views`` of all that a function without gradients reads and writes, and in the same loop, for decode steps
    of small models notice two: does one require gradients? ``instead`` names the function that has them."""
    lost = _grad_enabled()
    for x in arrays:
        if x is None or type(x) is ndarray:  # first: to ask whether one is a tensor takes longer
            continue
        if not isinstance(x, Tensor):
            check_views(x)
        elif x.is_neg() or (lost and x.requires_grad):
            check_views(x)
            raise LostGradients(instead)


def mark_written(*arrays: Any) -> None:
    """Raises the version counters of the torch tensors among them, as torch's own operators in place do: backward then
    refuses to read what a graph saved before. To be called behind the write: a refused call writes nothing. Tensors of
    inference mode have no counter, and no graph saves them."""
    if len(arrays) == 2 and isinstance(arrays[0], Tensor) and isinstance(arrays[1], Tensor):  # decode: no list
        _increment_version(arrays)
    else:
        _increment_version([x for x in arrays if isinstance(x, Tensor)])

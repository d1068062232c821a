"""Tells torch's autograd about calls that it does not see: which tensors they write, and which gradients would get
lost in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy import ndarray

from .arrays import Tensor, check_views, torch
from .tracing import increment_version as _increment_version

grad_enabled: Any = (lambda: False) if torch is None else torch.is_grad_enabled


class LostGradients(ValueError):
    """Raised for the first argument that requires gradients. ``refusal`` says which one that is."""

    def __init__(self, instead: str) -> None:
        wanted = f"expected torch.no_grad() or a tensor without requires_grad (for gradients there is {instead})"
        super().__init__(f"{wanted}, got one that requires gradients")


def check_serving(instead: str, arrays: Iterable[Any]) -> None:
    """Runs ``check_views`` on all arrays that a function without gradients reads and writes, and asks in the same loop
    whether one requires gradients: decode steps of small models notice a second loop. ``instead`` names the function
    that has gradients."""
    lost = grad_enabled()
    for x in arrays:
        if x is None or type(x) is ndarray:  # first: asking whether it is a tensor takes longer
            continue
        if not isinstance(x, Tensor):
            check_views(x)
        elif x.is_neg() or (lost and x.requires_grad):
            check_views(x)
            raise LostGradients(instead)


def is_plain_step(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    out: Any,
    gate: tuple[Any, Any],
    indices: tuple[Any, ...] = (None,) * 4,
) -> bool:
    """True if ``check_serving`` has nothing to say about a decode step; ``gate`` is A_log and dt_bias, and ``indices``
    are slots, flags and offsets: those of another library have to be ready on the stream of the call. Without a loop,
    which alone takes half as long as the checks in it."""
    A_log, dt_bias = gate
    slots, to, flags, offsets = indices
    if (slots is not None and type(slots) is not Tensor) or (to is not None and type(to) is not Tensor):
        return False
    if (flags is not None and type(flags) is not Tensor) or (offsets is not None and type(offsets) is not Tensor):
        return False
    try:
        wrong = q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg() or out.is_neg()
        wrong = wrong or (state is not None and state.is_neg())
        wrong = wrong or (A_log is not None and A_log.is_neg()) or (dt_bias is not None and dt_bias.is_neg())
        if not wrong and grad_enabled():
            wrong = q.requires_grad or k.requires_grad or v.requires_grad or g.requires_grad or beta.requires_grad
            wrong = wrong or out.requires_grad or (state is not None and state.requires_grad)
            wrong = wrong or (A_log is not None and A_log.requires_grad)
            wrong = wrong or (dt_bias is not None and dt_bias.requires_grad)
    except AttributeError:  # not all of them are torch tensors
        return False
    return not wrong


def mark_written(*arrays: Any) -> None:
    """Raises the version counters of the torch tensors among the arrays, as torch's own in-place operators do:
    backward then refuses to read what a graph saved before. Call it after the write, since a refused call writes
    nothing. Tensors of inference mode have no counter, and no graph saves them."""
    _increment_version([x for x in arrays if isinstance(x, Tensor)])


def mark_step(state: Any, out: Any) -> None:
    """``mark_written`` for a decode step: no list, and no check that the usual arrays do not need."""
    if type(state) is ndarray and type(out) is ndarray:
        return
    try:
        _increment_version((state, out))
    except (TypeError, RuntimeError):  # at least one is not a torch tensor
        mark_written(state, out)

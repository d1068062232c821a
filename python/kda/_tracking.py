"""Tells torch's autograd about calls that it does not see: which tensors they write, and which gradients would get
lost in them."""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from ._arrays import Tensor, check_views, torch

_grad_enabled: Any = (lambda: False) if torch is None else torch.is_grad_enabled
_increment_version: Any = (lambda tensors: None) if torch is None else torch._C._increment_version


class LostGradients(ValueError):
    """Raised for the first argument that requires gradients. ``refusal`` says which one that is."""

    def __init__(self, instead: str) -> None:
        wanted = f"expected torch.no_grad() or a tensor without requires_grad (for gradients there is {instead})"
        super().__init__(f"{wanted}, got one that requires gradients")


def check_serving(instead: str, *arrays: Any) -> None:
    """Runs ``check_views`` on all that a function without gradients reads and writes, and asks in the same loop
    whether one requires gradients: decode steps of small models notice a second loop. ``instead`` names the function
    that has gradients."""
    lost = _grad_enabled()
    for x in arrays:
        if x is None or type(x) is ndarray:  # first: asking whether it is a tensor takes longer
            continue
        if not isinstance(x, Tensor):
            check_views(x)
        elif x.is_neg() or (lost and x.requires_grad):
            check_views(x)
            raise LostGradients(instead)


def check_step(
    instead: str, q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, state: Any, out: Any
) -> None:  # fmt: skip
    """``check_serving`` for a decode step, without a loop: the loop alone takes half as long as the checks in it."""
    try:
        wrong = q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg() or out.is_neg()
        wrong = wrong or (state is not None and state.is_neg())
        wrong = wrong or (A_log is not None and A_log.is_neg()) or (dt_bias is not None and dt_bias.is_neg())
        if not wrong and _grad_enabled():
            wrong = q.requires_grad or k.requires_grad or v.requires_grad or g.requires_grad or beta.requires_grad
            wrong = wrong or out.requires_grad or (state is not None and state.requires_grad)
            wrong = wrong or (A_log is not None and A_log.requires_grad)
            wrong = wrong or (dt_bias is not None and dt_bias.requires_grad)
    except AttributeError:  # not all of them are torch tensors
        wrong = True
    if wrong:
        check_serving(instead, q, k, v, g, beta, A_log, dt_bias, state, out)


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

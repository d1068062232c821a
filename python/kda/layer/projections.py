"""What :mod:`kda.layer.products` makes of several weights, with gradients; the output projection; and parameters one
behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.derivatives import apply, autocast_state, first_derivatives, refuse_forward_mode
from ..call.dispatch import dispatched
from ..call.graph import run_operator
from .products import copies, gradients, product


def joint_product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """:func:`product`, as an operator where torch has to see it."""
    return run_operator("joint_linear", x=x, weights=list(weights)) if dispatched() else product(x, weights)


def joint_gradients(
    x: Tensor, weights: Sequence[Tensor], dy: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """:func:`gradients`, likewise."""
    if not dispatched():
        return gradients(x, weights, dy, wanted)
    found = run_operator("joint_linear_backward", x=x, weights=list(weights), dy=dy, wanted=list(wanted))
    dx, *dweights = (d if w else None for d, w in zip(found, wanted, strict=True))
    return dx, dweights


class JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.autocast = autocast_state()
        return product(x, weights)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor | None) -> tuple[Any, ...]:
        x, *weights = kept
        assert dy is not None
        dx, dweights = joint_gradients(x, weights, dy, ctx.needs_input_grad)
        return dx, *dweights

    jvp = staticmethod(refuse_forward_mode)


class Linear(torch.autograd.Function):
    """``F.linear`` of x ``[B, T, k]``, whose backward runs in the autocast state of its forward."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.autocast = autocast_state()
        return F.linear(x, weight, bias)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, weight), (of_x, of_weight, of_bias), rows = kept, ctx.needs_input_grad, dy.flatten(0, 1)
        dx = torch.mm(rows, weight).view(*dy.shape[:-1], weight.shape[1]) if of_x else None
        dweight = torch.mm(rows.t(), x.flatten(0, 1)) if of_weight else None
        return dx, dweight, rows.sum(0) if of_bias else None


def joint_linear(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """:func:`product` with gradients, for x ``[.., k]`` of the weights' dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if dispatched():
        y = joint_product(rows, weights)
    elif torch.is_grad_enabled():
        y = apply(JointLinear, rows, *weights)
    else:
        y = product(rows, weights)
    return y.view(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


class Concatenation(torch.autograd.Function):
    """``torch.cat``, whose gradients would be views of one tensor."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [x.shape[0] for x in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(copies(dy, ctx.rows))


def concatenated(parameters: Sequence[Tensor]) -> Tensor:
    return apply(Concatenation, *parameters)  # type: ignore[no-any-return]

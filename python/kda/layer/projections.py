"""What :mod:`kda.layer.products` makes of several weights, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.derivatives import apply, first_derivatives, refuse_forward_mode
from ..call.dispatch import dispatched
from .products import gradients, product


class JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return product(x, weights)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor | None) -> tuple[Any, ...]:
        x, *weights = kept
        assert dy is not None
        dx, dweights = gradients(x, weights, dy, ctx.needs_input_grad)
        return dx, *dweights

    jvp = staticmethod(refuse_forward_mode)


def joint_linear(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """:func:`product` with gradients, for x ``[.., k]`` of the weights' dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if dispatched():
        from ..operators import layer  # noqa: F401  # registers the operator

        y = torch.ops.kda.joint_linear(rows, list(weights))
    elif torch.is_grad_enabled():
        y = apply(JointLinear, rows, *weights)
    else:
        y = product(rows, weights)
    return y.view(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]

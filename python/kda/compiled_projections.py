"""``kda::joint_linear(x, weights) -> y`` with autograd, and ``kda::joint_linear_backward``, for torch.compile: see
``_projections``. Where the weights lie is seen when a graph runs, not when it is made."""

from __future__ import annotations

from typing import Any

import torch

from . import autograd
from ._projections import _filled, gradients, product
from .compiled import _define, _library

Tensor = torch.Tensor


def _fake(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], _filled(sum(w.shape[0] for w in weights)))


_define("joint_linear", "(Tensor x, Tensor[] weights) -> Tensor", product, _fake)


def _backward_run(x: Tensor, weights: list[Tensor], dy: Tensor, wanted: list[bool]) -> list[Tensor]:
    dx, dweights = gradients(x, weights, dy, wanted)
    # An operator must not return slices of one tensor.
    return [x.new_empty(0) if d is None else d.clone() if d._is_view() else d for d in (dx, *dweights)]


def _backward_fake(x: Tensor, weights: list[Tensor], dy: Tensor, wanted: list[bool]) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if w else x.new_empty(0)
        for t, w in zip((x, *weights), wanted, strict=True)
    ]


_define(
    "joint_linear_backward",
    "(Tensor x, Tensor[] weights, Tensor dy, bool[] wanted) -> Tensor[]",
    _backward_run,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)
    ctx.wanted = [t.requires_grad for t in (x, *weights)]


def _autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    grads = torch.ops.kda.joint_linear_backward(x, weights, dy, ctx.wanted)
    dx, *dweights = (g if w else None for g, w in zip(grads, ctx.wanted, strict=True))
    return dx, dweights


torch.library.register_autograd("kda::joint_linear_backward", autograd.refuse_second_derivatives, lib=_library)
torch.library.register_autograd("kda::joint_linear", _autograd, setup_context=_setup, lib=_library)

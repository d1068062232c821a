"""``kda::joint_linear(x, weights) -> y`` with autograd, and ``kda::joint_linear_backward``: see
:mod:`kda.layer.products`. Where the weights lie is seen when a graph runs, not when it is made. Autocast around a graph
that was made without changes nothing. And ``kda::old_state(state) -> copy``, for the caches of the layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..call.derivatives import refuse_second_derivatives
from ..call.graph import LIBRARY, Tensor, define
from ..call.tracing import any_autocast
from ..layer.products import filled_up, gradients, product
from ..layer.recompute import check_first_run


def _old_state_run(state: Tensor) -> Tensor:
    check_first_run("state", -1)
    return state.clone()


def _old_state_fake(state: Tensor) -> Tensor:
    return state.clone()


define("old_state", "(Tensor state) -> Tensor", _old_state_run, _old_state_fake)


def _fake(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], filled_up(sum(w.shape[0] for w in weights)))


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if any_autocast() else nullcontext()


def _run(x: Tensor, weights: list[Tensor]) -> Tensor:
    with _without_autocast(x):
        return product(x, weights)


define("joint_linear", "(Tensor x, Tensor[] weights) -> Tensor", _run, _fake)


def _backward_run(x: Tensor, weights: list[Tensor], dy: Tensor, wanted: list[bool]) -> list[Tensor]:
    with _without_autocast(x):
        dx, dweights = gradients(x, weights, dy, wanted)
    return [x.new_empty(0) if d is None else d for d in (dx, *dweights)]


def _backward_fake(x: Tensor, weights: list[Tensor], dy: Tensor, wanted: list[bool]) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if w else x.new_empty(0)
        for t, w in zip((x, *weights), wanted, strict=True)
    ]


define(
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


torch.library.register_autograd("kda::joint_linear_backward", refuse_second_derivatives, lib=LIBRARY)
torch.library.register_autograd("kda::joint_linear", _autograd, setup_context=_setup, lib=LIBRARY)

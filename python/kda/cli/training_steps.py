"""Forward and backward as calls of a case, ours or a peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..call.arrays import torch
from .arrays import DeviceSource

if TYPE_CHECKING:
    from .prefill import Inputs

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


class Step(NamedTuple):
    """Calls of a case, which return tensors. ``forward`` keeps what backward needs."""

    forward: Callable[[], Sequence[Any]]
    both: Callable[[], Sequence[Any]]


def gradient_of_outputs(inputs: Inputs) -> Any:
    """The gradient of the outputs, always the same."""
    return DeviceSource(inputs.x["v"].device.type, seed=1).normal(inputs.problem.dtype, *inputs.x["v"].shape)


def by_autograd(inputs: Inputs, function: Callable[..., Any]) -> Step:
    """The Step of a function like :func:`kda.chunk_kda`."""
    x, d_o = inputs.x, gradient_of_outputs(inputs)
    leaves = [x[name].requires_grad_() for name in LEAVES]

    def forward() -> Any:
        return function(**x)[0]

    def both() -> Sequence[Any]:
        o = forward()
        return [o, *torch.autograd.grad(o, leaves, d_o)]

    return Step(lambda: [forward()], both)

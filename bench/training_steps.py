"""Forward and backward as calls of a case, ours or a peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kda.call.arrays import torch
from kda.cli.arrays import DeviceSource

if TYPE_CHECKING:
    from bench.prefill import Inputs

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


class Step(NamedTuple):
    """Calls of a case, which return tensors. ``forward`` keeps what backward needs."""

    forward: Callable[[], Sequence[Any]]
    both: Callable[[], Sequence[Any]]


def with_states(inputs: Inputs) -> Inputs:
    """K-first cases have an initial and a final state, without which the layout would say nothing."""
    if inputs.problem.layout == "K-first":
        inputs.x |= {"initial_state": inputs.state, "output_final_state": True}
    return inputs


def gradient_of_outputs(inputs: Inputs) -> Any:
    """The gradient of the outputs, always the same."""
    return DeviceSource(inputs.x["v"].device.type, seed=1).normal(inputs.problem.dtype, *inputs.x["v"].shape)


def by_autograd(inputs: Inputs, function: Callable[..., Any]) -> Step:
    """The Step of a function like :func:`kda.chunk_kda`."""
    x, gradients = inputs.x, [gradient_of_outputs(inputs)]
    leaves = [x[name].requires_grad_() for name in LEAVES]
    if "initial_state" in x:
        leaves.append(x["initial_state"].requires_grad_())
        gradients.append(torch.ones_like(inputs.state))

    def forward() -> Sequence[Any]:
        return function(**x)[: len(gradients)]

    def both() -> Sequence[Any]:
        outputs = forward()
        return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]

    return Step(forward, both)

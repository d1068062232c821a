"""The output's norm and gate as registered torch operators.

* ``kda::norm_gate(...) -> y`` with autograd, ``kda::norm_gate_backward(...) -> gradients``, functional; what is not
  wanted is empty.
* ``kda::norm_gate_out(..., out!) -> ()``, in a given output.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..call.derivatives import refuse_second_derivatives
from ..call.graph import LIBRARY, by_schema, define, in_order, nothing
from ..call.inputs import NORM_WITH_GRADIENTS
from ..call.library import library

Tensor = torch.Tensor

_INPUTS = "Tensor x, Tensor? gate, Tensor? weight"


def _run(activation: int, num_threads: int, **rest: Any) -> Tensor:
    return autograd.run_norm_gate(**rest, form=activation, threads=num_threads)


def _fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


define(
    "norm_gate",
    f"({_INPUTS}, float eps, int activation, str? impl, SymInt num_threads) -> Tensor",
    _run,
    _fake,
)


def _backward_run(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    dy: Tensor,
    eps: float,
    activation: int,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    grads = autograd.run_norm_gate_backward(x, gate, weight, dy, eps, activation, wanted)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


def _backward_fake(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, wanted: list[bool], **_: Any
) -> tuple[Tensor, ...]:
    inputs = (x, gate, weight)
    return tuple(
        t.new_empty(t.shape) if w and t is not None else x.new_empty(0) for t, w in zip(inputs, wanted, strict=True)
    )


define(
    "norm_gate_backward",
    f"({_INPUTS}, Tensor dy, float eps, int activation, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _backward_run,
    _backward_fake,
)


_ARGUMENTS = by_schema(torch.ops.kda.norm_gate.default)
_IN_ORDER = in_order(torch.ops.kda.norm_gate.default)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a = _ARGUMENTS(*inputs)
    leaves = (a["x"], a["gate"], a["weight"])
    ctx.save_for_backward(*leaves)
    ctx.eps, ctx.form = a["eps"], a["activation"]
    ctx.wanted = [x is not None and x.requires_grad for x in leaves]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.kda.norm_gate_backward(*ctx.saved_tensors, dy, ctx.eps, ctx.form, ctx.wanted)
    found = [g if w else None for g, w in zip(grads, ctx.wanted, strict=True)]
    return _IN_ORDER(dict(zip(("x", "gate", "weight"), found, strict=True)))


torch.library.register_autograd("kda::norm_gate_backward", refuse_second_derivatives, lib=LIBRARY)
torch.library.register_autograd("kda::norm_gate", _backward, setup_context=_setup, lib=LIBRARY)


def _out_run(out: Tensor, **rest: Any) -> None:
    library().norm_gate(y=out, **rest)


define(
    "norm_gate_out",
    f"({_INPUTS}, Tensor(a!) out, float eps, int activation, str? impl, SymInt num_threads) -> ()",
    _out_run,
    nothing,
    NORM_WITH_GRADIENTS,
)


def norm_gate(x: Tensor, gate: Any, weight: Any, eps: float, form: int, out: Any, impl: Any, threads: int) -> Tensor:
    if out is None:
        return torch.ops.kda.norm_gate(x, gate, weight, eps, form, impl, threads)
    torch.ops.kda.norm_gate_out(x, gate, weight, out, eps, form, impl, threads)
    return out

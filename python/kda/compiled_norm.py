"""The output's norm and gate as registered torch operators, see compiled.py.

* ``kda::norm_gate(...) -> y`` with autograd, ``kda::norm_gate_backward(...) -> gradients``, functional; what is not
  wanted is empty.
* ``kda::norm_gate_out(..., out!) -> ()``, in a given output.
"""

from __future__ import annotations

from typing import Any

import torch

from . import autograd
from ._lib import library
from .compiled import _define, _library, _nothing
from .norm import _WITH_GRADIENTS

Tensor = torch.Tensor

_INPUTS = "Tensor x, Tensor? gate, Tensor? weight"


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_define(
    "norm_gate",
    f"({_INPUTS}, float eps, int activation, str? impl, int num_threads) -> Tensor",
    autograd.run_norm_gate,
    _fake,
)


def _backward_run(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, dy: Tensor, eps: float, form: int, wanted: list[bool]
) -> tuple[Tensor, ...]:
    grads = autograd.run_norm_gate_backward(x, gate, weight, dy, eps, form, wanted)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


def _backward_fake(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, dy: Tensor, eps: float, form: int, wanted: list[bool]
) -> tuple[Tensor, ...]:
    inputs = (x, gate, weight)
    return tuple(
        t.new_empty(t.shape) if w and t is not None else x.new_empty(0) for t, w in zip(inputs, wanted, strict=True)
    )


_define(
    "norm_gate_backward",
    f"({_INPUTS}, Tensor dy, float eps, int activation, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _backward_run,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.eps, ctx.form = inputs[3:5]
    ctx.wanted = [x is not None and x.requires_grad for x in inputs[:3]]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.kda.norm_gate_backward(*ctx.saved_tensors, dy, ctx.eps, ctx.form, ctx.wanted)
    return (*(g if w else None for g, w in zip(grads, ctx.wanted, strict=True)), None, None, None, None)


torch.library.register_autograd("kda::norm_gate_backward", autograd.refuse_second_derivatives, lib=_library)
torch.library.register_autograd("kda::norm_gate", _backward, setup_context=_setup, lib=_library)


def _out_run(x: Tensor, gate: Tensor | None, weight: Tensor | None, out: Tensor, *rest: Any) -> None:
    library().norm_gate(x, gate, weight, out, *rest, None)


_define(
    "norm_gate_out",
    f"({_INPUTS}, Tensor(a!) out, float eps, int activation, str? impl, int num_threads) -> ()",
    _out_run,
    _nothing,
    _WITH_GRADIENTS,
)


def norm_gate(x: Tensor, gate: Any, weight: Any, eps: float, form: int, out: Any, impl: Any, threads: int) -> Tensor:
    if out is None:
        return torch.ops.kda.norm_gate(x, gate, weight, eps, form, impl, threads)
    torch.ops.kda.norm_gate_out(x, gate, weight, out, eps, form, impl, threads)
    return out

"""``kda::gate`` with autograd, and ``kda::gate_backward``."""

from __future__ import annotations

from typing import Any

import torch

from .. import autograd
from ..call.derivatives import refuse_second_derivatives
from ..call.graph import LIBRARY, Tensor, by_schema, define, in_order
from ..call.library import library


def _gate_run(dtype: torch.dtype, form: int, **rest: Any) -> Tensor:
    x = rest["x"]
    g = torch.empty(x.shape, dtype=dtype, device=x.device)
    library().gate(g=g, gate_form=form, **rest)
    return g


def _gate_fake(x: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


define(
    "gate",
    "(Tensor x, Tensor? A_log, Tensor? dt_bias, int form, float lower_bound, ScalarType dtype, str? impl) -> Tensor",
    _gate_run,
    _gate_fake,
)


def _gate_backward_run(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, form: int, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dA, d_bias = autograd.run_gate_backward(x, A_log, dt_bias, dg, form, lower_bound)
    return dx, x.new_empty(0) if dA is None else dA, x.new_empty(0) if d_bias is None else d_bias


def _gate_backward_fake(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    empty = x.new_empty(0)
    return (
        x.new_empty(x.shape),
        empty if A_log is None else A_log.new_empty(A_log.shape),
        x.new_empty(0) if dt_bias is None else dt_bias.new_empty(dt_bias.shape),
    )


define(
    "gate_backward",
    "(Tensor x, Tensor? A_log, Tensor? dt_bias, Tensor dg, int form, float lower_bound) -> (Tensor, Tensor, Tensor)",
    _gate_backward_run,
    _gate_backward_fake,
)


_GATE_ARGUMENTS = by_schema(torch.ops.kda.gate.default)
_GATE_IN_ORDER = in_order(torch.ops.kda.gate.default)


def _gate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a = _GATE_ARGUMENTS(*inputs)
    ctx.save_for_backward(a["x"], a["A_log"], a["dt_bias"])
    ctx.form, ctx.lower_bound = a["form"], a["lower_bound"]


def _gate_autograd(ctx: Any, dg: Tensor) -> tuple[Any, ...]:
    x, A_log, dt_bias = ctx.saved_tensors
    dx, dA, d_bias = torch.ops.kda.gate_backward(x, A_log, dt_bias, dg, ctx.form, ctx.lower_bound)
    gradients = {"x": dx, "A_log": None if A_log is None else dA, "dt_bias": None if dt_bias is None else d_bias}
    return _GATE_IN_ORDER(gradients)


torch.library.register_autograd("kda::gate_backward", refuse_second_derivatives, lib=LIBRARY)
torch.library.register_autograd("kda::gate", _gate_autograd, setup_context=_gate_setup, lib=LIBRARY)


def gate(x: Tensor, *rest: Any) -> Tensor:
    return torch.ops.kda.gate(x, *rest)

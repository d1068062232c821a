"""Functions of torch's autograd around the kernels, for eager mode. For torch.compile see :mod:`kda.operators`, whose
own formulas would do here as well, but a forward of one token (H = 1, K = V = 16) takes 47 us with the Function and 360
with the operator and its formula (one core of a Xeon).

A mode of torch's dispatcher may be there in forward and not in backward, or the reverse: activation checkpointing runs
a forward once more, inside of backward. So what is saved does not depend on modes. It is the same tensors in the same
order here and in the operators' own formulas, and a Function that a mode sees calls its kernels as operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import autograd
from .call.derivatives import (
    Tensor,
    apply,
    autocast_state,
    first_derivatives,
    needs_function,
    refuse_forward_mode,
)
from .call.derivatives import chunks_between_states as chunks_between_states  # calls import it with eager_forward
from .call.dispatch import dispatched
from .call.graph import run_operator
from .call.inputs import TrainingCall
from .call.library import library

_SAVED = ("h", "v_new", "Aqk", "Akk")
_MORE = ("x1", "x2")  # channels of a convolution


# ---- the kernels, as operators where torch has to see them ----


def seen_forward(
    call: TrainingCall, final_state: bool, h_every: int, *, recurrent: bool = False, impl: str | None = None
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """:func:`autograd.run_forward`."""
    if not dispatched():
        return autograd.run_forward(call, final_state, h_every, recurrent=recurrent, impl=impl)
    o, hT, *saved = run_operator(
        "forward", **call.named(), final_state=final_state, h_every=h_every, recurrent=recurrent, impl=impl
    )
    kinds = () if recurrent else autograd.saved_kinds(call.v, call.q.shape[3], call.cu, call.options, h_every)
    return o, hT if final_state else None, tuple(saved[: len(kinds)])


def seen_backward(
    call: TrainingCall,
    saved: Sequence[Tensor],
    h_every: int,
    d_o: Tensor,
    dhT: Tensor | None,
    wanted: Sequence[bool],
    into: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """:func:`autograd.run_backward`. The first gradients are written ``into`` these."""
    if not dispatched():
        return autograd.run_backward(call, saved, h_every, d_o, dhT, wanted, None, into)
    kept = dict.fromkeys(_SAVED) | dict(zip(_SAVED, saved, strict=False))
    found = run_operator("backward", **call.named(), **kept, h_every=h_every, d_o=d_o, dhT=dhT, wanted=list(wanted))
    grads = [x if w and leaf is not None else None for x, w, leaf in zip(found, wanted, call.leaves(), strict=True)]
    return [*map(_copied, into, grads), *grads[len(into) :]]


def seen_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool
) -> Tensor:
    """The first result of :func:`autograd.run_conv`."""
    if not dispatched():
        return autograd.run_conv(x, weight, bias, state, cu, silu)[0]
    y, _ = run_operator(
        "conv",
        x=x,
        weight=weight,
        bias=bias,
        initial_state=state,
        cu_seqlens=cu,
        silu=silu,
        final_state=False,
        impl=None,
    )
    return y  # type: ignore[no-any-return]


def seen_conv_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu: Tensor | None,
    silu: bool,
    dy: Tensor,
    d_last: Tensor | None,
    *,
    wanted: Sequence[bool],
    into: Tensor | None = None,
    more: Sequence[Tensor | None] = (),
) -> list[Tensor | None]:
    """:func:`autograd.run_conv_backward`."""
    if not dispatched():
        return autograd.run_conv_backward(
            x, weight, bias, state, cu, silu, dy, d_last, wanted=wanted, into=into, more=more
        )
    need = [wanted[0] or into is not None, *wanted[1:]]
    found = run_operator(
        "conv_backward",
        x=x,
        weight=weight,
        bias=bias,
        initial_state=state,
        cu_seqlens=cu,
        silu=silu,
        dy=dy,
        d_final_state=d_last,
        wanted=need,
        **dict(zip(_MORE, more, strict=False)),
    )
    grads = [d if w and t is not None else None for d, w, t in zip(found, need, (x, weight, bias, state), strict=True)]
    return grads if into is None else [_copied(into, grads[0]), *grads[1:]]


def seen_gate_backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, form: int, lower_bound: float
) -> tuple[Tensor | None, ...]:
    """:func:`autograd.run_gate_backward`."""
    if not dispatched():
        return autograd.run_gate_backward(x, A_log, dt_bias, dg, form, lower_bound)
    found = run_operator("gate_backward", x=x, A_log=A_log, dt_bias=dt_bias, dg=dg, form=form, lower_bound=lower_bound)
    return tuple(d if t is not None else None for d, t in zip(found, (x, A_log, dt_bias), strict=True))


def seen_norm_gate_backward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, dy: Tensor, eps: float, form: int, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """:func:`autograd.run_norm_gate_backward`."""
    if not dispatched():
        return autograd.run_norm_gate_backward(x, gate, weight, dy, eps, form, wanted)
    found = run_operator(
        "norm_gate_backward", x=x, gate=gate, weight=weight, dy=dy, eps=eps, activation=form, wanted=list(wanted)
    )
    return [d if w and t is not None else None for d, w, t in zip(found, wanted, (x, gate, weight), strict=True)]


def _copied(into: Tensor, x: Tensor | None) -> Tensor:
    assert x is not None  # who gives it a place wants it
    return into.copy_(x)


# ---- the Functions ----


def eager_forward(
    call: TrainingCall, output_final_state: bool, h_every: int, *, recurrent: bool, impl: str | None
) -> tuple[Tensor, Tensor | None]:
    """Returns (o, hT), with gradients if ``h_every`` is not 0."""
    o: Tensor
    if h_every or needs_function(call.leaves()):
        o, hT = apply(KDAFunction, *call, output_final_state, h_every, recurrent, impl)
        return o, hT
    o, hT, _ = autograd.run_forward(call, output_final_state, h_every, recurrent=recurrent, impl=impl)
    return o, hT


class KDAFunction(torch.autograd.Function):
    """Autograd of chunk_kda, and of fused_recurrent_kda with ``recurrent``."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        """``given``: a :class:`TrainingCall`, then what :func:`autograd.run_forward` takes with it."""
        *call_of, final_state, h_every, recurrent, impl = given
        call = TrainingCall._make(call_of)
        o, hT, saved = autograd.run_forward(call, final_state, h_every, recurrent=recurrent, impl=impl)
        if h_every:
            ctx.save_for_backward(*call.leaves(), call.cu, *saved)
            ctx.options, ctx.h_every = call.options, h_every
            ctx.autocast = autocast_state()
        ctx.set_materialize_grads(False)
        return o, hT

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_o: Tensor | None, dhT: Tensor | None) -> tuple[Any, ...]:
        tensors, saved = kept[:9], kept[9:]
        call = TrainingCall._make((*tensors, ctx.options))
        d_o = torch.zeros_like(call.v) if d_o is None else d_o
        grads = seen_backward(call, saved, ctx.h_every, d_o, dhT, ctx.needs_input_grad[:8])
        return (*grads, None, None, None, None, None, None)


class GateFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        form: int,
        lower_bound: float,
        dtype: torch.dtype,
        impl: str | None,
    ) -> Tensor:
        g = torch.empty(x.shape, dtype=dtype, device=x.device)
        library().gate(x=x, A_log=A_log, dt_bias=dt_bias, g=g, gate_form=form, lower_bound=lower_bound, impl=impl)
        ctx.save_for_backward(x, A_log, dt_bias)
        ctx.form, ctx.lower_bound, ctx.autocast = form, lower_bound, autocast_state()
        return g

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dg: Tensor) -> tuple[Any, ...]:
        x, A_log, dt_bias = kept
        return (*seen_gate_backward(x, A_log, dt_bias, dg, ctx.form, ctx.lower_bound), None, None, None, None)


class ConvFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        cu: Tensor | None,
        how: tuple[bool, bool, str | None],
        *more: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``how``: silu, final_state and impl of :func:`autograd.run_conv`."""
        ctx.save_for_backward(x, weight, bias, state, *more, cu)
        ctx.silu, final_state, impl = how
        ctx.autocast = autocast_state()
        ctx.set_materialize_grads(False)
        return autograd.run_conv(x, weight, bias, state, cu, ctx.silu, final_state, impl, more=more)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, state, *more, cu = kept
        of_x, of_weight, of_bias, of_state, _cu, _how, *of_more = ctx.needs_input_grad
        wanted = (of_x or any(of_more), of_weight, of_bias, of_state)
        if dy is None:
            dy = x.new_zeros((*x.shape[:2], sum(autograd.conv_sizes(x, *more))))
        dx, *grads = seen_conv_backward(x, weight, bias, state, cu, ctx.silu, dy, d_last, wanted=wanted, more=more)
        dx, *d_more = autograd.conv_parts(dx, x, *more)
        return (dx, *grads, None, None, *d_more)


class NormGateFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, form: int, impl: str | None
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.form, ctx.autocast = eps, form, autocast_state()
        return autograd.run_norm_gate(x, gate, weight, eps, form, impl)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gate, weight = kept
        grads = seen_norm_gate_backward(x, gate, weight, dy, ctx.eps, ctx.form, ctx.needs_input_grad[:3])
        return (*grads, None, None, None)

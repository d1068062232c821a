"""torch autograd around the kernels, for eager mode. For torch.compile see :mod:`kda.operators`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .call.derivatives import (
    Tensor,
    apply,
    first_derivatives,
    in_large_pages,
    needs_function,
    plain,
    refuse_forward_mode,
    state_shape,
    wide_dtype,
)
from .call.inputs import TrainingCall
from .call.library import library
from .call.options import CHUNK, H_EVERY, STATE_K_FIRST, Options


def saved_kinds(
    v: Tensor, K: int, cu: Tensor | None, options: Options, h_every: int
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and dtypes of what forward keeps for backward. Nothing if ``h_every`` is 0; otherwise ``h``, a state
    every ``h_every`` chunks. If that is 1 also ``v_new``, ``Aqk`` and ``Akk``, and backward recomputes nothing. On
    CUDA: ``h`` and ``v_new`` in bf16 if ``h_every`` is 1 and backward can use them (16 bits), else nothing. There
    ``h`` is V-first, as backward takes it, whatever the layout of the states is."""
    if h_every == 0 or (v.is_cuda and (h_every > 1 or v.dtype == torch.float32)):
        return ()
    B, T, HV, V = v.shape
    N, *state = state_shape(v, K, cu, options)
    tokens = CHUNK * h_every
    h = (B * ((T + tokens - 1) // tokens) if cu is None else T // tokens + N, *state)
    v_new, scores = tuple(v.shape), (B, T, HV, CHUNK)
    if v.is_cuda:
        return (((h[0], HV, V, K), torch.bfloat16), (v_new, torch.bfloat16))
    wide = wide_dtype(v)
    return ((h, wide), (v_new, wide), (scores, wide), (scores, wide)) if h_every == 1 else ((h, wide),)


def h_v_first(v: Tensor, saved: Sequence[Tensor], options: Options) -> bool:
    """Whether ``h`` among them has another layout than the states."""
    return bool(saved) and v.is_cuda and options.state_layout == STATE_K_FIRST


def run_forward(
    call: TrainingCall, final_state: bool, h_every: int, recurrent: bool, impl: str | None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    """Returns (o, hT, saved), see :func:`saved_kinds`; the recurrent form saves nothing."""
    q, k, v, g, beta, A_log, dt_bias, h0, cu, options = call
    K = q.shape[3]
    o = in_large_pages(torch.empty_like(v, memory_format=torch.contiguous_format))
    hT = v.new_empty(state_shape(v, K, cu, options), dtype=wide_dtype(q)) if final_state else None
    if recurrent:
        library().decode(q, k, v, g, beta, A_log, dt_bias, cu, options=options, h0=h0, hT=hT, o=o, impl=impl)
        return o, hT, ()
    kinds = saved_kinds(v, K, cu, options, h_every)
    saved = tuple(in_large_pages(v.new_empty(shape, dtype=dtype)) for shape, dtype in kinds)
    h, v_new, Aqk, Akk = _four(saved)
    library().forward(
        q, k, v, g, beta, A_log, dt_bias, cu, options=options, h0=h0, hT=hT, has_initial_state=has_initial_state, o=o,
        h=h, v_new=v_new, Aqk=Aqk, Akk=Akk, h_every=h_every if saved else 0,
        h_v_first=h_v_first(v, saved, options), impl=impl,
    )  # fmt: skip
    return o, hT, saved


def _four(saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*saved, *(None,) * (4 - len(saved)))


def backward_call(
    call: TrainingCall, saved: Sequence[Tensor], h_every: int, d_o: Tensor, dhT: Tensor | None, wanted: Sequence[bool],
    impl: str | None = None, into: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], dict[str, Any]]:  # fmt: skip
    """Tensors for the gradients of (q, k, v, g, beta, A_log, dt_bias, h0), None where not wanted, and the operands.
    The first of these tensors are ``into``, the others new."""
    grads: list[Tensor | None] = [*into]
    grads += [
        in_large_pages(torch.empty_like(x, memory_format=torch.contiguous_format)) if w and x is not None else None
        for x, w in list(zip(call.leaves(), wanted, strict=True))[len(into) :]
    ]
    q, k, v, g, beta, A_log, dt_bias, h0, cu, options = call
    h, v_new, Aqk, Akk = _four(saved)
    dq, dk, dv, dg, dbeta, dA, d_bias, dh0 = grads
    return grads, {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu,
        "options": options, "h0": h0, "d_o": plain(d_o), "dhT": None if dhT is None else plain(dhT), "h": h,
        "v_new": v_new, "Aqk": Aqk, "Akk": Akk, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dA_log": dA,
        "d_dt_bias": d_bias, "dh0": dh0, "h_every": h_every if saved else 0,
        "h_v_first": h_v_first(v, saved, options), "impl": impl,
    }  # fmt: skip


def run_backward(*arguments: Any) -> list[Tensor | None]:
    """Gradients of (q, k, v, g, beta, A_log, dt_bias, h0), None where not wanted: see :func:`backward_call`."""
    grads, operands = backward_call(*arguments)
    library().backward(**operands)
    return grads


def eager_forward(
    call: TrainingCall, output_final_state: bool, h_every: int, recurrent: bool, impl: str | None
) -> tuple[Tensor, Tensor | None]:
    """Returns (o, hT), with gradients if ``h_every`` is not 0."""
    o: Tensor
    if h_every or needs_function(call.leaves()):
        o, hT = apply(KDAFunction, *call, output_final_state, h_every, recurrent, impl)
        return o, hT
    o, hT, _ = run_forward(call, output_final_state, h_every, recurrent, impl)
    return o, hT


def chunks_between_states(inputs: Sequence[Tensor | None], disable_recompute: bool) -> int:
    """``h_every`` of a forward: 0 if its inputs can have no gradients. Must be called outside of a ``Function``:
    inside, gradients are always disabled, and ``ctx.needs_input_grad`` ignores ``torch.no_grad()``."""
    if not torch.is_grad_enabled() or not any([x is not None and x.requires_grad for x in inputs]):
        return 0
    return 1 if disable_recompute else H_EVERY


class KDAFunction(torch.autograd.Function):
    """Autograd of chunk_kda, and of fused_recurrent_kda with ``recurrent``."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        """``given``: a :class:`TrainingCall`, then what :func:`run_forward` takes with it."""
        *call_of, final_state, h_every, recurrent, impl = given
        call = TrainingCall._make(call_of)
        o, hT, saved = run_forward(call, final_state, h_every, recurrent, impl)
        if h_every:
            ctx.save_for_backward(*call.leaves(), call.cu, *saved)
            ctx.options, ctx.h_every = call.options, h_every
        ctx.set_materialize_grads(False)
        return o, hT

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_o: Tensor | None, dhT: Tensor | None) -> tuple[Any, ...]:
        tensors, saved = kept[:9], kept[9:]
        call = TrainingCall._make((*tensors, ctx.options))
        d_o = torch.zeros_like(call.v) if d_o is None else d_o
        grads = run_backward(call, saved, ctx.h_every, d_o, dhT, ctx.needs_input_grad[:8])
        return (*grads, None, None, None, None, None, None)


class GateFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, form: int, lower_bound: float,
        dtype: torch.dtype, impl: str | None,
    ) -> Tensor:  # fmt: skip
        g = torch.empty(x.shape, dtype=dtype, device=x.device)
        library().gate(
            x=x, A_log=A_log, dt_bias=dt_bias, g=g, gate_form=form, lower_bound=lower_bound, impl=impl
        )  # fmt: skip
        ctx.save_for_backward(x, A_log, dt_bias)
        ctx.form, ctx.lower_bound = form, lower_bound
        return g

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dg: Tensor) -> tuple[Any, ...]:
        x, A_log, dt_bias = kept
        return (*run_gate_backward(x, A_log, dt_bias, dg, ctx.form, ctx.lower_bound), None, None, None, None)


def run_gate_backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, form: int, lower_bound: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dg = plain(dg)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dA = None if A_log is None else torch.empty_like(A_log, memory_format=torch.contiguous_format)
    d_bias = None if dt_bias is None else torch.empty_like(dt_bias, memory_format=torch.contiguous_format)
    library().gate_backward(
        x=x, A_log=A_log, dt_bias=dt_bias, dg=dg, dx=dx, dA_log=dA, d_dt_bias=d_bias, gate_form=form,
        lower_bound=lower_bound,
    )  # fmt: skip
    return dx, dA, d_bias


def conv_state_shape(x: Tensor, weight: Tensor, cu: Tensor | None, D: int = 0) -> tuple[int, int, int]:
    return (x.shape[0] if cu is None else cu.shape[0] - 1, D or x.shape[2], weight.shape[1] - 1)


def conv_sizes(x: Tensor, *more: Tensor | None) -> list[int]:
    """The channels of x, and of x1 and x2 behind it."""
    return [part.shape[2] for part in (x, *more) if part is not None]


def conv_parts(dx: Tensor | None, x: Tensor, *more: Tensor | None) -> list[Tensor | None]:
    """The gradients of x, x1 and x2 from that of all channels."""
    if dx is None or not more:
        return [dx, *(None for _ in more)]
    parts = dx.split_with_sizes(conv_sizes(x, *more), 2)
    return [*parts, *[None] * (1 + len(more) - len(parts))]


def run_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool,
    final_state: bool, impl: str | None, *, more: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``more``: x1 and x2, or nothing."""
    D = sum(conv_sizes(x, *more)) if more else 0
    y = x.new_empty((*x.shape[:2], D)) if more else torch.empty_like(x, memory_format=torch.contiguous_format)
    dtype = x.dtype if state is None else state.dtype
    last = x.new_empty(conv_state_shape(x, weight, cu, D), dtype=dtype) if final_state else None
    library().conv(
        x=x, weight=weight, bias=bias, cu_seqlens=cu, initial_state=state, final_state=last, y=y, silu=silu, impl=impl,
        **dict(zip(("x1", "x2"), more, strict=False)),
    )  # fmt: skip
    return y, last


def run_conv_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool, dy: Tensor,
    d_last: Tensor | None, *, wanted: Sequence[bool], into: Tensor | None = None, more: Sequence[Tensor | None] = (),
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of (x, weight, bias, state), None where not wanted. That of x is ``into``, if given, and has the
    channels of x1 and x2, which are ``more``."""
    inputs = (x, weight, bias, state)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    grads = [
        torch.empty(t.shape, dtype=wide if i in (1, 2) else t.dtype, device=t.device) if w and t is not None else None
        for i, (t, w) in enumerate(zip(inputs, wanted, strict=True))
    ]
    if more and wanted[0]:
        grads[0] = torch.empty_like(dy, dtype=x.dtype, memory_format=torch.contiguous_format)
    if into is not None:
        grads[0] = into
    dx, dweight, dbias, d_state = grads
    library().conv_backward(
        x=x, weight=weight, bias=bias, cu_seqlens=cu, initial_state=state, dy=plain(dy),
        d_final_state=None if d_last is None else d_last.resolve_neg(), dx=dx, dweight=dweight, dbias=dbias,
        d_initial_state=d_state, silu=silu, **dict(zip(("x1", "x2"), more, strict=False)),
    )  # fmt: skip
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


class ConvFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None,
        how: tuple[bool, bool, str | None], *more: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """``how``: silu, final_state and impl of :func:`run_conv`."""
        ctx.save_for_backward(x, weight, bias, state, cu, *more)
        ctx.silu, final_state, impl = how
        ctx.set_materialize_grads(False)
        return run_conv(x, weight, bias, state, cu, ctx.silu, final_state, impl, more=more)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, state, cu, *more = kept
        of_x, of_weight, of_bias, of_state, _cu, _how, *of_more = ctx.needs_input_grad
        wanted = (of_x or any(of_more), of_weight, of_bias, of_state)
        if dy is None:
            dy = x.new_zeros((*x.shape[:2], sum(conv_sizes(x, *more))))
        dx, *grads = run_conv_backward(x, weight, bias, state, cu, ctx.silu, dy, d_last, wanted=wanted, more=more)
        dx, *d_more = conv_parts(dx, x, *more)
        return (dx, *grads, None, None, *d_more)


def run_norm_gate(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, form: int, impl: str | None, threads: int = 0
) -> Tensor:
    y = in_large_pages(torch.empty_like(x, memory_format=torch.contiguous_format))
    library().norm_gate(
        x=x, gate=gate, weight=weight, y=y, eps=eps, activation=form, impl=impl, num_threads=threads
    )  # fmt: skip
    return y


def run_norm_gate_backward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, dy: Tensor, eps: float, form: int, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of (x, gate, weight), None where not wanted. That of the weight is made in float32, as the kernels sum
    it."""
    inputs = (x, gate, weight)
    dtypes = [None if t is None else t.dtype for t in inputs]
    if weight is not None:
        dtypes[2] = wide_dtype(weight)
    grads = [
        in_large_pages(torch.empty(t.shape, dtype=dtype, device=t.device)) if w and t is not None else None
        for t, dtype, w in zip(inputs, dtypes, wanted, strict=True)
    ]
    dx, dgate, dweight = grads
    library().norm_gate_backward(
        x=x, gate=gate, weight=weight, dy=plain(dy), dx=dx, dgate=dgate, dweight=dweight, eps=eps, activation=form
    )  # fmt: skip
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


class NormGateFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, form: int, impl: str | None
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.form = eps, form
        return run_norm_gate(x, gate, weight, eps, form, impl)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gate, weight = kept
        grads = run_norm_gate_backward(x, gate, weight, dy, ctx.eps, ctx.form, ctx.needs_input_grad[:3])
        return (*grads, None, None, None)

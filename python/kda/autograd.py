"""The kernels of training, with outputs that are made here: what :mod:`kda.functions` and the operators compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .call.derivatives import Tensor, in_large_pages, plain, state_shape, wide_dtype
from .call.inputs import TrainingCall
from .call.library import library
from .call.options import CHUNK, STATE_K_FIRST, Options


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
    call: TrainingCall,
    final_state: bool,
    h_every: int,
    *,
    recurrent: bool = False,
    impl: str | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
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
    states = {"h0": h0, "hT": hT, "has_initial_state": has_initial_state, "o": o}
    kept = {"h": h, "v_new": v_new, "Aqk": Aqk, "Akk": Akk, "h_every": h_every if saved else 0}
    kept["h_v_first"] = h_v_first(v, saved, options)
    library().forward(q, k, v, g, beta, A_log, dt_bias, cu, options=options, **states, **kept, impl=impl)
    return o, hT, saved


def run_states(
    call: TrainingCall, final_state: bool, chunks: int, impl: str | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns (o, hT, h): ``chunks`` states, one before each chunk; in bf16 for bf16 inputs, else in float32."""
    q, k, v, g, beta, A_log, dt_bias, h0, cu, options = call
    N, *state = state_shape(v, q.shape[3], cu, options)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    hT = v.new_empty((N, *state), dtype=torch.float32) if final_state else None
    h = v.new_empty((chunks, *state), dtype=states_dtype(q))
    library().forward(q, k, v, g, beta, A_log, dt_bias, cu, options=options, h0=h0, hT=hT, o=o, h=h, impl=impl)
    return o, hT, h


def states_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def _four(saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*saved, *(None,) * (4 - len(saved)))


def backward_call(
    call: TrainingCall,
    saved: Sequence[Tensor],
    h_every: int,
    d_o: Tensor,
    dhT: Tensor | None,
    wanted: Sequence[bool],
    impl: str | None = None,
    into: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], dict[str, Any]]:
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
    operands = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu}
    operands |= {"h0": h0, "d_o": plain(d_o), "dhT": None if dhT is None else plain(dhT)}
    operands |= {"h": h, "v_new": v_new, "Aqk": Aqk, "Akk": Akk}
    operands |= {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dA_log": dA, "d_dt_bias": d_bias, "dh0": dh0}
    how = {"h_every": h_every if saved else 0, "h_v_first": h_v_first(v, saved, options), "impl": impl}
    return grads, {**operands, "options": options, **how}


def run_backward(*arguments: Any) -> list[Tensor | None]:
    """Gradients of (q, k, v, g, beta, A_log, dt_bias, h0), None where not wanted: see :func:`backward_call`."""
    grads, operands = backward_call(*arguments)
    library().backward(**operands)
    return grads


def run_gate_backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, form: int, lower_bound: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dg = plain(dg)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dA = None if A_log is None else torch.empty_like(A_log, memory_format=torch.contiguous_format)
    d_bias = None if dt_bias is None else torch.empty_like(dt_bias, memory_format=torch.contiguous_format)
    library().gate_backward(
        x=x,
        A_log=A_log,
        dt_bias=dt_bias,
        dg=dg,
        dx=dx,
        dA_log=dA,
        d_dt_bias=d_bias,
        gate_form=form,
        lower_bound=lower_bound,
    )
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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu: Tensor | None,
    silu: bool,
    final_state: bool = False,
    impl: str | None = None,
    more: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor | None]:
    """``more``: x1 and x2, or nothing."""
    D = sum(conv_sizes(x, *more)) if more else 0
    y = x.new_empty((*x.shape[:2], D)) if more else torch.empty_like(x, memory_format=torch.contiguous_format)
    dtype = x.dtype if state is None else state.dtype
    last = x.new_empty(conv_state_shape(x, weight, cu, D), dtype=dtype) if final_state else None
    library().conv(
        x=x,
        weight=weight,
        bias=bias,
        cu_seqlens=cu,
        initial_state=state,
        final_state=last,
        y=y,
        silu=silu,
        impl=impl,
        **dict(zip(("x1", "x2"), more, strict=False)),
    )
    return y, last


def run_conv_backward(
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
    """Gradients of (x, weight, bias, state), None where not wanted. That of x is ``into``, if given, and has the
    channels of x1 and x2, which are ``more``."""
    inputs = (x, weight, bias, state)
    wide = wide_dtype(x)
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
        x=x,
        weight=weight,
        bias=bias,
        cu_seqlens=cu,
        initial_state=state,
        dy=plain(dy),
        d_final_state=None if d_last is None else d_last.resolve_neg(),
        dx=dx,
        dweight=dweight,
        dbias=dbias,
        d_initial_state=d_state,
        silu=silu,
        **dict(zip(("x1", "x2"), more, strict=False)),
    )
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


def run_norm_gate(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, form: int, impl: str | None, threads: int = 0
) -> Tensor:
    y = in_large_pages(torch.empty_like(x, memory_format=torch.contiguous_format))
    library().norm_gate(x=x, gate=gate, weight=weight, y=y, eps=eps, activation=form, impl=impl, num_threads=threads)
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
    )
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]

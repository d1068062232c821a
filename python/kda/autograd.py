"""torch autograd around the kernels, for eager mode. For torch.compile see compiled.py."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ._dispatch import refuse_batched_gradients, transform_refusal
from ._lib import library
from ._options import CHUNK, H_EVERY, Options

Tensor = torch.Tensor


# ---- requests of torch that are refused ----

_NO_SECOND = "second derivatives: expected a gradient that is not differentiated again (kda has first derivatives only)"
_NO_SECOND += ", got one in another backward"


class _NoSecondDerivatives(torch.autograd.Function):
    """Returns the first ``count`` tensors as they are. Differentiating them with respect to any of the tensors raises
    an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivatives()


def refuse_second_derivatives(*_: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND)


def first_derivatives(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Makes a ``Function.backward`` from ``backward(ctx, kept, *gradients)`` that also works with
    ``create_graph=True``: its results then refuse to be differentiated again. torch's ``once_differentiable``
    connects the results only to the incoming gradients, and to copies of those. Where an input reaches the loss by
    another path, its error never shows."""

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_batched_gradients(gradients)
        kept = ctx.saved_tensors  # read once: activation checkpointing recomputes them
        with torch.no_grad():
            results = backward(ctx, kept, *gradients)
        if not torch.is_grad_enabled():
            return results
        return _NoSecondDerivatives.apply(len(results), *results, *kept, *gradients)

    return call


def refuse_forward_mode(ctx: Any, *grad_inputs: Any) -> Any:
    wanted = "expected reverse mode, by torch.autograd.grad or backward() (kda has no forward derivatives)"
    raise NotImplementedError(f"forward mode: {wanted}, got a dual tensor")


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, for reverse mode only."""
    if (refused := transform_refusal()) is not None:
        raise refused
    return function.apply(*arguments)


# ---- outputs ----


def _large_pages() -> Callable[[Tensor], Tensor]:
    """Requests pages of 2 MiB for a new CPU tensor, where the system grants them on request (Linux). The memory of
    outputs is new in every step: without this a tenth of a training step goes into page faults on pages of 4 KiB."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    page, hugepage = 2 << 20, 14

    def mark(x: Tensor) -> Tensor:
        size = x.numel() * x.element_size()
        if madvise is not None and size >= 2 * page and x.device.type == "cpu":
            begin = (x.data_ptr() + page - 1) // page * page
            end = (x.data_ptr() + size) // page * page
            if end > begin:  # a hint: nothing depends on the answer
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), hugepage)
        return x

    return mark


_in_large_pages = _large_pages()


def state_shape(v: Tensor, K: int, cu: Tensor | None, options: Options) -> tuple[int, int, int, int]:
    B, _, HV, V = v.shape
    N = B if cu is None else cu.shape[0] - 1
    return (N, HV, K, V) if options.state_layout else (N, HV, V, K)


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def saved_kinds(
    v: Tensor, K: int, cu: Tensor | None, options: Options, h_every: int
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and dtypes of what forward keeps for backward. Nothing if ``h_every`` is 0; otherwise ``h``, a state
    every ``h_every`` chunks. If that is 1 also ``v_new``, ``Aqk`` and ``Akk``, and backward recomputes nothing. On
    CUDA: ``h`` and ``v_new`` in bf16 if ``h_every`` is 1 and backward can use them (V-first, 16 bits), else nothing."""
    if h_every == 0 or (v.is_cuda and (h_every > 1 or options.state_layout or v.dtype == torch.float32)):
        return ()
    B, T, HV, _ = v.shape
    N, *state = state_shape(v, K, cu, options)
    tokens = CHUNK * h_every
    h = (B * ((T + tokens - 1) // tokens) if cu is None else T // tokens + N, *state)
    v_new, scores = tuple(v.shape), (B, T, HV, CHUNK)
    if v.is_cuda:
        return ((h, torch.bfloat16), (v_new, torch.bfloat16))
    wide = wide_dtype(v)
    return ((h, wide), (v_new, wide), (scores, wide), (scores, wide)) if h_every == 1 else ((h, wide),)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, options: Options, final_state: bool, h_every: int, recurrent: bool,
    impl: str | None, has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    """Returns (o, hT, saved), see :func:`saved_kinds`; the recurrent form saves nothing."""
    K = q.shape[3]
    o = _in_large_pages(torch.empty_like(v, memory_format=torch.contiguous_format))
    hT = v.new_empty(state_shape(v, K, cu, options), dtype=wide_dtype(q)) if final_state else None
    if recurrent:
        library().decode(q, k, v, g, beta, A_log, dt_bias, cu, *options, h0, hT, None, None, 0, o, impl, 0, None)
        return o, hT, ()
    kinds = saved_kinds(v, K, cu, options, h_every)
    saved = tuple(_in_large_pages(v.new_empty(shape, dtype=dtype)) for shape, dtype in kinds)
    library().forward(
        q, k, v, g, beta, A_log, dt_bias, cu, *options, h0, hT, None, has_initial_state, 0, o, None, None,
        *four(saved), 0, h_every if saved else 0, impl, 0, None,
    )  # fmt: skip
    return o, hT, saved


def four(saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*saved, *(None,) * (4 - len(saved)))


def plain(x: Tensor) -> Tensor:
    """Copies a gradient where needed: gradients come as views of any kind, expanded by sum() or lazily negated by
    complex operations."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def backward_call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, options: Options, saved: Sequence[Tensor], h_every: int, d_o: Tensor,
    dhT: Tensor | None, wanted: Sequence[bool], impl: str | None = None, into: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], tuple[Any, ...]]:  # fmt: skip
    """Tensors for the gradients of (q, k, v, g, beta, A_log, dt_bias, h0), None where not wanted, and the arguments
    for the library. The first of them are ``into``, the others new."""
    inputs = (q, k, v, g, beta, A_log, dt_bias, h0)
    grads: list[Tensor | None] = [*into]
    grads += [
        _in_large_pages(torch.empty_like(x, memory_format=torch.contiguous_format)) if w and x is not None else None
        for x, w in list(zip(inputs, wanted, strict=True))[len(into) :]
    ]
    d_o, dhT = plain(d_o), None if dhT is None else plain(dhT)
    return grads, (
        q, k, v, g, beta, A_log, dt_bias, cu, *options, h0, d_o, dhT, *four(saved), *grads, h_every if saved else 0,
        impl, 0, None,
    )  # fmt: skip


def run_backward(*arguments: Any) -> list[Tensor | None]:
    """Gradients of (q, k, v, g, beta, A_log, dt_bias, h0), None where not wanted: see :func:`backward_call`."""
    grads, call = backward_call(*arguments)
    library().backward(*call)
    return grads


def chunks_between_states(inputs: Sequence[Tensor | None], disable_recompute: bool) -> int:
    """``h_every`` of a forward: 0 if its inputs can have no gradients. Must be called outside of a ``Function``:
    inside, gradients are always disabled, and ``ctx.needs_input_grad`` ignores ``torch.no_grad()``."""
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return 0
    return 1 if disable_recompute else H_EVERY


class KDAFunction(torch.autograd.Function):
    """Autograd of chunk_kda, and of fused_recurrent_kda with ``recurrent``."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
        dt_bias: Tensor | None, h0: Tensor | None, cu: Tensor | None, options: Options, final_state: bool,
        h_every: int, recurrent: bool, impl: str | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        inputs = (q, k, v, g, beta, A_log, dt_bias, h0)
        o, hT, saved = run_forward(*inputs, cu, options, final_state, h_every, recurrent, impl)
        if h_every:
            ctx.save_for_backward(*inputs, cu, *saved)
            ctx.options, ctx.h_every = options, h_every
        ctx.set_materialize_grads(False)
        return o, hT

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_o: Tensor | None, dhT: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, A_log, dt_bias, h0, cu, *saved = kept
        if d_o is None:
            d_o = torch.zeros_like(v)
        grads = run_backward(
            q, k, v, g, beta, A_log, dt_bias, h0, cu, ctx.options, saved, ctx.h_every, d_o, dhT,
            ctx.needs_input_grad[:8],
        )  # fmt: skip
        return (*grads, None, None, None, None, None, None)


class GateFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, form: int, lower_bound: float,
        dtype: torch.dtype, impl: str | None,
    ) -> Tensor:  # fmt: skip
        g = torch.empty(x.shape, dtype=dtype, device=x.device)
        library().gate(x, A_log, dt_bias, g, form, lower_bound, impl, 0, None)
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
    library().gate_backward(x, A_log, dt_bias, dg, dx, dA, d_bias, form, lower_bound, None, 0, None)
    return dx, dA, d_bias


def conv_state_shape(x: Tensor, weight: Tensor, cu: Tensor | None) -> tuple[int, int, int]:
    return (x.shape[0] if cu is None else cu.shape[0] - 1, x.shape[2], weight.shape[1] - 1)


def run_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool,
    final_state: bool, impl: str | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    dtype = x.dtype if state is None else state.dtype
    last = x.new_empty(conv_state_shape(x, weight, cu), dtype=dtype) if final_state else None
    library().conv(x, weight, bias, cu, state, last, None, None, y, silu, 0, impl, 0, None)
    return y, last


def run_conv_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool, dy: Tensor,
    d_last: Tensor | None, wanted: Sequence[bool], into: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of (x, weight, bias, state), None where not wanted. That of x is ``into``, if given."""
    inputs = (x, weight, bias, state)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    grads = [
        torch.empty(t.shape, dtype=wide if i in (1, 2) else t.dtype, device=t.device) if w and t is not None else None
        for i, (t, w) in enumerate(zip(inputs, wanted, strict=True))
    ]
    if into is not None:
        grads[0] = into
    library().conv_backward(
        x, weight, bias, cu, state, plain(dy), None if d_last is None else d_last.resolve_neg(), *grads, silu, None, 0,
        None,
    )  # fmt: skip
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


class ConvFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool,
        final_state: bool, impl: str | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, state, cu)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        return run_conv(x, weight, bias, state, cu, silu, final_state, impl)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, state, cu = kept
        if dy is None:
            dy = torch.zeros_like(x)
        grads = run_conv_backward(x, weight, bias, state, cu, ctx.silu, dy, d_last, ctx.needs_input_grad[:4])
        return (*grads, None, None, None, None)


def run_norm_gate(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, form: int, impl: str | None, threads: int = 0
) -> Tensor:
    y = _in_large_pages(torch.empty_like(x, memory_format=torch.contiguous_format))
    library().norm_gate(x, gate, weight, y, eps, form, impl, threads, None)
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
        _in_large_pages(torch.empty(t.shape, dtype=dtype, device=t.device)) if w and t is not None else None
        for t, dtype, w in zip(inputs, dtypes, wanted, strict=True)
    ]
    library().norm_gate_backward(x, gate, weight, plain(dy), *grads, eps, form, None, 0, None)
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

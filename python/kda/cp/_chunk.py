"""``kda.chunk_kda`` with a ``cp_context``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..autograd import run_backward, run_forward
from ..call.derivatives import (
    apply,
    autocast_state,
    chunks_between_states,
    first_derivatives,
    plain,
    state_shape,
    wide_dtype,
)
from ..call.inputs import TrainingCall
from ..call.options import Options
from ._exchange import Exchange, States, begin_states, check_window_call, same_kernels, starts_of

if TYPE_CHECKING:
    from ._context import Context

Tensor = torch.Tensor


def end_states(cp: Context, states: Tensor | None) -> Tensor | None:
    """Of the sequences in the window, from those of all segments."""
    if states is None or cp.sequences == len(cp.segments):
        return states
    return states[cp.tensor(cp.last_of_row, states.device, torch.int64)]


class ContextParallelFunction(torch.autograd.Function):
    """Autograd of chunk_kda on the window of this rank. ``h0`` has the states of sequences that begin in it; others
    do not read their row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        h0: Tensor | None,
        cp: Context,
        options: Options,
        final_state: bool,
        h_every: int,
        impl: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (q, k, v, g, beta, A_log, dt_bias)
        given = {}
        if h0 is not None:
            begins = [(row, i) for row, i in enumerate(cp.first_of_row) if not cp.segments[i].joined_before]
            given = {i: h0[row] for row, i in begins if i in cp.forward.cells}
        ticket = cp.ticket()
        exchange = Exchange(cp, cp.forward, "chunk_kda", inputs, options, ticket, given=given)
        found = exchange.states()
        like = q.new_empty(state_shape(v, q.shape[3], cp.cu_seqlens, options)[1:], dtype=wide_dtype(q))
        starts, has_state = starts_of(cp, h0, found, like)
        with same_kernels(cp):
            call = TrainingCall(*inputs, h0=starts, cu=cp.offsets(q.device), options=options)
            o, hT, saved = run_forward(call, final_state, h_every, impl=impl, has_initial_state=has_state)
        if h_every:
            states = torch.stack([x for _, x in found]) if found else None
            ctx.save_for_backward(*inputs, h0, states, exchange.kept(), *saved)
            ctx.cp, ctx.options, ctx.h_every, ctx.ticket = cp, options, h_every, ticket
            ctx.found, ctx.autocast = [i for i, _ in found], autocast_state()
        ctx.set_materialize_grads(False)
        return o, end_states(cp, hT)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_o: Tensor | None, dhT: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, A_log, dt_bias, h0, states, M, *saved = kept
        inputs, cp, options = (q, k, v, g, beta, A_log, dt_bias), ctx.cp, ctx.options
        d_o = torch.zeros_like(v) if d_o is None else plain(d_o)
        dhT = None if dhT is None else plain(dhT)
        found = list(zip(ctx.found, states, strict=True)) if states is not None else []
        like = q.new_empty(state_shape(v, q.shape[3], cp.cu_seqlens, options)[1:], dtype=wide_dtype(q))
        starts = begin_states(cp, h0, found, like) if found or h0 is not None else None
        given = {}
        if dhT is not None:
            given = {i: dhT[row] for row, i in enumerate(cp.last_of_row) if i in cp.reverse.cells}
        exchange = Exchange(
            cp, cp.reverse, "chunk_kda, backward", inputs, options, ctx.ticket, d_o=d_o, fwd_M=M, given=given
        )
        d_ends = _end_gradients(cp, dhT, exchange.states(), like)
        wanted = ctx.needs_input_grad[:8]
        with same_kernels(cp):
            call = TrainingCall(*inputs, h0=starts, cu=cp.offsets(q.device), options=options)
            grads = run_backward(call, saved, ctx.h_every, d_o, d_ends, wanted)
        return (*grads[:7], _begin_gradients(cp, h0, grads[7]), None, None, None, None, None)


def _end_gradients(cp: Context, dhT: Tensor | None, found: States, like: Tensor) -> Tensor | None:
    """Gradients of the states that all segments end with."""
    if dhT is None and not found:
        return None
    if dhT is not None and cp.sequences == len(cp.segments):
        gradients = dhT.clone()
    else:
        gradients = like.new_zeros(len(cp.segments), *like.shape)
        if dhT is not None and cp.segments:
            gradients[cp.tensor(cp.last_of_row, like.device, torch.int64)] = dhT
    for i, gradient in found:
        gradients[i] += gradient
    return gradients


def _begin_gradients(cp: Context, h0: Tensor | None, gradients: Tensor | None) -> Tensor | None:
    """Gradients of the initial states of sequences in the window; 0 where another segment gives the state."""
    if gradients is None or h0 is None:
        return None
    if cp.sequences != len(cp.segments):
        gradients = gradients[cp.tensor(cp.first_of_row, gradients.device, torch.int64)]
    for row, i in enumerate(cp.first_of_row):
        if cp.segments[i].joined_before:
            gradients[row] = 0
    return gradients.to(h0.dtype)


def _chunk_kda(
    given: Any,
    cp: Context,
    call: tuple[Any, ...],
    output_final_state: bool,
    return_intermediate_states: bool,
    disable_recompute: bool,
    impl: str | None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`kda.chunk_kda` with a ``cp_context``: ``given``, which is ``cp`` or stands for it."""
    *inputs, h0, cu, options = call

    def facts(layout: dict[str, Any]) -> dict[str, Any]:
        if return_intermediate_states:
            raise ValueError("return_intermediate_states: expected False with cp_context, got True")
        if cu is not None and cu is not cp.cu_seqlens and given is cp:  # FLA does not look at it
            raise ValueError("cu_seqlens: expected None with cp_context, which has its own, got a tensor")
        return {**layout, **check_window_call(cp, inputs, h0, options)}

    cp.compare("chunk_kda", facts)
    h_every = chunks_between_states((*inputs, h0), disable_recompute)
    result: tuple[Tensor, Tensor | None] = apply(
        ContextParallelFunction, *inputs, h0, cp, options, output_final_state, h_every, impl
    )
    return result


chunk_kda = torch.compiler.disable(_chunk_kda)  # graphs cannot hold our collectives

"""What :mod:`kda.cp` checks of a call on the window of a rank, and the states that its segments begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..call.derivatives import state_shape
from ..call.options import Options

if TYPE_CHECKING:
    from ._context import Context
    from ._exchange import States

Tensor = torch.Tensor


def begin_states(cp: Context, rows: Tensor | None, found: States, like: Tensor) -> Tensor:
    """The states that all segments begin with: those that come from other segments, and else ``rows``, of the
    sequences in the window, or zeros."""
    per_segment = cp.sequences == len(cp.segments)
    if rows is not None and per_segment:
        states = rows.to(like.dtype, copy=True)
    else:
        states = like.new_zeros(len(cp.segments), *like.shape)
        if rows is not None and cp.segments:
            states[cp.tensor(cp.first_of_row, like.device, torch.int64)] = rows.to(like.dtype)
    for i, state in found:
        states[i] = state
    return states


def starts_of(cp: Context, h0: Tensor | None, found: States, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The states that segments begin with, and which of these count: None for all. ``like`` is one state."""
    if h0 is None and not found:
        return None, None
    if h0 is None and len(found) == 1:  # the others start from zeros and never read it: no memory for them
        i, state = found[0]
        only = [n == i for n in range(len(cp.segments))]
        return state.expand(len(only), *state.shape), cp.tensor(only, like.device, torch.bool)
    return begin_states(cp, h0, found, like), None


def check_window_call(cp: Context, inputs: Any, h0: Any, options: Options) -> dict[str, Any]:
    """Checks what only a context asks for. Returns what must be the same on every rank."""
    (q, _, v, _, _), (A_log, dt_bias) = inputs[:5], inputs[5:]
    if tuple(q.shape[:2]) != (1, cp.tokens):
        raise ValueError(f"q: expected [1, {cp.tokens}, H, K], this rank's window of the tokens, got {list(q.shape)}")
    shape = list(state_shape(v, q.shape[3], cp.cu_seqlens, options))
    if h0 is not None and list(h0.shape) != shape:
        raise ValueError(
            f"initial_state: expected {shape}, one for each sequence in this rank's window, got {list(h0.shape)}"
        )
    shapes = {n: list(x.shape[2:]) for n, x in zip(("q", "k", "v", "g", "beta"), inputs, strict=False)}
    facts: dict[str, Any] = {f"{n}: heads and channels": x for n, x in shapes.items()}
    facts |= {f"{n}.dtype": str(x.dtype) for n, x in zip(("q", "k", "v", "g", "beta"), inputs, strict=False)}
    return {**facts, "A_log": A_log is not None, "dt_bias": dt_bias is not None, "options": list(options)}

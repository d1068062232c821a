"""The maps of segments: made, sent to all ranks, and folded into the states between segments. And what a call on the
window of a rank is checked for, and the states that its segments begin with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..call.derivatives import state_shape, wide_dtype
from ..call.library import batch_invariant, library
from ..call.options import Options
from ._message import Message, Ticket

if TYPE_CHECKING:
    from ._context import Context
    from ._plan import Fold, MapCall, Plan

Tensor = torch.Tensor
States = list[tuple[int, Tensor]]  # segments of this rank with a state from other segments


def same_kernels(cp: Context) -> AbstractContextManager[None]:
    """With ``cp_invariant``, kernels are chosen whose bits do not depend on the rest of the call."""
    return batch_invariant() if cp.cp_invariant else nullcontext()


class Cells:
    """One row for each cell: ``b`` or ``d``, then ``M`` where some rank needs one."""

    def __init__(self, rows: Tensor, shape: tuple[int, ...], with_M: bool) -> None:
        HV, size = shape[0], shape[0] * shape[1] * shape[2]
        self.rows, self.b = rows, rows[:, :size].unflatten(1, shape)
        K = round(((rows.shape[1] - size) // HV) ** 0.5)
        self.M = rows[:, size:].unflatten(1, (HV, K, K)) if with_M else None


class Exchange:
    """One direction of a call. Made, it has begun to send; ``states()`` waits and folds."""

    def __init__(
        self,
        cp: Context,
        direction: Plan,
        call: str,
        inputs: Sequence[Any],
        options: Options,
        ticket: Ticket,
        d_o: Tensor | None = None,
        fwd_M: Tensor | None = None,
        given: dict[int, Tensor] | None = None,
    ) -> None:
        """``d_o`` in reverse. ``fwd_M``: the M of forward. ``given`` are states of segments, by their number, that
        other ranks do not know of: the initial state, or in reverse the gradient of the returned one. They are mapped
        and added: ``b + M given``, ``d + M^T given``."""
        q, v = inputs[0], inputs[2]
        HV, K, V = v.shape[2], q.shape[3], v.shape[3]
        self.cp, self.plan, self.options, self.reverse = cp, direction, options, d_o is not None
        self.shape = (HV, K, V) if options.state_layout else (HV, V, K)
        width = HV * K * (V + K if direction.with_M else V)
        wide = wide_dtype(q)
        self.message = Message(q, (direction.size, width), wide, direction.sent)
        self.own = self._cells(self.message.x)
        cp.expect(max(cp.forward.sent, cp.reverse.sent) * width * wide.itemsize)
        self.passing = [i for i in direction.cells if cp.segments[i].passes_on]
        if fwd_M is not None:
            for M, i in zip(fwd_M, self.passing, strict=True):
                self._M(i).copy_(M)
        with same_kernels(cp):
            sent = [part for part in direction.calls if part.cells.start < direction.sent]
            for part in sent:
                self._map(part, inputs, d_o, fwd_M, given or {})
            self.everyone = cp.gather(self.message, call, ticket) if direction.sent else None
            for part in direction.calls[len(sent) :]:  # while the others travel
                self._map(part, inputs, d_o, fwd_M, given or {})

    def _cells(self, rows: Tensor) -> Cells:
        return Cells(rows, self.shape, self.plan.with_M)

    def _M(self, segment: int) -> Tensor:
        assert self.own.M is not None  # a segment that passes states on has one
        return self.own.M[self.plan.cells[segment]]

    def _map(
        self,
        part: MapCall,
        inputs: Sequence[Any],
        d_o: Tensor | None,
        fwd_M: Tensor | None,
        given: dict[int, Tensor],
    ) -> None:
        *tokenwise, A_log, dt_bias = inputs
        tensors = [x[:, part.tokens] for x in tokenwise]
        cu = self.cp.tensor(part.offsets, tensors[0].device)
        numbers = range(part.segments.start, part.segments.stop)
        b, M = self.own.b[part.cells], None
        added = [i for i in numbers if i in given]
        if (fwd_M is None and any(self.cp.segments[i].passes_on for i in numbers)) or any(
            not self.cp.segments[i].passes_on for i in added
        ):
            HV, K = self.shape[0], tensors[0].shape[3]
            keep = fwd_M is None and self.own.M is not None
            M = self.own.M[part.cells] if keep else b.new_empty(len(numbers), HV, K, K)  # type: ignore[index]
        wanted = {"M": M, "b": b} if d_o is None else {"d_o": d_o[:, part.tokens], "M": M, "d": b}
        library().segment_map(*tensors, A_log, dt_bias, cu, options=self.options, **wanted)
        for i in added:
            at = i - numbers.start
            m = M[at] if M is not None else self._M(i)
            merged = self._merge(m[None], b[at : at + 1], given[i])
            b[at].copy_(merged[0 if self.reverse else 1])

    def _merge(self, M: Tensor, b: Tensor, h0: Tensor) -> Tensor:
        states = b.new_empty(len(b) + 1, *b.shape[1:], dtype=wide_dtype(b))
        library().segment_merge(
            M=M, b=b, h0=h0, states=states, state_layout=self.options.state_layout, reverse=self.reverse
        )
        return states

    def kept(self) -> Tensor | None:
        """``[segments that pass states on, HV, K, K]``: this rank's M, for backward."""
        return torch.stack([self._M(i) for i in self.passing]) if self.passing else None

    def states(self) -> States:
        """The states that segments of this rank begin with; in reverse, the gradients of those they end with."""
        with same_kernels(self.cp):
            here = [x for fold in self.plan.folds if not fold.sent for x in self._folded(fold, self.own)]
            if self.everyone is None:
                return here
            everyone = self._cells(self.everyone().flatten(0, 1))  # a view, if each rank sends one row
            return here + [x for fold in self.plan.folds if fold.sent for x in self._folded(fold, everyone)]

    def _folded(self, fold: Fold, cells: Cells) -> States:
        b = _pick(cells.b, fold.cells)
        start = b[-1] if self.reverse else b[0]
        if len(fold.cells) == 1:
            return [(i, start) for i, _ in fold.wanted]
        assert cells.M is not None  # segments between two others pass states on
        rest = slice(0, -1) if self.reverse else slice(1, None)
        merged = self._merge(_pick(cells.M, fold.cells[rest]), b[rest], start)
        return [(i, merged[p]) for i, p in fold.wanted]


def _pick(x: Tensor, rows: list[int]) -> Tensor:
    """Without numbers on a device, which a captured call could not make."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return torch.stack([x[row] for row in rows])


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

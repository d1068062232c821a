"""The rows of other pieces that a causal convolution needs."""

from __future__ import annotations

from typing import Any

import torch

from ..call.arrays import integer
from ..call.derivatives import apply, autocast_state, first_derivatives
from ._context import Context
from ._fla import as_context
from ._layout import Piece
from ._message import Message

Tensor = torch.Tensor


def _count(piece: Piece, rows: int) -> int:
    """How many rows before the piece belong to its first sequence, ``rows`` at most."""
    return 0 if piece.sequence_start is None else min(rows, piece.start - piece.sequence_start)


def _own(cp: Context) -> list[tuple[Piece, int]]:
    """This rank's pieces, and the row of ``cu_seqlens`` that each begins with."""
    at = {offset: row for row, offset in reversed(list(enumerate(cp.layout.rows[cp.rank])))}
    return [(p, at.get(p.at, -1)) for p in cp.layout.pieces if p.rank == cp.rank]


def _exchanges(cp: Context, rows: int) -> int:
    """How many pieces a rank has at most, or 0 if no sequence crosses a border."""
    if not rows or all(p.sequence_start is None for p in cp.layout.pieces):
        return 0
    return 1 + max(p.place for p in cp.layout.pieces)


class HaloFunction(torch.autograd.Function):
    """The rows before each sequence of the window, up to ``rows``, stored at the end of the halo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Context, rows: int) -> Tensor:
        ctx.cp, ctx.rows, ctx.dtype, ctx.ticket = cp, rows, x.dtype, cp.ticket()
        ctx.autocast = autocast_state()
        halo = x.new_zeros(cp.sequences, x.shape[2], rows)
        if not (places := _exchanges(cp, rows)):
            return halo
        pieces = cp.layout.pieces
        sizes = [min(rows, p.end - p.start) for p in pieces]
        most = max(sizes)
        message = Message(x, (places, most, x.shape[2]), x.dtype)
        own = message.x  # the last rows of pieces, behind zeros if they are shorter
        cp.expect(places * rows * x.shape[2] * x.dtype.itemsize)  # backward
        for p, size in zip(pieces, sizes, strict=True):
            if p.rank == cp.rank:
                end = p.at + p.end - p.start
                own[p.place, most - size :] = x[0, end - size : end]
        tails = cp.gather(message, "conv_halo", ctx.ticket)()
        for p, row in _own(cp):
            if count := _count(p, rows):  # if pieces are shorter than the halo, it spans several
                at, found = pieces.index(p), 0
                earlier: list[Tensor] = []
                while found < count:
                    at -= 1
                    earlier.insert(0, tails[pieces[at].rank, pieces[at].place, most - sizes[at] :])
                    found += sizes[at]
                halo[row, :, rows - count :] = torch.cat(earlier)[-count:].T
        return halo

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_halo: Tensor) -> tuple[Any, ...]:
        cp, rows, D = ctx.cp, ctx.rows, d_halo.shape[1]
        dx = torch.zeros(1, cp.tokens, D, dtype=torch.promote_types(ctx.dtype, torch.float32), device=d_halo.device)
        if places := _exchanges(cp, rows):
            message = Message(d_halo, (places, rows, D), d_halo.dtype)
            own = message.x
            for p, row in _own(cp):
                if count := _count(p, rows):
                    own[p.place, rows - count :] = d_halo[row, :, rows - count :].T
            everyone = cp.gather(message, "conv_halo, backward", ctx.ticket)()
            for p in cp.layout.pieces:
                for mine, _ in _own(cp):  # row i of the halo of p is token p.start - rows + i
                    first, last = max(p.start - _count(p, rows), mine.start), min(p.start, mine.end)
                    if first < last:
                        at, row = mine.at + first - mine.start, first - p.start + rows
                        dx[0, at : at + last - first] += everyone[p.rank, p.place, row : row + last - first]
        return dx.to(ctx.dtype), None, None


_apply: Any = torch.compiler.disable(apply)


def conv_halo(x: Tensor, cp_context: Any, width: int) -> Tensor:
    """The raw rows before this rank's pieces that a causal convolution of ``width`` taps needs as its initial state,
    one per sequence of the window. Gradients go back to the ranks that own the rows.

    Args:
        x: ``[1, P, D]``, the input of the convolution, this rank's window.
        cp_context: a :class:`Context`, or FLA's.
        width: the number of taps, including the current token.

    Returns:
        ``[sequences, D, width - 1]``, oldest row first; zeros where a sequence has no earlier token.
    """
    cp = as_context(cp_context)

    def facts(layout: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(x, Tensor) or x.ndim != 3 or tuple(x.shape[:2]) != (1, cp.tokens):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: expected [1, {cp.tokens}, D], this rank's window of the tokens, got {got}")
        if integer("width", width) < 1:
            raise ValueError(f"width: expected >= 1, got {width}")
        return {**layout, "x: channels": x.shape[2], "x.dtype": str(x.dtype), "width": width}

    cp.compare("conv_halo", facts)
    halo: Tensor = _apply(HaloFunction, x, cp, width - 1)
    return halo

"""Contexts of FLA (``fla.ops.cp.FLACPContext``) as ours.

FLA's context knows this rank's sequences, and how many neighbours share the first and the last of them. Ranks tell
each other that once, through the store of the group. All offsets follow.
"""

from __future__ import annotations

from typing import Any

import torch

from ._agree import agree, ask
from ._context import Context, check_group

_FIELDS = ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank")
_KEPT = "_kda_context"


def as_context(given: Any) -> Context:
    """A :class:`kda.cp.Context`, or what FLA's ``build_cp_context`` returns. Of the latter, every rank must make the
    first call."""
    if isinstance(given, Context):
        return given
    return _foreign(given)  # type: ignore[no-any-return]


def _read(given: Any) -> Context:
    if not all(hasattr(given, name) for name in _FIELDS) or given.cu_seqlens is None:
        raise ValueError(f"cp_context: expected a kda.cp.Context, got {type(given).__name__}")
    kept = getattr(given, _KEPT, None)
    if kept is not None and kept.cu_seqlens is given.cu_seqlens:
        return kept  # type: ignore[no-any-return]
    context = _made(given)
    context.cu_seqlens = given.cu_seqlens  # callers pass it beside the context
    setattr(given, _KEPT, context)
    return context


_foreign: Any = torch.compiler.disable(_read)  # it asks other ranks, and numbers on the host


def _made(given: Any) -> Context:
    if any(getattr(given, name, None) is not None for name in ("pre_num_ranks_dev", "post_num_ranks_dev")):
        raise ValueError("cp_context.pre_num_ranks_dev: expected None (offsets are read once), got a tensor")
    group, rank, ranks = check_group(given.group)
    zigzag = getattr(given, "layout", "contiguous") == "zigzag"
    offsets = getattr(given, "cu_seqlens_cpu", None)
    cu = (given.cu_seqlens if offsets is None else offsets).tolist()
    tokens = cu[-1] // 2 if zigzag else cu[-1]  # of a piece
    if zigzag:
        front = given.front_num_seqs
        parts = [cu[: front + 1], [x - tokens for x in cu[front:]]]
        beside = list(zip(given.pre_num_ranks_by_part, given.post_num_ranks_by_part, strict=True))
    else:
        parts, beside = [cu], [(given.pre_num_ranks, given.post_num_ranks)]
    agree(group, "FLACPContext", lambda: {"layout": "zigzag" if zigzag else "contiguous", "tokens of a piece": tokens})
    everyone = ask(group, "FLACPContext", [[part, after] for part, (_, after) in zip(parts, beside, strict=True)])
    pieces = [own[0] for own in everyone] + [own[1] for own in reversed(everyone) if zigzag]
    ends: list[int] = []
    for number, (part, after) in enumerate(pieces):
        ends += [number * tokens + x for x in (part[1:-1] if after else part[1:])]
    context = Context([0, *ends], group, layout="zigzag" if zigzag else "contiguous")
    own = (rank, 2 * ranks - 1 - rank) if zigzag else (rank,)
    for number, (before, after) in zip(own, beside, strict=True):
        found = _shared(context, number * tokens, tokens)
        if found != (before, after):
            raise ValueError(
                f"cp_context: expected {found[0]} ranks before and {found[1]} after piece {number} (pre_num_ranks,"
                f" post_num_ranks) by what the others say, got {before} and {after}"
            )
    return context


def _shared(context: Context, start: int, tokens: int) -> tuple[int, int]:
    """How many pieces share the first sequence of the piece that begins here, and its last one."""
    own = [s for s in context.layout.segments if start <= s.start < start + tokens]
    if not own:
        return 0, 0
    cu = context.layout.cu
    begin, end = cu[own[0].sequence], cu[own[-1].sequence + 1]
    return start // tokens - begin // tokens, (end - 1) // tokens - start // tokens

"""Which rank holds which tokens, cut into segments: numbers on the host, the same on every rank.

The tokens of all ranks form one row. A *piece* is a run of it that lies on one rank; a rank has one piece in the
contiguous layout, two in the zigzag one. A *segment* is what one sequence has in one piece, or a
part of that of at most ``cp_window`` tokens. States pass from each segment to the next one of its sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..call.arrays import integer
from ..call.options import CHUNK

Run = tuple[int, int]  # of tokens: first, one beyond the last


class Piece(NamedTuple):
    start: int  # in the row
    end: int
    rank: int
    place: int  # among the pieces of its rank
    at: int  # of its first token in the window of its rank
    sequence_start: int | None  # of the sequence that crosses its start, or None


class Segment(NamedTuple):
    start: int
    end: int
    rank: int
    sequence: int
    at: int
    row: int  # of the cu_seqlens of its rank
    joined_before: bool  # to an earlier segment of its sequence
    joined_after: bool

    @property
    def passes_on(self) -> bool:
        return self.joined_before and self.joined_after


class Layout:
    """Pieces and segments of all ranks.

    Attributes:
        runs: the pieces of every rank as ``(start, end)``, a list for each.  windows: how many tokens ranks have.
        pieces: those with tokens, in the order of the row.  segments: the same.
        rows: for each rank the offsets of what sequences have in its pieces, the public ``cu_seqlens``.
    """

    def __init__(self, cu: list[int], runs: list[list[Run]], every: int | None) -> None:
        self.cu, self.runs = cu, runs
        self.windows = [sum(end - start for start, end in own) for own in runs]
        self.pieces = sorted(self._pieces())
        self.rows: list[list[int]] = [[0] for _ in runs]
        self.segments = self._segments(every)

    def _pieces(self) -> list[Piece]:
        pieces = []
        for rank, own in enumerate(self.runs):
            kept = [run for run in own if run[0] < run[1]]
            places = accumulate((end - start for start, end in kept), initial=0)
            for place, ((start, end), at) in enumerate(zip(kept, places, strict=False)):
                pieces.append(Piece(start, end, rank, place, at, self._sequence_across(start)))
        return pieces

    def _sequence_across(self, border: int) -> int | None:
        n = bisect_right(self.cu, border) - 1
        return self.cu[n] if n < len(self.cu) - 1 and self.cu[n] < border else None

    def _segments(self, every: int | None) -> list[Segment]:
        found: list[tuple[int, int, Piece, int, int]] = []
        for piece in self.pieces:
            offsets = self.rows[piece.rank]
            n = bisect_right(self.cu, piece.start) - 1
            while n < len(self.cu) - 1 and self.cu[n] < piece.end:
                start, end = max(self.cu[n], piece.start), min(self.cu[n + 1], piece.end)
                if start < end:
                    row = len(offsets) - 1
                    offsets.append(end - piece.start + piece.at)
                    cuts = range(start, end, every or end - start)
                    found += [(a, min(a + cuts.step, end), piece, n, row) for a in cuts]
                n += 1
        sequences = [None, *(x[3] for x in found), None]
        return [
            Segment(a, b, p.rank, n, a - p.start + p.at, row, sequences[i] == n, sequences[i + 2] == n)
            for i, (a, b, p, n, row) in enumerate(found)
        ]


# ---- the layouts by name ----


def nearest_cut(cu: list[int], every: int) -> Callable[[int], int]:
    """For ``cp_invariant``: the border nearest to a token where every number of ranks cuts the row, too."""

    def of(token: int) -> int:
        n = bisect_right(cu, token) - 1
        if n >= len(cu) - 1:
            return token
        before = cu[n] + (token - cu[n]) // every * every
        after = min(before + every, cu[n + 1])
        return before if token - before <= after - token else after

    return of


def equal_runs(layout: str, ranks: int, total: int, cut: Callable[[int], int] | None) -> list[list[Run]]:
    """Pieces of the same number of tokens; with ``cut``, as equal as the cuts allow."""
    count = ranks if layout == "contiguous" else 2 * ranks
    if cut is None and total % count:
        of = f"{ranks} ranks" if count == ranks else f"{count} pieces of {ranks} ranks (zigzag)"
        raise ValueError(f"tokens: expected a number divisible by the {of}, or windows, got {total}")
    borders = [total * i // count for i in range(count + 1)]
    if cut is not None:
        borders[1:-1] = map(cut, borders[1:-1])
    runs = list(pairwise(borders))
    return [[run] for run in runs] if count == ranks else [[runs[r], runs[-1 - r]] for r in range(ranks)]


def contiguous_runs(sizes: list[int]) -> list[list[Run]]:
    return [[run] for run in pairwise(accumulate(sizes, initial=0))]


def given_runs(layout: Any, ranks: int, total: int) -> list[list[Run]]:
    """Checks pieces that the caller lists himself."""
    if not isinstance(layout, Sequence) or isinstance(layout, str | bytes):
        raise ValueError(f"layout: expected 'contiguous', 'zigzag' or pieces for each rank, got {layout!r}")
    if len(layout) != ranks:
        raise ValueError(f"layout: expected pieces for each of the {ranks} ranks, got {len(layout)}")
    runs = [[_run(f"layout[{r}][{i}]", run) for i, run in enumerate(own)] for r, own in enumerate(layout)]
    end = 0
    for start, following in sorted(run for own in runs for run in own if run[0] != run[1]):
        if start != end or following < start:
            raise ValueError(
                f"layout: expected pieces that cover each of {total} tokens once, got none or two at {end}"
            )
        end = following
    if end != total:
        raise ValueError(f"layout: expected pieces that cover each of {total} tokens once, got {end} covered")
    for rank, own in enumerate(runs):
        if own != sorted(own):
            raise ValueError(f"layout[{rank}]: expected pieces in the order of their tokens, got {own}")
    return runs


def _run(name: str, run: Any) -> Run:
    if not isinstance(run, Sequence) or len(run) != 2:
        raise ValueError(f"{name}: expected (first, one beyond the last), got {run!r}")
    return integer(name, run[0]), integer(name, run[1])


def check_cuts(runs: list[list[Run]], cu: list[int], every: int) -> None:
    cut = nearest_cut(cu, every)
    for border in sorted({x for own in runs for run in own if run[0] < run[1] for x in run}):
        if cut(border) != border:
            raise ValueError(
                f"windows: expected borders at ends of sequences or multiples of cp_window = {every} of one with"
                f" cp_invariant, got one at token {border}, {border - cu[bisect_left(cu, border) - 1]} of its sequence"
            )


def check_window(every: Any) -> int:
    every = integer("cp_window", every)
    if every < CHUNK or every % CHUNK:
        raise ValueError(f"cp_window: expected a multiple of {CHUNK}, got {every}")
    return int(every)

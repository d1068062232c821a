"""What a rank maps, sends and folds in one direction: numbers on the host, made once for a context.

A *cell* holds the map of one segment. Every rank sends the same number of cells, those of sequences that several
ranks share. Cells of sequences that it has for itself come behind these and stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ._layout import Layout, Segment


class MapCall(NamedTuple):
    """Segments one after another whose maps one call makes."""

    segments: slice  # of this rank's segments
    cells: slice
    tokens: slice  # of the window
    offsets: tuple[int, ...]


class Fold(NamedTuple):
    """The maps of a sequence, joined one after another."""

    sent: bool  # they come from the gathered cells of all ranks, numbered through, or from this rank's own
    cells: list[int]  # in the order of tokens
    wanted: list[tuple[int, int]]  # (this rank's segment, which of the states)


class Plan(NamedTuple):
    cells: dict[int, int]  # of this rank's segments that have one
    size: int  # how many cells this rank needs
    sent: int  # how many of them every rank sends
    with_M: bool  # does any rank need an M?
    calls: list[MapCall]
    folds: list[Fold]


def plan(layout: Layout, rank: int, reverse: bool) -> Plan:
    """Forward, states pass to the next segment of a sequence; in reverse, their gradients to the one before."""
    segments = layout.segments
    of_sequence: dict[int, list[Segment]] = {}
    for segment in segments:
        of_sequence.setdefault(segment.sequence, []).append(segment)
    shared = {n: len({s.rank for s in own}) > 1 for n, own in of_sequence.items()}
    of_rank: list[list[Segment]] = [[] for _ in layout.runs]
    for segment in segments:
        if segment.joined_before if reverse else segment.joined_after:
            of_rank[segment.rank].append(segment)
    for own in of_rank:
        own.sort(key=lambda s: not shared[s.sequence])  # keeps the order of tokens otherwise
    sent = max(sum(shared[s.sequence] for s in own) for own in of_rank)
    place = {s: r * sent + i if shared[s.sequence] else i for r, own in enumerate(of_rank) for i, s in enumerate(own)}
    number = {s: i for i, s in enumerate(s for s in segments if s.rank == rank)}
    # Where a rank has fewer cells to send than others, those that stay come after the room for all that are sent.
    own = of_rank[rank]
    few = sum(shared[s.sequence] for s in own)
    cell = [i if i < few else sent + i - few for i in range(len(own))]
    for i in range(few, len(own)):
        place[own[i]] = cell[i]
    return Plan(
        cells={number[s]: c for s, c in zip(own, cell, strict=True)},
        size=max(sent, *(c + 1 for c in cell), 0),
        sent=sent,
        with_M=any(s.passes_on for s in segments),
        calls=_calls(own, [number[s] for s in own], cell, sent),
        folds=[f for n, s in of_sequence.items() if (f := _fold(s, shared[n], rank, number, place, reverse))],
    )


def _calls(own: list[Segment], numbers: list[int], cells: list[int], sent: int) -> list[MapCall]:
    """Those whose cells are sent come first."""
    groups: list[list[int]] = []
    for i in range(len(own)):
        if i and numbers[i] == numbers[i - 1] + 1 and cells[i] == cells[i - 1] + 1 and cells[i] != sent:
            groups[-1].append(i)
        else:
            groups.append([i])
    calls = []
    for group in groups:
        a, b = group[0], group[-1]
        first, last = own[a], own[b]
        tokens = slice(first.at, last.at + last.end - last.start)
        offsets = (*(own[i].at - first.at for i in group), tokens.stop - tokens.start)
        calls.append(MapCall(slice(numbers[a], numbers[b] + 1), slice(cells[a], cells[b] + 1), tokens, offsets))
    return calls


def _fold(
    chain: list[Segment], sent: bool, rank: int, number: dict[Segment, int], place: dict[Segment, int], reverse: bool
) -> Fold | None:
    """Forward, state p is the one after segments 0 .. p, for the segment behind them. In reverse, with the last
    segment as number ``len - 1``, state p is the gradient of the one before segment p."""
    mine = [i for i, s in enumerate(chain) if s.rank == rank and (s.joined_after if reverse else s.joined_before)]
    if not mine:
        return None
    if reverse:
        base = mine[0] + 1
        return Fold(sent, [place[s] for s in chain[base:]], [(number[chain[i]], i + 1 - base) for i in mine])
    return Fold(sent, [place[s] for s in chain[: mine[-1]]], [(number[chain[i]], i - 1) for i in mine])

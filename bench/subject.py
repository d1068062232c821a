"""A subject is what a bench on a GPU measures: cases, and rows of them. All print, record and compare in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.measure import note_once, reason
from kda.cli import show

Row = dict[str, Any]
Cell = Callable[[Row], str]


class Rates(NamedTuple):
    """What the device reaches elsewhere, in the same run."""

    bandwidth: float  # GB/s of y = 2 x
    product: float = 0.0  # GFLOP/s of a large bfloat16 matrix product, for the subject that asks


@dataclass
class Run:
    """How rows are measured, and what becomes of those that are missing."""

    rates: Rates
    notes: list[str] = field(default_factory=list)
    impl: str | None = None  # an implementation that is forced
    repeats: int = 7
    few: bool = False  # of the peers that tune themselves for minutes
    seconds: float = float("inf")  # for these
    started: Callable[[Any], object] = lambda case: None  # called before each case

    @contextmanager
    def noting(self, who: str, where: str = "") -> Iterator[None]:
        """An implementation declines the case, a peer is absent or fails in its own way: then there is no row."""
        try:
            yield
        except Exception as error:
            note_once(self.notes, f"no row of {who}: {reason(error, where)}")


@dataclass(frozen=True)
class Subject:
    sweep: Callable[[dict[str, list[Any]], Sequence[str], bool], list[Any]]  # sizes, names, quick: cases
    measured: Callable[[Sequence[Any], Run], Iterator[list[Row]]]  # rows as they are measured
    name_of: Callable[[Any], str]  # of a case
    case_of: Cell  # the first column
    columns: dict[str, Cell]  # the others, behind the contender; those without any cell are left out
    who: Cell
    what: Cell  # of a row in the record, behind the contender
    sizes: tuple[str, ...]  # of a row in the record
    told: tuple[str, ...] = ()  # keys that the contender's name tells already
    compared: Callable[[Sequence[Any], list[Row]], list[Row]] = lambda cases, found: found
    second: dict[str, Cell] = field(default_factory=dict)  # columns of a table below
    needs_product: bool = False

    def print(self, found: list[Row]) -> None:
        for columns in filter(None, (self.columns, self.second)):
            cells, last = [], None
            shown = {name: cell for name, cell in columns.items() if any(map(cell, found))}
            for row in found:
                case, values = self.case_of(row), [cell(row) for cell in shown.values()]
                if any(values):
                    cells.append(["" if case == last else case, self.who(row), *values])
                    last = case
            if cells:
                print()
                show.table(["case", "what", *shown], cells)

    def recorded(self, row: Row) -> Row:
        """As the record has it: flat, and named by who and what."""
        p, parts = row["problem"], row.get("parts_ms", {})
        left_out = {"problem", "parts_ms", "contender", "implementation", "what", *self.told}
        found: Row = {"what": f"{self.who(row)} {self.what(row)}".rstrip()}
        for name in self.sizes:
            found[name] = f"{p['layout']} {p['state_dtype']}" if name == "states" else p[name]
        if "lengths" in found:
            found["lengths"] = list(found["lengths"])
        found |= {name: value for name, value in row.items() if name not in left_out}
        return found | {f"{part} ms": ms for part, ms in parts.items()}


def who(row: Row) -> str:
    """The contender, and which implementation or whose kernels."""
    return f"{row['contender']} ({row['implementation']})" if row["implementation"] else str(row["contender"])


def over(peer: str) -> str:
    """The key in a row."""
    return f"over_{peer.lower()}"


def over_peers(found: list[Row], peers: Sequence[str]) -> list[Row]:
    """Adds to each row how many times as fast as each peer it is, in the same case."""

    def case(row: Row) -> tuple[Any, ...]:
        return row.get("what"), row["case"], row.get("gate")

    ms = {(case(row), row["contender"]): row["ms"] for row in found if row["contender"] != "kda"}
    for row in found:
        for peer in peers:
            time = ms.get((case(row), peer)) if row["contender"] != peer else None
            row[over(peer)] = time / row["ms"] if time else None
    return found


# ---- cells ----


def number(key: str, form: str) -> Cell:
    """Of a value, or nothing where there is none."""
    return lambda row: "" if row.get(key) is None else format(row[key], form)


def ratios(peers: Sequence[str]) -> dict[str, Cell]:
    return {f"over {peer}": number(over(peer), ".2f") for peer in peers}


SHARE = {"of the floor": number("share_of_stream_bandwidth", ".0%")}

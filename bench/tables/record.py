"""What the tables read: rows of a record, floors, and numbers as pages show them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from bench import ROOT

YARDSTICK = "y = 2 x"
Row = dict[str, Any]


class Record:
    """A record of a GPU. What this source has not measured is taken from the newest source that has."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.tests: list[Row] = [part.get("tests", {}) for part in (found, *found.get("earlier", ()))]
        self.parts: list[list[Row]] = [part.get("benchmarks", []) for part in (found, *found.get("earlier", ()))]

    @property
    def bandwidth(self) -> float:
        """Bytes a second of y = 2 x."""
        return float(self.row(what=YARDSTICK)["gb_per_s"] * 1e9)

    def rows(self, kind: Callable[[str], bool] = bool, /, **wanted: Any) -> list[Row]:
        """All of one source with these values. ``kind``: of ``what``, the rows' name."""
        found = ([r for r in part if r.items() >= wanted.items() and kind(r["what"])] for part in self.parts)
        return next(filter(None, found), [])

    def newest(self, **wanted: Any) -> list[Row]:
        """A row for each case, each of the newest source that has measured it."""
        found: dict[str, Row] = {}
        for row in (r for part in self.parts for r in part if r.items() >= wanted.items()):
            found.setdefault(row["case"], row)
        return list(found.values())

    def row(self, **wanted: Any) -> Row:
        found = self.rows(**wanted)
        if len(found) != 1:
            raise LookupError(f"the record has {len(found)} rows of {wanted}")
        return found[0]


@cache
def record(name: str = "nvidia-h200") -> Record:
    return Record(json.loads((ROOT / "docs/results" / f"{name}.json").read_text()))


# ---- numbers and tables ----


def plain(x: float, digits: int) -> str:
    """Without the zero in front of the point: .57"""
    text = f"{x:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def three(x: float) -> str:
    """Three digits at least: .055, .316, 1.18, 12.3, 130"""
    return plain(x, 3 if x < 0.9995 else 2 if x < 9.995 else 1 if x < 99.95 else 0)


def ms(x: float) -> str:
    """Milliseconds to three places: .055, 1.404"""
    return plain(x, 3)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    body = [list(row) for row in rows]
    assert all(len(row) == len(head) for row in body), "each row needs as many cells as the head"
    return [line(head), "|" + "---|" * len(head), *map(line, body)]

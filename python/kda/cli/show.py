"""Tables and progress for people: with rich on a terminal, otherwise plain text, which files and pipes get."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO

try:
    import rich
except ImportError:  # an extra of the wheel: pip install libkda[cli]
    rich = None  # type: ignore[assignment]

STYLES = {"ok": "green", "FAILED": "bold red", "skipped": "yellow", "*": "bold green"}


def _pretty(stream: TextIO) -> bool:
    return rich is not None and stream.isatty()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table. The first column is left-aligned; another is right-aligned if its cells begin with digits."""
    cells = [list(row) for row in rows]
    right = [i > 0 and all(not c[i] or c[i][0].isdigit() for c in cells) for i in range(len(columns))]
    if _pretty(sys.stdout):
        _rich_table(columns, cells, right)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), ["-" * w for w in widths], *cells]:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        print("  ".join(padded).rstrip())


def _rich_table(columns: Sequence[str], rows: list[list[str]], right: list[bool]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Table(box=SIMPLE)
    for name, flush_right in zip(columns, right, strict=True):
        out.add_column(name, justify="right" if flush_right else "left")
    for row in rows:  # as Text, in which brackets are not markup
        out.add_row(*(Text(cell, style=STYLES.get(cell.split(":")[0], "")) for cell in row))
    Console().print(out)


class Progress:
    """A bar on standard error if that is a terminal. Otherwise nothing, or with ``lines`` one line per label."""

    def __init__(self, total: int, lines: bool = False) -> None:
        self.total, self.done, self.what, self.lines = total, 0, "", lines and not sys.stderr.isatty()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if _pretty(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self.bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total)
        return self

    def label(self, what: str) -> None:
        self.what = what
        if self.lines:
            print(f"[{self.done}/{self.total}] {what}", file=sys.stderr, flush=True)
        self._show()

    def step(self) -> None:
        self.done = min(self.done + 1, self.total)
        self._show()

    def _show(self) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=self.what)
        elif sys.stderr.isatty():
            filled = 24 * self.done // max(self.total, 1)
            bar = "#" * filled + "." * (24 - filled)
            print(f"\r\033[K[{bar}] {self.done}/{self.total} {self.what}"[:100], end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

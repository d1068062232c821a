"""Prints the tables that pages show: figures, from the records in docs/results, and operands, from the library; and
sentences about the records.

    python -m bench tables --check    # which tables of pages are out of date; fails if there is one
    python -m bench tables --write    # puts today's in their place
    python -m bench tables gate       # prints some of them

In a page a table stands between two comments:

    <!-- table: gate -->
    | .. |
    <!-- end of table -->

Figures that the newest source has not measured are of the one before. Sentences around a table that repeat its figures
are not checked. Tables of operands are those of the library that Python finds: the installed one, or the one in
KDA_LIBRARY_DIR. A new table is a function in one of the modules beside this one, which returns lines, and its name in
TABLES there. A new operator has its table in operands.py already, and needs a place in docs/operands.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.tables import (
    claims,
    cpu,
    decode,
    elementwise,
    instructions,
    operands,
    plugs,
    prefill,
    ranks,
    readme,
    training,
)
from bench.tables.record import ROOT

TABLES: dict[str, Callable[[], list[str]]] = {
    **elementwise.TABLES,
    **prefill.TABLES,
    **training.TABLES,
    **decode.TABLES,
    **cpu.TABLES,
    **ranks.TABLES,
    **plugs.TABLES,
    **instructions.TABLES,
    **readme.TABLES,
    **operands.TABLES,
    **claims.TABLES,
}
MARKED = re.compile(r"(<!-- table: ([^\n]+) -->\n)(.*?)(<!-- end of table -->)", re.S)


def pages(root: Path = ROOT) -> Iterator[Path]:
    yield root / "README.md"
    yield root / "HACKING.md"
    yield from sorted((root / "docs").rglob("*.md"))
    yield root / "tests/emulator/README.md"


def written(text: str) -> str:
    """The page with today's tables. An unknown name is a KeyError."""
    return MARKED.sub(lambda m: m[1] + "".join(f"{line}\n" for line in TABLES[m[2]]()) + m[4], text)


def unlike(text: str) -> list[str]:
    """Names of tables in the page that are out of date."""
    return [m[2] for m in MARKED.finditer(text) if m[3].splitlines() != TABLES[m[2]]()]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")


def run(options: argparse.Namespace) -> int:
    if unknown := [name for name in options.tables if name not in TABLES]:
        raise ValueError(f"no table is called {unknown[0]!r}")
    for name in options.tables:
        print(f"<!-- table: {name} -->", *TABLES[name](), sep="\n")
    wrong = 0
    for page in pages():
        text = page.read_text()
        if options.check and (names := unlike(text)):
            print(f"{page.relative_to(ROOT)}: out of date: {', '.join(names)}")
            wrong += len(names)
        if options.write and written(text) != text:
            page.write_text(written(text))
            print(f"wrote {page.relative_to(ROOT)}")
    return int(wrong > 0)

"""python -m bench tables: pages show what the records and the library have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from bench.tables import command, instructions, operands
from bench.tables.record import Record, table, three
from kda.call.library import Operand, library

PAGES = {path.relative_to(command.ROOT).as_posix(): path.read_text() for path in command.pages()}


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if command.MARKED.search(text)])
def test_pages_are_up_to_date(page: str) -> None:
    assert command.unlike(PAGES[page]) == [], "python -m bench tables --write puts today's tables there"


def test_every_table_is_in_a_page() -> None:
    shown = [name for text in PAGES.values() for name in re.findall(r"<!-- table: (.*?) -->", text)]
    assert sorted(shown) == sorted(command.TABLES), "each in one page, and with an end"
    assert len(shown) == sum(len(command.MARKED.findall(text)) for text in PAGES.values())


def test_another_figure_is_noticed_and_written() -> None:
    page = PAGES["docs/kernels/cuda_gate.md"]
    cell = command.TABLES["gate"]()[2].split(" | ")[2]
    spoilt = page.replace(f" {cell} |", " .999 |", 1)
    assert spoilt != page and command.unlike(spoilt) == ["gate"]
    assert command.written(spoilt) == page
    with pytest.raises(KeyError):
        command.written(spoilt.replace("table: gate", "table: none"))


@pytest.mark.parametrize(
    ("member", "change", "tables"),
    [
        ("A_log", {"shape": "[T,HV]"}, ["kda_gate", "kda_gate_backward"]),
        ("in.A_log", {"optional": False}, ["kda_inputs"]),
        ("x2", {"dtypes": ("bool",)}, ["kda_conv", "kda_conv_backward"]),
        ("conv.state", {"role": "in"}, ["kda_decode", "kda_flush_verify"]),
        ("d_o", {"together": False}, ["kda_segment_map"]),
        ("y", {"may_be": ()}, ["kda_norm_gate"]),
    ],
)
def test_another_operand_is_noticed(
    member: str, change: dict[str, Any], tables: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tables of every operator or struct that has it."""
    real = library()

    class Changed:
        def operands(self, op: str) -> list[Operand]:
            return [o._replace(**change) if o.member == member else o for o in real.operands(op)]

    monkeypatch.setattr(operands, "library", Changed)
    assert command.unlike(PAGES["docs/operands.md"]) == tables


def test_the_newest_source_with_a_row_counts() -> None:
    def row(what: str, ms: float, **more: object) -> dict[str, object]:
        return {"what": what, "ms": ms, **more}

    now = [row("a", 1.0, B=1), row("a", 2.0, B=2)]
    before = [row("a", 3.0, B=1), row("b", 4.0)]
    record = Record({"benchmarks": now, "earlier": [{"tests": {}}, {"benchmarks": before}]})
    assert record.row(what="a", B=1)["ms"] == 1.0 and record.row(what="b")["ms"] == 4.0
    assert [r["ms"] for r in record.rows(lambda what: what != "b", B=1)] == [1.0]
    for wanted in ({"what": "a"}, {"what": "c"}):
        with pytest.raises(LookupError, match="rows of"):
            record.row(**wanted)


def test_each_case_is_of_the_newest_source_that_has_it() -> None:
    def rows(**ms: float) -> dict[str, Any]:
        return {"benchmarks": [{"what": "a", "case": case, "ms": x} for case, x in ms.items()]}

    record = Record(rows(x=1.0) | {"earlier": [rows(y=2.0, x=3.0), rows(y=4.0, z=5.0)]})
    assert [(r["case"], r["ms"]) for r in record.newest(what="a")] == [("x", 1.0), ("y", 2.0), ("z", 5.0)]
    assert record.newest(what="b") == []


def test_numbers_and_lines() -> None:
    assert [three(x) for x in (0.0554, 0.99951, 1.184, 12.34, 130.4)] == [".055", "1.00", "1.18", "12.3", "130"]
    assert table(["", "x"], [["a", ""], ["b", "1"]]) == ["| | x |", "|---|---|", "| a | |", "| b | 1 |"]


def test_the_command(bench_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_cli("tables", "gate", "--check").splitlines() == ["<!-- table: gate -->", *command.TABLES["gate"]()]
    monkeypatch.setitem(command.TABLES, "conv", lambda: ["| another |"])
    assert "docs/kernels/cuda_conv.md: out of date: conv" in bench_cli("tables", "--check", status=1)
    assert "no table is called 'none'" in bench_cli("tables", "none", status=2)


def test_instructions_say_what_is_not_measured() -> None:
    assert instructions.instructions(Record({"tests": {"instructions": {"ran": 0}}})) == [
        "**Not measured yet**: no record of a GPU has it."
    ]
    measured = {"needs": 90, "numbers": 6, "different": 2, "agrees": True, "error": 1e-7}
    rows = [
        {"instruction": "a", "kind": "sum", "limit": 1e-6, **measured},
        {"instruction": "b", "kind": "exact", "limit": 0, **measured, "agrees": False, "error": "bits"},
        {"instruction": "c", "kind": "exact", "limit": 0, "needs": 100},
    ]
    older = {"tests": {"instructions": {"rows": rows}}}
    lines = instructions.instructions(Record({"tests": {}, "earlier": [older]}))
    assert lines[2] == "| a | 6 | 2 | 1.0e-07 | 1.0e-06 |"
    assert "beyond the limit" in lines[3] and "not on this GPU: needs sm_100" in lines[4]

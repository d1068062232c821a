"""``python -m bench plugs``: engines beside kda through the engines' own interfaces, on the same tensors, and the
time that the host spends in an adapter.

A module of ``ENGINES`` has ``contests(device)``. Add an engine by adding a module. Rows of SGLang and vLLM, which need
not be installed, are those of ``plugs_serving``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import measure
from bench import plugs_serving as serving
from bench.measure import Call
from bench.run import check_file
from bench.tuning import compiled_at_once
from kda.cli import show
from kda.cli.arrays import cuda_device
from kda.cli.plugs import try_out
from kda.cli.problems import natural
from kda.plugs.engines import installed

ENGINES = {"FLA": "bench.plugs_fla"}
BAR = 5.0  # microseconds in an adapter


class Contest(NamedTuple):
    """Calls of one case, which take the same tensors. A call is None if there is none here: FLA has no CPU."""

    case: str
    through: Call  # the engine's function, and with it the adapter and our kernels
    direct: Call  # our function
    theirs: Call | None  # the engine's function without the adapter
    adapter: Callable[[], float] | None  # microseconds of the host in the adapter


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
    parser.add_argument("--repeats", type=natural, default=7, metavar="N")
    parser.add_argument("--engine", choices=(*ENGINES, *serving.VERSIONS), action="append", help="all unless given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")


def run(options: argparse.Namespace) -> int:
    check_file(options.json)
    device = options.device or ("cuda" if cuda_device() else "cpu")
    notes: list[str] = []
    found = []
    for row in rows(device, notes, repeats=options.repeats, engines=options.engine):
        found.append(row)
        print(f"{row['engine']} {row['case']}", file=sys.stderr, flush=True)
    record = {"command": " ".join(["python -m bench", *options.words]), **measure.machine(device), "plugs": found}
    print_rows(record, notes)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def rows(
    device: str,
    notes: list[str],
    *,
    repeats: int = 7,
    names: tuple[str, ...] = (),
    engines: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each case of each engine that is installed; the reason for a missing one goes to ``notes``.

    Args:
        device: "cuda" or "cpu".
        names: cases to measure, all if empty.
        engines: those to measure, all if None.
    """
    for engine, module in ENGINES.items():
        if engines is not None and engine not in engines:
            continue
        plug = try_out(engine) if installed(engine) else None
        if plug is None or plug.state != "plugged":
            measure.note_once(notes, f"no rows of {plug or f'{engine}: not installed'}")
            continue
        for contest in importlib.import_module(module).contests(device):
            if names and contest.case not in names:
                continue
            try:
                yield {"engine": engine, "version": plug.version, **_row(contest, device, repeats)}
            except Exception as error:  # an engine fails in its own ways
                measure.note_once(notes, f"no row of {engine}, {measure.reason(error, f'{contest.case}: ')}")

    if device == "cuda":
        yield from _serving_rows(notes, names, [*serving.VERSIONS] if engines is None else engines)


def _serving_rows(notes: list[str], names: tuple[str, ...], engines: Sequence[str]) -> Iterator[dict[str, Any]]:
    found = [case for case in serving.cases() if not names or case.name in names]
    for package, version in serving.VERSIONS.items():
        if package not in engines:
            continue
        theirs: dict[str, float] = {}  # milliseconds, by case
        try:
            for row in serving.rows(package, found, notes):
                if row["contender"] != "kda":
                    theirs[row["case"]] = row["us"] * 1e-3
                    continue
                yield {
                    "engine": package, "version": version, "case": row["case"], "device": "cuda",
                    "engine_ms": theirs.get(row["case"]), "through_ms": row["us"] * 1e-3, "direct_ms": None,
                    "over_engine": row.get("over_engine"), "adapter_us": row.get("adapter_us"),
                }  # fmt: skip
        except ImportError as error:
            measure.note_once(notes, str(error))


def _row(contest: Contest, device: str, repeats: int) -> dict[str, Any]:
    calls = {"engine": contest.theirs, "through": contest.through, "direct": contest.direct}
    times = {name: None if call is None else _milliseconds(call, device, repeats) for name, call in calls.items()}
    theirs, through, direct = times["engine"], times["through"], times["direct"]
    return {
        "case": contest.case,
        "device": device,
        "engine_ms": theirs,
        "through_ms": through,
        "direct_ms": direct,
        "over_engine": None if theirs is None or through is None else theirs / through,
        "adapter_us": None if contest.adapter is None else contest.adapter(),
    }


def _milliseconds(call: Call, device: str, repeats: int) -> float:
    """On a GPU from a graph, with nothing in the L2 cache."""
    if device == "cpu":
        return measure.medians({"call": call}, repeats)["call"] * 1e3
    with compiled_at_once():
        call()  # compiles and tunes
    return measure.graph_milliseconds(call, repeats=repeats, flush=True)


def print_rows(record: dict[str, Any], notes: list[str]) -> None:
    print(f"{record['cpu']}" if record["device"] == "cpu" else f"{record['device']}")
    if record["plugs"]:
        print()
    cells, last = [], None
    for r in record["plugs"]:
        engine = f"{r['engine']} {r['version']}"
        times = [f"{ms:.4f}" if (ms := r[f"{name}_ms"]) else "" for name in ("engine", "through", "direct")]
        over = f"{r['over_engine']:.2f}" if r["over_engine"] else ""
        host = f"{r['adapter_us']:.1f}" if r["adapter_us"] else ""
        cells.append(["" if engine == last else engine, r["case"], *times, over, host])
        last = engine
    if cells:
        columns = ["engine", "case", "engine's ms", "through kda, ms", "kda alone, ms", "over engine", "adapter us"]
        show.table(columns, cells)
    for note in notes:
        print(f"\n{note}")

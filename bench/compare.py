"""Times builds of the library against each other on a GPU. All builds measure each row in turn, so that a change of a
few percent can be told from noise of the machine.

    python -m bench compare before=/tmp/before/lib after=build/release/lib \\
        --serving "decode H=32 B=1,8,128" "flush_verify H=32 B=32 T=2,4" --prefill H96T8192 H12T2048slow

A build is a name and a folder with libkda.so and the binding, as in KDA_LIBRARY_DIR; each runs in its own process, with
the Python package of this tree. Rows are those of `python -m bench decode` (an operator of bench.serving_calls
and sizes; several values of a size, with commas, are several rows) and of `bench prefill` (as --rows there).

A row is a CUDA graph. For decode it is of all layers one after another, so many that the L2 cache keeps no state; for
prefill it is of one call, before which the cache is flushed. A turn is the median of five replays, and a cell is the
median over the turns (--turns), in microseconds a layer or a call. Behind it stands the ratio to the first build: below
1 is faster. A build that cannot take a row shows "-" and says why below, and the exit status is 1.

How large noise is: name one folder twice. A change below that is none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import ROOT

Row = tuple[str, dict[str, Any]]  # an operator and sizes, or "prefill" and which case


def serving_rows(texts: Iterable[str]) -> list[Row]:
    """All combinations of each text, such as "flush_verify B=1,8 T=4"."""
    from bench.serving_calls import OPERATORS
    from kda.cli.problems import Problem, combinations

    rows: list[Row] = []
    for text in texts:
        words = text.split()
        operator = " ".join(word for word in words if "=" not in word)
        if operator not in OPERATORS:
            raise ValueError(f"--serving: expected one of {', '.join(OPERATORS)}, got {operator!r}")
        given: dict[str, list[Any]] = {"H": [32], "T": [1]}
        for name, values in (word.split("=", 1) for word in words if "=" in word):
            given[name] = [int(v) if v.isdecimal() else v for v in values.split(",")]
        try:
            problems = combinations(Problem(), given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--serving: {text}: {error}") from None
        rows += [(operator, {name: getattr(p, name) for name in given}) for p in problems]
    return rows


def prefill_rows(names: list[str]) -> list[Row]:
    from bench import prefill

    cases = prefill.sweep({}, names) if names else []
    return [("prefill", {"case": case.name, "gate": case.gate}) for case in cases]


def microseconds(row: Row, impl: str | None) -> Iterator[float]:
    """Prepares the row, then yields a new time on every request."""
    from bench import measure, prefill, serving_calls
    from kda.call.arrays import torch
    from kda.cli.problems import Problem, combinations

    name, given = row
    if name == "prefill":
        [case] = prefill.sweep({}, [given["case"] + given["gate"]])
        call, calls, flush = prefill.prepare_kda(prefill.Inputs(case), impl), 1, True
    else:
        [problem] = combinations(Problem(), {key: [value] for key, value in given.items()})
        layers, operator = serving_calls.Layers(problem), serving_calls.OPERATORS[name]
        call, calls, flush = operator.prepare(layers, impl), layers.count * operator.rounds(problem), False
    call()
    while True:
        with torch.inference_mode():
            ms = measure.graph_milliseconds(call, repeats=5, flush=flush)
        yield ms * 1e3 / calls


def work(impl: str | None, requests: Iterable[str]) -> None:
    """Runs in the process of a build: prepares the row that a line holds, then answers every empty line with its
    time."""
    times: Iterator[float] = iter(())
    for line in requests:
        answer: dict[str, Any] = {}
        try:
            if line.strip():
                times = iter(())  # frees this row's memory before the next row asks for its own
                name, given = json.loads(line)
                times = microseconds((name, given), impl)
            answer["us"] = next(times)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(answer), flush=True)


class Build:
    def __init__(self, name: str, folder: str, impl: str | None) -> None:
        self.name = name
        environment = os.environ | {"KDA_LIBRARY_DIR": str(Path(folder).resolve())}
        command = [sys.executable, "-m", "bench", "compare", "--work", *(["--impl", impl] if impl else [])]
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: str = "") -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise ValueError(f"{self.name}: its process has ended")
        found: dict[str, Any] = json.loads(answer)
        return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("builds", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--serving", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--prefill", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--impl", help="an implementation to force")
    parser.add_argument("--turns", type=int, default=3, help="of each build a row (3)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if options.work:
        work(options.impl, sys.stdin)
        return 0
    if not all("=" in text for text in options.builds):
        raise ValueError("builds: expected NAME=FOLDER")
    rows = serving_rows(options.serving) + prefill_rows(options.prefill)
    builds = []
    for text in options.builds:
        name, folder = text.split("=", 1)
        builds.append(Build(name, folder, options.impl))
    print(f"{'':48}" + "".join(f"{build.name:>15}" for build in builds), flush=True)
    failed = False
    for name, given in rows:
        times: dict[Build, list[float]] = {build: [] for build in builds}
        errors: dict[Build, str] = {}
        for turn in range(options.turns):
            for build in builds:
                if build in errors:
                    continue
                answer = build.ask("" if turn else json.dumps([name, given]))
                if "error" in answer:
                    errors[build] = answer["error"]
                else:
                    times[build].append(answer["us"])
        medians = {build: statistics.median(found) for build, found in times.items() if build not in errors}
        base = medians.get(builds[0]) if builds else None
        line = f"{' '.join([name, *(f'{key}={value}' for key, value in given.items())]):48}"
        for build in builds:
            ratio = f"{medians[build] / base:6.3f}" if build in medians and base else ""
            line += f"{medians[build]:9.2f}{ratio:6}" if build in medians else f"{'-':>15}"
        print(line, *(f"  {build.name}: {error}" for build, error in errors.items()), sep="\n", flush=True)
        failed = failed or bool(errors)
    return int(failed)

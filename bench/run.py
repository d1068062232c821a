"""Measures operators on this machine, next to installed peers and to the machine's own ceilings: a large matrix
product, and reading and writing memory. Times are medians over repetitions that alternate between the things
compared. Nothing else should run at the same time."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.on_gpu import ON_GPU
from bench.operators import BENCHES, Bench
from bench.printed import print_record
from kda.cli import INTERRUPTED, show
from kda.cli.problems import Problem, combinations, given_sizes, natural, size_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m bench [COMMAND | OPERATOR ...] [options]"
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(BENCHES)}; all by default")
    size_arguments(parser, many=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where all of OPERATOR run there, else cpu")
    parser.add_argument("--impl", metavar="NAME,..", help="force implementations, see `python -m kda info`")
    parser.add_argument("--threads", type=natural, metavar="N", help="as if OMP_NUM_THREADS were set")
    parser.add_argument("--repeats", type=natural, default=7, metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, help="a slow call stops repeating after these")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="of kernels to measure beside ours on cuda")
    parser.add_argument("--rows", nargs="+", default=[], metavar="CASE", help="on cuda, as H64T8192 or H12*")
    parser.add_argument("--quick", action="store_true", help="a few cases of prefill on cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart: .png, .svg or .pdf; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    for name in options.operators:
        if name not in BENCHES:
            raise ValueError(f"operators: expected some of {', '.join(BENCHES)}, got {name}")
    _check_files(options)

    from bench.measure import machine, stream_bandwidth
    from bench.peers import add_folder, missing
    from kda.call.arrays import torch
    from kda.call.library import OPERATORS
    from kda.cli.arrays import Source
    from kda.cli.operators import forced, known

    options.device = options.device or _best_device(options.operators)
    names = options.operators or [n for n, b in BENCHES.items() if options.device in b.devices]
    known(options.impl, OPERATORS)
    for name in names:
        if options.device not in BENCHES[name].devices:
            raise ValueError(
                f"--device: expected {' or '.join(BENCHES[name].devices)} for {name}, got {options.device}"
            )
    notes = []
    given = given_sizes(options)
    if torch is None:
        given.setdefault("dtype", ["float32"])  # NumPy has no bfloat16
    special = [name for name in names if options.device == "cuda" and name in ON_GPU]
    if options.quick and "prefill" not in special:
        raise ValueError("--quick: expected prefill on cuda with it")
    if options.rows and not {"layer", "prefill", "stages", "training"} & {*special}:
        raise ValueError("--rows: expected prefill, stages, layer or training on cuda with it")
    rows = [(name, p) for name in names if name not in special for p in _problems(BENCHES[name], given)]
    if torch is None:
        notes = [f"no rows of {n}: it needs torch, which is not installed" for n in names if BENCHES[n].needs_torch]
        rows = [(name, p) for name, p in rows if not BENCHES[name].needs_torch]
    add_folder(options.peers)
    modules = {module for n in names for module, _ in BENCHES[n].peers.values()} if options.device == "cpu" else set()
    notes += missing(modules)
    absent = {m for m in modules if any(f" {m}:" in note for note in notes)}

    Source(options.device)  # reports a problem with the device before anything is measured
    record: dict[str, Any] = {"command": " ".join(["python -m bench", *options.words]), **machine(options.device)}
    record |= {"ceilings": {}, "rows": []}
    status = 0
    try:
        with forced(options.impl):
            if rows:
                _measure_rows(rows, record, options, absent, notes)
            if special:
                record["stream_gb_per_s"] = stream_bandwidth()
            for name in special:
                ON_GPU[name](given, record, options, notes)
    except KeyboardInterrupt:
        notes.append("interrupted: the rest was not measured")
        record["interrupted"], status = True, INTERRUPTED
    print_record(record, notes)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.plot and any(record.get(part) for part in ("rows", *ON_GPU, "serving")):
        from bench.plot import draw

        draw(record, options.plot)
    return status


def _best_device(operators: list[str]) -> str:
    import kda
    from kda.cli.arrays import cuda_device

    built = "cuda_gate" in kda.implementations("gate")
    everywhere = operators and all("cuda" in BENCHES[name].devices for name in operators)
    return "cuda" if built and everywhere and cuda_device() else "cpu"


def _check_files(options: argparse.Namespace) -> None:
    """Reports problems with output files now, not after minutes of measuring."""
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}: expected a file in a folder that exists, got {path}")
    if options.plot:
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--plot: needs matplotlib, which is not installed; `pip install libkda[cli]` brings it")
        if options.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot: expected a file that ends in .png, .svg or .pdf, got {options.plot}")


def _problems(bench: Bench, given: dict[str, list[Any]]) -> list[Problem]:
    """The operator's own problems, in every combination with the given values."""
    given = {name: [v for v in values if name != "T" or v <= bench.most_tokens] for name, values in given.items()}
    given = {name: values for name, values in given.items() if values} | {n: [v] for n, v in bench.only.items()}
    return list(dict.fromkeys(x for p in bench.problems for x in combinations(p, given)))


def _measure_rows(
    rows: list[tuple[str, Problem]],
    record: dict[str, Any],
    options: argparse.Namespace,
    absent: set[str],
    notes: list[str],
) -> None:
    from bench.measure import ceilings

    with show.Progress(2 + len(rows) * options.repeats, lines=True) as progress:

        def measure_ceilings() -> None:
            progress.label("ceilings")
            for unit, rate in ceilings(options.device).items():
                record["ceilings"][unit] = max(rate, record["ceilings"].get(unit, 0.0))
            progress.step()

        measure_ceilings()
        for name, p in rows:
            progress.label(f"{name}: {p.sizes}")
            record["rows"] += _measure(name, p, options, absent, notes, progress)
        measure_ceilings()  # again: a disturbance may have passed


def _measure(
    name: str, p: Problem, options: argparse.Namespace, absent: set[str], notes: list[str], progress: show.Progress
) -> list[dict[str, Any]]:
    """Returns a row for kda, then one for each peer."""
    from bench import peers
    from bench.measure import medians, synchronizer
    from kda.cli.arrays import Source

    bench = BENCHES[name]
    calls = {"kda": bench.prepare(p, Source(options.device))}
    for peer, (module, function) in bench.peers.items():
        if module in absent or options.device != "cpu":
            continue
        try:
            call = getattr(peers, function)(p, Source(options.device))
            call()
        except Exception as error:  # a peer may not support this shape
            notes.append(f"no row of {peer} for {p.sizes}: {type(error).__name__}: {error}")
        else:
            calls[peer] = call
    done = itertools.count(1)
    times = medians(
        calls,
        options.repeats,
        seconds=options.seconds,
        synchronize=synchronizer(options.device),
        tick=lambda: progress.step() if next(done) % len(calls) == 0 else None,
    )
    return [
        {
            "operator": name,
            "contender": contender,
            "problem": asdict(p),
            "ms": seconds * 1e3,
            "tokens_per_s": p.B * p.T / seconds,
            "rate": bench.work(p) / seconds * 1e-9,
            "unit": bench.unit,
            "times_kda": seconds / times["kda"],
        }
        for contender, seconds in times.items()
    ]

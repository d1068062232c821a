"""Measures operators on this machine, next to installed peers and to the machine's own ceilings: a large matrix
product, and reading and writing memory. Times are medians over repetitions that alternate between the things
compared. Nothing else should run at the same time."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kda
from bench import measure, peers
from bench.on_gpu import ON_GPU, measure_on_gpu
from bench.operators import BENCHES, Bench
from kda.call.library import OPERATORS
from kda.cli import INTERRUPTED, arrays, show
from kda.cli.arrays import Source
from kda.cli.bench import cases_of, readable, shared_arguments
from kda.cli.operators import forced, known
from kda.cli.problems import Problem, given_sizes

NAMED = {"layer", "prefill", "stages", "training"}  # on a GPU, where --rows chooses


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m bench [COMMAND | OPERATOR ...] [options]"
    shared_arguments(parser, BENCHES, "all of OPERATOR run there")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="of kernels to measure beside ours on cuda")
    parser.add_argument("--rows", nargs="+", default=[], metavar="CASE", help="on cuda, as H64T8192 or H12*")
    parser.add_argument("--quick", action="store_true", help="a few cases of prefill on cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")


def run(options: argparse.Namespace) -> int:
    _check(options)
    names = options.operators or [n for n, b in BENCHES.items() if options.device in b.devices]
    given, notes = given_sizes(options), list[str]()
    special = [name for name in names if options.device == "cuda" and name in ON_GPU]
    rows = [(name, p) for name in names if name not in special for p in _cases(BENCHES[name], given)]
    peers.add_folder(options.peers)
    modules = {module for n in names for module, _ in BENCHES[n].peers.values()} if options.device == "cpu" else set()
    notes += peers.missing(modules)
    absent = {m for m in modules if any(f" {m}:" in note for note in notes)}

    record: dict[str, Any] = {"command": " ".join(["python -m bench", *options.words])}
    record |= {**measure.machine(options.device), "ceilings": {}, "rows": []}
    status = 0
    try:
        with forced(options.impl):
            if rows:
                _measure_rows(rows, record, options, absent, notes)
            if special:
                record["stream_gb_per_s"] = measure.stream_bandwidth()
            for name in special:
                measure_on_gpu(name, given, record, options, notes)
    except KeyboardInterrupt:
        notes.append("interrupted: the rest was not measured")
        record["interrupted"], status = True, INTERRUPTED
    print_record(record, notes)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return status


def _check(options: argparse.Namespace) -> None:
    """Reports what is wrong now, not after minutes of measuring, and chooses the device."""
    for name in options.operators:
        if name not in BENCHES:
            raise ValueError(f"operators: expected some of {', '.join(BENCHES)}, got {name}")
    check_file(options.json)
    options.device = options.device or _best_device(options.operators)
    known(options.impl, OPERATORS)
    for name in options.operators:
        if options.device not in (devices := BENCHES[name].devices):
            raise ValueError(f"--device: expected {' or '.join(devices)} for {name}, got {options.device}")
    on_gpu = {*(options.operators or BENCHES)} if options.device == "cuda" else set()
    if options.quick and "prefill" not in on_gpu:
        raise ValueError("--quick: expected prefill on cuda with it")
    if options.rows and not NAMED & on_gpu:
        raise ValueError("--rows: expected prefill, stages, layer or training on cuda with it")
    Source(options.device)


def check_file(path: Path | None) -> None:
    if path and not path.absolute().parent.is_dir():
        raise ValueError(f"--json: expected a file in a folder that exists, got {path}")


def _best_device(operators: list[str]) -> str:
    built = "cuda_gate" in kda.implementations("gate")
    everywhere = operators and all("cuda" in BENCHES[name].devices for name in operators)
    return "cuda" if built and everywhere and arrays.cuda_device() else "cpu"


def _cases(bench: Bench, given: dict[str, list[Any]]) -> list[Problem]:
    return cases_of(bench.cases, given | {n: [v] for n, v in bench.only.items()}, bench.most_tokens)


def _measure_rows(
    rows: list[tuple[str, Problem]],
    record: dict[str, Any],
    options: argparse.Namespace,
    absent: set[str],
    notes: list[str],
) -> None:
    with show.Progress(2 + len(rows) * options.repeats, lines=True) as progress:

        def measure_ceilings() -> None:
            progress.label("ceilings")
            for unit, rate in measure.ceilings(options.device).items():
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
    bench, new = BENCHES[name], Source(options.device)
    calls = {"kda": bench.prepare(p, new)}
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
    times = measure.medians(
        calls,
        options.repeats,
        seconds=options.seconds,
        synchronize=measure.synchronizer(options.device),
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


def print_record(record: dict[str, Any], notes: list[str]) -> None:
    print(f"{record['cpu']}, {record['threads']} threads, {record['library']['cpu']}")
    if record["device"] != "cpu":
        print(record["device"])
    if record["rows"]:
        _print_rows(record)
    if "stream_gb_per_s" in record:
        print(f"y = 2 x: {record['stream_gb_per_s']:.0f} GB/s")
    if "product_gflop_per_s" in record:
        print(f"a large bfloat16 matrix product: {record['product_gflop_per_s'] / 1e3:.0f} TFLOP/s")
    for part, subject in ON_GPU.values():
        if part in record:
            subject.print(record[part])
    for note in notes:
        print(f"\n{note}")


def _print_rows(record: dict[str, Any]) -> None:
    limits = record["ceilings"]
    print(f"ceilings: {limits['GFLOP/s']:.0f} GFLOP/s matrix product, {limits['GB/s']:.1f} GB/s read + write\n")
    rows = []
    for r in record["rows"]:
        p = Problem(**r["problem"])
        what = [r["operator"], f"{p.sizes}, {p.dtype}", readable(r["ms"]), f"{r['tokens_per_s']:.3g}"]
        rate = [f"{r['rate']:.3g} {r['unit']}", f"{r['rate'] / limits[r['unit']]:.0%}", ""]
        mine = r["contender"] == "kda"
        rows.append([*what, *rate] if mine else ["", r["contender"], *what[2:], "", "", f"{r['times_kda']:.3g}"])
    show.table(["operator", "case", "time", "tokens/s", "rate", "of ceiling", "time / kda's"], rows)
    if any(r["unit"] == "GB/s" and r["rate"] > limits["GB/s"] for r in record["rows"] if r["contender"] == "kda"):
        print("\nMore GB/s than the memory gives: what these calls touch stays in the caches.")

"""The rows of `python -m bench`, as the record has them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import measure, plugs
from bench.on_gpu import ON_GPU
from bench.record.elementwise import conv_timings, gate_timings, norm_timings
from bench.record.processes import of_python, run
from bench.record.record import YARDSTICK
from bench.subject import Rates, Row, Run

TUNING = 160  # seconds, for peers that tune themselves
WITH_NAMES = ("prefill", "stages", "layer", "training")


def subject_timings(
    name: str, rates: Rates, notes: list[str], seconds: float, names: Sequence[str]
) -> Iterator[list[Row]]:
    """Measures what `python -m bench name` does; FLA, which tunes itself for a minute, as far as time allows. Yields
    the rows of one case after the other, except where rows of several cases are compared."""
    _, subject = ON_GPU[name]
    cases = subject.sweep({}, names if name in WITH_NAMES else (), False)
    how = Run(rates, notes, few=seconds < TUNING if name == "layer" else True, seconds=seconds)
    found: list[Row] = []
    for rows in subject.measured(cases, how):
        if name in ("prefill", "decode"):
            found += rows
        else:
            yield [subject.recorded(row) for row in subject.compared(cases, rows)]
    yield [subject.recorded(row) for row in subject.compared(cases, found)]


def demonstration_timings(notes: list[str]) -> list[dict[str, Any]]:
    """Runs `python -m examples.demo` on the GPU, with ten seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        places = ["--train-on", "cuda", "--serve-on", "cuda", "--out", folder]
        result = run([sys.executable, "-m", "examples.demo", "--seconds", "10", *places], **of_python())
        path = Path(folder) / "summary.json"
        if result.returncode or not path.exists():
            notes.append(f"no row of the demonstration: {(result.stderr.strip() or result.stdout).splitlines()[-1]}")
            return []
        found = json.loads(path.read_text())
    measured = ("training_seconds", "training_bytes_per_second", "seconds")
    loss = {"nats_per_byte": found["nats_per_byte"]["model"]}
    return [{"what": "demonstration", **{name: found[name] for name in measured}, **loss}]


def plugs_timings(notes: list[str]) -> Iterator[list[Row]]:
    """Measures what `python -m bench plugs` does. Yields one row after the other: FLA tunes itself."""
    for row in plugs.rows("cuda", notes):
        yield [{"what": f"plug of {row.pop('engine')}", **row}]


BENCHMARKS = (
    "gate", "conv", "norm", "serving", "prefill", "prefill_f32", "stages", "layer", "training", "demonstration",
    "plugs",  # the last: from here on FLA's functions are ours
)  # fmt: skip


def benchmarks(parts: Sequence[str], seconds: float, names: Sequence[str]) -> Iterator[list[Row]]:
    import torch

    bandwidth, notes = measure.stream_bandwidth(), list[str]()
    yield [{"what": YARDSTICK, "gb_per_s": bandwidth}]
    with torch.inference_mode():
        if "gate" in parts:
            yield [row for HV in (32, 96) for row in gate_timings(torch, HV, bandwidth)]
        if "conv" in parts:
            yield conv_timings(torch, 3 * 32 * 128, bandwidth)
        if "norm" in parts:
            yield norm_timings(torch, bandwidth)
    product = measure.ceilings("cuda")["GFLOP/s"] if "layer" in parts else 0.0
    for name, (part, _) in sorted(ON_GPU.items(), key=lambda item: BENCHMARKS.index(item[1][0])):
        if part in parts:
            yield from subject_timings(name, Rates(bandwidth, product), notes, seconds, names)
    if "demonstration" in parts:
        yield demonstration_timings(notes)
    if "plugs" in parts:
        yield from plugs_timings(notes)
    print(*notes, sep="\n", flush=True)

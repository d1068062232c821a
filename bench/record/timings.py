"""The rows of `python -m bench`, as the record has them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.record.elementwise import conv_timings, gate_timings, norm_timings
from bench.record.processes import of_python, run
from bench.record.record import YARDSTICK

TUNING = 160  # seconds, for peers that tune themselves


def serving_timings(bandwidth: float, notes: list[str]) -> list[dict[str, Any]]:
    """Measures what `python -m bench decode` does."""
    from bench import serving

    found = [row for p in serving.sweep({}) for row in serving.rows(p, bandwidth, notes)]
    serving.compare(found)
    kept = ("layers", "us", "least_bytes", "share_of_stream_bandwidth", "over_baseline", "over_plain")
    rows = []
    for row in found:
        p = row["problem"]
        sizes = {name: p[name] for name in ("B", "T", "HV", "K")} | {"states": f"{p['layout']} {p['state_dtype']}"}
        rows.append({"what": serving.label(row), **sizes, **{name: row[name] for name in kept}})
    return rows


def prefill_timings(
    bandwidth: float, notes: list[str], seconds: float = TUNING, names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measures what `python -m bench prefill` does; FLA, which tunes itself for a minute, as far as time allows."""
    from bench import prefill

    rows = []
    for row in prefill.rows(prefill.sweep({}, names), bandwidth, notes, few=True, seconds=seconds):
        p = row.pop("problem")
        sizes = {name: p[name] for name in ("B", "T", "HV", "K")} | {"lengths": list(p["lengths"])}
        what = {"what": f"{prefill.label(row)} prefill", "case": row.pop("case"), "gate": row.pop("gate")}
        rows.append(what | sizes | {name: row[name] for name in row if name not in ("contender", "implementation")})
    return rows


def prefill_f32_timings(notes: list[str]) -> list[dict[str, Any]]:
    """Measures what `python -m bench prefill_f32` does."""
    from bench import prefill_f32

    rows = []
    for row in prefill_f32.rows(prefill_f32.sweep({}), notes):
        p = row.pop("problem")
        what = {"what": f"{prefill_f32.label(row)} prefill_f32"} | {
            name: p[name] for name in ("B", "T", "HV", "K", "V")
        }
        rows.append(what | {name: row[name] for name in row if name not in ("contender", "implementation")})
    return rows


def stages_timings(bandwidth: float, notes: list[str], names: Sequence[str] = ()) -> Iterator[list[dict[str, Any]]]:
    """Measures what `python -m bench stages` does. Yields the rows of one case after the other."""
    from bench import prefill, stages

    for found in stages.measured(stages.sweep({}, names), bandwidth, notes):
        rows = []
        for row in found:
            p = row.pop("problem")
            what = {"what": f"{prefill.label(row)} {row.pop('stage')}", "case": row.pop("case")}
            what |= {name: p[name] for name in ("B", "T", "H", "HV", "K", "V")}
            rows.append(what | {name: row[name] for name in row if name not in ("contender", "implementation")})
        yield rows


def layer_timings(
    bandwidth: float, notes: list[str], names: Sequence[str] = (), few: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Measures what `python -m bench layer` does; with ``few``, peers are not trained. Yields the rows of one case
    after the other."""
    from bench import layer, measure

    rates = layer.Rates(measure.ceilings("cuda")["GFLOP/s"], bandwidth)
    for found in layer.measured(layer.sweep({}, names), rates, notes, few=few):
        rows = []
        for row in found:
            p, parts = row.pop("problem"), row.pop("parts_ms")
            what = {"what": f"{layer.label(row)} layer, {row.pop('what')}", "case": row.pop("case")}
            what |= {name: p[name] for name in ("B", "T", "H", "HV", "K", "V", "hidden")}
            what |= {name: row[name] for name in row if name not in ("contender", "implementation")}
            rows.append(what | {f"{part} ms": ms for part, ms in parts.items()})
        yield rows


def training_timings(notes: list[str], names: Sequence[str] = ()) -> Iterator[list[dict[str, Any]]]:
    """Measures what `python -m bench training` does, FLA for a few cases only. Yields the rows of one case after
    the other, because FLA tunes itself for a minute or more."""
    from bench import training

    for found in training.measured(training.sweep({}, names), notes, few=True):
        rows = []
        for row in training.compared(found):
            p = row.pop("problem")
            sizes = {name: p[name] for name in ("B", "T", "H", "HV", "K", "V")} | {"lengths": list(p["lengths"])}
            what = {"what": f"{training.label(row)} training", "case": row.pop("case"), "gate": row.pop("gate")}
            rows.append(what | sizes | {n: row[n] for n in row if n not in ("contender", "implementation", "kept")})
        yield rows


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


def plugs_timings(notes: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Measures what `python -m bench plugs` does. Yields one row after the other: FLA tunes itself."""
    from bench import plugs

    for row in plugs.rows("cuda", notes):
        yield [{"what": f"plug of {row.pop('engine')}", **row}]


BENCHMARKS = (
    "gate", "conv", "norm", "serving", "prefill", "prefill_f32", "stages", "layer", "training", "demonstration",
    "plugs",  # the last: from here on FLA's functions are ours
)  # fmt: skip


def benchmarks(parts: Sequence[str], seconds: float, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    import torch

    from bench.measure import stream_bandwidth

    bandwidth, notes = stream_bandwidth(), list[str]()
    yield [{"what": YARDSTICK, "gb_per_s": bandwidth}]
    with torch.inference_mode():
        if "gate" in parts:
            yield [row for HV in (32, 96) for row in gate_timings(torch, HV, bandwidth)]
        if "conv" in parts:
            yield conv_timings(torch, 3 * 32 * 128, bandwidth)
        if "norm" in parts:
            yield norm_timings(torch, bandwidth)
    if "serving" in parts:
        yield serving_timings(bandwidth, notes)
    if "prefill" in parts:
        yield prefill_timings(bandwidth, notes, seconds, names)
    if "prefill_f32" in parts:
        yield prefill_f32_timings(notes)
    if "stages" in parts:
        yield from stages_timings(bandwidth, notes, names)
    if "layer" in parts:
        yield from layer_timings(bandwidth, notes, names, few=seconds < TUNING)
    if "training" in parts:
        yield from training_timings(notes, names)
    if "demonstration" in parts:
        yield demonstration_timings(notes)
    if "plugs" in parts:
        yield from plugs_timings(notes)
    print(*notes, sep="\n", flush=True)

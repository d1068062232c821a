"""Measures a subject on a GPU: shows progress, and keeps what was measured if it is interrupted."""

from __future__ import annotations

import argparse
from typing import Any

from bench import layer, measure, prefill, prefill_f32, serving, stages, training
from bench.subject import Rates, Row, Run, Subject
from kda.cli import show

# By the operator that is asked for: where the record has the rows, and what measures them.
ON_GPU: dict[str, tuple[str, Subject]] = {
    "prefill": ("prefill", prefill.SUBJECT),
    "prefill_f32": ("prefill_f32", prefill_f32.SUBJECT),
    "stages": ("stages", stages.SUBJECT),
    "layer": ("layer", layer.SUBJECT),
    "training": ("training", training.SUBJECT),
    "decode": ("serving", serving.SUBJECT),
}


def measure_on_gpu(
    name: str, given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    part, subject = ON_GPU[name]
    names = [name for word in options.rows for name in word.split(",")]
    cases, found = subject.sweep(given, names, options.quick), list[Row]()
    if subject.needs_product and "product_gflop_per_s" not in record:
        record["product_gflop_per_s"] = measure.ceilings(options.device)["GFLOP/s"]
    rates = Rates(record["stream_gb_per_s"], record.get("product_gflop_per_s", 0.0))
    try:
        with show.Progress(len(cases), lines=True) as progress:

            def started(case: Any) -> None:
                progress.label(subject.name_of(case))
                progress.step()

            run = Run(rates, notes, options.impl, options.repeats, options.quick, started=started)
            for rows in subject.measured(cases, run):
                found += rows
    finally:
        record[part] = subject.compared(cases, found)

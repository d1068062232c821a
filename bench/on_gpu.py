"""The operators that ``python -m bench`` measures in another way on a GPU, with progress."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kda.cli import show
from kda.cli.problems import Problem

if TYPE_CHECKING:
    from bench import prefill


def _measure_serving(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    """Measures decode and rounds of speculation on the GPU."""
    from bench import serving

    swept = serving.sweep(given)
    record["serving"] = []
    try:
        with show.Progress(len(swept), lines=True) as progress:
            for p in swept:
                progress.label(serving.about(p))
                found = serving.rows(p, record["stream_gb_per_s"], notes, impl=options.impl, repeats=options.repeats)
                record["serving"] += found
                progress.step()
    finally:
        serving.compare(record["serving"])


def _names(options: argparse.Namespace) -> list[str]:
    return [name for word in options.rows for name in word.split(",")]


def _measure_prefill(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from bench import prefill

    cases = prefill.sweep(given, _names(options), options.quick)
    how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "few": options.quick}
    found: list[dict[str, Any]] = []
    try:
        with show.Progress(2 * len(cases), lines=True) as progress:

            def started(case: prefill.Case) -> None:
                progress.label(f"{case.name}, {case.gate}")
                progress.step()

            for some in prefill.measured(cases, record["stream_gb_per_s"], notes, **how, started=started):
                found += some
    finally:
        record["prefill"] = prefill.compared(cases, found)


def _measure_prefill_f32(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from bench import prefill_f32

    swept = prefill_f32.sweep(given)
    record["prefill_f32"] = []
    with show.Progress(len(swept), lines=True) as progress:

        def started(p: Problem) -> None:
            progress.label(p.sizes)
            progress.step()

        how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
        for some in prefill_f32.measured(swept, notes, **how):
            record["prefill_f32"] += some


def _measure_training(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from bench import training

    cases, found = training.sweep(given, _names(options)), list[dict[str, Any]]()
    try:
        with show.Progress(len(cases), lines=True) as progress:

            def started(case: prefill.Case) -> None:
                progress.label(f"{training.name_of(case)}, {case.gate}")
                progress.step()

            how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
            for some in training.measured(cases, notes, **how):
                found += some
    finally:
        record["training"] = training.compared(found)


def _measure_stages(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from bench import stages

    cases = stages.sweep(given, _names(options))
    record["stages"] = []
    with show.Progress(len(cases), lines=True) as progress:

        def started(case: prefill.Case) -> None:
            progress.label(stages.name_of(case))
            progress.step()

        how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
        for some in stages.measured(cases, record["stream_gb_per_s"], notes, **how):
            record["stages"] += some


def _measure_layer(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from bench import layer, measure

    cases = layer.sweep(given, _names(options))
    record["product_gflop_per_s"] = measure.ceilings(options.device)["GFLOP/s"]
    rates = layer.Rates(record["product_gflop_per_s"], record["stream_gb_per_s"])
    record["layer"] = []
    with show.Progress(len(cases), lines=True) as progress:

        def started(case: layer.Case) -> None:
            progress.label(case.name)
            progress.step()

        how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
        for some in layer.measured(cases, rates, notes, **how):
            record["layer"] += some


# Operators that are measured in another way on a GPU.
ON_GPU = {
    "prefill": _measure_prefill,
    "prefill_f32": _measure_prefill_f32,
    "stages": _measure_stages,
    "layer": _measure_layer,
    "decode": _measure_serving,
    "training": _measure_training,
}

"""The stage ``bwd_wy_dqkg`` on a CUDA device, ours and FLA's: which cases, times in a CUDA graph, bytes, and how they
compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bench import measure
from bench.cases import Case, full_name, named
from bench.subject import SHARE, Row, Run, Subject, number, over_peers, ratios, who
from bench.tuning import compiled_at_once
from kda.call.arrays import torch
from kda.cli import problems
from kda.cli.arrays import DeviceSource
from kda.cli.operators import implementations_on
from kda.cli.problems import Problem, combinations

DEVICE = "cuda"
STAGE = "bwd_wy_dqkg"
FLA = "FLA"

FIXED = {"gate": "log", "beta": "activated"}
DEFAULT = Problem(H=32, T=8192, layout="K-first", gate="log", beta="activated")
SHAPES: tuple[dict[str, Any], ...] = (  # unless sizes are given
    {"T": 1024},
    {"T": 4096},
    {"T": 8192},
    {"T": 8192, "B": 2},
    {"T": 8192, "H": 16, "HV": 32},
)
ALL = ("H32 T8192",)  # where every implementation is measured, and not only the first that takes the case

Call = Callable[[], Sequence[Any]]
# Contender, implementation, and a function that turns the arguments of kda.stages.bwd_wy_dqkg into a call.
Contender = tuple[str, "str | None", Callable[[dict[str, Any]], Call]]


def sweep(given: dict[str, list[Any]], names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """All combinations of the sizes, or the cases listed above; of those, only the ones with these names, such as
    H32T8192 or H32*."""
    fixed = {name: [value] for name, value in FIXED.items()}
    several = [given | fixed] if given else [{name: [value] for name, value in sizes.items()} for sizes in SHAPES]
    found = [Case(p, p.gate) for values in several for p in combinations(DEFAULT, values)]
    return named(found, names, name_of)


def name_of(case: Case) -> str:
    return full_name(case, usual="K-first")


def prepare_kda(x: dict[str, Any], impl: str | None) -> Call:
    from kda import stages

    return partial(stages.bwd_wy_dqkg, **x, impl=impl)


def prepare_fla(x: dict[str, Any]) -> Call:
    """Its scores have the dtype of k. It calls G g, and dv_new dv."""
    function = importlib.import_module("fla.ops.kda.chunk_bwd").chunk_kda_bwd_wy_dqkg_fused
    B, heads_and_sizes = x["k"].shape[0], x["h"].shape[1:]
    theirs = {name: x[name] for name in ("q", "k", "v", "v_new", "beta", "scale", "state_v_first")}
    theirs |= {"g": x["G"], "A": x["Akk_inv"].to(x["k"].dtype), "do": x["d_o"], "dv": x["dv_new"]}
    theirs |= {name: x[name].view(B, -1, *heads_and_sizes) for name in ("h", "dh")}
    return partial(function, **theirs, chunk_size=64)


def bytes_of(call: Any, results: Sequence[Any]) -> int:
    """Bytes if all tensors that the call was given are read once, and all results written once."""
    tensors = [x for x in (*call.keywords.values(), *results) if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def measured(cases: Sequence[Case], run: Run) -> Iterator[list[Row]]:
    """The rows of one case after the other: kda with the first implementation that takes it, or for ALL with every
    one, then FLA."""
    names = implementations_on(DEVICE, f"stage_{STAGE}", run.impl)
    for case in cases:
        run.started(case)
        found: list[Row] = []
        for name in names:
            if not found or name_of(case) in ALL:
                found += _row(case, ("kda", name, partial(prepare_kda, impl=name)), run)
        found += _row(case, (FLA, None, prepare_fla), run)
        yield over_peers(found, [FLA])


def _row(case: Case, contender: Contender, run: Run) -> Iterator[Row]:
    kind, name, prepare = contender
    row: Row = {"stage": STAGE, "case": name_of(case), "contender": kind, "implementation": name}
    with run.noting(who(row), f"{name_of(case)}: "):
        call = prepare(problems.wy_dqkg(case.problem, DeviceSource(DEVICE)))
        with compiled_at_once():
            results = call()  # compiles and tunes
        least = bytes_of(call, results)
        ms = measure.graph_milliseconds(call, repeats=run.repeats, flush=True)
        row |= {"problem": asdict(case.problem), "ms": ms, "least_bytes": least}
        yield row | {"share_of_stream_bandwidth": least / ms * 1e-6 / run.rates.bandwidth}


SUBJECT = Subject(
    sweep=sweep,
    measured=measured,
    name_of=name_of,
    case_of=lambda row: f"{row['stage']}, {row['case']}",
    who=who,
    columns={
        "ms": number("ms", ".4f"),
        "MB": lambda row: f"{row['least_bytes'] / 1e6:.1f}",
        **SHARE,
        **ratios([FLA]),
    },
    what=lambda row: str(row["stage"]),
    sizes=("B", "T", "H", "HV", "K", "V"),
    told=("stage",),
)

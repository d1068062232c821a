"""Forward and backward on a CUDA device, ours and the peers': which cases, times in CUDA graphs, memory, and how they
compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import kda
from bench import measure
from bench.cases import Case, full_name, given_cases, named
from bench.measure import Call
from bench.peers import prefill as prefill_peers
from bench.peers import training as training_peers
from bench.prefill import Inputs
from bench.subject import Row, Run, Subject, number, over_peers, ratios, who
from bench.training_steps import Step, by_autograd, with_states
from bench.tuning import compiled_at_once
from kda.cli.operators import forced
from kda.cli.problems import Problem

SHAPES: tuple[dict[str, Any], ...] = (  # unless sizes are given
    {"H": 12, "T": 8192},
    {"H": 32, "T": 8192},
    {"H": 64, "T": 8192},
    {"H": 96, "T": 8192},
    {"H": 12, "T": 65536},
    {"H": 32, "lengths": (1024,) * 8},
    {"H": 16, "HV": 32, "T": 8192},
    {"H": 32, "T": 8192, "layout": "K-first"},
    {"H": 32, "T": 8192, "K": 64, "V": 64},
)
ALL_GATES = ("H12 T8192", "H32 T8192", "H64 T8192")  # all others: only strong ones
TUNED = ("H32 T8192",)  # where FLA, which tunes itself, is measured if there is little time
PORTABLE = "cuda_prefill_chunk,cuda_backward_chunk"


# Contender, implementation, what forward keeps for backward, and a function that makes a Step of the inputs.
Contender = tuple[str, "str | None", "str | None", Callable[[Inputs], Step]]


def sweep(given: dict[str, list[Any]], names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """All combinations of the sizes, or the cases listed above; of those, only the ones with these names, such as
    H64T8192, H12* or H32*softplus."""
    found = given_cases(Problem(H=32, T=8192), given, "training") if given else []
    for sizes in SHAPES if not given else ():
        p = Problem(**sizes, gate="lower_bound")
        found += [Case(p, "strong")]
        if full_name(found[-1]) in ALL_GATES:
            found += [Case(p, "slow"), Case(replace(p, gate="softplus"), "softplus")]
    return named(found, names, full_name)


def prepare_kda(inputs: Inputs, impl: str | None, saved: bool) -> Step:
    def chunk_kda(**x: Any) -> Any:
        return kda.chunk_kda(**x, disable_recompute=saved)

    # Backward runs in torch's threads, which only the environment reaches.
    step = by_autograd(inputs, chunk_kda)
    return Step(*(_forced(impl, call) for call in step))


def _forced(impl: str | None, call: Call) -> Any:
    def run() -> Any:
        with forced(impl):
            return call()

    return run


def _ours(impl: str | None) -> list[Contender]:
    """The library's choice, and its code for every GPU; or ``impl`` alone, in forward and backward where they have
    an implementation of that name."""
    kept = {"h, v_new": True, "nothing": False}
    names = [impl] if impl else [None, PORTABLE]
    return [("kda", n, what, partial(prepare_kda, impl=n, saved=kept[what])) for n in names for what in kept]


def measured(cases: Sequence[Case], run: Run) -> Iterator[list[Row]]:
    """The rows of one case after the other. With ``few``, FLA is measured only for TUNED."""
    contenders = [*_ours(run.impl), *((peer.name, None, None, peer.prepare) for peer in training_peers.PEERS)]
    for case in cases:
        run.started(case)
        left_out = prefill_peers.TUNED if run.few and full_name(case) not in TUNED else None
        yield [row for c in contenders if c[0] != left_out for row in _row(case, c, run)]


def _row(case: Case, contender: Contender, run: Run) -> Iterator[Row]:
    name, implementation, kept, prepare = contender
    row: Row = {"case": full_name(case), "gate": case.gate, "contender": name}
    row |= {"implementation": implementation, "kept": kept, "problem": asdict(case.problem)}
    with run.noting(label(row), f"{full_name(case)}, {case.gate}: "):
        step = prepare(with_states(Inputs(case)))
        with compiled_at_once():
            step.both()  # compiles and tunes
        row["peak_gib"] = measure.own_bytes(step.both, peak=True) / 2**30
        row["ms"] = measure.graph_milliseconds(step.both, repeats=run.repeats, flush=True)
        row["forward_ms"] = measure.graph_milliseconds(step.forward, repeats=run.repeats, flush=True)
        row["backward_ms"] = row["ms"] - row["forward_ms"]
        yield row


def label(row: Row) -> str:
    return f"{who(row)}, {row['kept']} saved" if row["contender"] == "kda" else who(row)


PEERS = [peer.name for peer in training_peers.PEERS]
SUBJECT = Subject(
    sweep=sweep,
    measured=measured,
    compared=lambda cases, found: over_peers(found, PEERS),
    name_of=lambda case: f"{full_name(case)}, {case.gate}",
    case_of=lambda row: f"{row['case']}, {row['gate']}",
    who=label,
    columns={
        **{f"{part} ms": number(f"{part}_ms", ".3f") for part in ("forward", "backward")},
        "both ms": number("ms", ".3f"),
        "peak GiB": number("peak_gib", ".3f"),
        **ratios(PEERS),
    },
    what=lambda row: "training",
    sizes=("B", "T", "H", "HV", "K", "V", "lengths"),
    told=("kept",),
)

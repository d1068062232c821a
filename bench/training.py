"""Forward and backward on a CUDA device, ours and the peers': which cases, times in CUDA graphs, memory, and how they
compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import kda
from bench import measure, prefill
from bench.measure import Call
from bench.peers import prefill as prefill_peers
from bench.peers import training as training_peers
from bench.prefill import Case, Inputs
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


def sweep(given: dict[str, list[Any]], names: Sequence[str] = ()) -> list[Case]:
    """All combinations of the sizes, or the cases listed above; of those, only the ones with these names, such as
    H64T8192, H12* or H32*softplus."""
    found = prefill.cases_given(Problem(H=32, T=8192), given, "training") if given else []
    for sizes in SHAPES if not given else ():
        p = Problem(**sizes, gate="lower_bound")
        found += [Case(p, "strong")]
        if name_of(found[-1]) in ALL_GATES:
            found += [Case(p, "slow"), Case(replace(p, gate="softplus"), "softplus")]
    return prefill.named(found, names, name_of)


def name_of(case: Case, usual: str = "V-first") -> str:
    """``usual``: the layout that goes without saying."""
    p = case.problem
    sizes = f" K{p.K} V{p.V}" if (p.K, p.V) != (128, 128) else ""
    layout = "" if p.layout == usual else f" {p.layout}"
    return case.name + sizes + layout + (f" {p.dtype}" if p.dtype != "bfloat16" else "")


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


def measured(
    cases: Sequence[Case],
    notes: list[str],
    *,
    impl: str | None = None,
    repeats: int = 7,
    few: bool = False,
    started: Callable[[Case], object] = lambda case: None,
) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of one case after the other. The reason for a missing row goes to ``notes``; ``started`` is
    called before each case. With ``few``, FLA is measured only for TUNED."""
    contenders = [*_ours(impl), *((peer.name, None, None, peer.prepare) for peer in training_peers.PEERS)]
    for case in cases:
        started(case)
        left_out = prefill_peers.TUNED if few and name_of(case) not in TUNED else None
        yield [row for c in contenders if c[0] != left_out for row in _row(case, c, notes, repeats)]


def _row(case: Case, contender: Contender, notes: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    name, implementation, kept, prepare = contender
    row: dict[str, Any] = {"case": name_of(case), "gate": case.gate, "contender": name}
    row |= {"implementation": implementation, "kept": kept, "problem": asdict(case.problem)}
    try:
        step = prepare(with_states(Inputs(case)))
        with compiled_at_once():
            step.both()  # compiles and tunes
        row["peak_gib"] = measure.own_bytes(step.both, peak=True) / 2**30
        row["ms"] = measure.graph_milliseconds(step.both, repeats=repeats, flush=True)
        row["forward_ms"] = measure.graph_milliseconds(step.forward, repeats=repeats, flush=True)
        row["backward_ms"] = row["ms"] - row["forward_ms"]
    except Exception as error:  # an implementation declines the case, a peer is absent or fails
        reason = measure.reason(error, f"{name_of(case)}, {case.gate}: ")
        measure.note_once(notes, f"no row of {label(row)}: {reason}")
        return
    yield row


def compared(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each row how many times as fast as the peers it is, forward and backward together."""
    found = list(found)
    times = {(r["case"], r["gate"], r["contender"]): r["ms"] for r in found}
    for r in found:
        for peer in training_peers.PEERS:
            ms = times.get((r["case"], r["gate"], peer.name))
            r[prefill.over(peer.name)] = ms / r["ms"] if ms and r["contender"] != peer.name else None
    return found


def label(row: dict[str, Any]) -> str:
    if row["contender"] != "kda":
        return str(row["contender"])
    name = f"kda ({row['implementation']})" if row["implementation"] else "kda"
    return f"{name}, {row['kept']} saved"

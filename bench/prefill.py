"""Prefill on a CUDA device, ours and the peers': which cases, times in a CUDA graph, errors, and how they compare."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import kda
from bench import measure
from bench.cases import Case, given_cases, named
from bench.measure import Call
from bench.peers import prefill as prefill_peers
from bench.subject import SHARE, Row, Run, Subject, number, over_peers, ratios, who
from bench.tuning import compiled_at_once
from kda.call.arrays import torch
from kda.cli import problems
from kda.cli.arrays import DeviceSource, copy, widen
from kda.cli.operators import implementations_on
from kda.cli.problems import BYTES, Problem

DEVICE = "cuda"
SLOW_CHANNEL, SLOW_DECAY = 5, -0.001  # in every head, in nats a token, as trained models have
CHECKED_HEADS = 4  # heads are independent: the error of the first ones represents all


PACKED = (1300, 547, 2048, 963, 271, 3063)
SHAPES: tuple[dict[str, Any], ...] = (  # unless sizes are given
    {"H": 96, "T": 8192},
    {"H": 96, "lengths": PACKED},
    {"H": 96, "lengths": (1024,) * 8},
    {"H": 64, "T": 8192},
    {"H": 64, "lengths": (1024,) * 8},
    {"H": 64, "T": 16384, "B": 2},
    {"H": 64, "T": 4096},
    {"H": 64, "T": 1024},
    {"H": 64, "T": 512},
    {"H": 32, "T": 2048},
    {"H": 32, "T": 8192},
    {"H": 32, "T": 32768},
    {"H": 24, "T": 8192},
    {"H": 16, "lengths": (2048,) * 8},
    {"H": 12, "T": 2048},
    {"H": 12, "T": 4096},
    {"H": 12, "T": 8192},
    {"H": 12, "lengths": (2048,) * 4},
    {"H": 12, "T": 65536},
    *({"H": H, "T": T} for H in (96, 12) for T in (64, 128, 256)),
)
SOFTPLUS = (
    *("H96 T8192", "H96 6 lengths, 8192", "H64 T8192", "H32 T2048", "H32 T8192", "H32 T32768", "H16 8 x 2048"),
    *("H12 T2048", "H12 T8192"),
)
QUICK = {  # and the gate with which FLA is measured first, where its time is short
    "H32 T8192": "softplus",
    "H16 8 x 2048": "strong",
    "H64 T8192": "strong",
    "H96 T8192": "strong",
    "H12 T2048": "strong",
}


def sweep(given: dict[str, list[Any]], names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """All combinations of the sizes, or the cases listed above; of those, only the ones with these names, such as
    H64T8192, H12* or H96*slow."""
    found: list[Case] = []
    if given:
        found = given_cases(Problem(H=64, T=8192), given, "prefill")
    else:
        for sizes in SHAPES:
            p = Problem(**sizes, gate="lower_bound")
            found += [Case(p, "strong"), Case(p, "slow")]
            if found[-1].name in SOFTPLUS:
                found.append(Case(replace(p, gate="softplus"), "softplus"))
        if quick:
            found = [case for case in found if case.name in QUICK]
    return named(found, names)


class Inputs:
    """The inputs of a case, always the same ones."""

    def __init__(self, case: Case) -> None:
        p, new = case.problem, DeviceSource(DEVICE)
        self.problem, self.x = p, problems.common(p, new)
        self.x["A_log"] *= 0.1
        self.x["dt_bias"] *= 0.1
        if case.gate == "slow":
            share = SLOW_DECAY / self.x["lower_bound"]  # as a fraction of the bound: a sigmoid
            raw = math.log(share / (1 - share)) / self.x["A_log"].exp() - self.x["dt_bias"][:, SLOW_CHANNEL]
            self.x["g"][..., SLOW_CHANNEL] = raw.to(self.x["g"].dtype)
        self.state = (0.1 * problems.states(p, new, p.N).float()).to(getattr(torch, p.state_dtype))

    def new_out(self) -> Any:
        return torch.full_like(self.x["v"], math.nan)


def least_bytes(p: Problem) -> float:
    """Bytes if inputs are read once, outputs written once, and states read and written."""
    tokens = p.B * p.T * (2 * p.H * p.K + p.HV * (p.K + 2 * p.V + 1)) * BYTES[p.dtype]
    return tokens + 2 * p.N * p.HV * p.K * p.V * BYTES[p.state_dtype]


def small(case: Case) -> bool:
    """Enough for the oracle."""
    p = case.problem
    return p.B * p.T <= 2048 and p.H <= 12


# Contender, implementation, and a function that turns the inputs into a call that returns the outputs and the states.
Contender = tuple[str, "str | None", Callable[[Inputs], Callable[[], Any]]]


def prepare_kda(inputs: Inputs, impl: str | None) -> Call:
    """Ours, in place on the states."""
    out, state = inputs.new_out(), inputs.state.clone()

    def run() -> Any:
        kda.prefill(**inputs.x, state=state, out=out, impl=impl)
        return out, state

    return run


def _ours(impl: str | None) -> list[Contender]:
    return [("kda", name, partial(prepare_kda, impl=name)) for name in implementations_on(DEVICE, "forward", impl)]


@lru_cache(maxsize=4)
def _oracle(case: Case) -> tuple[Any, Any]:
    """Outputs and states of the first heads, in float64 from the same inputs."""
    inputs, heads = Inputs(case), min(CHECKED_HEADS, case.problem.H)
    values = heads * case.problem.HV // case.problem.H
    x = {name: widen(copy(a)) if hasattr(a, "dtype") else a for name, a in inputs.x.items()}
    x |= {name: x[name][:, :, :heads] for name in "qk"} | {name: x[name][:, :, :values] for name in ("v", "g", "beta")}
    x |= {name: x[name][:values] for name in ("A_log", "dt_bias")}
    state = widen(copy(inputs.state))[:, :values].contiguous()
    return kda.prefill(**x, state=state, impl="reference"), state


def _error(x: Any, expected: Any, axis: int) -> float:
    """Relative error of the heads that the oracle has: root mean squares."""
    x = x.narrow(axis, 0, expected.shape[axis]).double().cpu()
    return float((x - expected).norm() / expected.norm())


def _rows(case: Case, contenders: Sequence[Contender], run: Run) -> list[Row]:
    inputs, least, found = Inputs(case), least_bytes(case.problem), list[Row]()
    for contender, name, prepare in contenders:
        row: Row = {"case": case.name, "gate": case.gate, "contender": contender, "implementation": name}
        with run.noting(who(row), f"{case.name}, {case.gate}: "):
            call = prepare(inputs)
            with compiled_at_once():
                out, state = call()  # compiles and tunes
            if small(case):
                expected = _oracle(case)
                row |= {"error_o": _error(out, expected[0], 2), "error_state": _error(state, expected[1], 1)}
            ms = measure.graph_milliseconds(call, repeats=run.repeats, flush=True)
            row |= {"problem": asdict(case.problem), "ms": ms, "least_bytes": least}
            found.append(row | {"share_of_stream_bandwidth": least / ms * 1e-6 / run.rates.bandwidth})
    return found


def measured(cases: Sequence[Case], run: Run) -> Iterator[list[Row]]:
    """For each case: kda with every implementation that takes it, then the peers. With ``few``, FLA, which tunes
    itself, is measured only for QUICK and the cases that share its tuning, and for no case that begins too late."""
    begin = time.monotonic()
    peers: list[Contender] = [(peer.name, None, peer.prepare) for peer in prefill_peers.PEERS]
    tuned = [peer for peer in peers if peer[0] == prefill_peers.TUNED]
    others = [*_ours(run.impl), *(peer for peer in peers if peer not in tuned)]
    with torch.inference_mode():
        for case in cases:
            run.started(case)
            yield _rows(case, others, run)
        for case in _tuned_first(cases, run.few):
            if time.monotonic() - begin > run.seconds:
                run.notes.append(f"no row of {prefill_peers.TUNED} from {case.name}, {case.gate} on: no time left")
                break
            run.started(case)
            yield _rows(case, tuned, run)


def _tuning(case: Case) -> tuple[Any, ...]:
    """FLA tunes itself on its first call, which takes a minute. Cases with the same key share the result."""
    p = case.problem
    return p.H, p.HV, bool(p.lengths), p.gate


def _tuned_first(cases: Sequence[Case], few: bool) -> list[Case]:
    """The cases for which FLA is measured, in this order: after each of QUICK, the cases that need no more tuning."""
    if not few:
        return list(cases)
    quick = [c for called in QUICK.items() for c in cases if (c.name, c.gate) == called]
    return list(dict.fromkeys(c for q in quick for c in (q, *(x for x in cases if _tuning(x) == _tuning(q)))))


def compared(cases: Sequence[Case], found: list[Row]) -> list[Row]:
    """Rows in the order of the cases, each with how many times as fast as the peers it is, and how many times as slow
    as with strong gates."""
    order = {(case.name, case.gate): n for n, case in enumerate(cases)}
    found = over_peers(sorted(found, key=lambda row: order[row["case"], row["gate"]]), PEERS)
    times = {(r["case"], r["gate"], who(r)): r["ms"] for r in found}
    for r in found:
        strong = times.get((r["case"], "strong", who(r)))
        r["times_strong"] = r["ms"] / strong if strong and r["gate"] != "strong" else None
    return found


PEERS = [peer.name for peer in prefill_peers.PEERS]
SUBJECT = Subject(
    sweep=sweep,
    measured=measured,
    compared=compared,
    name_of=lambda case: f"{case.name}, {case.gate}",
    case_of=lambda row: f"{row['case']}, {row['gate']}",
    who=who,
    columns={"ms": number("ms", ".3f"), **SHARE, **ratios(PEERS), "times strong": number("times_strong", ".2f")},
    second={"error of o": number("error_o", ".1e"), "of the state": number("error_state", ".1e")},
    what=lambda row: "prefill",
    sizes=("B", "T", "HV", "K", "lengths"),
)

"""Prefill on a CUDA device, ours and the peers': which cases, times in a CUDA graph, errors, and how they compare."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, TypeVar

import kda
from bench import measure
from bench.measure import Call
from bench.peers import prefill as prefill_peers
from bench.tuning import compiled_at_once
from kda.call.arrays import torch
from kda.cli import problems
from kda.cli.arrays import DeviceSource, copy, widen
from kda.cli.operators import implementations_on
from kda.cli.problems import BYTES, Problem, combinations

DEVICE = "cuda"
SLOW_CHANNEL, SLOW_DECAY = 5, -0.001  # in every head, in nats a token, as trained models have
CHECKED_HEADS = 4  # heads are independent: the error of the first ones represents all


@dataclass(frozen=True)
class Case:
    problem: Problem
    gate: str  # "strong": every channel decays by about 2.5 nats a token; "slow": all but one channel a head do;
    # "softplus": without a lower bound; "log": steps as a stage takes them

    @property
    def name(self) -> str:
        p = self.problem
        heads = f"H{p.H}" if p.HV == p.H else f"H{p.H} HV{p.HV}"
        if p.lengths:
            same = len(set(p.lengths)) == 1
            return f"{heads} {p.N} x {p.lengths[0]}" if same else f"{heads} {p.N} lengths, {p.T}"
        return f"{heads} {f'B{p.B} ' if p.B > 1 else ''}T{p.T}"

    @property
    def checked(self) -> bool:
        """Small enough for the oracle."""
        p = self.problem
        return p.B * p.T <= 2048 and p.H <= 12

    @property
    def tuning(self) -> tuple[Any, ...]:
        """FLA tunes itself on its first call, which takes a minute. Cases with the same key share the result."""
        return self.problem.H, self.problem.HV, bool(self.problem.lengths), self.problem.gate


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
        found = cases_given(Problem(H=64, T=8192), given, "prefill")
    else:
        for sizes in SHAPES:
            p = Problem(**sizes, gate="lower_bound")
            found += [Case(p, "strong"), Case(p, "slow")]
            if found[-1].name in SOFTPLUS:
                found.append(Case(replace(p, gate="softplus"), "softplus"))
        if quick:
            found = [case for case in found if case.name in QUICK]
    return named(found, names)


def cases_given(p: Problem, given: dict[str, list[Any]], operator: str) -> list[Case]:
    """All combinations of the sizes, with strong and slow gates."""
    gates = given.get("gate", ["lower_bound"])
    if "log" in gates:
        raise ValueError(f"--gate: expected lower_bound or softplus for {operator} on cuda, got log")
    return [
        Case(p, gate)
        for p in combinations(p, given | {"gate": gates})
        for gate in (["softplus"] if p.gate == "softplus" else ["strong", "slow"])
    ]


SomeCase = TypeVar("SomeCase", bound=Case)


def named(
    cases: Sequence[SomeCase], names: Sequence[str], name_of: Callable[[SomeCase], str] = lambda case: case.name
) -> list[SomeCase]:
    """The cases that one of ``names`` matches, or all if there are none."""

    def called(case: SomeCase, name: str) -> bool:
        words = [x.replace(" ", "").lower() for x in (name, name_of(case), name_of(case) + case.gate)]
        return any(fnmatch.fnmatchcase(word, words[0]) for word in words[1:])

    for name in names:
        if not any(called(case, name) for case in cases):
            known = ", ".join(dict.fromkeys(name_of(case).replace(" ", "") for case in cases))
            raise ValueError(f"--rows: expected some of {known}, or patterns of them, got {name}")
    return [case for case in cases if not names or any(called(case, name) for name in names)]


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


def _rows(
    case: Case, contenders: Sequence[Contender], bandwidth: float, notes: list[str], repeats: int
) -> list[dict[str, Any]]:
    inputs, least, found = Inputs(case), least_bytes(case.problem), list[dict[str, Any]]()
    for contender, name, prepare in contenders:
        row: dict[str, Any] = {"case": case.name, "gate": case.gate, "contender": contender, "implementation": name}
        try:
            call = prepare(inputs)
            with compiled_at_once():
                out, state = call()  # compiles and tunes
            if case.checked:
                expected = _oracle(case)
                row |= {"error_o": _error(out, expected[0], 2), "error_state": _error(state, expected[1], 1)}
            ms = measure.graph_milliseconds(call, repeats=repeats, flush=True)
        except Exception as error:  # an implementation declines the case, a peer is absent or fails
            reason = measure.reason(error, f"{case.name}, {case.gate}: ")
            measure.note_once(notes, f"no row of {contender}{f' ({name})' if name else ''}: {reason}")
            continue
        row |= {"problem": asdict(case.problem), "ms": ms, "least_bytes": least}
        found.append(row | {"share_of_stream_bandwidth": least / ms * 1e-6 / bandwidth})
    return found


def rows(cases: Sequence[Case], bandwidth: float, notes: list[str], **how: Any) -> list[dict[str, Any]]:
    """All rows of :func:`measured`, with the comparisons of :func:`compared`."""
    return compared(cases, chain.from_iterable(measured(cases, bandwidth, notes, **how)))


def measured(
    cases: Sequence[Case],
    bandwidth: float,
    notes: list[str],
    *,
    impl: str | None = None,
    repeats: int = 7,
    few: bool = False,
    seconds: float = math.inf,
    started: Callable[[Case], object] = lambda case: None,
) -> Iterator[list[dict[str, Any]]]:
    """Yields rows as they are measured. For each case: kda with every implementation that takes it (or with
    ``impl``), then the peers. The reason for a missing row goes to ``notes``. With ``few``, FLA, which tunes itself,
    is measured only for QUICK and the cases that share its tuning, and for no case that begins later than
    ``seconds``. ``bandwidth`` is that of :func:`bench.measure.stream_bandwidth`; ``started`` is called before each
    case."""
    begin = time.monotonic()
    peers: list[Contender] = [(peer.name, None, peer.prepare) for peer in prefill_peers.PEERS]
    tuned = [peer for peer in peers if peer[0] == prefill_peers.TUNED]
    others = [*_ours(impl), *(peer for peer in peers if peer not in tuned)]
    with torch.inference_mode():
        for case in cases:
            started(case)
            yield _rows(case, others, bandwidth, notes, repeats)
        for case in _tuned_first(cases, few):
            if time.monotonic() - begin > seconds:
                notes.append(f"no row of {prefill_peers.TUNED} from {case.name}, {case.gate} on: no time left")
                break
            started(case)
            yield _rows(case, tuned, bandwidth, notes, repeats)


def _tuned_first(cases: Sequence[Case], few: bool) -> list[Case]:
    """The cases for which FLA is measured, in this order: after each of QUICK, the cases that need no more tuning."""
    if not few:
        return list(cases)
    quick = [c for called in QUICK.items() for c in cases if (c.name, c.gate) == called]
    return list(dict.fromkeys(c for q in quick for c in (q, *(other for other in cases if other.tuning == q.tuning))))


def compared(cases: Sequence[Case], found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of the cases, each with how many times as fast as the peers it is, and how many times as slow
    as with strong gates."""
    order = {(case.name, case.gate): n for n, case in enumerate(cases)}
    found = sorted(found, key=lambda row: order[row["case"], row["gate"]])
    times = {(r["case"], r["gate"], r["contender"], r["implementation"]): r["ms"] for r in found}
    for r in found:
        for peer in prefill_peers.PEERS:
            ms = times.get((r["case"], r["gate"], peer.name, None))
            r[over(peer.name)] = ms / r["ms"] if ms and r["contender"] != peer.name else None
        strong = times.get((r["case"], "strong", r["contender"], r["implementation"]))
        r["times_strong"] = r["ms"] / strong if strong and r["gate"] != "strong" else None
    return found


def over(peer: str) -> str:
    """The key in a row."""
    return f"over_{peer.lower()}"


def label(row: dict[str, Any]) -> str:
    return f"kda ({row['implementation']})" if row["contender"] == "kda" else str(row["contender"])

"""Decode and rounds of speculation on a CUDA device, ours and those of peers: which problems, times in a CUDA graph,
and how they compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bench import measure, serving_calls
from bench.measure import Call
from bench.peers import serving as serving_peers
from bench.serving_calls import OPERATORS, Layers, least_bytes
from bench.subject import SHARE, Row, Run, Subject, number
from kda.cli.operators import implementations_on
from kda.cli.problems import Problem, combinations

BASELINE = {True: "SGLang fused_sigmoid", False: "SGLang snapshots + scatter"}  # for one token, for several

USUAL: dict[str, list[Any]] = {"H": [32], "B": [1, 8, 32, 128]}  # where nothing else is given
EVERYTHING: tuple[dict[str, list[Any]], ...] = (  # unless sizes are given; one token comes with each
    {"T": [2, 3, 4, 6], "B": [2**i for i in range(8)]},
    {"T": [2, 3, 4, 6], "H": [64]},
    {"H": [12, 24, 32, 64, 96], "B": [2**i for i in range(9)]},
    {"T": [4], "state_dtype": ["bfloat16"]},
    {"T": [4], "B": [32], "layout": ["K-first"]},
    {"T": [4], "H": [12], "B": [64], "layers": [69]},
)


def sweep(given: dict[str, list[Any]], names: Sequence[str] = (), quick: bool = False) -> list[Problem]:
    """One token, and the given numbers of tokens, in every combination with the other sizes."""
    found: list[Problem] = []
    for sizes in (given,) if given else EVERYTHING:
        tokens = [1, *(t for t in sizes.get("T", []) if t <= 16)]
        found += combinations(Problem(), USUAL | sizes | {"T": tokens})
    return sorted(dict.fromkeys(found), key=lambda p: (p.HV, p.B, p.T))


def measured(swept: Sequence[Problem], run: Run) -> Iterator[list[Row]]:
    """For each problem: kda with every implementation that takes it, then the peers."""
    for p in swept:
        run.started(p)
        layers, found = Layers(p), list[Row]()
        for operator, contender, name, prepare in _contenders(p, run.impl):
            row: Row = {"operator": operator, "contender": contender, "implementation": name}
            row |= {"problem": asdict(p), "layers": layers.count}
            with run.noting(label(row) if contender == "kda" else contender):
                ms = measure.graph_milliseconds(prepare(layers), repeats=run.repeats)
                us = ms / layers.count / OPERATORS[operator].rounds(p) * 1e3
                least = least_bytes(operator, p)
                share = least / us * 1e-3 / run.rates.bandwidth
                found.append(row | {"us": us, "least_bytes": least, "share_of_stream_bandwidth": share})
        yield found


def compared(found: list[Row]) -> list[Row]:
    """Adds to each row how many times faster it is than the baseline, and than our plain form of it."""
    times: dict[tuple[Problem, str], float] = {}  # of the fastest implementation
    for r in found:
        key = Problem(**r["problem"]), r["operator"] if r["contender"] == "kda" else r["contender"]
        times[key] = min(r["us"], times.get(key, math.inf))
    for r in found:
        p, operator = Problem(**r["problem"]), OPERATORS[r["operator"]]
        r["over_baseline"] = r["over_plain"] = None
        if not operator.part and (p, BASELINE[p.T == 1]) in times:
            r["over_baseline"] = times[p, BASELINE[p.T == 1]] / r["us"]
        plain = (p, operator.plain) if operator.plain else (_plain(p), r["operator"])
        if r["contender"] == "kda" and plain in times and plain != (p, r["operator"]):
            r["over_plain"] = times[plain] / r["us"]
    return found


def _plain(p: Problem) -> Problem:
    return replace(p, state_dtype=Problem.state_dtype, layout=Problem.layout)


# Operator, contender, implementation, and a function that makes the call of all layers.
_Contender = tuple[str, str, "str | None", Callable[[Layers], Call]]


def _contenders(p: Problem, impl: str | None) -> Iterator[_Contender]:
    for operator, entry in OPERATORS.items():
        if entry.one_token != (p.T == 1):
            continue
        names: list[str | None] = [None]
        if entry.each:
            names = [*implementations_on(serving_calls.DEVICE, entry.each, impl)]
        for name in names:
            yield operator, "kda", name, partial(entry.prepare, impl=name)
    for peer in serving_peers.PEERS:
        if (p.T == 1) == peer.one_token:
            yield "decode" if p.T == 1 else "verify + flush", peer.name, None, peer.prepare


def label(row: Row) -> str:
    if row["contender"] != "kda":
        return str(row["contender"])
    return f"kda {row['operator']}" + (f" ({row['implementation']})" if row["implementation"] else "")


def about(p: Problem) -> str:
    """Sizes, and the options that differ from the usual ones."""
    usual = Problem().options.split(", ")
    return ", ".join([p.sizes, *(option for option in p.options.split(", ") if option not in usual)])


SUBJECT = Subject(
    sweep=sweep,
    measured=measured,
    compared=lambda swept, found: compared(found),
    name_of=about,
    case_of=lambda row: about(Problem(**row["problem"])),
    who=label,
    columns={
        "us a layer": number("us", ".4g"),
        **SHARE,
        **{f"over {what}": number(f"over_{what}", ".2f") for what in ("baseline", "plain")},
    },
    what=lambda row: "",
    sizes=("B", "T", "HV", "K", "states"),
    told=("operator",),
)

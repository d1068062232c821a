"""Decode and rounds of speculation on a CUDA device, ours and those of peers: which problems, times in a CUDA graph,
and how they compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bench import measure, serving_calls
from bench.measure import Call
from bench.peers import serving as serving_peers
from bench.serving_calls import OPERATORS, Layers, least_bytes
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


def sweep(given: dict[str, list[Any]]) -> list[Problem]:
    """One token, and the given numbers of tokens, in every combination with the other sizes."""
    found: list[Problem] = []
    for sizes in (given,) if given else EVERYTHING:
        tokens = [1, *(t for t in sizes.get("T", []) if t <= 16)]
        found += combinations(Problem(), USUAL | sizes | {"T": tokens})
    return sorted(dict.fromkeys(found), key=lambda p: (p.HV, p.B, p.T))


def rows(
    p: Problem, bandwidth: float, notes: list[str], *, impl: str | None = None, repeats: int = 7
) -> list[dict[str, Any]]:
    """Rows of kda with every implementation that takes the problem (or with ``impl``), then those of the peers. The
    reason for a missing row goes to ``notes``. ``bandwidth`` is that of :func:`bench.measure.stream_bandwidth`."""
    layers = Layers(p)
    found: list[dict[str, Any]] = []
    for operator, contender, name, prepare in _contenders(p, impl):
        try:
            ms = measure.graph_milliseconds(prepare(layers), repeats=repeats)
        except Exception as error:  # an implementation declines the problem, a peer is absent or fails
            what = f" {operator}{f' ({name})' if name else ''}" if contender == "kda" else ""
            measure.note_once(notes, f"no row of {contender}{what}: {measure.reason(error)}")
            continue
        us = ms / layers.count / OPERATORS[operator].rounds(p) * 1e3
        least = least_bytes(operator, p)
        row: dict[str, Any] = {"operator": operator, "contender": contender, "implementation": name}
        row |= {"problem": asdict(p), "layers": layers.count, "us": us, "least_bytes": least}
        found.append(row | {"share_of_stream_bandwidth": least / us * 1e-3 / bandwidth})
    return found


def compare(found: list[dict[str, Any]]) -> None:
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


def label(row: dict[str, Any]) -> str:
    if row["contender"] != "kda":
        return str(row["contender"])
    return f"kda {row['operator']}" + (f" ({row['implementation']})" if row["implementation"] else "")


def about(p: Problem) -> str:
    """Sizes, and the options that differ from the usual ones."""
    usual = Problem().options.split(", ")
    return ", ".join([p.sizes, *(option for option in p.options.split(", ") if option not in usual)])

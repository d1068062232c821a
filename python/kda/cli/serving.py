"""Decode and rounds of speculation on a CUDA device, ours and those of peers: the layers of a model after one another
in a CUDA graph, each with a pool of its own, so that no state is in the L2 cache when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import kda

from . import measure, problems, serving_peers
from .arrays import DeviceSource
from .measure import Call, in_turn
from .operators import device_of
from .problems import BYTES, Problem

DEVICE = "cuda"
STATES = 512 << 20  # bytes of states that a pass touches, at least: several times an L2 cache
BASELINE = {True: "SGLang fused_sigmoid", False: "SGLang snapshots + scatter"}  # for one token, for several


class Layers:
    """What a pass visits: per layer a pool of states and the inputs of B requests, whose slots are random."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.count = max(4, -(-STATES // (p.B * _state_bytes(p))))
        new, slots = DeviceSource(DEVICE), 2 * p.B + 1
        self.pools = problems.states(p, new, self.count * slots).unflatten(0, (self.count, slots))
        self.slots = new.slots(p.B, slots)
        self.accept_len = new.integers([p.T] * p.B)  # all of them, which takes the longest
        self.shared = problems.common(replace(p, B=self.count * p.B), new)
        self.x = {n: self.shared.pop(n).unflatten(0, (self.count, p.B)) for n in ("q", "k", "v", "g", "beta")}
        self.out = new.normal(p.dtype, self.count, p.B, p.T, p.HV, p.V)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Of each layer its number, and the keywords that kda's functions share."""
        given = self.shared | {"state_indices": self.slots}
        for n, state in enumerate(self.pools):
            yield n, {name: x[n] for name, x in self.x.items()} | given | {"state": state, "out": self.out[n]}

    def new_records(self) -> kda.Records:
        p = self.p
        return kda.new_records(p.B, p.T, p.H, p.HV, p.K, p.V, layers=self.count, device=DEVICE)


def sweep(given: dict[str, list[Any]]) -> list[Problem]:
    """One token, and as many as asked for, in every combination with the other sizes."""
    sizes: dict[str, list[Any]] = {"H": [32], "B": [1, 8, 32, 128]} | given
    tokens = [1, *(t for t in sizes.pop("T", []) if t <= 16)]
    return problems.combinations(Problem(), sizes | {"T": tokens})


def rows(
    p: Problem, bandwidth: float, notes: list[str], *, impl: str | None = None, repeats: int = 7
) -> list[dict[str, Any]]:
    """Those of kda with every implementation that takes the problem (or with ``impl``), then those of the peers. Why
    one is missing goes to ``notes``. ``bandwidth`` is that of :func:`kda.cli.measure.stream_bandwidth`."""
    layers = Layers(p)
    found: list[dict[str, Any]] = []
    for operator, contender, name, prepare in _contenders(p, impl):
        try:
            ms = measure.graph_milliseconds(prepare(layers), repeats=repeats)
        except Exception as error:  # an implementation declines the problem, a peer is absent or breaks
            absent = isinstance(error, (ImportError, FileNotFoundError, NotImplementedError))
            reason = str(error) if absent else f"{type(error).__name__}: {error}"
            note = f"no row of {contender}{f' {operator} ({name})' if name else ''}: {reason}"
            if note not in notes:
                notes.append(note)
            continue
        us = ms / layers.count * 1e3
        share = least_bytes(operator, p) / us * 1e-3 / bandwidth
        row: dict[str, Any] = {"operator": operator, "contender": contender, "implementation": name}
        row |= {"problem": asdict(p), "layers": layers.count, "us": us}
        found.append(row | {"share_of_stream_bandwidth": share, "over_baseline": None})
    baseline = next((r["us"] for r in found if r["contender"] == BASELINE[p.T == 1]), None)
    for r in found:
        if baseline and r["operator"] not in ("verify", "flush"):  # which are half a round
            r["over_baseline"] = baseline / r["us"]
    return found


def least_bytes(operator: str, p: Problem) -> float:
    """What a layer must read and write. A whole round could do without records and snapshots."""
    state = p.B * _state_bytes(p)
    tokens = p.B * p.T * (2 * p.H * p.K + p.HV * (p.K + 2 * p.V + 1)) * BYTES[p.dtype]
    records = p.B * p.T * (p.H * p.K + p.HV * (p.K + p.V)) * 4
    return {"verify": state + tokens + records, "flush": 2 * state + records}.get(operator, 2 * state + tokens)


def _state_bytes(p: Problem) -> int:
    return p.HV * p.K * p.V * BYTES[p.state_dtype]


# Operator, contender, implementation, and what makes the call of all layers.
_Contender = tuple[str, str, "str | None", Callable[[Layers], Call]]


def _contenders(p: Problem, impl: str | None) -> Iterator[_Contender]:
    ours = {"decode": _decode} if p.T == 1 else {"verify": _verify, "flush": _flush, "flush_verify": _flush_verify}
    for operator, prepare in ours.items():
        names = kda.implementations(operator)
        for name in [impl] if impl in names else [n for n in names if device_of(n) == DEVICE]:
            yield operator, "kda", name, partial(prepare, impl=name)
    if p.T > 1:
        yield "verify + flush", "kda", None, _verify_and_flush
    for peer in serving_peers.PEERS:
        if (p.T == 1) == peer.one_token:
            yield "decode" if p.T == 1 else "verify + flush", peer.name, None, peer.prepare


def _decode(layers: Layers, impl: str | None) -> Call:
    return in_turn([partial(kda.decode, **x, impl=impl) for _, x in layers])


def _verify(layers: Layers, impl: str | None, records: kda.Records | None = None) -> Call:
    records = records or layers.new_records()
    return in_turn([partial(kda.verify_kvbuffer, **x, records=_of_layer(records, n), impl=impl) for n, x in layers])


def _flush(layers: Layers, impl: str | None, records: kda.Records | None = None) -> Call:
    """One call for all layers."""
    given = {"state_indices": layers.slots, "state_v_first": layers.shared["state_v_first"], "impl": impl}
    records = records or _recorded(layers)
    return partial(kda.flush_kvbuffer_all_layers, layers.pools, records, layers.accept_len, **given)


def _verify_and_flush(layers: Layers) -> Call:
    records = layers.new_records()
    return in_turn([_verify(layers, None, records), _flush(layers, None, records)])


def _flush_verify(layers: Layers, impl: str | None) -> Call:
    last, records = _recorded(layers), layers.new_records()
    given = {"accept_len": layers.accept_len, "impl": impl}
    return in_turn([
        partial(
            kda.flush_verify_kvbuffer, **x, **given, records=_of_layer(records, n), last=_of_layer(last, n)
        )
        for n, x in layers
    ])  # fmt: skip


def _recorded(layers: Layers) -> kda.Records:
    """As a verify leaves them."""
    records = layers.new_records()
    _verify(layers, None, records)()
    return records


def _of_layer(records: kda.Records, n: int) -> kda.Records:
    return kda.Records(records.u[n], records.k[n], records.alpha[n])


def label(row: dict[str, Any]) -> str:
    if row["contender"] != "kda":
        return str(row["contender"])
    return f"kda {row['operator']}" + (f" ({row['implementation']})" if row["implementation"] else "")

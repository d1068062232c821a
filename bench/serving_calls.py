"""Calls of decode and of rounds of speculation for :mod:`bench.serving` to time. A call passes through the layers
of a model one after another, each with its own pool, so that no state is in the L2 cache when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import kda
from bench.measure import Call, in_turn
from kda.call.arrays import torch
from kda.cli import problems
from kda.cli.arrays import DeviceSource
from kda.cli.problems import BYTES, Problem

DEVICE = "cuda"
STATES = 512 << 20  # least bytes of states that a pass touches: several times an L2 cache
RING = 16  # entries, or room for four rounds
TAPS = 4  # of the convolution


class Layers:
    """What a pass visits: for each layer a pool of states and the inputs of B requests with random slots."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.count = p.layers or max(4, -(-STATES // (p.B * state_bytes(p))))
        self.new, slots = DeviceSource(DEVICE), 2 * p.B + 1
        self.pools = problems.states(p, self.new, self.count * slots).unflatten(0, (self.count, slots))
        self.slots = self.new.slots(p.B, slots)
        self.accept_len = self.new.integers([p.T] * p.B)  # all drafts, which takes the longest
        self.shared = problems.common(replace(p, B=self.count * p.B), self.new)
        self.x = {n: self.shared.pop(n).unflatten(0, (self.count, p.B)) for n in ("q", "k", "v", "g", "beta")}
        self.out = self.new.normal(p.dtype, self.count, p.B, p.T, p.HV, p.V)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """For each layer: its number, and the keywords that kda's functions share."""
        given = self.shared | {"state_indices": self.slots}
        for n, state in enumerate(self.pools):
            yield n, {name: x[n] for name, x in self.x.items()} | given | {"state": state, "out": self.out[n]}

    def new_records(self) -> kda.Records:
        p = self.p
        return kda.new_records(p.B, p.T, p.H, p.HV, p.K, p.V, layers=self.count, device=DEVICE)

    def new_rings(self) -> list[kda.Records]:
        """One ring per layer, each with its own cursors."""
        p = self.p
        sizes = (p.B, ring_entries(p), p.H, p.HV, p.K, p.V)
        return [kda.new_records(*sizes, ring=True, device=DEVICE) for _ in range(self.count)]

    def new_convolutions(self) -> list[kda.Conv]:
        """One per layer; a row is q, k and v side by side."""
        rows = torch.cat([self.x[name].flatten(3) for name in "qkv"], -1)
        dtype, D = self.p.dtype, rows.shape[-1]
        weights = self.new.normal(dtype, self.count, D, TAPS)
        states = self.new.normal(dtype, self.count, self.pools.shape[1], D, TAPS - 1)
        return [kda.Conv(*layer, self.slots) for layer in zip(rows, weights, [None] * self.count, states, strict=True)]


def state_bytes(p: Problem) -> int:
    """Bytes of states of a request."""
    return p.HV * p.K * p.V * BYTES[p.state_dtype]


def ring_entries(p: Problem) -> int:
    return max(RING, 4 * p.T)


def ring_rounds(p: Problem) -> int:
    """Rounds from one write of the state to the next: after the last of them, less than room for two more is left."""
    return ring_entries(p) // p.T - 1


def least_bytes(operator: str, p: Problem) -> float:
    """Bytes that a layer must read and write, on a ring in an average round. A round that leaves the state up to date
    could do without records and snapshots."""
    state, D = p.B * state_bytes(p), 2 * p.H * p.K + p.HV * p.V
    tokens = p.B * p.T * (D + p.HV * (p.K + p.V + 1)) * BYTES[p.dtype]
    records = p.B * p.T * (p.H * p.K + p.HV * (p.K + p.V)) * 4
    convolved = state + tokens + records + D * (TAPS + p.B * (TAPS - 1)) * BYTES[p.dtype]  # weights and the last rows
    rounds = ring_rounds(p)  # round i reads the records of i rounds
    ring = (1 + 1 / rounds) * state + tokens + (1 + (rounds + 1) / 2) * records
    special: dict[str, float] = {"verify": state + tokens + records, "flush": 2 * state + records}
    special |= {"conv + verify": convolved, "verify with conv": convolved, "ring decode": ring, "ring verify": ring}
    return special.get(operator, 2 * state + tokens)


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


def _verify_and_flush(layers: Layers, impl: str | None) -> Call:
    records = layers.new_records()
    return in_turn([_verify(layers, impl, records), _flush(layers, impl, records)])


def _flush_verify(layers: Layers, impl: str | None) -> Call:
    last, records = _recorded(layers), layers.new_records()
    given = {"accept_len": layers.accept_len, "impl": impl}
    return in_turn([
        partial(
            kda.flush_verify_kvbuffer, **x, **given, records=_of_layer(records, n), last=_of_layer(last, n)
        )
        for n, x in layers
    ])  # fmt: skip


def _ring(layers: Layers, impl: str | None) -> Call:
    """All rounds from an empty ring to the write of the state, which leaves the ring empty."""
    rings, given = layers.new_rings(), {"accept_len": layers.accept_len, "impl": impl}
    in_turn([partial(kda.verify_kvbuffer, **x, records=rings[n]) for n, x in layers])()  # what the first round accepts
    one = in_turn([partial(kda.flush_verify_kvbuffer, **x, **given, records=rings[n]) for n, x in layers])
    return in_turn([one] * ring_rounds(layers.p))


def _conv_and_verify(layers: Layers, impl: str | None) -> Call:
    """The output of the convolution is read at once, so all layers share one buffer."""
    p, records, calls = layers.p, layers.new_records(), list[Call]()
    convolutions = layers.new_convolutions()
    y = torch.empty_like(convolutions[0].x)
    q, k, v = y.split([p.H * p.K, p.H * p.K, p.HV * p.V], -1)
    convolved = {"q": q.unflatten(-1, (p.H, p.K)), "k": k.unflatten(-1, (p.H, p.K)), "v": v.unflatten(-1, (p.HV, p.V))}
    for n, x in layers:
        conv = convolutions[n]
        front = partial(kda.causal_conv1d_update, conv.x, conv.state, conv.weight, state_indices=conv.indices, out=y)
        calls += [front, partial(kda.verify_kvbuffer, **x | convolved, records=_of_layer(records, n), impl=impl)]
    return in_turn(calls)


def _verify_with_conv(layers: Layers, impl: str | None) -> Call:
    records, convolutions = layers.new_records(), layers.new_convolutions()
    raw: dict[str, Any] = dict.fromkeys("qkv")
    return in_turn([
        partial(kda.verify_kvbuffer, **x | raw, conv=convolutions[n], records=_of_layer(records, n), impl=impl)
        for n, x in layers
    ])  # fmt: skip


def _recorded(layers: Layers) -> kda.Records:
    """Records as a verify leaves them."""
    records = layers.new_records()
    _verify(layers, None, records)()
    return records


def _of_layer(records: kda.Records, n: int) -> kda.Records:
    return kda.Records(records.u[n], records.k[n], records.alpha[n])


@dataclass(frozen=True)
class Operator:
    prepare: Callable[..., Call]  # from layers and the name of an implementation to the call of all layers
    one_token: bool = False  # for T = 1; otherwise for a round of drafts
    each: str = ""  # measured with each of the library's implementations of this operator, else with the default
    plain: str = ""  # the operator that does the same without the optimisation
    part: bool = False  # of a round; not compared with a whole one
    rounds: Callable[[Problem], int] = lambda p: 1  # in the call


# To add a row to the table, add one entry.
OPERATORS = {
    "decode": Operator(_decode, one_token=True, each="decode"),
    "ring decode": Operator(_ring, one_token=True, plain="decode", rounds=ring_rounds),
    "verify": Operator(_verify, each="verify", part=True),
    "flush": Operator(_flush, each="flush", part=True),
    "flush_verify": Operator(_flush_verify, each="flush_verify"),
    "verify + flush": Operator(_verify_and_flush),
    "ring verify": Operator(_ring, plain="flush_verify", rounds=ring_rounds),
    "conv + verify": Operator(_conv_and_verify, part=True),
    "verify with conv": Operator(_verify_with_conv, plain="conv + verify", part=True),
}

"""A small serving engine. Requests arrive with prompts, find prefixes of them in a cache, draft, have some drafts
accepted, miss rounds, fork and leave, in slots full of NaN from earlier requests. Every way to speculate serves the
same requests. Every output of every draft must be that of plain decode, token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import pytest
import torch

import kda
from support import Tensor, assert_close, same_bits

NAN = float("nan")
TOKENS, ROWS, SLOTS = 5, 4, 7  # most tokens of a request in a round, requests in a batch, requests at most
VOCABULARY, EVERY = 30, 64
H, HV, K, V = 1, 2, 9, 6
D = 2 * H * K + HV * V
STATE = (HV, V, K)
OFFSETS = (torch.int32, torch.int64)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Model:
    """One layer: a table with rows for every token, and the recurrence, optionally after a convolution."""

    def __init__(self, conv: bool) -> None:
        torch.manual_seed(1)
        self.x, self.g, self.beta = (torch.randn(VOCABULARY, *s) for s in ((D,), (HV, K), (HV,)))
        self.weight = torch.randn(D, 4) if conv else None
        gate = {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV * K), "use_gate_in_kernel": True}
        self.options = {**gate, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}

    def inputs(self, tokens: Tensor, x: Tensor) -> dict[str, Any]:
        """``tokens`` [B, T]; ``x``: their rows, or the result of the convolution."""
        q, k, v = x.split((H * K, H * K, HV * V), 2)
        parts = {"q": q.unflatten(2, (H, K)), "k": k.unflatten(2, (H, K)), "v": v.unflatten(2, (HV, V))}
        return {**parts, "g": self.g[tokens], "beta": self.beta[tokens], **self.options}

    def run(self, op: Any, sequences: list[list[int]], states: Tensor, tails: Tensor, **more: Any) -> Tensor:
        """Runs ``op`` on packed sequences, one state each, all in place."""
        cu = torch.tensor([0, *accumulate(map(len, sequences))])
        tokens = torch.tensor([*chain(*sequences)]).long()[None]
        x = self.x[tokens]
        if self.weight is not None:
            x = kda.causal_conv1d_update(x, tails, self.weight, cu_seqlens=cu)
        out: Tensor = op(**self.inputs(tokens, x), state=states, cu_seqlens=cu, **more)
        return out


# ---- the ways to serve ----


@dataclass
class Batch:
    tokens: Tensor  # [ROWS, T], or packed [1, ...] by cu
    slots: Tensor  # negative: padding
    lengths: list[int]
    cu: Tensor | None
    rows: Tensor  # [ROWS, TOKENS, D], raw rows of each request


class Way:
    """A pool of states and whatever else the way needs. Unused memory is NaN, or a meaningless number."""

    sits_out = True  # drafts of a request that is not in the next batch may wait for their flush
    exact = False  # has the bits of plain decode

    def __init__(self, model: Model, v_first: bool = True) -> None:
        self.model, self.v_first = model, v_first
        self.pool = torch.full((SLOTS, *STATE) if v_first else (SLOTS, HV, K, V), NAN)
        self.tails = torch.full((SLOTS, D, 3), NAN)
        self.accepted = torch.full((SLOTS,), 77, dtype=torch.int32)  # in the last round, not flushed yet
        self.rows = torch.full((SLOTS, TOKENS, D), NAN)  # of the last round

    def start(self, slot: int, state: Tensor, tail: Tensor) -> None:
        self.pool[slot] = state if self.v_first else state.transpose(-1, -2)
        self.tails[slot], self.accepted[slot] = tail, 0

    def forget(self, slot: int) -> None:
        for x in (self.pool, self.tails, self.rows):
            x[slot] = NAN
        self.accepted[slot] = 1000

    def state(self, slot: int) -> Tensor:
        return self.pool[slot] if self.v_first else self.pool[slot].transpose(-1, -2)

    def call(self, b: Batch) -> dict[str, Any]:
        x, options = self.model.x[b.tokens], {"state": self.pool, "state_v_first": self.v_first, "cu_seqlens": b.cu}
        inputs = self.model.inputs(b.tokens, x)
        if self.model.weight is not None:
            conv = kda.Conv(x, self.model.weight, None, self.tails, b.slots)
            inputs |= {"q": None, "k": None, "v": None, "conv": conv}
        return {**inputs, **options}

    def last_round(self, b: Batch) -> dict[str, Any]:
        """The last round for the rows of this batch; rows of padding are meaningless."""
        rows = {} if self.model.weight is None else {"last_conv_x": self.rows[b.slots.clamp(0).long()]}
        return {"accept_len": self.accepted[b.slots.clamp(0).long()], **rows}

    def accept(self, b: Batch, m: Tensor) -> None:
        for slot, accepted, rows in zip(b.slots.tolist(), m, b.rows, strict=True):
            if slot >= 0:
                self.accepted[slot], self.rows[slot] = accepted, rows

    def flushing(self, slots: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """accept_len and keywords of a flush."""
        at = slots.clamp(0).long()
        conv = {"conv_x": self.rows[at], "conv_state": self.tails, "conv_indices": slots}
        return self.accepted[at], {"state_v_first": self.v_first, **({} if self.model.weight is None else conv)}

    def records(self, entries: int) -> kda.Records:
        records = kda.new_records(SLOTS, entries, H, HV, K, V)
        for x in records[:3]:
            x.fill_(NAN)
        return records


class VerifyThenFlush(Way):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.drafts = self.records(TOKENS)

    def speculate(self, b: Batch) -> Tensor:
        before = self.pool.clone()
        mine = self.drafts._replace(indices=b.slots)
        out: Tensor = kda.verify_kvbuffer(**self.call(b), records=mine, state_indices=b.slots)
        assert same_bits(self.pool, before), "verify writes no state"
        return out

    def accept(self, b: Batch, m: Tensor) -> None:
        super().accept(b, m)
        self.settle(b.slots)

    def settle(self, slots: Tensor) -> None:
        m, more = self.flushing(slots)
        kda.flush_kvbuffer(self.pool, self.drafts._replace(indices=slots), m, state_indices=slots, **more)
        self.accepted[slots[slots >= 0].long()] = 0


class FlushVerify(Way):
    sits_out = False  # two buffers of records take turns

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.drafts, self.last = self.records(TOKENS), self.records(TOKENS)

    def speculate(self, b: Batch) -> Tensor:
        self.last, self.drafts = self.drafts, self.last
        both = {n: x._replace(indices=b.slots) for n, x in (("records", self.drafts), ("last", self.last))}
        out: Tensor = kda.flush_verify_kvbuffer(**self.call(b), **both, state_indices=b.slots, **self.last_round(b))
        return out

    settle = VerifyThenFlush.settle


class Ring(Way):
    def __init__(self, model: Model, entries: int, v_first: bool = True) -> None:
        super().__init__(model, v_first)
        self.buffer = kda.DraftBuffer(SLOTS, TOKENS, H, HV, K, V, entries=entries)
        for x in self.buffer.records[:3]:
            x.fill_(NAN)
        self.buffer.records.ring_count.fill_(10**6)

    def start(self, slot: int, state: Tensor, tail: Tensor) -> None:
        super().start(slot, state, tail)
        self.buffer.reset(int32([-1, slot]))

    def speculate(self, b: Batch) -> Tensor:
        out: Tensor = self.buffer.step(**self.call(b), slots=b.slots, **self.last_round(b))
        return out

    def settle(self, slots: Tensor) -> None:
        m, more = self.flushing(slots)
        self.buffer.flush(self.pool, slots, m, **more)
        self.accepted[slots[slots >= 0].long()] = 0


class Snapshots(Way):
    """decode_mtp keeps the state after every draft, and continues from one of them: no flush, and no records."""

    exact = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.pool = torch.full((SLOTS * (1 + TOKENS), *STATE), NAN)
        self.kept = SLOTS + torch.arange(SLOTS * TOKENS, dtype=torch.int32).view(SLOTS, TOKENS)

    def start(self, slot: int, state: Tensor, tail: Tensor) -> None:
        super().start(slot, state, tail)
        self.pool[self.kept[slot, 0]], self.accepted[slot] = state, 1

    def speculate(self, b: Batch) -> Tensor:
        at, call = b.slots.clamp(0).long(), self.call(b)
        kept = torch.where(b.slots[:, None] >= 0, self.kept[at], -1)
        if "conv" in call:  # which decode advances by all drafts
            call["conv"] = call["conv"]._replace(state=self.tails.clone())
        more = {"snapshots": self.pool, "snapshot_slots": kept, "accepted": self.accepted[at], "update_state": False}
        out: Tensor = kda.decode_mtp(**call, state_indices=b.slots, **more)
        return out

    def accept(self, b: Batch, m: Tensor) -> None:
        for n, slot in enumerate(b.slots.tolist()):
            if slot >= 0 and m[n]:
                self.accepted[slot] = m[n]
                if self.model.weight is not None:
                    only = {"state_indices": b.slots[n : n + 1]}
                    kda.causal_conv1d_update(b.rows[n : n + 1, : m[n]], self.tails, self.model.weight, **only)

    def settle(self, slots: Tensor) -> None:
        for slot in slots[slots >= 0].tolist():
            self.pool[slot] = self.pool[self.kept[slot, self.accepted[slot] - 1]].clone()
            self.pool[self.kept[slot, 0]], self.accepted[slot] = self.pool[slot], 1


# ---- requests ----


@dataclass
class Request:
    slot: int
    text: list[int]  # all tokens known; all but the last have been fed
    state: Tensor  # after the tokens that have been fed, by plain decode
    tail: Tensor
    chance: random.Random = field(repr=False)

    def follower(self, text: list[int]) -> int:
        """What followed the previous occurrence of the last token."""
        before = [i for i, x in enumerate(text[:-1]) if x == text[-1]]
        return text[before[-1] + 1] if before else 0

    def token(self) -> int:
        """The model's choice: mostly what n-grams would predict."""
        return self.follower(self.text) if self.chance.random() < 0.8 else self.chance.randrange(VOCABULARY)

    def drafts(self, n: int) -> list[int]:
        text = list(self.text)
        for _ in range(n):
            text.append(self.follower(text) if self.chance.random() < 0.9 else self.chance.randrange(VOCABULARY))
        return text[len(self.text) - 1 :]


class World:
    """Schedules, decides on tokens, and knows the right results. Its random numbers do not depend on the ways."""

    def __init__(self, conv: bool, seed: int) -> None:
        self.model, self.chance = Model(conv), random.Random(seed)
        rings = [Ring(self.model, 2 * TOKENS), Ring(self.model, 23), Ring(self.model, 64, v_first=False)]
        self.ways: list[Any] = [VerifyThenFlush(self.model), FlushVerify(self.model), *rings, Snapshots(self.model)]
        self.requests: list[Request] = []
        self.prompts = [[self.chance.randrange(VOCABULARY) for _ in range(200)] for _ in range(3)]
        self.cache: dict[tuple[int, ...], int] = {}
        self.checkpoints = torch.full((12, *STATE), NAN)
        self.waiting: set[int] = set()  # slots whose drafts are not flushed yet
        self.counts = dict.fromkeys(("outputs", "accepted", "hits", "forks", "settled"), 0)

    # ---- arriving and leaving ----

    def tail_after(self, tokens: list[int]) -> Tensor:
        rows = torch.cat([torch.zeros(3, D), self.model.x[torch.tensor(tokens).long()]])
        return rows[-3:].t().contiguous()

    def arrive(self, slot: int) -> None:
        """Prefills a prompt from its longest prefix in the cache; leaves checkpoints for later requests."""
        prompt = self.chance.choice(self.prompts)[: self.chance.randrange(1, 200)]
        prompt = prompt + [self.chance.randrange(VOCABULARY) for _ in range(self.chance.randrange(1, 20))]
        fed = prompt[:-1]
        cached = max((m for m in range(0, len(fed) + 1, EVERY) if tuple(fed[:m]) in self.cache), default=0)
        self.counts["hits"] += cached > 0
        state = torch.zeros(1, *STATE)
        if cached:
            state[0] = self.checkpoints[self.cache[tuple(fed[:cached])]]
        tail = self.tail_after(fed[:cached])[None]
        wanted = []
        for m in range(cached + EVERY, len(fed) + 1, EVERY):
            new = len(self.cache) < len(self.checkpoints) and tuple(fed[:m]) not in self.cache
            wanted.append(self.cache.setdefault(tuple(fed[:m]), len(self.cache)) if new else -1)
        keep = {"checkpoints": self.checkpoints, "checkpoint_slots": int32([*wanted, -1])[None]}
        self.model.run(kda.prefill, [fed[cached:]], state, tail, **keep)
        whole, plain = torch.zeros(1, *STATE), torch.zeros(1, *STATE)
        self.model.run(kda.prefill, [fed], whole, self.tail_after([])[None])
        self.model.run(kda.decode, [fed], plain, self.tail_after([])[None])
        assert same_bits(state, whole), "a restored checkpoint is the prefix"
        assert_close({"final_state": plain}, {"final_state": state})
        request = Request(slot, prompt, state[0], self.tail_after(fed), random.Random(self.chance.random()))
        self.begin(request)

    def begin(self, request: Request) -> None:
        self.requests.append(request)
        for way in self.ways:
            way.start(request.slot, request.state, request.tail)

    def settle(self, requests: list[Request], ways: list[Way]) -> None:
        """Afterwards the pool holds the text, and nothing else is needed to continue from it."""
        slots = int32([r.slot for r in requests])
        for way in ways:
            way.settle(slots)
            for r in requests:
                self.counts["settled"] += 1
                assert_close({"final_state": r.state}, {"final_state": way.state(r.slot)}, what=type(way).__name__)
                assert self.model.weight is None or same_bits(way.tails[r.slot], r.tail)
                assert not way.exact or same_bits(way.state(r.slot), r.state)

    def fork(self, parent: Request, slot: int) -> None:
        """Two continuations of one text: the slot is copied, so it must be up to date."""
        self.settle([parent], self.ways)
        self.counts["forks"] += 1
        child = Request(slot, list(parent.text), parent.state, parent.tail, random.Random(self.chance.random()))
        self.requests.append(child)
        for way in self.ways:
            way.start(slot, way.state(parent.slot).clone(), way.tails[parent.slot].clone())

    def come_and_go(self) -> None:
        for r in list(self.requests):
            if self.chance.random() < 0.06:
                self.requests.remove(r)
                for way in self.ways:
                    way.forget(r.slot)
        free = [s for s in range(SLOTS) if all(r.slot != s for r in self.requests)]
        self.chance.shuffle(free)
        if free and self.chance.random() < 0.4:
            self.arrive(free.pop())
        if free and self.requests and self.chance.random() < 0.1:
            self.fork(self.chance.choice(self.requests), free.pop())

    # ---- a round ----

    def round(self) -> None:
        self.come_and_go()
        batch: list[Request | None] = self.chance.sample(self.requests, min(len(self.requests), ROWS))
        batch = [r if self.chance.random() < 0.9 else None for r in batch]
        batch += [None] * (ROWS - len(batch))
        for way in self.ways:
            out = [r for r in self.requests if r not in batch]
            if out and not way.sits_out:
                self.settle(out, [way])

        dense = self.chance.random() < 0.3  # equally many tokens for all, or packed, some requests without any
        T = self.chance.randrange(1, TOKENS + 1)
        lengths = [T if dense else self.chance.randrange(0, TOKENS + 1) for _ in batch]
        nobody = Request(-1, [0], torch.zeros(STATE), torch.zeros(D, 3), self.chance)
        feeds = [(r or nobody).drafts(n)[:n] for r, n in zip(batch, lengths, strict=True)]
        tokens, rows = torch.tensor([*chain(*feeds)]).long(), torch.full((ROWS, TOKENS, D), NAN)
        for row, feed in zip(rows, feeds, strict=True):
            row[: len(feed)] = self.model.x[torch.tensor(feed).long()]
        cu = None if dense else torch.tensor([0, *accumulate(lengths)], dtype=self.chance.choice(OFFSETS))
        slots = int32([r.slot if r else -1 for r in batch])
        b = Batch(tokens.view(ROWS, T) if dense else tokens[None], slots, lengths, cu, rows)

        truth = [torch.stack([getattr(r or nobody, n) for r in batch]) for n in ("state", "tail")]
        plain = self.model.run(kda.decode, feeds, *(x.clone() for x in truth))[0].split(lengths)
        plain = torch.cat([x if r else torch.zeros_like(x) for x, r in zip(plain, batch, strict=True)])
        outputs = [way.speculate(b).view(-1, HV, V) for way in self.ways]
        for way, o in zip(self.ways, outputs, strict=True):
            assert_close({"o": plain}, {"o": o}, what=type(way).__name__)
            assert not way.exact or same_bits(o, plain)
        assert same_bits(outputs[0], outputs[1]), "flush_verify has the bits of flush and verify"

        taken = []
        for r, feed in zip(batch, feeds, strict=True):
            m = 0
            while r and m < len(feed) and feed[m] == r.text[-1]:
                m += 1
                r.text.append(r.token())
            taken.append(m)
        self.model.run(kda.decode, [f[:m] for f, m in zip(feeds, taken, strict=True)], *truth)
        for n, r in enumerate(batch):
            if r:
                r.state, r.tail = truth[0][n].clone(), self.tail_after(r.text[:-1])
        for way in self.ways:
            way.accept(b, int32(taken))
        self.counts["outputs"] += sum(n for r, n in zip(batch, lengths, strict=True) if r)
        self.counts["accepted"] += sum(taken)


@pytest.mark.cuda
@pytest.mark.parametrize("conv", [False, True])
def test_serving(conv: bool) -> None:
    world = World(conv, seed=conv)
    rounds = 1000
    for _ in range(rounds):
        world.round()
    world.settle(world.requests, world.ways)
    # The run was varied: requests drafted, were right now and then, found prefixes, forked.
    counts = world.counts
    assert counts["outputs"] > 4 * rounds and 0.3 < counts["accepted"] / counts["outputs"] < 0.9
    assert min(counts["hits"], counts["forks"]) > rounds / 50

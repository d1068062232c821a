"""Verify, flush and flush_verify with CUDA tensors: the numbers of the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import kda
from drafting import NAN, alike, drafts, given, int32, random_trees, same_records, tokens
from places import DEVICE, FORMS, HERE, LARGE, ORACLE, POOLS, Place, all_same, close, extreme, matches, spaced
from rounds import flush, flush_verify, records_of, rounds, two, verify
from support import Problem, Tensor, half_masked, make, rel_rmse, same_bits, saturated, wild

pytestmark = pytest.mark.usefixtures("kernels")
KINDS: dict[str, dict[str, Any]] = {
    "unbounded": {"K": 64, "V": 64},
    "bounded_k_first": {"gate": "lower_bound", "v_first": False, "G": 4, "K": 128, "V": 64},
    "bfloat16": {"dtype": torch.bfloat16, "gate": "log", "beta": "2sigmoid", **LARGE},
    "tree": {"gate": "lower_bound", "K": 64, "V": 128},
    "tree_k_first": {"G": 1, "H": 3, "v_first": False},
    "any": {},
    "any_bounded_k_first": {"gate": "lower_bound", "v_first": False, "G": 4},
    "any_bfloat16": {"dtype": torch.bfloat16, "gate": "log", "beta": "2sigmoid"},
    "tree_any": {"gate": "lower_bound"},
}


# ---- numbers ----


@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_drafts_and_of_accepted_ones(kind: str, T: int) -> None:
    p, h0 = drafts(T, **KINDS[kind])
    following, _ = drafts(2, seed=1, **KINDS[kind])
    trees = {"parents": random_trees(3, T, T)} if kind.startswith("tree") else {}
    last = {f"last_{n}": x for n, x in trees.items()}
    for dtype in POOLS:
        results = []
        for place in (ORACLE, HERE):
            pool, records = place(h0.to(dtype)), records_of(place, p, T)
            got = {"o": verify(place, p, pool, records, **trees)}
            for m in range(T + 1):
                got[f"state {m}"] = pool.clone()
                flush(place, p, got[f"state {m}"], records, alike(m), **trees)
            results.append(got | dict(zip("uka", records[:3], strict=True)))
        for name, x in results[1].items():
            close(results[0][name], x, f"{dtype} {name.replace(' ', '_')}")
        assert same_bits(pool.cpu(), h0.to(dtype)), "verify writes no state"
        assert same_bits(got["state 0"], pool), "nothing accepted, nothing written"
        assert same_bits(verify(HERE, p, pool, None, **trees), got["o"]), "outputs only"

        for m in {0, 1, T // 2, T}:  # in one pass with the next round: the same bits
            apart, fused, state = records_of(HERE, p, 2), records_of(HERE, p, 2), pool.clone()
            o = verify(HERE, following, got[f"state {m}"], apart)
            o_fused = flush_verify(HERE, following, state, fused, alike(m), records, **last)
            assert same_bits(o_fused, o) and same_bits(state, got[f"state {m}"]) and same_records(fused, apart), m


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, pool: torch.dtype) -> None:
    for sizes in ({}, LARGE):
        p, following, h0 = two(5, **{**FORMS[form], **sizes})
        for parents in (None, random_trees(3, 5)):
            matches(rounds, p, following, h0.to(pool), int32(2, 5, 0), parents, what=sizes)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("K", [1, 5, 30, 64, 100, 128, 256])
def test_sizes(K: int, v_first: bool) -> None:
    for V in (1, 5, 30, 64, 100, 128, 256):
        p, following, h0 = two(3, K=K, V=V, v_first=v_first)
        for pool in POOLS:
            matches(rounds, p, following, h0.to(pool), int32(3, 1, 2), what=(V, pool))


@pytest.mark.parametrize("gate", ["log", "minus_30", "none", "softplus", "lower_bound"])
def test_gates_whose_products_underflow(gate: str) -> None:
    """Decays between tokens are products, never quotients of products, which may be 0."""
    raw = gate in ("softplus", "lower_bound")
    p, following, h0 = two(16, gate=gate if raw else "log", K=64, V=64)
    change: dict[str, Callable[[Problem], Problem]] = {
        "log": wild, "minus_30": lambda p: saturated(p, -30.0), "none": lambda p: saturated(p, 0.0)
    }  # fmt: skip
    for parents in (None, random_trees(3, 16)):
        matches(rounds, change.get(gate, extreme)(p), following, h0, int32(1, 16, 7), parents)


@pytest.mark.parametrize("T", [2, 9, 16])
def test_trees_are_their_chains(T: int) -> None:
    """Every token's output is that of plain decode along its path; so is the state after a flush that ends there."""
    (p, h0), parents = drafts(T, K=64, V=30), random_trees(3, T, T)
    parents[1], parents[2] = -1, torch.arange(-1, T - 1)  # all of them first tokens; a chain
    records, pool = records_of(HERE, p, T), HERE(h0)
    o = verify(HERE, p, pool, records, parents=parents)
    for t in range(T):
        state = pool.clone()
        flush(HERE, p, state, records, alike(t + 1), parents=parents)
        for n in range(3):
            path = [t]
            while (before := int(parents[n, path[0]])) >= 0:
                path.insert(0, before)
            plain = ORACLE(h0[n : n + 1])
            chain = kda.decode(**ORACLE.call(tokens(p, slice(n, n + 1), path)), state=plain)
            close(chain[0, -1], o[n, t], f"{n} {t} o")
            close(plain[0], state[n], f"{n} {t} state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_a_fused_projection(dtype: torch.dtype) -> None:
    """Slices at odd offsets, so that rows are only aligned to their elements."""
    for sizes in ({"K": 30, "V": 5}, LARGE):
        p, following, h0 = two(4, dtype=dtype, gate="log", **sizes)
        got = matches(rounds, p, following, h0, int32(4, 0, 2), slices=True)
        assert all_same(got, rounds(HERE, p, following, h0, int32(4, 0, 2)))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", POOLS)
def test_memory_with_gaps(dtype: torch.dtype, v_first: bool) -> None:
    """Rows of states, records and outputs need not be adjacent, nor aligned."""
    p, following, h0 = two(4, K=64, V=30, v_first=v_first, dtype=torch.bfloat16)
    recorded = [*records_of(HERE, p, 4)[:3], *records_of(HERE, p, 4)[:3]]
    dense = [HERE(h0.to(dtype)), HERE(p.tensors["v"]), *recorded]
    views, memories = zip(*map(spaced, dense), strict=True)
    for state, out, *records in (dense, views):
        last, this = kda.Records(*records[:3]), kda.Records(*records[3:])
        kda.verify_kvbuffer(**HERE.call(p), state=state, records=last, out=out)
        call = HERE.call(following, accept_len=int32(2, 4, 0))
        kda.flush_verify_kvbuffer(**call, state=state, records=this, last=last, out=out)
        flush(HERE, p, state, this, int32(1, 0, 4))
    assert all_same(dense, views) and all(x[..., [0, 1, 2, -2, -1]].isnan().all() for x in memories)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("first_valid_slot", [0, 1])
@pytest.mark.parametrize("tree", [False, True])
def test_packed_requests_padding_and_poison(index: torch.dtype, first_valid_slot: int, tree: bool) -> None:
    """Empty requests, rows without a request, padding, a recycled slot, a request without records. Unused memory
    holds NaN before and the same NaN after. The device treats indices beyond the pool as padding."""
    lengths, slots = [4, 0, 3, 1, 16, 2, 5], [7, first_valid_slot - 1, 1, -3, 5, 2, 3]
    homes = [0, 1, 8, 2, -1, 3, 5]  # of records
    p = make(lengths=lengths, tail=3, H=1, G=2, K=64, V=30, gate="softplus", beta="sigmoid", v_first=True)
    p = p.having(initial_state=None, cu_seqlens=p.options["cu_seqlens"].to(index))
    pool, known = torch.full((9, 2, 30, 64), NAN), torch.tensor([True, True, False, True, True, True, True])
    live = [n for n, s in enumerate(slots) if s >= first_valid_slot]
    for n in live:
        pool[slots[n]] = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(n))
    pool[1] = NAN
    trees = {"parents": random_trees(7, 16)} if tree else {}
    accepted = int32(3, 4, 2, 1, 9, 0, 2)

    def scenario(place: Place) -> dict[str, Tensor]:
        at, records_at = slots, homes
        if place is HERE and DEVICE.type == "cuda":
            at, records_at = [s if s != -3 else 9 for s in slots], [s if s >= 0 else 9 for s in homes]
        shared = {"state_indices": int32(*at), "first_valid_slot": first_valid_slot}
        state, records, more = place(pool), *(records_of(place, p, 17, slots=9) for _ in range(2))
        records, more = (r._replace(indices=place(int32(*records_at))) for r in (records, more))
        out = torch.full_like(p.tensors["v"], NAN)
        o = verify(place, p, state, records, has_initial_state=known, out=out, **trees, **shared)
        unwritten = state.clone()
        state[1] = 0
        fused = state.clone()
        flush(place, p, state, records, accepted, **trees, **shared)
        last = {f"last_{n}": x for n, x in trees.items()}
        o_next = flush_verify(place, p, fused, more, accepted, records, out=out, **last, **trees, **shared)
        kept = {f"{n}{i}": x for i, r in enumerate((records, more)) for n, x in zip("uka", r[:3], strict=True)}
        return {"o": o, "unwritten": unwritten, "state": state, "o_next": o_next, "fused": fused, **kept}

    got = matches(scenario)
    assert same_bits(got["unwritten"].cpu(), pool) and same_bits(got["state"], got["fused"])
    start = pool.clone()
    start[1] = 0
    for slot in [slots[4], slots[5], *(s for s in range(9) if s not in slots)]:  # no records; none accepted; unused
        assert same_bits(got["state"][slot].cpu(), start[slot])
    ends = np.cumsum([0, *lengths])
    for o in (got["o"][0], got["o_next"][0]):
        assert not o[-3:].any() and not any(o[ends[n] : ends[n + 1]].any() for n in range(7) if n not in live)


# ---- numbers that are clamped ----

FAR = 2**31 - 1


def test_clamped_lengths_and_parents() -> None:
    p, following, h0 = two(5, K=30, V=20)
    clamped = [
        (int32(0, 5, 3), None, int32(-5, 6, 3), None),
        (int32(0, 5, 5), None, int32(-FAR - 1, FAR, 99), None),
        (alike(5), [-1, 0, 0, 2, 3], int32(5, 6, FAR), [0, 1, 0, 3, FAR]),
        (alike(5), [-1, 0, -1, 2, 3], alike(5), [FAR, 0, -9, 2, 4]),
        (alike(4), [-1, 0, 1, 2, -1], alike(4), [-7, 77, 2, 1000, -FAR - 1]),
    ]
    for m, tree, odd_m, odd_tree in clamped:
        trees = (None if x is None else int32(*x).expand(3, 5).contiguous() for x in (tree, odd_tree))
        meant, odd = (rounds(HERE, p, following, h0, *x) for x in zip((m, odd_m), trees, strict=True))
        assert all_same(meant, odd), (odd_m, odd_tree)


def test_clamped_cursors() -> None:
    p, h0 = drafts(3, K=30, V=20)
    ring = records_of(HERE, p, 23, ring=True)
    for x in ring[:3]:
        x.uniform_(0, 0.5)

    def results(first: int, count: int, m: int = 2) -> list[Tensor]:
        ring.ring_first.fill_(first)
        ring.ring_count.fill_(count)
        mine, pool = HERE(ring), HERE(h0)
        o = verify(HERE, p, pool, mine)
        flush(HERE, p, pool, ring, alike(m))
        stepped, fused = HERE(ring), HERE(h0)
        return [o, pool, *mine[:3], flush_verify(HERE, p, fused, stepped, alike(m)), fused, *given(stepped)]

    lowest = -FAR - 1
    cursors = {(23, 6): (0, 6), (-1, 6): (22, 6), (FAR, 6): (FAR % 23, 6), (lowest, 6): (lowest % 23, 6)}
    counts = {(3, -1): (3, 0), (3, lowest): (3, 0), (3, 7, 99): (3, 7, 16), (3, 7, -4): (3, 7, 0)}
    for odd, meant in {**cursors, **counts}.items():
        assert all_same(results(*odd)[:2], results(*meant)[:2]), odd  # flush_verify keeps room for its own drafts
    most = results(3, 20, 0)
    for count in (21, 23, FAR):
        assert same_bits(results(3, count, 0)[0], most[0]), "committed entries leave room for the drafts"


# ---- rings ----


@pytest.mark.parametrize("entries", [8, 13, 40])
@pytest.mark.parametrize("dtype", POOLS)
def test_rings_of_a_serving_loop(entries: int, dtype: torch.dtype) -> None:
    """Around the ring again and again: outputs of plain decode, states written in the same rounds as by the oracle,
    and its cursors. A bfloat16 pool is rounded whenever it is written."""
    T, rng, places = 4, np.random.default_rng(entries), (ORACLE, HERE)
    slots, sizes = int32(5, -1, 0, 2), {"N": 4, "K": 64, "V": 30}
    live, (p, h0) = [0, 2, 3], drafts(T, **sizes)
    homes, start = slots[live].long(), torch.full((6, *h0.shape[1:]), NAN, dtype=dtype)
    start[homes] = h0[live].to(dtype)
    pools, buffers, plain = [place(start) for place in places], [], ORACLE(start[homes])
    for place in places:
        buffers.append(kda.DraftBuffer(6, T, 1, 2, 64, 30, entries=entries, device=place(slots).device))
        buffers[-1].records = records_of(place, p, entries, slots=6, ring=True)

    def agree(expected: Tensor, x: Tensor, what: str) -> None:
        if dtype == torch.float32:
            close(expected, x, what)
        else:
            assert rel_rmse(expected, x.cpu()) < 0.02, what

    m, written = alike(0, 4), 0
    for turn in range(40):
        p, _ = drafts(T, seed=turn, **sizes)
        before = [pool.clone() for pool in pools]
        for place, buffer, pool in zip(places, buffers, pools, strict=True):
            o = buffer.step(**place.call(p), state=pool, slots=place(slots), accept_len=place(m))
        states = plain.new_empty(3, T, *plain.shape[1:])
        call = ORACLE.call(tokens(p, live), state=plain)
        agree(kda.decode_mtp(**call, snapshots=states, update_state=False), o[live], f"{turn} o")
        for slot in range(6):
            moved = [not same_bits(a[slot], b[slot]) for a, b in zip(before, pools, strict=True)]
            assert moved[0] == moved[1], (turn, slot)
            written += moved[0]
        for x, y in zip(buffers[0].records[4:], buffers[1].records[4:], strict=True):
            assert torch.equal(x, y.cpu()), "cursors"
        m = torch.from_numpy(rng.integers(0, T + 1, 4)).int()
        for i, length in enumerate(m[live].tolist()):
            if length:
                plain[i] = states[i, length - 1]
        if turn % 20 == 19:
            for place, buffer, pool in zip(places, buffers, pools, strict=True):
                buffer.flush(pool, place(slots), place(m), impl=place.impl)
            agree(plain, pools[1][homes.to(DEVICE)], f"{turn} state")
            m = alike(0, 4)
    assert written and same_bits(pools[1][[1, 3, 4]].cpu(), start[[1, 3, 4]])


@pytest.mark.parametrize("first", [0, 5, 12])
@pytest.mark.parametrize("tree", [False, True])
def test_a_ring_by_hand(first: int, tree: bool) -> None:
    """Committed entries before a chain or a tree, across the end of the slot."""
    T, R = 4, 13
    (p, following, h0), trees = two(T, K=64, V=30), {"parents": random_trees(3, T)} if tree else {}

    def scenario(place: Place) -> dict[str, Tensor]:
        ring, pool = records_of(place, p, R, ring=True), place(h0)
        ring.ring_first.fill_(first)
        for call in (p, following):
            verify(place, call, pool, ring)
            ring.ring_count.add_(place(int32(4, 2, 0)))
        o = verify(place, p, pool, ring, **trees)
        flush(place, p, pool, ring, int32(3, 4, 0), **trees)
        return {"o": o, "state": pool, "u": ring.u, "k": ring.k, "alpha": ring.alpha}

    got = matches(scenario)
    assert same_bits(got["state"][2].cpu(), h0[2])


# ---- a long text ----


ROUNDS, MOST, TEXTS = 10_000, 6, 2  # number of rounds, drafts of each, requests


@cache
def long_text(size: int, dtype: torch.dtype) -> tuple[Problem, Tensor, Tensor, dict[int, Tensor]]:
    """Drafts of all rounds, the states before them, how many are accepted, and the oracle's states after some rounds.
    Memory is long: half of the gates are 0, the others small."""
    p, h0 = drafts(MOST * ROUNDS, N=TEXTS, K=size, V=size, gate="log", decay=10.0)
    p, h0 = half_masked(p), h0.to(dtype)
    accepted = torch.from_numpy(np.random.default_rng(0).integers(0, MOST + 1, (ROUNDS, TEXTS))).int()
    state, after, first = ORACLE(h0), {}, 0
    for last in (0, 63, ROUNDS - 1):
        for n in range(TEXTS):
            turns = [range(MOST * t, MOST * t + int(accepted[t, n])) for t in range(first, last + 1)]
            text = tokens(p, slice(n, n + 1), [*chain(*turns)])
            kda.decode(**ORACLE.call(text), state=state[n : n + 1])
        after[last], first = state.clone(), last + 1
    return p, h0, accepted, after


@pytest.mark.slow
@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("way", ["verify_flush", "flush_verify", "ring"])
def test_ten_thousand_rounds_do_not_drift(way: str, size: int, dtype: torch.dtype) -> None:
    """The error is at most 10 times that of one round, however many there were."""
    p, h0, accepted, exact = long_text(size, dtype)
    here, pool, lengths, errors = HERE(p), HERE(h0), HERE(accepted), []
    turns = [records_of(HERE, p, MOST, slots=TEXTS) for _ in range(2)]
    buffer = kda.DraftBuffer(TEXTS, MOST, 1, 2, size, size, entries=32, device=DEVICE)
    slots, none = HERE(torch.arange(TEXTS).int()), HERE(alike(0, TEXTS))
    for turn in range(ROUNDS):
        call = tokens(here, slice(None), slice(MOST * turn, MOST * (turn + 1))).keywords
        before = lengths[turn - 1] if turn else none
        if way == "verify_flush":
            kda.verify_kvbuffer(**call, state=pool, records=turns[0])
            kda.flush_kvbuffer(pool, turns[0], lengths[turn])
        elif way == "flush_verify":
            kda.flush_verify_kvbuffer(
                **call, state=pool, records=turns[turn % 2], accept_len=before, last=turns[turn % 2 - 1]
            )
        else:
            buffer.step(**call, state=pool, slots=slots, accept_len=before)
        if turn not in exact:
            continue
        now = pool.clone()  # what is not flushed yet is flushed in a copy
        if way == "flush_verify":
            kda.flush_kvbuffer(now, turns[turn % 2], lengths[turn])
        elif way == "ring":
            kda.flush_kvbuffer(now, buffer.records._replace(indices=slots), lengths[turn])
        if dtype == torch.float32:
            close(exact[turn], now, f"{turn} state")
        errors.append(rel_rmse(exact[turn], now.cpu()))
    assert max(errors) <= min(10 * errors[0], 0.0065), errors

"""Speculative decoding is plain decode: outputs and flushed states are what ``kda.decode`` gives token by token. What
the library promises to the bit is compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda
from drafting import (
    NAN,
    REQUESTS,
    alike,
    decoded,
    drafts,
    int32,
    layout,
    near,
    random_trees,
    records_for,
    same_records,
    tokens,
)
from support import Problem, Tensor, assert_close, same_bits, saturated, wild

pytestmark = pytest.mark.cuda
KINDS: dict[str, dict[str, Any]] = {
    "unbounded": {},
    "bounded_k_first": {"gate": "lower_bound", "v_first": False, "G": 4},
    "bfloat16": {"dtype": torch.bfloat16, "gate": "log", "beta": "2sigmoid"},
    "tree": {"gate": "lower_bound"},
    "tree_k_first": {"gate": "softplus", "G": 1, "H": 3, "v_first": False},
}


@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_drafts_and_of_accepted_ones(kind: str, T: int) -> None:
    p, h0 = drafts(T, **KINDS[kind])
    following, _ = drafts(2, seed=1, **KINDS[kind])
    trees = {"parents": random_trees(REQUESTS, T, T)} if kind.startswith("tree") else {}
    expected, states = decoded(p, h0, *trees.values())
    for pool_dtype in (torch.float32, torch.bfloat16):
        pool = h0.to(pool_dtype)
        if pool_dtype == torch.bfloat16:
            expected, states = decoded(p, pool, *trees.values())
        records, before = records_for(p, T), pool.clone()
        o = kda.verify_kvbuffer(**p.keywords, state=pool, records=records, **trees)
        near(o, expected)
        assert same_bits(pool, before), "verify writes no state"
        for m in range(T + 1):
            state = pool.clone()
            kda.flush_kvbuffer(state, records, alike(m), **trees, **layout(p))
            near(o, expected, state, states[m])
            assert m or same_bits(state, before), "nothing accepted, nothing written"

            # In one pass with the next round: the same bits.
            apart, fused, fused_state = records_for(p, 2), records_for(p, 2), pool.clone()
            o_apart = kda.verify_kvbuffer(**following.keywords, state=state, records=apart)
            last = {"last": records, "last_parents": trees.get("parents")}
            o_fused = kda.flush_verify_kvbuffer(
                **following.keywords, state=fused_state, records=fused, accept_len=alike(m), **last
            )
            assert same_bits(o_fused, o_apart) and same_bits(fused_state, state) and same_records(fused, apart)


def test_decode_goes_on_after_every_commit() -> None:
    """Whatever was accepted, 64 more tokens are those of a request that never speculated."""
    T, (p, h0), (rest, _) = 5, drafts(5), drafts(64, seed=1)
    records = records_for(p, T)
    kda.verify_kvbuffer(**p.keywords, state=h0, records=records)
    for m in range(T + 1):
        state, plain = h0.clone(), decoded(p, h0)[1][m]
        kda.flush_kvbuffer(state, records, alike(m))
        near(kda.decode(**rest.keywords, state=state), decoded(rest, plain)[0], state, decoded(rest, plain)[1][-1])


@pytest.mark.parametrize("gates", ["wild", "minus_30", "none"])
def test_gates_whose_products_underflow(gates: str) -> None:
    """Decays between tokens are products, never quotients of products, which may be 0."""
    p, h0 = drafts(16, gate="log", beta="activated")
    change: dict[str, Callable[[], Problem]] = {
        "wild": lambda: wild(p),
        "minus_30": lambda: saturated(p, -30.0),
        "none": lambda: saturated(p, 0.0),
    }
    p = change[gates]()
    for parents in (None, random_trees(REQUESTS, 16)):
        records = records_for(p, 16)
        expected, states = decoded(p, h0, parents)
        near(kda.verify_kvbuffer(**p.keywords, state=h0, records=records, parents=parents), expected)
        for m in (1, 7, 16):
            state = h0.clone()
            kda.flush_kvbuffer(state, records, alike(m), parents=parents)
            assert_close({"final_state": states[m]}, {"final_state": state})


def test_grouped_values_are_repeated_heads() -> None:
    p, h0 = drafts(4, H=2, G=3)
    twice = p.having(**{n: p.tensors[n].repeat_interleave(3, 2) for n in "qk"})
    results = []
    for call in (p, twice):
        records, state = records_for(call, 4), h0.clone()
        o = kda.verify_kvbuffer(**call.keywords, state=state, records=records)
        kda.flush_kvbuffer(state, records, int32(4, 2, 0))
        results.append((o, state))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_scale_is_used() -> None:
    p, h0 = drafts(4)
    o = kda.verify_kvbuffer(**p.keywords, state=h0)
    assert_close({"o": 3 * o}, {"o": kda.verify_kvbuffer(**p.keywords, state=h0, scale=3 * 20**-0.5)})


# ---- rings ----


@pytest.mark.parametrize("entries", [5, 8, 21])
@pytest.mark.parametrize("tree", [False, True])
def test_rings(entries: int, tree: bool) -> None:
    """Cursors moved by hand, past the end of the slot again and again: drafts dropped, committed tokens taken back,
    and a flush if little room is left or branches of a tree were accepted."""
    T, rng = 4, np.random.default_rng(entries)
    p, pool = drafts(T)
    ring = records_for(p, entries, ring=True)
    ring.ring_first.fill_(entries - 1)
    text: list[list[Tensor]] = [[h0] for h0 in pool.clone()]  # states of plain decode; the first is in the pool
    wraps = 0
    for turn in range(40):
        p, _ = drafts(T, seed=turn)
        parents = random_trees(REQUESTS, T, turn) if tree else None
        expected, states = decoded(p, torch.stack([x[-1] for x in text]), parents)
        near(kda.verify_kvbuffer(**p.keywords, state=pool, records=ring, parents=parents), expected)
        accepted = rng.integers(0, T + 1, REQUESTS).tolist()
        for n, m in enumerate(accepted):
            last, count = None if parents is None else parents[n].tolist(), int(ring.ring_count[n])
            chain = last is None or last[: m + 1] == list(range(-1, min(m, T - 1)))
            if count + m <= entries - T and chain:
                text[n] += [x[n] for x in states[1 : m + 1]]
                back = int(rng.integers(0, 3)) if len(text[n]) > 2 else 0
                text[n] = text[n][: len(text[n]) - back]
                ring.ring_count[n] += m - back
                continue
            only = torch.where(torch.arange(REQUESTS) == n, n, -1).int()
            kda.flush_kvbuffer(pool, ring, alike(m), state_indices=only, parents=parents)
            assert_close({"final_state": states[m][n] if m else text[n][-1]}, {"final_state": pool[n]}, what=f"{turn}")
            text[n] = [pool[n].clone()]
            end = int(ring.ring_first[n]) + count + m
            ring.ring_first[n], ring.ring_count[n], wraps = end % entries, 0, wraps + end // entries
    assert wraps > 5


def test_a_ring_is_written_only_when_it_runs_full() -> None:
    T, (p, h0) = 3, drafts(3, N=2)
    buffer, pool, slots = kda.DraftBuffer(2, T, 1, 2, 20, 36, entries=12), h0.clone(), int32(1, 0)
    plain, written = h0.flip(0), []
    for turn in range(8):
        p, _ = drafts(T, N=2, seed=turn)
        before = pool.clone()
        o = buffer.step(**p.keywords, state=pool, slots=slots, accept_len=alike(2 if turn else 0, 2))
        written.append(not same_bits(pool, before))
        expected, states = decoded(p, plain)
        near(o, expected)
        plain = states[2]
    # 12 entries: with 8 committed, there would be no room for two rounds of 3.
    assert written == [False] * 4 + [True] + [False] * 3
    assert buffer.records.ring_count.tolist() == [6, 6] and buffer.records.ring_first.tolist() == [8, 8]
    buffer.flush(pool, slots, alike(2, 2))
    assert_close({"final_state": plain.flip(0)}, {"final_state": pool})
    assert not buffer.records.ring_count.any()


def test_copies_of_a_slot_are_flushed_first() -> None:
    """A state whose ring is not empty is old. After a flush only the slot must be copied, and the ring of the target
    slot is reset."""
    (p, h0), m = drafts(3, N=1), int32(2)
    buffer, pool = kda.DraftBuffer(2, 3, 1, 2, 20, 36, entries=16), torch.cat([h0, h0])
    buffer.step(**p.keywords, state=pool, slots=int32(1), accept_len=int32(0))  # slot 1 was used by another request
    buffer.step(**p.keywords, state=pool, slots=int32(1), accept_len=int32(3))
    buffer.step(**p.keywords, state=pool, slots=int32(0), accept_len=int32(0))
    assert same_bits(pool[0], h0[0]) and buffer.records.ring_count.tolist() == [0, 3]
    buffer.flush(pool, int32(0), m)
    pool[1] = pool[0]
    buffer.reset(int32(1, -1))
    plain = decoded(p, h0)[1][2]
    assert_close({"final_state": plain}, {"final_state": pool[:1]})
    following, _ = drafts(3, N=2, seed=1)
    o = buffer.step(**following.keywords, state=pool, slots=int32(0, 1), accept_len=alike(0, 2))
    near(o, decoded(following, plain.expand(2, -1, -1, -1))[0])


# ---- padding, poison, and other requests ----


@pytest.mark.parametrize("first_valid_slot", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_nobodys_memory_is_neither_read_nor_written(first_valid_slot: int, packed: bool) -> None:
    """Padded rows are zeros; unused slots and entries hold NaN before and the same NaN after."""
    N, T = 6, 4
    p, h0 = drafts(T, N=N)
    lengths = [4, 0, 3, 1, 4, 2] if packed else [T] * N
    if packed:
        cut = {n: torch.cat([p.tensors[n][i, :m] for i, m in enumerate(lengths)] + [p.tensors[n][0]])[None] for n in
               ("q", "k", "v", "g", "beta")}  # fmt: skip
        call = p.having(**cut, cu_seqlens=torch.tensor([0, *np.cumsum(lengths)]))
    else:
        call = p
    slots, homes = [7, first_valid_slot - 1, 1, -3, 5, 2], [0, 1, 8, 2, -1, 3]  # of states, of records
    live = [n for n, s in enumerate(slots) if s >= first_valid_slot]
    pool = torch.full((9, *h0.shape[1:]), NAN)
    for n in live:
        pool[slots[n]] = h0[n]
    start = pool.clone()
    known = torch.tensor([True, True, False, True, True, True])
    h0[2] = 0
    pool[1] = NAN  # recycled
    records = records_for(call, T + 1, slots=9)._replace(indices=int32(*homes))
    shared = {"state_indices": int32(*slots), "first_valid_slot": first_valid_slot}
    out = torch.full_like(call.tensors["v"], NAN)
    before = pool.clone()
    assert kda.verify_kvbuffer(
        **call.keywords, state=pool, records=records, has_initial_state=known, out=out, **shared
    ) is out  # fmt: skip
    assert same_bits(pool, before)
    expected, states = decoded(p, h0)
    at = np.cumsum([0, *lengths])
    for n in range(N):
        o = out[0, at[n] : at[n + 1]] if packed else out[n]
        near(o, expected[n, : lengths[n]] if n in live else torch.zeros_like(o))
    assert not packed or not out[0, at[-1] :].any()
    used = {(homes[n], t) for n in live if homes[n] >= 0 for t in range(lengths[n])}
    for x in records[:3]:
        assert {(s, t) for s in range(9) for t in range(T + 1) if not x[s, t].isnan().all()} == used

    pool[1] = 0
    before, accepted = pool.clone(), [min(m, 2) for m in lengths]
    kda.flush_kvbuffer(pool, records, int32(*accepted), **shared)
    for slot in range(9):
        n = slots.index(slot) if slot in slots else -1
        if n in live and homes[n] >= 0 and accepted[n]:
            assert_close({"final_state": states[accepted[n]][n]}, {"final_state": pool[slot]})
        else:
            assert same_bits(pool[slot], before[slot])

    # The same for flush and verify in one call, and for decode_mtp.
    more: dict[str, Any] = {"records": records_for(call, T, slots=9)._replace(indices=int32(*homes)), **shared}
    kda.flush_verify_kvbuffer(
        **call.keywords, state=before, last=records, accept_len=int32(*accepted), out=out.fill_(NAN), **more
    )
    assert same_bits(before, pool) and same_bits(out, kda.verify_kvbuffer(**call.keywords, state=pool, **shared))
    plain, mtp = start.clone(), start.clone()
    more = {"has_initial_state": known, **shared}
    assert same_bits(
        kda.decode_mtp(**call.keywords, state=mtp, **more), kda.decode(**call.keywords, state=plain, **more)
    )
    assert same_bits(mtp, plain)


@pytest.mark.parametrize("v_first", [True, False])
def test_neighbours_and_threads_change_no_bit(v_first: bool) -> None:
    p, h0 = drafts(7, N=5, V=100, v_first=v_first)
    rounds = p, drafts(7, N=5, V=100, v_first=v_first, seed=1)[0]
    parents, accepted = random_trees(5, 7), int32(3, 0, 7, 5, 1)

    def results(rows: slice, threads: int = 0) -> tuple[Tensor, ...]:
        """All results for these rows alone."""
        first, second = (tokens(r, rows) for r in rounds)
        N, more = len(h0[rows]), {"num_threads": threads}
        a, b, ring = records_for(p, 7, N), records_for(p, 7, N), records_for(p, 20, N, ring=True)
        m, tree, apart, fused, plain = accepted[rows], {"parents": parents[rows]}, *(h0[rows].clone() for _ in range(3))
        o = [kda.verify_kvbuffer(**first.keywords, state=apart, records=a, **tree, **more)]
        kda.flush_kvbuffer(apart, a, m, **tree, **layout(p), **more)
        last = {"last": a, "last_parents": parents[rows]}
        o.append(kda.flush_verify_kvbuffer(**second.keywords, state=fused, records=b, accept_len=m, **last, **more))
        for call in (first, second):
            step = {"records": ring, "accept_len": 0 * m if call is first else m}
            o.append(kda.flush_verify_kvbuffer(**call.keywords, state=plain, **step, **more))
        kda.flush_kvbuffer(plain, ring, m, **layout(p), **more)
        o.append(kda.decode_mtp(**first.keywords, state=plain, **more))
        return *o, apart, fused, plain, *a[:3], *b[:3], *ring[:3]

    whole = results(slice(None))
    for threads in (1, 2, 4):
        assert all(same_bits(a, b) for a, b in zip(results(slice(None), threads), whole, strict=True)), threads
    for n in range(5):
        assert all(same_bits(a, b[n : n + 1]) for a, b in zip(results(slice(n, n + 1)), whole, strict=True)), n


def test_nan_stays_in_its_request() -> None:
    p, h0 = drafts(4)
    rest, _ = drafts(4, seed=1)
    sick = p.having(v=p.tensors["v"].clone().index_fill_(0, torch.tensor([1]), NAN))
    results = []
    for call, others in ((p, h0), (sick, h0.clone().index_fill_(0, torch.tensor([2]), NAN))):
        records, more, pool = records_for(p, 4), records_for(p, 4), others.clone()
        o = [kda.verify_kvbuffer(**call.keywords, state=pool, records=records)]
        o.append(
            kda.flush_verify_kvbuffer(**rest.keywords, state=pool, records=more, accept_len=alike(3), last=records)
        )
        results.append([*o, pool])
    for well, x in zip(*results, strict=True):
        assert same_bits(x[0], well[0]) and x[2].isnan().any() and well.isfinite().all()

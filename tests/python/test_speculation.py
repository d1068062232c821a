"""Speculative decoding is plain decode: outputs and flushed states are what ``kda.decode`` gives token by token. More,
against the float64 oracle, is in tests/gpu/test_speculation.py, for either device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kda
from drafting import (
    REQUESTS,
    alike,
    decoded,
    drafts,
    int32,
    layout,
    near,
    random_trees,
    records_for,
    tokens,
)
from support import Tensor, assert_close, same_bits

pytestmark = pytest.mark.cuda


def test_decode_goes_on_after_every_commit() -> None:
    """Whatever was accepted, 64 more tokens are those of a request that never speculated."""
    T, (p, h0), (rest, _) = 5, drafts(5), drafts(64, seed=1)
    records = records_for(p, T)
    kda.verify_kvbuffer(**p.keywords, state=h0, records=records)
    for m in range(T + 1):
        state, plain = h0.clone(), decoded(p, h0)[1][m]
        kda.flush_kvbuffer(state, records, alike(m))
        near(kda.decode(**rest.keywords, state=state), decoded(rest, plain)[0], state, decoded(rest, plain)[1][-1])


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


# ---- other requests ----


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

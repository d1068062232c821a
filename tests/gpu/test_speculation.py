"""Verify, flush and flush_verify with CUDA tensors: numbers of the float64 oracle, and what is promised to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda
from drafting import NAN, alike, drafts, given, int32, layout, random_trees, records_for, same_records, tokens
from places import (
    DEVICE,
    FORMS,
    HERE,
    LARGE,
    ORACLE,
    POOLS,
    Place,
    all_same,
    captured,
    close,
    extreme,
    far_pool,
    flood,
    matches,
    only_cuda,
    spaced,
    without_synchronisation,
)
from support import Problem, Tensor, half_masked, make, rel_rmse, same_bits, saturated, wild

KINDS: dict[str, dict[str, Any]] = {
    "unbounded": {"K": 64, "V": 64},
    "bounded_k_first": {"gate": "lower_bound", "v_first": False, "G": 4, "K": 128, "V": 64},
    "bfloat16": {"dtype": torch.bfloat16, "gate": "log", "beta": "2sigmoid", **LARGE},
    "tree": {"gate": "lower_bound", "K": 64, "V": 128},
    "tree_k_first": {"G": 1, "H": 3, "v_first": False},
}


def records_of(place: Place, p: Problem, entries: int, **more: Any) -> kda.Records:
    """Full of NaN."""
    moved: kda.Records = place(records_for(p, entries, **more))
    return moved


def verify(place: Place, p: Problem, pool: Tensor, records: kda.Records | None, **more: Any) -> Tensor:
    """From and to memory of the place."""
    o: Tensor = kda.verify_kvbuffer(**place.call(p, **more), state=pool, records=records)
    return o


def flush(place: Place, p: Problem, pool: Tensor, records: kda.Records, m: Tensor, **more: Any) -> None:
    kda.flush_kvbuffer(pool, records, place(m), **layout(p), **place(more), impl=place.impl)


def flush_verify(
    place: Place,
    p: Problem,
    pool: Tensor,
    records: kda.Records,
    m: Tensor,
    last: kda.Records | None = None,
    **more: Any,
) -> Tensor:
    call = place.call(p, accept_len=m, **more)
    o: Tensor = kda.flush_verify_kvbuffer(**call, state=pool, records=records, last=last)
    return o


def rounds(
    place: Place, p: Problem, following: Problem, h0: Tensor, m: Tensor, parents: Tensor | None = None,
    slices: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Verify, flush, and in one call a flush with the verify of the following drafts."""
    N, T = p.tensors["g"].shape[:2]
    trees = {} if parents is None else {"parents": parents}
    pool, fused, a, b, c = place(h0), place(h0), *(records_of(place, p, T, slots=N) for _ in range(3))
    o = verify(place, p, pool, a, slices=slices, **trees)
    flush(place, p, pool, a, m, **trees)
    last = {f"last_{n}": x for n, x in trees.items()}
    o_next = flush_verify(place, following, fused, b, m, a, slices=slices, **last)
    assert same_bits(verify(place, following, pool, c), o_next) and same_records(b, c), "one call, or two"
    results = {"o": o, "state": pool, "fused": fused} | dict(zip("uka", a[:3], strict=True))
    # Where a written state is rounded, now and then to the other neighbour, a round that begins there is another.
    return results if h0.dtype == torch.bfloat16 else {**results, "o_next": o_next, "u_next": b.u}


def two(T: int, **sizes: Any) -> tuple[Problem, Problem, Tensor]:
    """Two rounds' drafts, and states."""
    (p, h0), (following, _) = drafts(T, **sizes), drafts(T, seed=1, **sizes)
    return p, following, h0


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
    """Decays between tokens are products, never quotients of products that may be 0."""
    raw = gate in ("softplus", "lower_bound")
    p, following, h0 = two(16, gate=gate if raw else "log", K=64, V=64)
    change: dict[str, Callable[[Problem], Problem]] = {
        "log": wild, "minus_30": lambda p: saturated(p, -30.0), "none": lambda p: saturated(p, 0.0)
    }  # fmt: skip
    for parents in (None, random_trees(3, 16)):
        matches(rounds, change.get(gate, extreme)(p), following, h0, int32(1, 16, 7), parents)


@pytest.mark.parametrize("T", [2, 9, 16])
def test_trees_are_their_chains(T: int) -> None:
    """Every token's output is that of plain decode along its path; so is the state of a flush that ends there."""
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
    """Of odd offsets, so that no row is aligned to more than an element."""
    for sizes in ({"K": 30, "V": 5}, LARGE):
        p, following, h0 = two(4, dtype=dtype, gate="log", **sizes)
        got = matches(rounds, p, following, h0, int32(4, 0, 2), slices=True)
        assert all_same(got, rounds(HERE, p, following, h0, int32(4, 0, 2)))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", POOLS)
def test_memory_with_gaps(dtype: torch.dtype, v_first: bool) -> None:
    """Rows of states, records and outputs need not lie side by side, nor begin anywhere in particular."""
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
    """Empty requests, rows of nobody, padding, a recycled slot, a request without records. What nobody names holds NaN
    before and the same NaN after; the device takes indices beyond the pool for padding."""
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
    for slot in [slots[4], slots[5], *(s for s in range(9) if s not in slots)]:  # no records; none accepted; nobody's
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
    """Around the ring again and again: outputs of plain decode, states written in the rounds in which the oracle
    writes them, and its cursors. A bfloat16 pool is rounded whenever it is written."""
    T, rng, places = 4, np.random.default_rng(entries), (ORACLE, HERE)
    slots, sizes = int32(5, -1, 0, 2), {"N": 4, "K": 64, "V": 30}
    live, (p, h0) = [0, 2, 3], drafts(T, **sizes)
    homes, start = slots[live].long(), torch.full((6, *h0.shape[1:]), NAN, dtype=dtype)
    start[homes] = h0[live].to(dtype)
    pools, buffers, plain = [place(start) for place in places], [], ORACLE(start[homes])
    for place in places:
        buffers.append(kda.DraftBuffer(6, T, 1, 2, 64, 30, entries=entries))
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
    """Committed entries in front of a chain or a tree, around the end of the slot."""
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


# ---- promises to the bit ----


@pytest.mark.parametrize("sizes", [{"K": 128, "V": 100}, {"K": 20, "V": 36, "v_first": False, "dtype": torch.bfloat16}])
def test_company_changes_no_bit(sizes: dict[str, Any]) -> None:
    """A request alone, in a batch, elsewhere in it, among padding, in two runs."""
    N, T = 40, 7
    p, following, h0 = two(T, N=N, **sizes)
    trees, accepted = random_trees(N, T), torch.arange(N).int() % (T + 1)

    def results(order: list[int]) -> list[Tensor]:
        """Outputs by rows, then what is kept by slots."""
        rows = [max(n, 0) for n in order]
        first, second = (tokens(x, rows) for x in (p, following))
        m, tree, at = accepted[rows], trees[rows], HERE(int32(*order))
        a, b, ring = (records_of(HERE, p, e, slots=N, ring=e > T)._replace(indices=at) for e in (T, T, 20))
        apart, fused, circling = (HERE(h0) for _ in range(3))
        o = [verify(HERE, first, apart, a, parents=tree, state_indices=at)]
        flush(HERE, first, apart, a, m, parents=tree, state_indices=at)
        o.append(flush_verify(HERE, second, fused, b, m, a, last_parents=tree, state_indices=at))
        for call, length in ((first, 0 * m), (second, m)):
            o.append(flush_verify(HERE, call, circling, ring, length, state_indices=at))
        flush(HERE, first, circling, ring, m, state_indices=at)
        return [*o, apart, fused, circling, *a[:3], *b[:3], *ring[:3], ring.ring_first, ring.ring_count]

    whole = results(list(range(N)))
    assert all_same(results(list(range(N))), whole)
    for order in ([0], [39], [3, 36], [-1, 5, -1, -1, 9], list(range(N))[::-1], [-1] * 200 + [7]):
        live = [n for n in order if n >= 0]
        for i, (x, y) in enumerate(zip(results(order), whole, strict=True)):
            rows = [n >= 0 for n in order] if i < 4 else live
            assert same_bits(x[rows], y[live]), (order, i)


def test_nan_stays_in_its_request() -> None:
    p, following, h0 = two(4, N=5, K=64, V=64)
    sick = h0.clone()
    sick[3, 1] = NAN
    well, got = (rounds(HERE, *x, alike(3, 5)) for x in ((p, following, h0), (flood(p, 1), following, sick)))
    for name, x in got.items():
        assert same_bits(x[[0, 2, 4]], well[name][[0, 2, 4]]), name
        assert name in ("k", "a") or x[1].isnan().any(), name
    assert same_bits(got["o"][3, :, 0], well["o"][3, :, 0]), "nor does it leave its head"


def test_inputs_are_never_written() -> None:
    p, following, h0 = two(4, dtype=torch.bfloat16, K=64, V=64)
    trees, m, slots = random_trees(3, 4), int32(-1, 4, 99), int32(2, -1, 0)
    pool, a, b = HERE(h0), records_of(HERE, p, 4), records_of(HERE, p, 4)
    first = HERE.call(p, parents=trees, state_indices=slots, has_initial_state=torch.tensor([True, True, False]))
    second = HERE.call(following, last_parents=trees, state_indices=slots, accept_len=m)
    before = HERE(first), HERE(second)
    kda.verify_kvbuffer(**first, state=pool, records=a)
    recorded = HERE(a)
    kda.flush_verify_kvbuffer(**second, state=pool, records=b, last=a)
    kda.flush_kvbuffer(pool, a, second["accept_len"], state_indices=first["state_indices"], parents=first["parents"])
    assert all_same(first, before[0]) and all_same(second, before[1]) and same_records(a, recorded)


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("tree", [False, True])
def test_all_layers_are_a_loop_over_layers(dtype: torch.dtype, tree: bool) -> None:
    layers, T = 5, 4
    p, h0 = drafts(T, K=64, V=100)
    pools = HERE(torch.randn(layers, 6, *h0.shape[1:]).to(dtype))
    records = records_of(HERE, p, T, fill=0.5, layers=layers)
    for x in records[:3]:
        x.uniform_(0, 0.5)
    records, start = records._replace(indices=HERE(int32(2, -1, 0))), pools.clone()
    shared = HERE({"state_indices": int32(5, 1, 3), **({"parents": random_trees(3, T, 1)} if tree else {})})
    kda.flush_kvbuffer_all_layers(pools, records, HERE(int32(3, 4, 2)), **shared)
    for layer in range(layers):
        one = records._replace(**{n: getattr(records, n)[layer] for n in ("u", "k", "alpha")})
        pool = start[layer].clone()
        kda.flush_kvbuffer(pool, one, HERE(int32(3, 4, 2)), **shared)
        assert same_bits(pool, pools[layer]) and not same_bits(pool, start[layer])
    assert same_bits(pools[:, [0, 1, 2, 4]], start[:, [0, 1, 2, 4]])


@pytest.mark.parametrize(("N", "T"), [(0, 3), (3, 0)])
def test_nothing_to_do(N: int, T: int) -> None:
    p, h0 = drafts(T, N=N)
    a, b, pool = records_of(HERE, p, 3, slots=N), records_of(HERE, p, 3, slots=N), HERE(h0)
    assert verify(HERE, p, pool, a).shape == (N, T, 2, 36)
    flush_verify(HERE, p, pool, b, alike(0, N), a)
    flush(HERE, p, pool, a, alike(0, N))
    assert same_bits(pool.cpu(), h0) and all(x.isnan().all() for x in (*a[:3], *b[:3]))


# ---- a long text ----


@pytest.mark.parametrize("way", ["verify_flush", "flush_verify", "ring"])
def test_two_thousand_rounds_do_not_drift(way: str) -> None:
    """math.md 8: at most 10 times the error of one round, however many there were. The memory is long: half of the
    gates are 0, the others small."""
    T, N, ROUNDS = 6, 2, 2000
    p, h0 = drafts(T * ROUNDS, N=N, K=32, V=32, gate="log", decay=10.0)
    p = half_masked(p)
    here, exact, pool = HERE(p), ORACLE(h0), HERE(h0)
    accepted = torch.from_numpy(np.random.default_rng(0).integers(0, T + 1, (ROUNDS, N))).int()
    lengths = HERE(accepted)
    turns = [records_of(HERE, p, T, slots=N) for _ in range(2)]
    buffer = kda.DraftBuffer(N, T, 1, 2, 32, 32, entries=32, device=DEVICE)
    slots, none = HERE(torch.arange(N).int()), HERE(alike(0, N))
    texts: list[list[int]] = [[] for _ in range(N)]
    for turn in range(ROUNDS):
        call = tokens(here, slice(None), slice(T * turn, T * (turn + 1))).keywords
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
        for n in range(N):
            texts[n] += range(T * turn, T * turn + int(accepted[turn, n]))
        if turn not in (0, 63, ROUNDS - 1):
            continue
        now = pool.clone()  # what is not flushed yet is flushed in a copy
        if way == "flush_verify":
            kda.flush_kvbuffer(now, turns[turn % 2], lengths[turn])
        elif way == "ring":
            kda.flush_kvbuffer(now, buffer.records._replace(indices=slots), lengths[turn])
        for n in range(N):
            kda.decode(**ORACLE.call(tokens(p, slice(n, n + 1), texts[n])), state=exact[n : n + 1])
            texts[n] = []
        close(exact, now, f"{turn} state")


# ---- the device: graphs, streams, large memory, refusals ----


def shuffle(call: dict[str, Any], slots: int, T: int) -> None:
    """New numbers in the memory of a call; some requests are padding. Nothing waits for the device."""
    for name in ("q", "k", "v", "g", "beta"):
        call[name].normal_()
    N = len(call["state_indices"])
    call["state_indices"].copy_(torch.randperm(slots + 3, device=DEVICE)[:N] - 3)
    call["accept_len"].random_(-1, T + 2)
    call["parents"].random_(-2, T)


def one_of_each(memory: dict[str, Any]) -> list[Tensor]:
    """verify, flush, flush_verify with two buffers, and a step of a ring, on one memory; returns what they wrote."""
    call, pool, ring_pool, a, b, ring = (memory[n] for n in ("call", "pool", "ring_pool", "a", "b", "ring"))
    inputs = {n: x for n, x in call.items() if n not in ("parents", "accept_len")}
    parents, m, at = call["parents"], call["accept_len"], call["state_indices"]
    a, b, ring = (r._replace(indices=at) for r in (a, b, ring))
    o = [kda.verify_kvbuffer(**inputs, state=pool, records=a, parents=parents)]
    kda.flush_kvbuffer(pool, a, m, state_indices=at, parents=parents)
    o.append(kda.flush_verify_kvbuffer(**inputs, state=pool, records=b, accept_len=m, last=a, last_parents=parents))
    o.append(kda.flush_verify_kvbuffer(**inputs, state=ring_pool, records=ring, accept_len=m))
    return [*o, pool, ring_pool, *a[:3], *b[:3], *given(ring)]


def memory_of(N: int, T: int, slots: int, seed: int = 0, **sizes: Any) -> dict[str, Any]:
    p, _ = drafts(T, N=N, seed=seed, **sizes)
    _, pool = drafts(1, N=slots, seed=seed, **sizes)
    more = {"state_indices": torch.arange(N).int(), "accept_len": alike(T, N), "parents": random_trees(N, T, seed)}
    kept = {n: records_of(HERE, p, T, slots=slots, fill=0.0) for n in "ab"}
    ring = records_of(HERE, p, 3 * T, slots=slots, ring=True, fill=0.0)
    return {"call": HERE.call(p, **more), "pool": HERE(pool), "ring_pool": HERE(pool), **kept, "ring": ring}


@only_cuda
def test_graphs() -> None:
    """Captured once, replayed with whatever the memory holds then."""
    slots, T = 9, 4
    captive, eager = (memory_of(5, T, slots, K=64, V=64, dtype=torch.bfloat16) for _ in range(2))
    start, results = HERE(captive), []

    def call() -> None:
        results[:] = one_of_each(captive)

    graph = captured(call)
    for name in ("pool", "ring_pool", "a", "b", "ring"):
        for x, y in zip(given_tensors(captive[name]), given_tensors(start[name]), strict=True):
            x.copy_(y)
    torch.manual_seed(0)
    for turn in range(200):
        shuffle(captive["call"], slots, T)
        for name, x in captive["call"].items():
            if isinstance(x, Tensor):
                eager["call"][name].copy_(x)
        graph.replay()
        assert all_same(one_of_each(eager), results), turn


def given_tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else given(x)


@only_cuda
def test_nothing_waits() -> None:
    memory, buffer = memory_of(3, 4, 5), kda.DraftBuffer(5, 4, 1, 2, 20, 36, device=DEVICE)
    call = {n: x for n, x in memory["call"].items() if n not in ("parents", "state_indices", "impl")}
    slots = HERE(int32(4, -1, 0))
    with without_synchronisation():
        for _ in range(3):
            one_of_each(memory)
            buffer.step(**call, state=memory["pool"], slots=slots)
            buffer.flush(memory["pool"], slots, call["accept_len"])


@only_cuda
def test_two_streams_at_once() -> None:
    def work(seed: int) -> list[Tensor]:
        memory = memory_of(32, 8, 40, seed=seed, **LARGE)
        return [x.clone() for _ in range(5) for x in one_of_each(memory)]

    alone = [work(seed) for seed in range(2)]
    memories = [memory_of(32, 8, 40, seed=seed, **LARGE) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    together: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(5):
        for memory, stream, results in zip(memories, streams, together, strict=True):
            with torch.cuda.stream(stream):
                results += [x.clone() for x in one_of_each(memory)]
    torch.cuda.synchronize()
    assert all(all_same(a, b) for a, b in zip(alone, together, strict=True))


@only_cuda
@pytest.mark.parametrize("far", ["float32", "bfloat16", "layers", "u", "k", "alpha"])
def test_slots_beyond_2_31_elements(far: str) -> None:
    """Of the pool, of all layers' pools, of each array of the records."""
    p, following, h0 = two(2, N=1, K=64, V=64)
    h0, at = h0.to(torch.bfloat16 if far == "bfloat16" else torch.float32), {"state_indices": int32(2)}
    expected = rounds(HERE, p, following, h0, int32(2))
    records = records_of(HERE, p, 2)._replace(indices=HERE(int32(2)))
    if far in records._fields:
        records = records._replace(**{far: far_pool(getattr(records, far))})
    pool = HERE(h0.expand(3, -1, -1, -1)) if far in records._fields else far_pool(HERE(h0))
    for x in (pool, getattr(records, far, pool)):
        x[0].fill_(NAN)
    pool[2] = HERE(h0)[0]
    assert same_bits(verify(HERE, p, pool, records, **at), expected["o"])
    if far == "layers":
        kept = kda.Records(*(x[2].expand(3, 1, *x.shape[1:]).contiguous() for x in records[:3]))
        kda.flush_kvbuffer_all_layers(pool[:, None], kept, HERE(int32(2)))
    else:
        pool[1].fill_(NAN)
        more = records_of(HERE, p, 2, slots=1)
        flush_verify(HERE, following, pool, more, int32(2), records, **at)
        assert same_bits(pool[2], expected["fused"][0]) and pool[:2].isnan().all()
        pool[2] = HERE(h0)[0]
        flush(HERE, p, pool, records, int32(2), **at)
        assert pool[:2].isnan().all() and getattr(records, far, pool)[0].isnan().all()
    assert same_bits(pool[2], expected["state"][0])


def refusals() -> dict[str, tuple[type[Exception], str, Callable[[], object]]]:
    p, h0 = drafts(2)
    long, _ = drafts(17)
    pool, a, b, m = HERE(h0), records_of(HERE, p, 17), records_of(HERE, p, 17), alike(1)
    x = torch.zeros(3, 2, 2 * 20 + 2 * 36)
    conv = HERE(kda.Conv(x, torch.zeros(x.shape[2], 4), None, torch.zeros(3, x.shape[2], 3))._asdict())
    raw = {**HERE.call(p), "q": None, "k": None, "v": None, "conv": kda.Conv(**conv), "state": pool}
    rolled = {"conv_x": conv["x"], "conv_state": conv["state"]}
    away = a._replace(alpha=a.alpha.cpu())
    return {
        "verify 17": (ValueError, "16", lambda: verify(HERE, long, pool, a)),
        "flush_verify 17": (ValueError, "16", lambda: flush_verify(HERE, long, pool, a, m, b)),
        "verify conv": (NotImplementedError, "conv", lambda: kda.verify_kvbuffer(**raw, records=a)),
        "flush conv": (NotImplementedError, "conv", lambda: flush(HERE, p, pool, a, m, **rolled)),
        "flush_verify conv": (
            NotImplementedError, "conv",
            lambda: kda.flush_verify_kvbuffer(**raw, records=a, accept_len=HERE(m), last=b, last_conv_x=conv["x"]),
        ),
        "verify records": (ValueError, "^records.alpha: .*got cpu", lambda: verify(HERE, p, pool, away)),
        "flush length": (ValueError, "^accept_len: .*got cpu", lambda: kda.flush_kvbuffer(pool, a, m)),
        "flush records": (ValueError, "^records.alpha: .*got cpu", lambda: flush(HERE, p, pool, away, m)),
        "flush_verify last": (ValueError, "^last.alpha: .*got cpu", lambda: flush_verify(HERE, p, pool, b, m, away)),
        "flush_verify state": (ValueError, "^state: .*got cpu", lambda: flush_verify(HERE, p, h0, a, m, b)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["verify 17", "flush_verify 17", *(
    pytest.param(n, marks=only_cuda)
    for n in ("verify conv", "flush conv", "flush_verify conv", "verify records", "flush length", "flush records",
              "flush_verify last", "flush_verify state")
)])  # fmt: skip
def test_refusals_are_sentences(name: str) -> None:
    kind, sentence, call = refusals()[name]
    with pytest.raises(kind, match=sentence):
        call()

"""Speculative decoding is plain decode: outputs and flushed states are what ``kda.decode`` gives token by token; what
the library promises to the bit is compared to the bit."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda
import kda.compiled
import kda.speculation
from support import Problem, Tensor, assert_close, make, same_bits, saturated, wild

NAN = float("nan")
REQUESTS = 3
SIZES = {"H": 1, "G": 2, "K": 20, "V": 36, "gate": "softplus", "beta": "sigmoid", "v_first": True}


def drafts(T: int, N: int = REQUESTS, seed: int = 0, **changes: Any) -> tuple[Problem, Tensor]:
    """A call of T tokens a request without states, and the states."""
    p = make(B=N, T=T, seed=seed, **{**SIZES, **changes})
    return p.having(initial_state=None), p.tensors["initial_state"]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def alike(m: int, N: int = REQUESTS) -> Tensor:
    return torch.full((N,), m, dtype=torch.int32)


def tokens(p: Problem, *which: Any) -> Problem:
    """Part of the rows and tokens."""
    return p.having(**{n: p.tensors[n][which] for n in ("q", "k", "v", "g", "beta")})


def random_trees(N: int, T: int, seed: int = 0) -> Tensor:
    """Every token hangs on any before it, or on the committed text."""
    rng = np.random.default_rng(seed)
    return torch.tensor([[int(rng.integers(-1, t)) if t else -1 for t in range(T)] for _ in range(N)]).int()


def decoded(p: Problem, h0: Tensor, parents: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Plain decode of one token a call, in float32: outputs, and the states before all and after every token. A token
    goes on from the state of its parent."""
    p, states, o = p.map(Tensor.float), [h0.float()], []
    for t in range(p.tensors["q"].shape[1]):
        before = [t - 1] * len(h0) if parents is None else parents[:, t].clamp(-1).tolist()
        state = torch.stack([states[b + 1][n] for n, b in enumerate(before)])
        o.append(kda.decode(**tokens(p, slice(None), slice(t, t + 1)).keywords, state=state))
        states.append(state)
    return torch.cat(o, 1), states


def records_for(p: Problem, entries: int, slots: int = REQUESTS, fill: float = NAN, **more: Any) -> kda.Records:
    (H, K), (HV, V) = p.tensors["q"].shape[2:], p.tensors["v"].shape[2:]
    records = kda.new_records(slots, entries, H, HV, K, V, **more)
    for x in records[:3]:
        x.fill_(fill)
    return records


def same_records(a: kda.Records, b: kda.Records) -> bool:
    return all(same_bits(x, y) for x, y in zip(given(a), given(b), strict=True))


def given(records: kda.Records) -> list[Any]:
    return [x for x in records if x is not None]


def layout(p: Problem) -> dict[str, Any]:
    return {"state_v_first": p.options["state_v_first"]}


def near(o: Tensor, expected: Tensor, state: Tensor | None = None, expected_state: Tensor | None = None) -> None:
    """float32 to 1e-5; bfloat16 outputs to 0.003."""
    assert_close({"o": expected}, {"o": o}, slack=0.6 if o.dtype == torch.bfloat16 else 1)
    if state is not None and expected_state is not None:
        assert_close({"final_state": expected_state}, {"final_state": state})


# ---- against decode ----

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
    """Decays between tokens are products, never quotients of products that may be 0."""
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
    """Cursors moved by hand, past the end of the slot again and again: drafts given up, committed tokens taken back,
    and where little room is left, or branches of a tree were accepted, a flush."""
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
    # 12 entries: with 8 committed, no room for two rounds of 3 would be left.
    assert written == [False] * 4 + [True] + [False] * 3
    assert buffer.records.ring_count.tolist() == [6, 6] and buffer.records.ring_first.tolist() == [8, 8]
    buffer.flush(pool, slots, alike(2, 2))
    assert_close({"final_state": plain.flip(0)}, {"final_state": pool})
    assert not buffer.records.ring_count.any()


def test_copies_of_a_slot_are_flushed_first() -> None:
    """A state whose ring is not empty is old; after a flush the slot alone is all there is to copy. The ring of the
    slot copied to begins anew."""
    (p, h0), m = drafts(3, N=1), int32(2)
    buffer, pool = kda.DraftBuffer(2, 3, 1, 2, 20, 36, entries=16), torch.cat([h0, h0])
    buffer.step(**p.keywords, state=pool, slots=int32(1), accept_len=int32(0))  # somebody was in slot 1
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


# ---- padding, poison, and neighbours ----


@pytest.mark.parametrize("first_valid_slot", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_nobodys_memory_is_neither_read_nor_written(first_valid_slot: int, packed: bool) -> None:
    """Padded rows are zeros; slots and entries of nobody hold NaN before and the same NaN after."""
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

    # The same for both in one call, and for decode_mtp.
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
        """Of the rows alone."""
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


# ---- the convolution in front ----


def convolved(p: Problem, W: int, bias: bool, seed: int = 0) -> tuple[Problem, kda.Conv]:
    """Raw rows instead of q, k, v, over a pool with one slot more than requests, and in another order."""
    (H, K), (HV, V), random = p.tensors["q"].shape[2:], p.tensors["v"].shape[2:], torch.Generator().manual_seed(seed)
    (N, T), D, dtype = p.tensors["q"].shape[:2], 2 * H * K + HV * V, p.tensors["q"].dtype
    weight, b = torch.randn(D, W, generator=random), torch.randn(D, generator=random) if bias else None
    x, pool = (torch.randn(shape, generator=random).to(dtype) for shape in ((N, T, D), (N + 1, D, W - 1)))
    state = pool.transpose(1, 2).contiguous().transpose(1, 2)  # rows of channels: any strides
    return p.having(q=None, k=None, v=None), kda.Conv(x, weight, b, state, torch.arange(N, 0, -1).int())


def rolled(conv: kda.Conv, m: int) -> Tensor:
    """The convolution's pool after m tokens of every request."""
    state = conv.state.clone()
    kda.causal_conv1d_update(conv.x[:, :m], state, conv.weight, conv.bias, state_indices=conv.indices)
    return state


def separate(p: Problem, conv: kda.Conv, like: Problem) -> Problem:
    """The call without the fused convolution: the operator kda.causal_conv1d_update in front."""
    y = kda.causal_conv1d_update(conv.x, conv.state.clone(), conv.weight, conv.bias, state_indices=conv.indices)
    sizes = [like.tensors[n].shape[2] * like.tensors[n].shape[3] for n in "qkv"]
    parts = y.split(sizes, 2)
    return p.having(**{n: x.unflatten(2, like.tensors[n].shape[2:]) for n, x in zip("qkv", parts, strict=True)})


def raw(p: Problem) -> dict[str, Any]:
    return {"q": None, "k": None, "v": None, **p.keywords}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("W", "bias"), [(4, True), (3, False), (2, True)])
@pytest.mark.parametrize("T", [1, 3, 7])
def test_fused_convolution_is_the_one_in_front(dtype: torch.dtype, W: int, bias: bool, T: int) -> None:
    like, h0 = drafts(T, dtype=dtype, H=2)
    (p, conv), (following, second) = (
        convolved(like, W, bias),
        convolved(drafts(T, dtype=dtype, H=2, seed=1)[0], W, bias),
    )
    plain, state = h0.clone(), h0.clone()
    mtp = conv._replace(state=conv.state.clone())
    o = kda.decode_mtp(**raw(p), state=state, conv=mtp)
    assert same_bits(o, kda.decode(**separate(p, conv, like).keywords, state=plain)) and same_bits(state, plain)
    assert same_bits(mtp.state, rolled(conv, T)), "decode rolls on by all tokens"

    before, a, b = conv.state.clone(), records_for(like, T), records_for(like, T)
    o = kda.verify_kvbuffer(**raw(p), state=h0, records=a, conv=conv)
    assert same_bits(o, kda.verify_kvbuffer(**separate(p, conv, like).keywords, state=h0, records=b))
    assert same_bits(conv.state, before) and same_records(a, b), "verify does not roll it on"
    for m in range(T + 1):
        state, pool, apart = h0.clone(), conv.state.clone(), conv._replace(x=second.x, state=conv.state.clone())
        fused_state, fused = h0.clone(), apart._replace(state=conv.state.clone())
        rows = {"conv_x": conv.x, "conv_state": apart.state, "conv_indices": conv.indices}
        kda.flush_kvbuffer(state, a, alike(m), **rows)
        assert same_bits(apart.state, rolled(conv, m)) and same_bits(pool, conv.state)
        ra, rb = records_for(like, T), records_for(like, T)
        o = kda.verify_kvbuffer(**raw(following), state=state, records=ra, conv=apart)
        last = {"last": a, "accept_len": alike(m), "last_conv_x": conv.x}
        got = kda.flush_verify_kvbuffer(**raw(following), state=fused_state, records=rb, conv=fused, **last)
        assert same_bits(got, o) and same_bits(fused_state, state) and same_bits(fused.state, apart.state)
        assert same_records(ra, rb)


def test_fused_convolution_along_trees() -> None:
    T, W = 9, 4
    like, h0 = drafts(T)
    p, conv = convolved(like, W, True)
    parents, records = random_trees(REQUESTS, T, 3), records_for(like, T)
    o = kda.verify_kvbuffer(**raw(p), state=h0, records=records, conv=conv, parents=parents)
    for n in range(REQUESTS):
        for t in range(T):
            path = [t]
            while (before := int(parents[n, path[0]])) >= 0:
                path.insert(0, before)
            chain = conv._replace(x=conv.x[n : n + 1, path], indices=conv.indices[n : n + 1])
            call = p.having(**{name: p.tensors[name][n : n + 1, path] for name in ("g", "beta")})
            plain, state, pool = h0[n : n + 1].clone(), h0.clone(), conv.state.clone()
            near(o[n, t], kda.decode(**separate(call, chain, like).keywords, state=plain)[0, -1])
            m = torch.where(torch.arange(REQUESTS) == n, t + 1, 0).int()
            rows = {"conv_x": conv.x, "conv_state": pool, "conv_indices": conv.indices}
            kda.flush_kvbuffer(state, records, m, parents=parents, **rows)
            assert_close({"final_state": plain}, {"final_state": state[n : n + 1]})
            assert same_bits(pool, rolled(chain, len(path)))


# ---- decode_mtp: where states come from and go to ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
def test_states_of_decode_mtp(dtype: torch.dtype, v_first: bool) -> None:
    T, S = 4, 6
    p, h0 = drafts(T, v_first=v_first)
    h0 = h0.to(dtype)
    expected_o, expected_states = decoded(p, h0)
    in_place, untouched = h0.clone(), h0.clone()
    o = kda.decode_mtp(**p.keywords, state=in_place)
    assert same_bits(o, kda.decode(**p.keywords, state=untouched)) and same_bits(in_place, untouched)
    near(o, expected_o, in_place, expected_states[-1])

    kept, state = torch.full((REQUESTS, S, *h0.shape[1:]), NAN, dtype=dtype), h0.clone()
    assert same_bits(kda.decode_mtp(**p.keywords, state=state, update_state=False), o)
    assert same_bits(kda.decode_mtp(**p.keywords, state=state, update_state=False, snapshots=kept), o)
    assert same_bits(state, h0) and same_bits(kept[:, T - 1], in_place) and kept[:, T:].isnan().all()
    for t in range(T):
        alone = h0.clone()
        kda.decode(**tokens(p, slice(None), slice(t + 1)).keywords, state=alone)
        assert same_bits(kept[:, t], alone), "the state of a call with the tokens so far"

    # The same in slots of the pool itself; some not wanted.
    pool = torch.full((30, *h0.shape[1:]), NAN, dtype=dtype)
    homes, slots = int32(29, 7, 0), torch.arange(1, 1 + REQUESTS * S).view(REQUESTS, S).int() + 7
    slots[1, 2] = -1
    pool[homes.long()] = h0
    before = pool.clone()
    more = {"state_indices": homes, "snapshot_slots": slots, "snapshots": pool}
    assert same_bits(kda.decode_mtp(**p.keywords, state=pool, update_state=False, **more), o)
    for n, t in np.ndindex(REQUESTS, T):
        if slots[n, t] >= 0:
            before[slots[n, t]] = kept[n, t]
    assert same_bits(pool, before)

    # The next round starts from what was accepted, wherever it was kept; lengths are clamped to 1..S.
    following, _ = drafts(T, v_first=v_first, seed=1)
    starts = torch.stack([kept[n, m - 1] for n, m in enumerate((1, 4, 2))])
    expected = kda.decode(**following.keywords, state=starts)
    accepted = int32(-5, 4, 2)
    o = kda.decode_mtp(**following.keywords, state=pool, update_state=False, accepted=accepted, **more)
    assert same_bits(o, expected)
    for n in range(REQUESTS):
        assert same_bits(pool[slots[n, T - 1]], starts[n])
    o = kda.decode_mtp(**following.keywords, state=state, snapshots=kept, accepted=accepted)
    assert same_bits(o, expected) and same_bits(state, starts) and same_bits(kept[:, T - 1], starts)


# ---- all layers ----


def test_all_layers_are_a_loop_over_layers() -> None:
    layers, T = 5, 4
    p, h0 = drafts(T)
    x = torch.randn(layers, REQUESTS, T, 2 * 20 + 2 * 36)
    for dtype in (torch.float32, torch.bfloat16):
        pools = torch.randn(layers, 6, *h0.shape[1:]).to(dtype)
        tails = torch.randn(layers, 4, x.shape[3], 3)
        records = records_for(p, T, fill=0.5, layers=layers)._replace(indices=int32(2, -1, 0))
        shared = {"state_indices": int32(5, 1, 3), "conv_indices": int32(0, 3, 2)}
        for more in (shared, {**shared, "parents": random_trees(REQUESTS, T, 1)}):
            at_once, rolled_at_once = pools.clone(), tails.clone()
            kda.flush_kvbuffer_all_layers(
                at_once, records, int32(3, 4, 2), conv_x=x, conv_state=rolled_at_once, **more
            )  # fmt: skip
            for layer in range(layers):
                one = records._replace(**{n: getattr(records, n)[layer] for n in ("u", "k", "alpha")})
                pool, tail = pools[layer].clone(), tails[layer].clone()
                kda.flush_kvbuffer(pool, one, int32(3, 4, 2), conv_x=x[layer], conv_state=tail, **more)
                assert same_bits(pool, at_once[layer]) and same_bits(tail, rolled_at_once[layer])
            assert same_bits(at_once[:, [0, 1, 2, 4]], pools[:, [0, 1, 2, 4]]) and not same_bits(at_once, pools)


# ---- memory ----


def test_slices_and_inputs() -> None:
    """Slices of wider rows, before, between and after which nobody reads or writes; inputs stay as they are."""
    p, h0 = drafts(3, dtype=torch.bfloat16, K=17, V=5)
    wide = {n: torch.full((*x.shape[:-1], x.shape[-1] + 3), NAN, dtype=x.dtype) for n, x in p.tensors.items()}
    cut = {n: wide[n][..., 1:-2].copy_(x) for n, x in p.tensors.items()}
    apart = p.having(**{n: cut[n] for n in ("q", "k", "v", "g", "beta")})
    out = torch.full((REQUESTS, 3, 2, 9), NAN, dtype=torch.bfloat16)
    a, b, pool = records_for(p, 3), records_for(p, 3), torch.full((REQUESTS, 1000), NAN)
    spaced = pool[:, 3 : 3 + h0[0].numel()].view(h0.shape).copy_(h0)
    before = {n: x.clone() for n, x in wide.items()}
    o = kda.verify_kvbuffer(**p.keywords, state=h0, records=a)
    kda.verify_kvbuffer(**apart.keywords, state=spaced, records=b, out=out[..., 2:7])
    assert same_bits(out[..., 2:7], o) and same_records(a, b) and out[..., [0, 1, 7, 8]].isnan().all()
    kept = kda.Records(*(x.clone() if isinstance(x, Tensor) else x for x in a))
    for state in (h0, spaced):
        kda.flush_kvbuffer(state, a, alike(2))
    assert same_bits(spaced, h0) and same_records(a, kept) and pool[:, [0, 1, 2]].isnan().all()
    assert all(same_bits(wide[n], before[n]) for n in wide)


def test_slots_beyond_2_31_elements() -> None:
    """Of states and of records; address space only."""
    p, h0 = drafts(2, N=1)
    stride = 2**30 + 4096
    memory = far_memory(2 * stride + 2**16)
    pool = memory.as_strided((3, *h0.shape[1:]), (stride, *h0.stride()[1:]))
    pool[2] = h0[0]
    near_records, state = records_for(p, 2, 1), h0.clone()
    expected = kda.verify_kvbuffer(**p.keywords, state=h0, records=near_records)
    kda.flush_kvbuffer(state, near_records, int32(2))
    shared = {"state_indices": int32(2)}
    far = [
        far_memory(2 * stride + 2**16).as_strided((3, *x.shape[1:]), (stride, *x.stride()[1:]))
        for x in near_records[:3]
    ]
    records = kda.Records(*far, indices=int32(2))
    assert same_bits(kda.verify_kvbuffer(**p.keywords, state=pool, records=records, **shared), expected)
    assert all(same_bits(x[2], y[0]) for x, y in zip(far, near_records[:3], strict=True))
    kda.flush_kvbuffer(pool, records, int32(2), **shared)
    assert same_bits(pool[2], state[0]) and not pool[:2].any()


def far_memory(size: int) -> Tensor:
    try:  # pages that nobody touches take no memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return torch.frombuffer(mmap.mmap(-1, 4 * size, flags=flags), dtype=torch.float32)
    except (OSError, ValueError, MemoryError) as e:
        pytest.skip(f"not enough address space here: {e}")


def arrays(x: Any) -> Any:
    """NumPy instead of torch."""
    if isinstance(x, tuple):
        return type(x)(*map(arrays, x))
    return x.numpy() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("change", [lambda x: x, arrays], ids=["records of torch", "all NumPy"])
def test_numpy(change: Callable[[Any], Any]) -> None:
    like, h0 = drafts(3)
    _, conv = convolved(like, 4, True)
    results = []
    for to in (lambda x: x, arrays):
        keywords = {n: to(x) for n, x in like.keywords.items()}
        state, kept = to(h0.clone()), to(torch.zeros(REQUESTS, 3, *h0.shape[1:]))
        records, more = (change(records_for(like, 3)) for _ in range(2))
        front, m = to(conv._replace(state=conv.state.clone())), to(int32(2, 0, 3))
        o = [kda.decode_mtp(**{**keywords, "q": None, "k": None, "v": None}, state=state, conv=front, snapshots=kept)]
        o.append(kda.verify_kvbuffer(**keywords, state=state, records=records))
        o.append(kda.flush_verify_kvbuffer(**keywords, state=state, records=more, accept_len=m, last=records))
        rows = {"conv_x": front.x, "conv_state": front.state, "conv_indices": front.indices}
        kda.flush_kvbuffer(state, more, m, **rows)
        buffer, slots = kda.DraftBuffer(4, 3, 1, 2, 20, 36), to(int32(3, -1, 0))
        buffer.records = change(buffer.records)
        pool = to(torch.cat([h0, h0[:1]]))
        o += [buffer.step(**keywords, state=pool, slots=slots, accept_len=n) for n in (0 * m, m)]
        buffer.flush(pool, slots, m)
        results.append([*o, state, kept, pool, front.state, *records[:3], *given(buffer.records)])
    for a, b in zip(*results, strict=True):
        assert isinstance(a, Tensor) or not isinstance(b, Tensor)
        assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


# ---- torch.compile ----

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def loop(p: Problem, following: Problem, conv: kda.Conv, state: Tensor, kept: Tensor, pool: Tensor) -> tuple[Any, ...]:
    """Every function, on memory of its own call."""
    records, more = records_for(p, 3, fill=0.0), records_for(p, 3, fill=0.0)
    buffer, m, slots = kda.DraftBuffer(4, 3, 1, 2, 20, 36), int32(2, 0, 3), int32(3, -1, 0)
    o = [kda.decode_mtp(**raw(following), state=state, conv=conv, snapshots=kept)]
    into = {
        "snapshots": pool,
        "snapshot_slots": int32(-1, -1, 3, *[-1] * 6).view(3, 3),
        "state_indices": int32(0, 1, 2),
    }
    o.append(kda.decode_mtp(**p.keywords, state=pool, update_state=False, **into))
    o.append(kda.verify_kvbuffer(**p.keywords, state=state, records=records, parents=int32(-1, -1, 0).expand(3, 3)))
    rows = {"conv_x": conv.x, "conv_state": conv.state, "conv_indices": conv.indices}
    kda.flush_kvbuffer(state, records, m, **rows)
    o.append(kda.flush_verify_kvbuffer(**p.keywords, state=state, records=more, accept_len=m, last=records))
    kda.flush_kvbuffer_all_layers(state[None], kda.Records(*(x[None] for x in more[:3])), m)
    o += [buffer.step(**p.keywords, state=pool, slots=slots, accept_len=n) for n in (0 * m, m)]
    counts = buffer.records.ring_count.clone()
    buffer.flush(pool, slots, m)
    return *(x + 1 for x in o), *records[:3], *given(buffer.records), counts


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend: str) -> None:
    p, h0 = drafts(3)
    following, conv = convolved(p, 4, True)
    torch._dynamo.reset()
    results = []
    for function in (loop, torch.compile(loop, fullgraph=True, backend=backend)):
        own = [h0.clone(), torch.zeros(REQUESTS, 3, *h0.shape[1:]), torch.cat([h0, h0[:1]])]
        front = conv._replace(state=conv.state.clone())
        results.append([*function(p, following, front, *own), *own, front.state])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_operators_are_proper(monkeypatch: pytest.MonkeyPatch) -> None:
    p, h0 = drafts(3)
    following, conv = convolved(p, 4, True)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(kda.speculation, "_compiling", lambda: True)
    monkeypatch.setattr(kda.compiled, "run_in_place", lambda name, *a: calls.append((name, a)))
    loop(p, following, conv, h0, torch.zeros(REQUESTS, 3, *h0.shape[1:]), torch.cat([h0, h0[:1]]))
    assert {name for name, _ in calls} == {"decode_mtp", "verify", "flush", "flush_verify"}
    for name, arguments in calls:
        torch.library.opcheck(getattr(torch.ops.kda, name).default, arguments, test_utils=OPCHECKS)

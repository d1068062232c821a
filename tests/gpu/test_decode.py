"""kda.decode and kda.decode_mtp with CUDA tensors: numbers of the float64 oracle, and bitwise promises."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import kda
from drafting import NAN, drafts, int32, tokens
from places import (
    DEVICE,
    FORMS,
    HERE,
    LARGE,
    POOLS,
    Place,
    all_same,
    extreme,
    far_pool,
    flood,
    matches,
    only_cuda,
    spaced,
)
from support import Problem, Tensor, far_memory, make, same_bits, wild

pytestmark = pytest.mark.usefixtures("kernels")


def decode(place: Place, p: Problem, pool: Tensor | None, **more: Any) -> dict[str, Tensor]:
    """Runs one call on a copy of the pool."""
    call = place.call(p, state=pool, **more)
    o = kda.decode(**call)
    return {"o": o} if pool is None else {"o": o, "state": call["state"]}


# ---- numbers ----


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, pool: torch.dtype) -> None:
    for sizes in ({}, LARGE):
        for T in (1, 4):
            p, h0 = drafts(T, **{**FORMS[form], **sizes})
            matches(decode, p, h0.to(pool), what=(sizes, T))


@pytest.mark.parametrize("T", range(1, 17))
def test_any_number_of_tokens(T: int) -> None:
    for sizes in ({"K": 64, "V": 64}, LARGE):
        p, h0 = drafts(T, dtype=torch.bfloat16, **sizes)
        matches(decode, p, h0, what=sizes)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("K", [1, 5, 30, 64, 100, 128, 256])
def test_sizes(K: int, v_first: bool) -> None:
    for V in (1, 5, 30, 64, 100, 128, 256):
        for pool in POOLS:
            p, h0 = drafts(2, N=2, K=K, V=V, v_first=v_first)
            matches(decode, p, h0.to(pool), what=(V, pool))


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
def test_infinite_gates(gate: str) -> None:
    p, h0 = drafts(8, gate=gate, K=64, V=64)
    p = wild(p) if gate == "log" else extreme(p)
    matches(decode, p, h0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_a_fused_projection(dtype: torch.dtype) -> None:
    """Slices at odd offsets, so that rows are only aligned to their elements."""
    for sizes in ({"K": 30, "V": 5}, LARGE):
        p, h0 = drafts(3, dtype=dtype, gate="log", **sizes)
        matches(decode, p, h0, slices=True)
        assert all_same(decode(HERE, p, h0, slices=True), decode(HERE, p, h0))


def test_any_dtype_of_outputs() -> None:
    p, h0 = drafts(3, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        out = torch.full_like(p.tensors["v"], NAN, dtype=dtype)
        assert matches(decode, p, h0, out=out)["o"].dtype == dtype


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", POOLS)
def test_memory_with_gaps(dtype: torch.dtype, v_first: bool) -> None:
    """Rows of states, snapshots and outputs need not be adjacent, nor aligned."""
    p, h0 = drafts(3, K=64, V=30, v_first=v_first, dtype=torch.bfloat16)
    dense = [HERE(h0.to(dtype)), HERE(torch.zeros(3, 3, *h0.shape[1:], dtype=dtype)), HERE(p.tensors["v"])]
    views, memories = zip(*map(spaced, dense), strict=True)
    for state, kept, out in (dense, views):
        kda.decode_mtp(**HERE.call(p), state=state, snapshots=kept, out=out)
    assert all_same(dense, views) and all(x[..., [0, 1, 2, -2, -1]].isnan().all() for x in memories)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[4, 0, 1, 16, 0, 40], [0, 0, 3], [0], [1] * 50])
def test_packed_requests(lengths: list[int], index: torch.dtype) -> None:
    """Some are empty, and rows that belong to no request follow."""
    p = make(lengths=lengths, tail=3, H=1, G=2, K=64, V=30, gate="softplus", beta="sigmoid", v_first=True)
    p = p.having(initial_state=None, cu_seqlens=p.options["cu_seqlens"].to(index))
    h0 = torch.randn(len(lengths), 2, 30, 64, generator=torch.Generator().manual_seed(5))
    got = matches(decode, p, h0, out=torch.full_like(p.tensors["v"], NAN))
    assert not got["o"][:, -3:].any()
    empty = [n for n, length in enumerate(lengths) if not length]
    assert same_bits(got["state"][empty].cpu(), h0[empty])


def test_no_state_is_zeros() -> None:
    p, h0 = drafts(3, K=64, V=64)
    got = matches(decode, p, None)
    assert same_bits(got["o"], decode(HERE, p, torch.zeros_like(h0))["o"])


@pytest.mark.parametrize(("N", "T"), [(0, 3), (3, 0)])
def test_nothing_to_do(N: int, T: int) -> None:
    p, h0 = drafts(T, N=N)
    got = decode(HERE, p, h0)
    assert got["o"].shape == (N, T, 2, 36) and same_bits(got["state"].cpu(), h0)


def padded(place: Place, p: Problem, pool: Tensor, slots: list[int], **more: Any) -> dict[str, Tensor]:
    """With the oracle, slots beyond the pool become -1, because it refuses them."""
    at = slots if place is HERE else [s if s < len(pool) else -1 for s in slots]
    return decode(place, p, pool, state_indices=int32(*at), **more)


BEYOND = [9, 10, 2**31 - 1]  # a pool of 9 slots


@pytest.mark.parametrize("nowhere", [[-3], pytest.param(BEYOND, marks=only_cuda)])
@pytest.mark.parametrize("first_valid_slot", [0, 1])
@pytest.mark.parametrize("pool_dtype", POOLS)
def test_padding_in_a_poisoned_pool(pool_dtype: torch.dtype, first_valid_slot: int, nowhere: list[int]) -> None:
    """Padded rows are zeros and touch nothing. A slot without an initial state is not read, and unused slots are not
    either. Unlike the CPU, the device accepts indices beyond the pool, as padding."""
    usual = {"dtype": torch.bfloat16}
    forms = [(3, {}), (1, usual), (1, {**usual, "v_first": False})]
    for index, (T, form) in product(nowhere, forms):
        slots = [7, first_valid_slot - 1, 1, index, 5, 2]
        live = [n for n, s in enumerate(slots) if first_valid_slot <= s < 9]
        p, h0 = drafts(T, N=6, K=64, V=64, **form)
        pool = torch.full((9, *h0.shape[1:]), NAN, dtype=pool_dtype)
        for n in live:
            pool[slots[n]] = h0[n]
        pool[1] = NAN  # recycled: without an initial state
        known = torch.tensor([True, True, False, True, True, True])

        more = {"first_valid_slot": first_valid_slot, "out": torch.full_like(p.tensors["v"], NAN)}
        got = matches(padded, p, pool, slots, has_initial_state=known, **more)
        assert not got["o"][[n for n in range(6) if n not in live]].any()
        nobodys = [s for s in range(9) if s not in [slots[n] for n in live]]
        assert same_bits(got["state"][nobodys].cpu(), pool[nobodys])


# ---- decode_mtp: where states come from and go to ----


@pytest.mark.parametrize("size", [64, 128])  # with 128, bf16 is on the fast path
@pytest.mark.parametrize("form", ["decays", "bf16", "bf16_bounded_k_first"])
@pytest.mark.parametrize("pool_dtype", POOLS)
def test_snapshots(form: str, pool_dtype: torch.dtype, size: int) -> None:
    """Snapshots in separate rows: those of the oracle, and bitwise the states of plain decode with the tokens so
    far."""
    T, S = 4, 6
    p, h0 = drafts(T, K=size, V=size, **FORMS[form])
    h0 = h0.to(pool_dtype)

    def scenario(place: Place, **more: Any) -> dict[str, Tensor]:
        call = place.call(p, state=h0, snapshots=torch.full((3, S, *h0.shape[1:]), NAN, dtype=pool_dtype), **more)
        return {"o": kda.decode_mtp(**call), "state": call["state"], "kept": call["snapshots"]}

    got, frozen = matches(scenario), scenario(HERE, update_state=False)
    assert same_bits(frozen["state"].cpu(), h0) and same_bits(frozen["kept"], got["kept"])
    for t in range(T):
        plain = decode(HERE, tokens(p, slice(None), slice(t + 1)), h0)
        assert same_bits(got["kept"][:, t], plain["state"]) and same_bits(got["o"][:, : t + 1], plain["o"])
    for o in (frozen["o"], kda.decode_mtp(**HERE.call(p, state=h0, update_state=False))):
        assert same_bits(o, got["o"])
    assert same_bits(got["state"], got["kept"][:, T - 1])


@pytest.mark.parametrize("sizes", [{"K": 64, "V": 64}, {"K": 128, "V": 128, "dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("pool_dtype", POOLS)
def test_snapshots_in_slots_of_the_pool(pool_dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    """Some are not wanted. The next round starts from the accepted ones, with lengths clamped to 1..S."""
    T, S = 4, 5
    (p, h0), following = drafts(T, **sizes), drafts(T, **sizes, seed=1)[0]
    pool = torch.full((30, *h0.shape[1:]), NAN, dtype=pool_dtype)
    homes, slots = [29, 7, 0], torch.arange(8, 8 + 3 * S).view(3, S).int()
    slots[1, 2], slots[2, 1] = -1, -1000
    if DEVICE.type == "cuda":
        slots[2, 1] = 30
    pool[homes] = h0.to(pool_dtype)
    kept = HERE.call(p, state=pool[homes], snapshots=torch.empty(3, S, *h0.shape[1:], dtype=pool_dtype))
    o = kda.decode_mtp(**kept)
    state, more = HERE(pool), {**HERE({"snapshot_slots": slots, "state_indices": int32(*homes)}), "update_state": False}
    assert same_bits(kda.decode_mtp(**HERE.call(p), state=state, snapshots=state, **more), o)
    expected = HERE(pool)
    for n, t in [(n, t) for n in range(3) for t in range(T) if 0 <= slots[n, t] < 30]:
        expected[slots[n, t]] = kept["snapshots"][n, t]
    assert same_bits(state, expected)

    lengths = {(1, 4, 3): (-5, 4, 3), (4, 1, 4): (4, 0, 4)}
    for wanted, given in lengths.items():
        starts = torch.stack([kept["snapshots"][n, m - 1] for n, m in enumerate(wanted)])
        plain = decode(HERE, following, starts)
        again, rows = state.clone(), kept["snapshots"].clone()
        into = {**more, "snapshots": again, "accepted": HERE(int32(*given))}
        assert same_bits(kda.decode_mtp(**HERE.call(following), state=again, **into), plain["o"])
        assert all(same_bits(again[slots[n, T - 1]], plain["state"][n]) for n in range(3))
        call = HERE.call(following, state=h0.to(pool_dtype), accepted=int32(*given))
        assert same_bits(kda.decode_mtp(**call, snapshots=rows), plain["o"])
        assert same_bits(call["state"], plain["state"]) and same_bits(rows[:, T - 1], plain["state"])
    skipped = HERE(int32(1, 3, 2))  # for requests 1 and 2, which then start from zeros
    o = kda.decode_mtp(**HERE.call(following), state=state.clone(), accepted=skipped, **more)
    assert same_bits(o[1:], decode(HERE, tokens(following, slice(1, 3)), None)["o"])


def test_accepted_beyond_all_snapshots() -> None:
    p, h0 = drafts(3, K=64, V=64)
    kept = HERE(torch.randn(3, 3, *h0.shape[1:]))
    o = [
        kda.decode_mtp(**HERE.call(p, state=h0, snapshots=kept, accepted=int32(*m)))
        for m in ((3, 1, 3), (9, -(2**31), 2**31 - 1))
    ]
    assert same_bits(*o)


# ---- bitwise promises ----

USUAL: dict[str, Any] = {"dtype": torch.bfloat16, "H": 2, "G": 2, "K": 64, "V": 64}


@pytest.mark.parametrize("gate", ["softplus", "lower_bound", "log"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("V", [64, 128])
@pytest.mark.parametrize("K", [64, 128])
def test_usual_calls_have_the_bits_of_others(K: int, V: int, v_first: bool, pool: torch.dtype, gate: str) -> None:
    """One token, entirely in bf16, with the activations inside, has its own kernels on the device, for each layout.
    The same numbers in a call with one more or one other argument use other kernels."""
    p, h0 = drafts(2, **{**USUAL, "K": K, "V": V, "v_first": v_first, "gate": gate})
    both, h0 = p.having(g=p.tensors["g"].bfloat16()), h0.to(pool)
    p = tokens(both, slice(None), slice(1))
    usual, v = matches(decode, p, h0), p.tensors["v"]

    # The same kernels.
    ones = torch.ones(3, dtype=torch.bool)
    assert all_same(decode(HERE, p, h0, has_initial_state=ones), usual), "flags"
    assert all_same(decode(HERE, p, h0, slices=True), usual), "inputs of odd addresses"

    # Other kernels.
    out = torch.full_like(v, NAN)
    assert all_same(decode(HERE, p.map(Tensor.float), h0, out=out), usual), "inputs in float32"
    in_f32 = decode(HERE, p, h0, out=out.float())
    assert same_bits(in_f32["o"].to(v.dtype), usual["o"]) and same_bits(in_f32["state"], usual["state"]), "o in float32"
    line = p.having(**{n: p.tensors[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")})
    packed = decode(HERE, line.having(cu_seqlens=torch.arange(4)), h0)
    assert same_bits(packed["o"][0], usual["o"][:, 0]) and same_bits(packed["state"], usual["state"]), "cu_seqlens"
    kept = HERE(torch.full((3, 1, *h0.shape[1:]), NAN, dtype=pool))
    assert same_bits(kda.decode_mtp(**HERE.call(p, state=h0), snapshots=kept), usual["o"]), "snapshots"
    assert same_bits(kept[:, 0], usual["state"]), "snapshots"
    state, memory = spaced(HERE(h0))
    assert same_bits(kda.decode(**HERE.call(p), state=state), usual["o"]) and same_bits(state, usual["state"]), "gaps"
    assert memory[..., [0, 1, 2, -2, -1]].isnan().all(), "gaps"
    together = decode(HERE, both, h0)
    assert same_bits(together["o"][:, :1], usual["o"]), "two tokens"
    if pool == torch.float32:  # in bf16 the state is rounded between calls
        then = decode(HERE, tokens(both, slice(None), slice(1, 2)), usual["state"])
        assert same_bits(together["o"][:, 1:], then["o"]) and same_bits(together["state"], then["state"]), "two tokens"

    # The other layout (where the CPU adds in another order), more heads, and many more: other kernels again.
    turned = decode(HERE, p.having(state_v_first=not v_first), h0.mT.contiguous())
    same = same_bits(turned["o"], usual["o"]) and same_bits(turned["state"].mT, usual["state"])
    assert same or DEVICE.type == "cpu", "the other layout"
    for padding in (200, 1200):
        order = [-1] * padding + [2, 0, 1]
        many = decode(HERE, tokens(p, [max(n, 0) for n in order]), h0, state_indices=int32(*order))
        assert same_bits(many["o"][-3:], usual["o"][[2, 0, 1]]) and same_bits(many["state"], usual["state"]), padding
        assert not many["o"][:-3].any(), "padding"

    # Absent states are zeros.
    zeros = decode(HERE, p, torch.zeros_like(h0))
    assert same_bits(decode(HERE, p, None)["o"], zeros["o"]), "no states"
    poisoned = h0.index_fill(0, torch.tensor([1]), NAN)
    some = decode(HERE, p, poisoned, has_initial_state=torch.tensor([True, False, True]))
    for name, x in some.items():
        assert same_bits(x[[0, 2]], usual[name][[0, 2]]) and same_bits(x[1], zeros[name][1]), "flags"


@pytest.mark.parametrize("form", ["decays", "bf16_bounded_k_first", "one_group_of_8"])
@pytest.mark.parametrize("sizes", [LARGE, {"K": 30, "V": 100}])
def test_company_changes_no_bit(form: str, sizes: dict[str, int]) -> None:
    """A request alone, in a batch, elsewhere in it, among padding, in two runs; and its tokens one per call."""
    N, T = 70, 3
    p, h0 = drafts(T, N=N, **{**FORMS[form], **sizes})
    whole = decode(HERE, p, h0)
    assert all_same(decode(HERE, p, h0), whole)
    reverse = list(range(N))[::-1]
    for order in ([0], [69], [3, 66], [-1, 5, -1, -1, 9], reverse, [-1] * 300 + [7]):
        live = [n for n in order if n >= 0]
        some = decode(HERE, tokens(p, [max(n, 0) for n in order]), h0, state_indices=int32(*order))
        assert same_bits(some["o"][[n >= 0 for n in order]], whole["o"][live]), order
        assert same_bits(some["state"][live], whole["state"][live]), order
        others = [n for n in range(N) if n not in live]
        assert same_bits(some["state"][others].cpu(), h0[others]), order

    state, o = HERE(h0), []
    for t in range(T):
        o.append(kda.decode(**HERE.call(tokens(p, slice(None), slice(t, t + 1))), state=state))
    assert same_bits(torch.cat(o, 1), whole["o"]) and same_bits(state, whole["state"])

    # With this many heads another kernel runs calls of one token.
    many, state = [-1] * 300 + [7], HERE(h0)
    for t in range(T):
        one = tokens(p, [max(n, 0) for n in many], slice(t, t + 1))
        last = kda.decode(**HERE.call(one, state_indices=int32(*many)), state=state)
        assert same_bits(last[-1], whole["o"][7, t : t + 1]) and (last[:-1] == 0).all()
    assert same_bits(state[7], whole["state"][7])


def test_packed_requests_are_rows() -> None:
    p, h0 = drafts(5, N=4, K=64, V=64)
    flat = p.having(
        **{n: p.tensors[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.arange(0, 21, 5),
    )
    rows, line = decode(HERE, p, h0), decode(HERE, flat, h0)
    assert same_bits(line["o"][0].view_as(rows["o"]), rows["o"]) and same_bits(line["state"], rows["state"])


def test_nan_stays_in_its_request() -> None:
    p, h0 = drafts(4, N=5, K=64, V=64)
    sick = h0.clone()
    sick[3, 1] = NAN
    well, got = decode(HERE, p, h0), decode(HERE, flood(p, 1), sick)
    for name in ("o", "state"):
        assert same_bits(got[name][[0, 2, 4]], well[name][[0, 2, 4]]) and got[name][1].isnan().all()
    assert same_bits(got["o"][3, :, 0], well["o"][3, :, 0]), "nor does it leave its head"


# ---- large memory ----


@only_cuda
@pytest.mark.parametrize("dtype", POOLS)
def test_slots_beyond_2_31_elements(dtype: torch.dtype) -> None:
    p, h0 = drafts(2, N=1, K=64, V=64)
    near = decode(HERE, p, h0.to(dtype))
    pool = far_pool(HERE(h0.to(dtype)))
    pool[0].fill_(NAN)
    pool[2] = HERE(h0)[0]
    o = kda.decode(**HERE.call(p, state_indices=int32(2)), state=pool)
    assert same_bits(o, near["o"]) and same_bits(pool[2], near["state"][0]) and pool[0].isnan().all()


@pytest.mark.parametrize("op", [kda.decode, kda.verify_kvbuffer, kda.prefill])
def test_tokens_beyond_2_31_elements(op: Any) -> None:
    """In inputs and outputs. With K = V = 80, prefill has one kernel for either distance of tokens: TMA has a limit."""
    p, h0 = drafts(4, N=1, K=80, V=80, dtype=torch.bfloat16)
    near, call, stride = HERE.call(p, state=h0), HERE.call(p, state=h0, out=p.tensors["v"]), 2**30 + 4096
    with DEVICE:
        memory, at = far_memory((3 * stride + 2**16) // 2).view(torch.bfloat16), 0
    for n in ("q", "k", "v", "g", "beta", "out"):
        x = call[n]
        call[n] = memory.as_strided(x.shape, (0, stride, *x.stride()[2:]), at).copy_(x)
        at += x[0, 0].numel()
    assert same_bits(op(**call), op(**near)) and same_bits(call["state"], near["state"])

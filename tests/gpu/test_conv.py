"""kda.causal_conv1d and kda.causal_conv1d_update with CUDA tensors: numbers of the float64 oracle, gradients, and
bitwise promises. test_scenarios.py has graphs, streams and the like for all operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from drafting import NAN, int32
from places import (
    DEVICE,
    HERE,
    Place,
    all_same,
    far_pool,
    matches,
    only_cuda,
    spaced,
)
from support import Tensor, same_bits

Call = dict[str, Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [3, 0, 1, 2, 140, 4, 1, 0]


def inputs(B: int = 3, T: int = 7, D: int = 12, W: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
    """x, weight, bias, and the rows before x."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "state": (B, D, W - 1)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def packed(lengths: list[int], tail: int = 0, **sizes: Any) -> Call:
    p = inputs(B=len(lengths), T=1, **sizes)
    return {
        **p,
        "x": inputs(B=1, T=sum(lengths) + tail, seed=1, **sizes)["x"],
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)]),
    }


def whole(place: Place, p: Call, **more: Any) -> dict[str, Tensor]:
    call = place({**p, **more})
    y, last = kda.causal_conv1d(initial_state=call.pop("state", None), **call, output_final_state=True, impl=place.impl)
    return {"o": y, "state": last}


def update(place: Place, p: Call, **more: Any) -> dict[str, Tensor]:
    """Runs on a copy of the pool."""
    call = place({**p, **more})
    return {"o": kda.causal_conv1d_update(**call, impl=place.impl), "state": call["state"]}


def gradients(place: Place, p: Call) -> dict[str, Tensor]:
    """Gradients of everything, for a loss that differs from element to element."""
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in place(p).items()}
    state = leaves.pop("state", None)
    y, last = kda.causal_conv1d(initial_state=state, **leaves, output_final_state=True, impl=place.impl)
    random = torch.Generator().manual_seed(5)
    seeds = [torch.randn(t.shape, generator=random).to(p["x"].dtype).to(t) for t in (y, last)]
    of = {n: x for n, x in {**leaves, "state": state}.items() if x is not None and x.requires_grad}
    return dict(zip((f"d{n}" for n in of), torch.autograd.grad([y, last], list(of.values()), seeds), strict=True))


# ---- numbers ----


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absent", [(), ("bias",), ("state",), ("bias", "state")])
def test_numbers(absent: tuple[str, ...], dtype: torch.dtype, W: int) -> None:
    for D, T in itertools.product((5, 12, 300), (1, 2, 3, 4, 7, 70)):
        p = {n: x for n, x in inputs(T=T, D=D, W=W, dtype=dtype).items() if n not in absent}
        for activation in ("silu", None):
            matches(whole, p, activation=activation, what=(D, T, activation))


# ---- x in parts ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 128, 192), (64, 126, 194), (384,), (5, 379)])
def test_parts_have_the_bits_of_one_tensor(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Projections q, k and v, in memory of their own or as slices; one token (decode), and many."""
    for T, slices in itertools.product((1, 70), (False, True)):
        p = HERE(inputs(T=T, D=384, dtype=dtype))
        results = []
        for parts in (False, True):
            leaves = {n: x.clone().requires_grad_() for n, x in p.items()}
            x = leaves.pop("x")
            split = x.split(sizes, 2)
            arrays: Any = [t if slices else t.contiguous() for t in split] if parts else x
            y, last = kda.causal_conv1d(
                arrays, leaves["weight"], leaves["bias"], leaves["state"], output_final_state=True, impl=HERE.impl
            )
            state = p["state"].clone()
            with torch.no_grad():
                rows = [t.detach() for t in arrays] if parts else x.detach()
                again = kda.causal_conv1d_update(rows, state, p["weight"], p["bias"])
            found = torch.autograd.grad([y.square().sum(), last.sum()], [x, *leaves.values()])
            results.append([y, last, again, state, *found])
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True)), (T, slices)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [1] * 200, [300]])
def test_packed_sequences(lengths: list[int], index: torch.dtype) -> None:
    for D in (5, 12):
        p = packed(lengths, tail=3, D=D)
        p["cu_seqlens"] = p["cu_seqlens"].to(index)
        got = matches(update, p, out=torch.full_like(p["x"], NAN), what=D)
        assert not got["o"][:, -3:].any()
        empty = [n for n, length in enumerate(lengths) if not length]
        assert same_bits(got["state"][empty].cpu(), p["state"][empty])


@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype, W: int) -> None:
    for D, T in itertools.product((5, 12), (1, 2, 3, 4, 7, 200)):
        p = inputs(T=T, D=D, W=W, dtype=dtype)
        for some in (p, {n: p[n] for n in ("x", "weight")}):
            matches(gradients, some, what=(D, T))
        matches(gradients, packed(LENGTHS, tail=3, D=D, W=W, dtype=dtype), what=("packed", D))


def test_large_numbers() -> None:
    """Sigmoids of 0 and 1."""
    p = inputs(T=50)
    p["x"] *= 300
    matches(whole, p)


# ---- memory ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_wider_rows(dtype: torch.dtype) -> None:
    """Slices at any offset, so that rows are only aligned to their elements; states by rows and by channels."""
    for W in (3, 4):
        p = HERE(inputs(T=9, W=W, dtype=dtype))
        expected = update(HERE, p)
        for at in (0, 1, 2, 4):
            row = torch.full((3, 9, 29), NAN, dtype=dtype, device=DEVICE)
            x = row[..., at : at + 12].copy_(p["x"])
            wide = torch.full((12, W + 3), NAN, dtype=dtype, device=DEVICE)
            weight = wide[:, at % 3 : at % 3 + W].copy_(p["weight"])
            for by_rows in (False, True):
                state = p["state"].clone()
                if by_rows:
                    state = state.transpose(1, 2).contiguous().transpose(1, 2)
                out = torch.full_like(row, NAN)[..., at : at + 12]
                kda.causal_conv1d_update(x, state, weight, p["bias"], out=out)
                assert same_bits(out, expected["o"]) and same_bits(state, expected["state"]), (at, by_rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_with_gaps(dtype: torch.dtype) -> None:
    p = HERE(inputs(T=9, dtype=dtype))
    dense = [p["state"], torch.empty_like(p["x"])]
    views, memories = zip(*map(spaced, dense), strict=True)
    for state, out in (dense, views):
        kda.causal_conv1d_update(p["x"], state, p["weight"], p["bias"], out=out)
    assert all_same(dense, views) and all(x[..., [0, 1, 2, -2, -1]].isnan().all() for x in memories)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_any_dtype(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    for D in (5, 12):
        p = inputs(T=2, D=D, dtype=dtype)
        p["state"] = p["state"].to(state_dtype)
        matches(update, p)


BEYOND = [9, 10, 2**31 - 1]  # a pool of 9 slots


def padded(place: Place, p: Call, slots: list[int], **more: Any) -> dict[str, Tensor]:
    """With the oracle, slots beyond the pool become -1, because it refuses them."""
    at = slots if place is HERE else [s if s < 9 else -1 for s in slots]
    return update(place, p, state_indices=int32(*at), **more)


@pytest.mark.parametrize("nowhere", [[-3], pytest.param(BEYOND, marks=only_cuda)])
@pytest.mark.parametrize("first_valid_slot", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3, 20])
def test_padding_in_a_poisoned_pool(T: int, dtype: torch.dtype, first_valid_slot: int, nowhere: list[int]) -> None:
    """Padded rows are zeros and touch nothing. A slot without an initial state is not read, and unused slots are not
    either. One token in bf16 has a kernel of its own on CUDA."""
    for index in nowhere:
        slots = [7, first_valid_slot - 1, 1, index, 5, 2]
        live = [n for n, s in enumerate(slots) if first_valid_slot <= s < 9]
        p = inputs(B=6, T=T, dtype=dtype)
        pool = torch.full((9, *p["state"].shape[1:]), NAN, dtype=dtype)
        for n in live:
            pool[slots[n]] = p["state"][n]
        pool[1] = NAN  # recycled: without an initial state
        known = torch.tensor([True, True, False, True, True, True])
        more = {"first_valid_slot": first_valid_slot, "out": torch.full_like(p["x"], NAN)}
        got = matches(padded, {**p, "state": pool}, slots, has_initial_state=known, **more)
        assert not got["o"][[n for n in range(6) if n not in live]].any()
        nobodys = [s for s in range(9) if s not in [slots[n] for n in live]]
        assert same_bits(got["state"][nobodys].cpu(), pool[nobodys])


# ---- bitwise promises ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_one_token_by_either_kernel(dtype: torch.dtype, bias: bool, activation: str | None) -> None:
    """Calls of one token with numbers of one 16-bit dtype have a kernel of their own on CUDA. Weights in f32 lead to
    the other one, and both layouts of the state to the same bits. Here the state is read and written in other slots."""
    p = inputs(B=5, T=1, D=520, dtype=dtype)
    p = HERE({**p, "bias": p["bias"] if bias else None})
    slots = HERE({"state_indices": int32(4, 0, -1, 2, 3), "out_state_indices": int32(5, 0, 1, -1, 6)})
    results = []
    for wide, by_row in ((False, False), (False, True), (True, False)):
        pool = HERE(inputs(B=7, T=1, D=520, dtype=dtype, seed=2))["state"]
        if by_row:
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        weights = {n: x.float() if wide and x is not None else x for n, x in p.items() if n in ("weight", "bias")}
        o = kda.causal_conv1d_update(p["x"], pool, **weights, activation=activation, **slots)
        results.append({"o": o, "state": pool.contiguous()})
    assert all_same(results[1], results[0])
    assert all_same(results[2], results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_pieces_over_a_pool(dtype: torch.dtype) -> None:
    for W, D in itertools.product((2, 3, 4), (5, 12)):
        p = HERE(inputs(B=2, T=29, D=D, W=W, dtype=dtype))
        expected = update(HERE, p)
        pool = torch.full((5, D, W - 1), NAN, dtype=dtype, device=DEVICE)
        slots = HERE(int32(3, 1))
        pool[slots.long()] = p["state"]
        pieces = [
            kda.causal_conv1d_update(x, pool, p["weight"], p["bias"], state_indices=slots)
            for x in p["x"].split([1, 1, 4, 0, 2, 1, 17, 3], 1)
        ]
        assert same_bits(torch.cat(pieces, 1), expected["o"]) and same_bits(pool[slots.long()], expected["state"])
        assert pool[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 3, 40])
def test_company_changes_no_bit(T: int, dtype: torch.dtype) -> None:
    """A sequence alone, in a batch, elsewhere in it, among padding, in two runs, and packed."""
    N = 70
    p = HERE(inputs(B=N, T=T, dtype=dtype))
    expected = update(HERE, p)
    assert all_same(update(HERE, p), expected)
    for order in ([0], [69], [3, 66], [-1, 5, -1, -1, 9], list(range(N))[::-1], [-1] * 300 + [7]):
        live = [n for n in order if n >= 0]
        some = update(HERE, {**p, "x": p["x"][[max(n, 0) for n in order]]}, state_indices=int32(*order))
        assert same_bits(some["o"][[n >= 0 for n in order]], expected["o"][live]), order
        assert same_bits(some["state"][live], expected["state"][live]), order
        others = [n for n in range(N) if n not in live]
        assert same_bits(some["state"][others], p["state"][others]), order
    line = update(HERE, {**p, "x": p["x"].flatten(0, 1)[None]}, cu_seqlens=torch.arange(0, N * T + 1, T))
    assert same_bits(line["o"][0].view_as(p["x"]), expected["o"]) and same_bits(line["state"], expected["state"])


def test_nan_stays_in_its_sequence_and_channel() -> None:
    p = inputs(B=4, T=30)
    well, sick = update(HERE, p), {**p, "x": p["x"].clone(), "state": p["state"].clone()}
    sick["x"][1, 10, 5], sick["state"][2, 7, 0] = NAN, NAN
    got = update(HERE, sick)
    read = torch.zeros(4, 30, 12, dtype=torch.bool)
    read[1, 10:14, 5], read[2, :1, 7] = True, True
    assert got["o"].cpu()[read].isnan().all() and same_bits(got["o"].cpu()[~read], well["o"].cpu()[~read])
    assert same_bits(got["state"], well["state"])


@pytest.mark.parametrize(("B", "T"), [(0, 3), (3, 0)])
def test_nothing_to_do(B: int, T: int) -> None:
    p = inputs(B=B, T=T)
    got = update(HERE, p)
    assert got["o"].shape == (B, T, 12) and same_bits(got["state"].cpu(), p["state"])
    assert all(not x.any() for n, x in gradients(HERE, p).items() if n != "dstate")


# ---- compiled ----


def test_compiled_equals_eager() -> None:
    p = HERE(inputs())

    def train(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        y, last = kda.causal_conv1d(x, weight, bias, state, output_final_state=True)
        return y * 2, last

    def serve(x: Tensor, state: Tensor) -> Tensor:
        y: Tensor = kda.causal_conv1d_update(x, state, p["weight"])
        return y + 1

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    results = []
    for function in (train, compiled(train)):
        leaves = [x.clone().requires_grad_() for x in p.values()]
        y, last = function(*leaves)
        (y.sum() + last.square().sum()).backward()
        results.append([y, last, *(x.grad for x in leaves)])
    assert all_same(*results)
    states = [p["state"].clone() for _ in range(2)]
    outputs = [f(p["x"], s) for f, s in zip((serve, compiled(serve)), states, strict=True)]
    assert same_bits(*outputs) and same_bits(*states)


# ---- large memory, refusals ----


@only_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_beyond_2_31_elements(dtype: torch.dtype) -> None:
    p = HERE(inputs(B=1, T=2, dtype=dtype))
    near = update(HERE, p)
    pool = far_pool(p["state"])
    pool[0].fill_(NAN)
    pool[2] = p["state"][0]
    y = kda.causal_conv1d_update(p["x"], pool, p["weight"], p["bias"], state_indices=HERE(int32(2)))
    assert same_bits(y, near["o"]) and same_bits(pool[2], near["state"][0]) and pool[0].isnan().all()


@only_cuda
def test_float64_is_the_oracles() -> None:
    p = HERE(inputs(dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="cuda_conv: float64 runs on `reference` only"):
        kda.causal_conv1d(p["x"], p["weight"])

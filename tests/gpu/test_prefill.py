"""kda.prefill, and chunk_kda and fused_recurrent_kda without gradients, with CUDA tensors: numbers of the float64
oracle, and bitwise promises. tests/python has more, for both devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from drafting import NAN, drafts, int32
from places import (
    DEVICE,
    FORMS,
    HERE,
    LARGE,
    ORACLE,
    POOLS,
    Place,
    all_same,
    close,
    extreme,
    matches,
    only_cuda,
    spaced,
    without_synchronisation,
)
from support import Problem, Tensor, assert_close, budget, make, rel_rmse, same_bits, wild

SIZES = {"H": 1, "G": 2, "K": 20, "V": 36, "gate": "softplus", "beta": "sigmoid", "v_first": True}
TRAINING = [kda.chunk_kda, kda.fused_recurrent_kda]
TOKENWISE = ("q", "k", "v", "g", "beta")


def prefill(place: Place, p: Problem, pool: Tensor | None, **more: Any) -> dict[str, Tensor]:
    """Runs one call on copies of the pool and of the checkpoints."""
    call = place.call(p, state=pool, **more)
    o = kda.prefill(**call)
    return {"o": o} | {n: call[n] for n in ("state", "checkpoints") if call.get(n) is not None}


def trained(place: Place, p: Problem, function: Any, **more: Any) -> dict[str, Tensor]:
    o, final_state = function(**place.call(p, output_final_state=True, **more))
    return {"o": o, "state": final_state}


def prompts(lengths: list[int], tail: int = 0, **changes: Any) -> tuple[Problem, Tensor]:
    """Packed prompts without their states, and the states."""
    p = make(lengths=lengths, tail=tail, **{**SIZES, **changes})
    return p.having(initial_state=None), p.tensors["initial_state"]


# ---- numbers ----


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, pool: torch.dtype) -> None:
    for sizes in ({}, LARGE):
        p, h0 = drafts(130, **{**FORMS[form], **sizes})
        # If products have 16-bit operands, states have their rounding, too.
        rounding = 200.0 if DEVICE.type == "cuda" and sizes and p.tensors["q"].dtype != torch.float32 else 1.0
        matches(prefill, p, h0.to(pool), what=sizes, rounding=rounding)
        if pool == torch.float32:
            for function in TRAINING:
                what = function.__name__, sizes
                matches(trained, p.having(initial_state=h0), function, what=what, rounding=rounding)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("K", [1, 5, 30, 64, 100, 128, 256])
def test_sizes(K: int, v_first: bool) -> None:
    for V in (1, 5, 30, 64, 100, 128, 256):
        p, h0 = prompts([65, 0, 9], tail=2, K=K, V=V, v_first=v_first)
        slots, kept = int32(4, -1, 0, 1, 2, 3).view(3, 2), torch.zeros(5, *h0.shape[1:])
        matches(prefill, p, h0, checkpoints=kept, checkpoint_slots=slots, what=V)


@only_cuda
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_on_tensor_cores(dtype: torch.dtype, v_first: bool) -> None:
    """cuda_prefill_chunk by name: packed prompts with checkpoints, and a long one, from their start or resumed."""
    chunked = Place(DEVICE, impl="cuda_prefill_chunk")
    for lengths in ([65, 0, 9, 200], [3200]):
        for K, V in ((64, 64), (64, 128), (128, 64), (128, 128)):
            p, h0 = prompts(lengths, tail=2, K=K, V=V, v_first=v_first, dtype=dtype)
            slots = int32(4, -1, 0, 1, 2, 3, -1, 5).view(4, 2)[: len(lengths)]
            more = {"checkpoints": torch.zeros(6, *h0.shape[1:]), "checkpoint_slots": slots}
            for before in (None, int32(37, 5, 64, 100)[: len(lengths)]):
                expected, got = (prefill(at, p, h0, **more, checkpoint_offset=before) for at in (ORACLE, chunked))
                for name, x in got.items():
                    close(expected[name], x, f"{lengths} {K} {V} {name}", 200.0)


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
def test_float16_keeps_its_bits(gate: str) -> None:
    """The error is far below that of bfloat16: no operand of a product has fewer bits than q, k and v."""
    p, h0 = prompts([500, 64, 3], gate=gate, K=128, V=128, dtype=torch.float16)
    expected, got = (prefill(place, p, h0)["o"] for place in (ORACLE, HERE))
    assert rel_rmse(expected.cpu(), got.cpu()) < budget("o", torch.float16)


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
def test_infinite_gates(gate: str) -> None:
    p, h0 = prompts([150, 1, 64], gate=gate, K=64, V=64)
    matches(prefill, wild(p) if gate == "log" else extreme(p), h0)


def test_any_dtype_of_outputs() -> None:
    p, h0 = prompts([70, 3], dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        out = torch.full_like(p.tensors["v"], NAN, dtype=dtype)
        assert matches(prefill, p, h0, out=out)["o"].dtype == dtype


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", POOLS)
def test_memory_with_gaps(dtype: torch.dtype, v_first: bool) -> None:
    """Rows of states, checkpoints and outputs need not be adjacent, nor aligned."""
    p, h0 = prompts([70, 130], K=64, V=30, v_first=v_first, dtype=torch.bfloat16)
    dense = [HERE(h0.to(dtype)), HERE(torch.zeros(3, *h0.shape[1:], dtype=dtype)), HERE(p.tensors["v"])]
    views, memories = zip(*map(spaced, dense), strict=True)
    slots = HERE(int32(2, -1, 0, 1).view(2, 2))
    for state, kept, out in (dense, views):
        kda.prefill(**HERE.call(p), state=state, checkpoints=kept, checkpoint_slots=slots, out=out)
    assert all_same(dense, views) and all(x[..., [0, 1, 2, -2, -1]].isnan().all() for x in memories)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_rows_that_share_memory(name: str, dim: int) -> None:
    """Rows shared by all tokens, or all heads: expanded tensors have a stride of zero."""
    p, h0 = drafts(130, **{**FORMS["bf16_bounded_k_first"], **LARGE})
    call, (shared, dense) = HERE.call(p), (HERE(h0), HERE(h0))
    x = call.pop(name).narrow(dim, 0, 1).expand(p.tensors[name].shape)
    o = kda.prefill(**call, **{name: x}, state=shared)
    assert same_bits(kda.prefill(**call, **{name: x.contiguous()}, state=dense), o) and same_bits(dense, shared)


# Sequences of at most one chunk, of about three, of any length; with their heads more than a GPU works on at a time.
SHORT = {"one": [20] * 44, "three": [90, 96] * 12, "any": [1, 63, 64, 65, 0, 200, 33, 96, 5, 128, 31, 2]}
BOUNDED = {**LARGE, "dtype": torch.bfloat16, "gate": "lower_bound"}


def pool_of(rows: Tensor, gaps: tuple[int, int, int], first: int) -> tuple[Tensor, Tensor]:
    """A pool with these rows, and its memory: NaN between heads, columns and channels, and before everything."""
    shape = [n + gap for n, gap in zip(rows.shape[1:], gaps, strict=True)]
    memory = rows.new_full((first + len(rows) * shape[0] * shape[1] * shape[2],), NAN)
    view = memory[first:].view(len(rows), *shape)[:, : rows.shape[1], : rows.shape[2], : rows.shape[3]]
    return view.copy_(rows), memory


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("lengths", SHORT)
def test_ways_to_states(lengths: str, dtype: torch.dtype) -> None:
    """In place on a pool with padding, wherever its rows are and whichever index comes first: the same bits."""
    N, group = len(SHORT[lengths]), 4 if lengths == "any" else 2
    p, _ = prompts(SHORT[lengths], tail=9, **{**BOUNDED, "H": group, "G": group})
    random = torch.Generator().manual_seed(5)
    rows = torch.randn(N + 3, group * group, 128, 128, generator=random).to(dtype)
    slots = torch.randperm(N + 3, generator=random)[:N].int()
    slots[[2, N // 2]] = -1
    more = {"state_indices": slots, "has_initial_state": torch.rand(N, generator=random) < 0.7}
    rounding = 200.0 if DEVICE.type == "cuda" else 1.0
    expected = matches(prefill, p, rows, rounding=rounding, **more)
    call = HERE.call(p, **more)
    # Gaps of 16 bytes between columns; gaps between heads and slots, too; addresses aligned only to an element.
    for gaps, first in (((0, 0, 16 // rows.itemsize), 0), ((1, 1, 0), 0), ((0, 0, 1), 0), ((0, 0, 0), 1)):
        pool, memory = pool_of(HERE(rows), gaps, first)
        o, margins = kda.prefill(**call, state=pool), memory.numel() - pool.numel()
        assert same_bits(expected["o"], o) and same_bits(expected["state"], pool), (gaps, first)
        assert memory.isnan().sum() == margins, (gaps, first)
    pool = HERE(rows.mT.contiguous())
    o = kda.prefill(**{**call, "state_v_first": False}, state=pool)
    assert same_bits(expected["o"], o) and same_bits(expected["state"], pool.mT.contiguous())


@pytest.mark.parametrize("lengths", SHORT)
def test_states_need_not_be_wanted(lengths: str) -> None:
    """If the first or final states are not wanted, other results keep their bits, which are also those of a pool."""
    p, h0 = prompts(SHORT[lengths], tail=9, **{**BOUNDED, "H": 4, "G": 2})
    for initial in (h0, None):
        call, pool = HERE.call(p, initial_state=initial), HERE(h0 if initial is not None else torch.zeros_like(h0))
        o, final = kda.chunk_kda(**call, output_final_state=True)
        alone, nothing = kda.chunk_kda(**call, output_final_state=False)
        assert nothing is None and same_bits(o, alone)
        assert same_bits(kda.prefill(**HERE.call(p), state=pool), o) and same_bits(pool, final)
    expected, got = (trained(place, p, kda.chunk_kda) for place in (ORACLE, HERE))
    close(expected["state"], got["state"], "state", 200.0 if DEVICE.type == "cuda" else 1.0)
    # Among so many outputs, one has a larger error than is allowed elsewhere, but within what numerics.md allows.
    o = got["o"].cpu()
    assert rel_rmse(expected["o"], o) < 0.003
    assert_close({"o": expected["o"]}, {"o": o})


# ---- bitwise promises ----


@pytest.mark.parametrize("form", ["decays", "bf16_bounded_k_first", "one_group_of_8"])
@pytest.mark.parametrize("sizes", [LARGE, {"K": 30, "V": 100}, {"K": 200, "V": 40}])
def test_recurrent_prefill_is_decode(form: str, sizes: dict[str, int]) -> None:
    """Prefill equals decode of the same tokens, however they come: in rows, packed, or one token per call. With many
    heads, too, where other blocks process them."""
    recurrent = {"impl": "cuda_prefill_recurrent" if DEVICE.type == "cuda" else "cpu_recurrent"}
    for N in (2, 90):
        p, h0 = drafts(21, N=N, **{**FORMS[form], **sizes})
        call = HERE.call(p)
        flat = {n: call[n].flatten(0, 1)[None] for n in TOKENWISE} | {"cu_seqlens": HERE(torch.arange(N + 1) * 21)}
        rows, packed, steps, at_once = (HERE(h0) for _ in range(4))
        o = kda.prefill(**{**call, **recurrent}, state=rows)
        assert same_bits(kda.prefill(**{**call, **flat, **recurrent}, state=packed)[0].view_as(o), o)
        assert same_bits(kda.decode(**call, state=at_once), o)
        tokens = [{n: call[n][:, t : t + 1] for n in TOKENWISE} for t in range(21)]
        assert same_bits(torch.cat([kda.decode(**{**call, **x}, state=steps) for x in tokens], 1), o)
        assert same_bits(packed, rows) and same_bits(at_once, rows) and same_bits(steps, rows)


@only_cuda
@pytest.mark.parametrize("B", [1, 32])
def test_turns_change_no_bit(B: int) -> None:
    """With more tokens and heads than cuda_prefill_chunk can hold images of at once, and with fewer."""
    shape = (B, 65536 // B, 24)
    q, k, v, g = (torch.randn(*shape, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    beta = torch.rand(shape, device=DEVICE)

    def run(heads: slice) -> tuple[Tensor, Tensor]:
        inputs = [x[:, :, heads] for x in (q, k, v, -g.abs() / 10, beta)]
        state = torch.ones(B, inputs[0].shape[2], 128, 128, device=DEVICE)
        assert kda.workspace_size(*inputs, state, impl="cuda_prefill_chunk") < 2**30 + 2**25
        return kda.prefill(*inputs, state, use_qk_l2norm_in_kernel=True, impl="cuda_prefill_chunk"), state

    (o, state), parts = run(slice(None)), [run(slice(0, 12)), run(slice(12, 24))]
    assert same_bits(torch.cat([x for x, _ in parts], 2), o) and same_bits(torch.cat([x for _, x in parts], 1), state)


@only_cuda
def test_offsets_on_the_host_spare_a_wait() -> None:
    p, _ = prompts([200, 0, 64, 3, 100], tail=33, dtype=torch.bfloat16, K=64, V=64)
    call = HERE.call(p)
    with without_synchronisation(), torch.inference_mode():
        kda.chunk_kda(**call, cu_seqlens_cpu=p.options["cu_seqlens"], return_intermediate_states=True)

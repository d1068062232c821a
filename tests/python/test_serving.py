"""prefill and decode on pools of states: what serving engines rely on, mostly bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import kda
from support import (
    Problem,
    Tensor,
    assert_close,
    far_memory,
    make,
    oracle,
    reference,
    same_bits,
)

on_cuda = pytest.mark.cuda
OPS = [pytest.param(op, marks=on_cuda) for op in (kda.prefill, kda.decode)]
both = pytest.mark.parametrize("op", OPS, ids=lambda f: f.__name__)
NAN = float("nan")


def serving_problem(lengths: list[int], tail: int = 0, **changes: Any) -> tuple[Problem, Tensor]:
    """A call without its states, and the states ``[N, HV, V, K]``."""
    options: dict[str, Any] = {"H": 1, "G": 2, "K": 20, "V": 36, "gate": "softplus", "beta": "sigmoid", "v_first": True}
    p = make(lengths=lengths, tail=tail, **{**options, **changes})
    return p.having(initial_state=None), p.tensors["initial_state"]


def new_pool(slots: int, like: Tensor, pad: int = 7) -> Tensor:
    """NaN everywhere, with ``pad`` elements between the slots."""
    size = like[0].numel()
    return torch.full((slots, size + pad), NAN, dtype=like.dtype)[:, :size].view(slots, *like.shape[1:])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sequence(p: Problem, first: int, last: int) -> Problem:
    """Tokens first .. last-1 as a separate call."""
    cut = {n: x[:, first:last] for n, x in p.tensors.items() if n in ("q", "k", "v", "g", "beta")}
    return p.having(**cut, cu_seqlens=None)


def rows(p: Problem) -> list[tuple[int, int]]:
    cu = p.options["cu_seqlens"].tolist()
    return list(pairwise(cu))


# ---- slots ----


@both
@pytest.mark.parametrize("first_valid_slot", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots(op: Callable[..., Tensor], first_valid_slot: int, dtype: torch.dtype) -> None:
    p, h0 = serving_problem([5, 70, 0, 1, 17], tail=4)
    h0 = h0.to(dtype)
    alone = h0.clone()
    expected = op(**p.keywords, state=alone)

    slots = [6, -1, 3, first_valid_slot - 1, 1]  # two of them padding
    live = [n for n, s in enumerate(slots) if s >= first_valid_slot]
    pool = new_pool(8, h0)
    for n in live:
        pool[slots[n]] = h0[n]
    before = pool.clone()
    out = torch.full_like(p.tensors["v"], NAN)
    got = op(**p.keywords, state=pool, state_indices=int32(*slots), first_valid_slot=first_valid_slot, out=out)
    assert got is out
    for n, (first, last) in enumerate(rows(p)):
        if n in live:
            assert same_bits(out[:, first:last], expected[:, first:last]), f"sequence {n}"
            assert same_bits(pool[slots[n]], alone[n]), f"state of sequence {n}"
        else:
            assert same_bits(out[:, first:last], torch.zeros_like(out[:, first:last])), f"padding {n}"
    assert same_bits(out[:, -4:], torch.zeros_like(out[:, -4:])), "rows beyond cu_seqlens[-1]"
    for slot in set(range(8)) - {slots[n] for n in live}:
        assert same_bits(pool[slot], before[slot]), f"slot {slot} is nobody's"
    assert torch.isnan(torch.as_strided(pool, (7, 7), (pool.stride(0), 1), h0[0].numel())).all(), "between the slots"


@both
def test_many_padded_rows(op: Callable[..., Tensor]) -> None:
    p, h0 = serving_problem([1] * 50)
    pool = new_pool(3, h0)
    before = pool.clone()
    for first_valid_slot, padding in ((0, -1), (1, 0), (1, -7)):
        out = torch.full_like(p.tensors["v"], NAN)
        indices = torch.full((50,), padding, dtype=torch.int32)
        op(**p.keywords, state=pool, state_indices=indices, first_valid_slot=first_valid_slot, out=out)
        assert same_bits(out, torch.zeros_like(out)) and same_bits(pool, before)


@both
def test_recycled_slots(op: Callable[..., Tensor]) -> None:
    p, h0 = serving_problem([5, 70, 3])
    pool = new_pool(3, h0)
    pool[1] = h0[1]
    has = torch.tensor([False, True, False])
    fresh = torch.where(has.view(3, 1, 1, 1), h0, 0.0)
    out = op(**p.keywords, state=pool, state_indices=int32(0, 1, 2), has_initial_state=has)
    assert same_bits(out, op(**p.keywords, state=fresh)), "NaN of a recycled slot must not be read, not even times 0"
    assert same_bits(pool, fresh)


@both
def test_no_state_is_zeros(op: Callable[..., Tensor]) -> None:
    p, h0 = serving_problem([5, 70, 3])
    op(**p.keywords, state=h0)  # a call with states in between: nothing of it may remain
    zeros = torch.zeros_like(h0)
    assert same_bits(op(**p.keywords), op(**p.keywords, state=zeros)) and zeros.any()


# ---- checkpoints ----


@pytest.mark.parametrize("impl", [pytest.param(None, marks=on_cuda), "reference"])
@pytest.mark.parametrize("every", [64, 128, 256])
@pytest.mark.parametrize("v_first", [True, False])
def test_checkpoints_are_the_states_of_the_prefixes(impl: str | None, every: int, v_first: bool) -> None:
    lengths = [130, 64, 0, 63, 256, 300]
    p, h0 = serving_problem(lengths, tail=2, v_first=v_first)
    M = 4
    slots = torch.arange(3, 3 + len(lengths) * M, dtype=torch.int32).view(-1, M)
    slots[4, 0] = -1  # one sequence does not want its first checkpoint
    checkpoints = new_pool(3 + slots.numel(), h0)
    untouched = checkpoints.clone()
    state = h0.clone()
    more = {"checkpoints": checkpoints, "checkpoint_slots": slots, "checkpoint_every": every, "impl": impl}
    kda.prefill(**p.keywords, state=state, **more)
    for n, (first, last) in enumerate(rows(p)):
        for m in range(1, M + 1):
            slot, tokens = int(slots[n, m - 1]), m * every
            if slot >= 0 and first + tokens <= last:
                expected = h0[n : n + 1].clone()
                kda.prefill(**sequence(p, first, first + tokens).keywords, state=expected, impl=impl)
                assert same_bits(checkpoints[slot], expected[0]), f"sequence {n} after {tokens} tokens"
                untouched[slot] = expected[0]
    assert same_bits(checkpoints, untouched), "only completed ones are written"


@on_cuda
@pytest.mark.parametrize("first_valid_slot", [0, 1])
def test_130_tokens_give_the_checkpoint_after_128(first_valid_slot: int) -> None:
    """The contract of SGLang's prefix cache. Slot 0 is skipped if it means padding, and nothing is written beyond M."""
    p, h0 = serving_problem([130])
    pool, more = new_pool(4, h0), {"first_valid_slot": first_valid_slot}
    kda.prefill(**p.keywords, state=h0.clone(), checkpoints=pool, checkpoint_slots=int32(0, 2).view(1, 2), **more)
    after = h0.clone()
    kda.prefill(**sequence(p, 0, 128).keywords, state=after)
    written = [slot for slot in range(4) if not pool[slot].isnan().any()]
    assert written == ([2] if first_valid_slot else [0, 2]) and same_bits(pool[2], after[0])
    pool = new_pool(4, h0)
    kda.prefill(**p.keywords, state=h0.clone(), checkpoints=pool, checkpoint_slots=int32(3).view(1, 1), **more)
    assert not pool[3].isnan().any() and pool[:3].isnan().all()


@on_cuda
def test_checkpoints_in_bfloat16_and_without_states() -> None:
    p, h0 = serving_problem([70])
    pool = new_pool(1, h0.bfloat16())
    kda.prefill(**p.keywords, checkpoints=pool, checkpoint_slots=int32(0).view(1, 1))
    zeros = torch.zeros_like(h0)
    kda.prefill(**sequence(p, 0, 64).keywords, state=zeros)
    assert same_bits(pool[0], zeros[0].bfloat16())


# ---- memory ----


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_fused_projections(op: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """q, k, v, g are slices of one row of a projection, beta is a column slice with a row stride, and so is out."""
    p, h0 = serving_problem([5, 70, 1], tail=2, dtype=dtype, K=24, V=40)
    t, sizes = p.tensors, {n: p.tensors[n][0, 0].numel() for n in "qkvg"}
    fused = torch.full((1, 78, sum(sizes.values()) + 9), NAN, dtype=dtype)
    cut, at = {}, 5
    for n, size in sizes.items():
        cut[n] = fused[..., at : at + size].view(t[n].shape).copy_(t[n])
        at += size
    cut["beta"] = torch.full((1, 78, 9), NAN, dtype=dtype)[..., 4:8:2].copy_(t["beta"])
    out = torch.full((1, 78, 2 * 40 + 3), NAN, dtype=dtype)
    state, expected_state = h0.clone(), h0.clone()
    expected = op(**p.keywords, state=expected_state)
    o = op(**p.having(**cut).keywords, state=state, out=out[..., :80].view(1, 78, 2, 40))
    assert same_bits(o, expected) and same_bits(state, expected_state) and out[..., 80:].isnan().all()


def test_workspace() -> None:
    p, h0 = serving_problem([5, 70, 1])
    expected = kda.prefill(**p.keywords, state=h0.clone())
    size = kda.workspace_size(**p.keywords, state=h0)
    assert size == kda.workspace_size(**p.map(torch.zeros_like).keywords, state=h0), "contents do not matter"
    memory = torch.full((size // 4 + 128,), NAN)
    start = -memory.data_ptr() % 256 // 4
    workspace, beyond = memory[start : start + size // 4], memory[start + size // 4 :].clone()
    for _ in range(2):  # with poisoned memory at first, then with what the first call left
        assert same_bits(kda.prefill(**p.keywords, state=h0.clone(), workspace=workspace), expected)
    assert same_bits(memory[start + size // 4 :], beyond)
    one = kda.workspace_size(**p.keywords, state=h0, num_threads=1)
    assert one <= size
    assert same_bits(kda.prefill(**p.keywords, state=h0.clone(), workspace=workspace[: one // 4]), expected)
    state = h0.clone()
    for bad in (workspace[: one // 4 - 1], memory[start + 1 :], workspace[::2]):
        with pytest.raises(ValueError, match="workspace"):
            kda.prefill(**p.keywords, state=state, workspace=bad)
    assert same_bits(state, h0)


@on_cuda
def test_workspace_of_bytes() -> None:
    """A workspace of uint8, the usual way to allocate a number of bytes."""
    p, h0 = serving_problem([5])
    memory = torch.empty(kda.workspace_size(**p.keywords, state=h0) + 256, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 256 :]
    assert same_bits(
        kda.prefill(**p.keywords, state=h0.clone(), workspace=workspace), kda.prefill(**p.keywords, state=h0)
    )


@both
def test_pool_beyond_2_31_elements(op: Callable[..., Tensor]) -> None:
    stride, wrapped = 2**30 + 2048, 4096  # slot 2 begins at element 2^31 + 4096: where would 32 bits end up?
    memory = far_memory(2 * stride + 2**20)
    p, h0 = serving_problem([5, 70])
    pool = memory.as_strided((3, *h0.shape[1:]), (stride, *h0.stride()[1:]))
    pool[2], pool[0] = h0[0], h0[1]
    state = h0.clone()
    expected = op(**p.keywords, state=state)
    assert same_bits(op(**p.keywords, state=pool, state_indices=int32(2, 0)), expected)
    assert same_bits(pool[2], state[0]) and same_bits(pool[0], state[1])
    assert not memory[wrapped : wrapped + h0[0].numel()].any()
    if op is kda.prefill:
        more = {"checkpoints": pool, "checkpoint_slots": int32(-1, 2).view(2, 1)}
        kda.prefill(**p.keywords, state=h0.clone(), **more)
        after = h0[1:].clone()
        kda.prefill(**sequence(p, 5, 69).keywords, state=after)
        assert same_bits(pool[2], after[0])


# ---- lengths and splits ----


@pytest.mark.parametrize("impl", [pytest.param(None, marks=on_cuda), "cpu_recurrent"])
def test_any_mix_of_lengths_is_each_alone(impl: str | None) -> None:
    lengths = [*range(1, 66), 0, 130]
    p, h0 = serving_problem(lengths, K=8, V=8)
    state = h0.clone()
    o = kda.prefill(**p.keywords, state=state, impl=impl)
    for n, (first, last) in enumerate(rows(p)):
        alone = h0[n : n + 1].clone()
        o_alone = kda.prefill(**sequence(p, first, last).keywords, state=alone, impl=impl)
        assert same_bits(o_alone, o[:, first:last]), lengths[n]
        assert same_bits(alone, state[n : n + 1]), lengths[n]
    expected_o, expected_state, _ = oracle(p.having(initial_state=h0).map(Tensor.double))
    assert_close({"o": expected_o, "final_state": expected_state}, {"o": o, "final_state": state})


@on_cuda
@pytest.mark.parametrize("op_name", ["prefill", "decode"])
@pytest.mark.parametrize("splits", [[64, 128], [64, 192], [1, 2], [63, 65], [17, 100, 101], [129]])
def test_chunked_prefill(op_name: str, splits: list[int]) -> None:
    """Bit for bit at multiples of 64, and anywhere for the recurrence; elsewhere within the gates."""
    op = getattr(kda, op_name)
    p, h0 = serving_problem([200])
    whole, state = h0.clone(), h0.clone()
    o = op(**p.keywords, state=whole)
    bounds = [0, *splits, 200]
    parts = [op(**sequence(p, a, b).keywords, state=state) for a, b in pairwise(bounds)]
    if op_name == "decode" or all(s % 64 == 0 for s in splits):
        assert same_bits(torch.cat(parts, 1), o) and same_bits(state, whole)
    expected = oracle(p.having(initial_state=h0).map(Tensor.double))
    assert_close({"o": expected[0], "final_state": expected[1]}, {"o": torch.cat(parts, 1), "final_state": state})


@on_cuda
def test_prefill_then_decode() -> None:
    p, h0 = serving_problem([100])
    whole, state = h0.clone(), h0.clone()
    o = kda.prefill(**p.keywords, state=whole)
    parts = [kda.prefill(**sequence(p, 0, 75).keywords, state=state)]
    parts += [kda.decode(**sequence(p, t, t + 1).keywords, state=state) for t in range(75, 100)]
    assert_close({"o": o, "final_state": whole}, {"o": torch.cat(parts, 1), "final_state": state})


@both
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(op: Callable[..., Tensor], threads: int) -> None:
    p, h0 = serving_problem([5, 200, 70], V=100)
    a, b = h0.clone(), h0.clone()
    assert same_bits(op(**p.keywords, state=a), op(**p.keywords, state=b, num_threads=threads)) and same_bits(a, b)


# ---- other arrays ----


class Exchanged:
    """An array of another library: DLPack, a shape, and a dtype with a name."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("op_name", ["prefill", "decode", "fused_recurrent_kda"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("wrap", [lambda x: x, Exchanged], ids=["numpy", "dlpack"])
def test_other_arrays(op_name: str, dtype: Any, wrap: Callable[[np.ndarray], Any]) -> None:
    p, h0 = serving_problem([5, 70, 1], tail=1, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype)
    p = p.having(dt_bias=p.tensors["dt_bias"].view(2, 20))
    arrays = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in p.keywords.items()}
    wrapped = {n: wrap(x) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    op, torch_state, state = getattr(kda, op_name), h0.clone(), h0.numpy().copy()
    if op_name == "fused_recurrent_kda":
        expected, torch_state = op(**p.keywords, initial_state=h0, output_final_state=True)
        got, state = op(**wrapped, initial_state=wrap(h0.numpy()), output_final_state=True)
    else:
        expected, got = op(**p.keywords, state=torch_state), op(**wrapped, state=wrap(state))
        out = np.full_like(arrays["v"], NAN)
        assert op(**arrays, state=h0.numpy().copy(), out=out) is out and np.array_equal(out, got)
    assert isinstance(got, np.ndarray) and got.dtype == dtype and isinstance(state, np.ndarray)
    assert same_bits(torch.from_numpy(got), expected) and same_bits(torch.from_numpy(state), torch_state)


def test_numpy_pool_in_place() -> None:
    p, h0 = serving_problem([1, 1, 1])
    arrays = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in p.keywords.items()}
    pool = np.full((5, *h0.shape[1:]), NAN, np.float32)
    pool[3], pool[1] = h0[0].numpy(), h0[2].numpy()
    o = kda.decode(**arrays, state=pool, state_indices=np.array([3, -1, 1], np.int32))
    state = h0.clone()
    expected = kda.decode(**p.keywords, state=state)
    assert np.array_equal(o[:, [0, 2]], expected[:, [0, 2]].numpy()) and not o[:, 1].any()
    assert np.array_equal(pool[[3, 1]], state[[0, 2]].numpy()) and np.isnan(pool[[0, 2, 4]]).all()


def test_gate_of_numpy_arrays() -> None:
    x, A_log, bias = (
        np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in [(2, 5, 2, 4), (2,), (8,)]
    )
    expected = kda.fused_kda_gate(torch.from_numpy(x), torch.from_numpy(A_log), torch.from_numpy(bias)).numpy()
    assert np.array_equal(kda.fused_kda_gate(x, A_log, bias), expected)
    turned = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert np.array_equal(kda.fused_kda_gate(turned, A_log, bias), expected)
    for half in (np.float16, np.dtype("float16"), "float16"):
        assert np.array_equal(kda.fused_kda_gate(x, A_log, bias, output_dtype=half), expected.astype(np.float16))


@on_cuda
def test_serving_is_training_forward() -> None:
    """The same numbers from either function."""
    p, h0 = serving_problem([5, 70, 1])
    trained, final_state = kda.chunk_kda(**p.keywords, initial_state=h0, output_final_state=True)
    state = h0.clone()
    assert same_bits(kda.prefill(**p.keywords, state=state), trained) and same_bits(state, final_state)
    trained, final_state = kda.fused_recurrent_kda(**p.keywords, initial_state=h0, output_final_state=True)
    state = h0.clone()
    assert same_bits(kda.decode(**p.keywords, state=state), trained) and same_bits(state, final_state)
    assert_close(reference(p.having(initial_state=h0), False), {"o": trained, "final_state": final_state})

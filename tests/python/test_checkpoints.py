"""Checkpoints at multiples of 16 tokens of a request that resumes anywhere, of states and of the convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from support import Tensor, assert_close, on_cpu, same_bits
from test_serving import NAN, new_pool, rows, sequence, serving_problem

on_cuda = pytest.mark.cuda
D, W = 10, 4


def forward_implementations() -> list[str | None]:
    return ["cpu_chunk", "reference"] if on_cpu() else [None]


def places(length: int, every: int, before: int) -> list[int]:
    """After how many tokens of the call there are checkpoints."""
    return [t for t in range(1, length + 1) if (before + t) % every == 0]


@on_cuda
@pytest.mark.parametrize("every", [16, 48, 64, 80])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_checkpoints_of_requests_that_resume(every: int, v_first: bool, width: torch.dtype) -> None:
    lengths, before = [5, 150, 0, 1, 70, 33], [11, 0, 5, 15, 37, 47]
    p, h0 = serving_problem(lengths, v_first=v_first)
    M = 12
    for impl in forward_implementations():
        pool, kept = h0.clone(), new_pool(6 * M + 2, h0)
        slots = (torch.randperm(6 * M) + 2).view(6, M).to(width)
        slots[1, 1] = -1
        o = kda.prefill(
            **p.keywords, state=pool, checkpoints=kept, checkpoint_slots=slots, checkpoint_every=every, impl=impl,
            checkpoint_offset=torch.tensor(before, dtype=width),
        )  # fmt: skip
        plain = h0.clone()
        assert_close({"o": kda.prefill(**p.keywords, state=plain, impl=impl)}, {"o": o}, 0.1)
        assert_close({"final_state": plain}, {"final_state": pool}, 0.1)
        used = set()
        for n, (first, _) in enumerate(rows(p)):
            for m, t in enumerate(places(lengths[n], every, before[n])):
                if (slot := int(slots[n, m])) < 0:
                    continue
                used.add(slot)
                state = h0[n : n + 1].clone()
                kda.prefill(
                    **sequence(p, first, first + t).keywords, state=state, impl="reference" if on_cpu() else None
                )
                assert_close({"final_state": state[0]}, {"final_state": kept[slot]}, 0.1, f"{impl} {n} {t}")
        assert len(used) >= 3
        for slot in set(range(len(kept))) - used:
            assert kept[slot].isnan().all(), f"slot {slot} is nobody's"


@on_cuda
def test_offsets_of_whole_chunks_change_no_bit() -> None:
    p, h0 = serving_problem([150, 70])
    results = []
    for more in ({}, {"checkpoint_offset": torch.tensor([0, 128])}):
        pool, kept = h0.clone(), new_pool(4, h0)
        impl = {"impl": "cpu_chunk"} if on_cpu() else {}
        slots = torch.tensor([[0, 1], [3, -1]])
        o = kda.prefill(**p.keywords, state=pool, checkpoints=kept, checkpoint_slots=slots, **more, **impl)
        results.append((o, pool, kept))
    assert all(map(same_bits, *results))


@on_cuda
def test_one_pool_for_states_and_checkpoints() -> None:
    """A request reads a shared slot, writes its own and leaves checkpoints, all in one pool."""
    p, h0 = serving_problem([40, 21])
    pool, apart = new_pool(9, h0), new_pool(9, h0)
    pool[4] = apart[4] = h0[0]
    kept = new_pool(9, h0)
    call: dict[str, Any] = {
        **p.keywords, "state_indices": torch.tensor([4, 4]), "out_state_indices": torch.tensor([0, 8]),
        "checkpoint_slots": torch.tensor([[1, 2, -1], [6, 7, 3]]), "checkpoint_every": 16,
        "checkpoint_offset": torch.tensor([9, 0]),
    }  # fmt: skip
    o = kda.prefill(**call, state=pool, checkpoints=pool)
    assert same_bits(o, kda.prefill(**call, state=apart, checkpoints=kept))
    for slot in range(9):
        assert same_bits(pool[slot], (kept if slot in (1, 2, 6) else apart)[slot])


def conv_call(lengths: list[int]) -> tuple[dict[str, Any], Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, sum(lengths), D)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return (
        {"weight": torch.randn(D, W), "bias": torch.randn(D), "cu_seqlens": cu},
        x,
        torch.randn(len(lengths), D, W - 1),
    )


@on_cuda
@pytest.mark.parametrize("every", [16, 48])
def test_checkpoints_of_the_convolution(every: int) -> None:
    lengths, before = [5, 100, 0, 1, 40], [11, 0, 16, 15, 14]
    call, x, start = conv_call(lengths)
    names: list[str | None] = [i for i in kda.implementations("conv") if "cuda" not in i] if on_cpu() else [None]
    for impl in names:
        pool, plain = start.clone(), start.clone()
        kept = torch.full((5, 8, D, W - 1), NAN).flatten(0, 1)
        slots = torch.arange(40).view(5, 8)
        slots[1, 0] = -1
        y = kda.causal_conv1d_update(
            x, pool, **call, checkpoints=kept, checkpoint_slots=slots, checkpoint_every=every, impl=impl,
            checkpoint_offset=torch.tensor(before),
        )  # fmt: skip
        assert same_bits(y, kda.causal_conv1d_update(x, plain, **call, impl=impl)) and same_bits(pool, plain)
        for n, (first, last) in enumerate(
            zip(call["cu_seqlens"].tolist(), call["cu_seqlens"].tolist()[1:], strict=False)
        ):
            rows_of = torch.cat((start[n], x[0, first:last].T), 1)
            at = places(lengths[n], every, before[n])
            for m in range(8):
                live = m < len(at) and int(slots[n, m]) >= 0
                expected = rows_of[:, at[m] : at[m] + W - 1] if live else torch.full((D, W - 1), NAN)
                assert same_bits(kept[8 * n + m], expected.contiguous()), f"{impl}: {n} {m}"


@on_cuda
def test_checkpoints_of_the_convolution_in_its_pool() -> None:
    call, x, start = conv_call([40, 21])
    pool, kept = torch.full((9, D, W - 1), NAN), torch.full((9, D, W - 1), NAN)
    pool[4] = start[0]
    apart = pool.clone()
    call |= {
        "state_indices": torch.tensor([4, 4]), "out_state_indices": torch.tensor([0, 8]), "checkpoint_every": 16,
        "checkpoint_slots": torch.tensor([[1, 2, -1], [6, 7, 3]]), "checkpoint_offset": torch.tensor([9, 0]),
        "has_initial_state": torch.tensor([True, False]),
    }  # fmt: skip
    y = kda.causal_conv1d_update(x, pool, **call, checkpoints=pool)
    assert same_bits(y, kda.causal_conv1d_update(x, apart, **call, checkpoints=kept))
    for slot in range(9):
        assert same_bits(pool[slot], (kept if slot in (1, 2, 6) else apart)[slot])


APART = "checkpoint_slots: expected slots that no sequence reads or writes, got slot "
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint_every": 24}, "checkpoint_every: expected a positive multiple of 16, got 24"),
    ({"checkpoint_every": 0}, "checkpoint_every: expected a positive multiple of 16, got 0"),
    ({"checkpoint_offset": torch.tensor([3, -1])}, "checkpoint_offset: expected numbers >= 0, got -1"),
    ({"checkpoint_offset": torch.tensor([3])}, r"checkpoint_offset: expected shape \[2\] \(\[N\]\), got \[1\]"),
    ({"checkpoint_offset": torch.tensor([3, 2**31])}, "checkpoint_offset: expected integers of 32 bits, got 2147483"),
    ({"checkpoint_offset": torch.tensor([3.0, 1.0])}, "checkpoint_offset: expected int32 or int64, got float32"),
    ({"checkpoint_offset": 3}, "checkpoint_offset: expected an array, got"),
    ({"checkpoint_slots": torch.tensor([[2], [5]])}, APART + "2, which sequence 0 reads"),
    ({"checkpoint_slots": torch.tensor([[5], [1]])}, APART + "1, which sequence 1 writes"),
    ({"checkpoint_slots": torch.tensor([[5], [5]])}, "checkpoint_slots: expected every live slot once, got slot 5"),
    ({"checkpoint_slots": torch.tensor([5, 4])}, r"checkpoint_slots: expected shape \[N,M\] with N = 2, got \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("op", [kda.prefill, kda.causal_conv1d_update])
def test_refused(op: Any, change: dict[str, Any], message: str) -> None:
    p, h0 = serving_problem([20, 20])
    call: dict[str, Any] = {
        "state_indices": torch.tensor([2, 2]), "out_state_indices": torch.tensor([0, 1]), "checkpoint_every": 16,
        "checkpoint_slots": torch.tensor([[5], [4]]),
    } | change  # fmt: skip
    pool = new_pool(6, h0) if op is kda.prefill else torch.ones(6, 4, 3)
    with pytest.raises(ValueError, match="^" + message):
        if op is kda.prefill:
            op(**p.keywords, state=pool, checkpoints=pool, **call)
        else:
            op(torch.ones(2, 20, 4), pool, torch.ones(4, 4), checkpoints=pool, **call)


def test_an_offset_needs_checkpoints() -> None:
    p, h0 = serving_problem([20, 20])
    with pytest.raises(ValueError, match=r"^checkpoint_offset: expected none without checkpoints, got one"):
        kda.prefill(**p.keywords, state=h0, checkpoint_offset=torch.tensor([1, 2]))


def test_who_keeps_them() -> None:
    p, h0 = serving_problem([20, 20])
    call = {**p.keywords, "state": h0, "checkpoints": h0.clone(), "checkpoint_slots": torch.tensor([[0], [1]])}
    for more in ({"checkpoint_every": 16}, {"checkpoint_offset": torch.tensor([1, 2])}):
        assert "* cpu_chunk" in kda.explain(**call, **more)


def test_compiled() -> None:
    p, h0 = serving_problem([20, 40])
    call = {**p.keywords, "checkpoint_slots": torch.tensor([[0, 2], [1, 3]]), "checkpoint_every": 16,
            "checkpoint_offset": torch.tensor([5, 0])}  # fmt: skip
    eager, compiled = (
        (h0.clone(), h0.new_full((4, *h0.shape[1:]), NAN)),
        (h0.clone(), h0.new_full((4, *h0.shape[1:]), NAN)),
    )
    expected = kda.prefill(**call, state=eager[0], checkpoints=eager[1])
    run = torch.compile(lambda state, kept, **kw: kda.prefill(**kw, state=state, checkpoints=kept), backend="aot_eager")
    assert same_bits(run(*compiled, **call), expected) and all(map(same_bits, eager, compiled))

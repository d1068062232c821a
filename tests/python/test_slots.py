"""Slots to read and slots to write: several sequences start from one state, and a pool may only be read. Indices of
either width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from support import Problem, Tensor, on_cpu, same_bits
from test_serving import NAN, int32, new_pool, rows, sequence, serving_problem

on_cuda = pytest.mark.cuda
both = pytest.mark.parametrize("op", [pytest.param(f, marks=on_cuda) for f in (kda.prefill, kda.decode)])
WIDTHS = [torch.int32, torch.int64]


def implementations(op: Callable[..., Any]) -> list[str | None]:
    """Those of the CPU, by name; on a GPU the one that is chosen."""
    name = "forward" if op is kda.prefill else "decode"
    return [i for i in kda.implementations(name) if not i.startswith("cuda")] if on_cpu() else [None]


def forked(op: Callable[..., Tensor], p: Problem, starts: list[Tensor | None], impl: str | None) -> list[Tensor]:
    """The outputs of all sequences, each run alone in place, and then their last states."""
    outputs, states = [], []
    for (first, last), start in zip(rows(p), starts, strict=True):
        state = torch.zeros_like(next(s for s in starts if s is not None)) if start is None else start.clone()
        outputs.append(op(**sequence(p, first, last).keywords, state=state[None], impl=impl))
        states.append(state)
    return outputs + states


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_several_sequences_read_one_slot(op: Any, dtype: torch.dtype, v_first: bool, width: torch.dtype) -> None:
    p, h0 = serving_problem([5, 70, 0, 3, 1], tail=4, v_first=v_first)
    h0 = h0.to(dtype)
    starts = [h0[0], h0[0], None, None, h0[0]]  # the third starts from zeros, the fourth is padding
    read, write, has = [2, 2, 7, -1, 2], [6, 4, 0, 5, -1], [True, True, False, True, True]
    for impl in implementations(op):
        pool = new_pool(8, h0)
        pool[2] = h0[0]
        before = pool.clone()
        alone = forked(op, p, starts, impl)
        out = op(
            **p.keywords, state=pool, state_indices=torch.tensor(read, dtype=width), impl=impl,
            out_state_indices=torch.tensor(write, dtype=width), has_initial_state=torch.tensor(has),
        )  # fmt: skip
        for n, (first, last) in enumerate(rows(p)):
            wanted = torch.zeros_like(out[:, first:last]) if read[n] < 0 else alone[n]
            assert same_bits(out[:, first:last], wanted), f"{impl}: sequence {n}"
        for n, slot in ((0, 6), (1, 4), (2, 0)):
            assert same_bits(pool[slot], alone[5 + n]), f"{impl}: state of sequence {n}"
        for slot in (1, 2, 3, 5, 7):
            assert same_bits(pool[slot], before[slot]), f"{impl}: slot {slot} is written by none"


@both
def test_a_pool_that_is_only_read(op: Any) -> None:
    p, h0 = serving_problem([5, 70, 3])
    for impl in implementations(op):
        expected = forked(op, p, [h0[1]] * 3, impl)
        for more in ({"update_state": False}, {"out_state_indices": int32(-1, -1, -1)}):
            pool = new_pool(3, h0)
            pool[1] = h0[1]
            before = pool.clone()
            out = op(**p.keywords, state=pool, state_indices=int32(1, 1, 1), impl=impl, **more)
            assert same_bits(pool, before)
            for n, (first, last) in enumerate(rows(p)):
                assert same_bits(out[:, first:last], expected[n])


@both
def test_rows_to_read_and_slots_to_write(op: Any) -> None:
    """Without state_indices row n is read."""
    p, h0 = serving_problem([5, 70, 3])
    expected, state = h0.clone(), h0.clone()
    out = op(**p.keywords, state=expected)
    assert same_bits(op(**p.keywords, state=state, out_state_indices=int32(0, 1, 2)), out)
    assert same_bits(state, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
def test_the_convolution(width: torch.dtype) -> None:
    torch.manual_seed(0)
    D, lengths = 12, [1, 5, 0, 2]
    x, weight = torch.randn(1, sum(lengths), D), torch.randn(D, 4)
    cu = torch.tensor([0, 1, 6, 6, 8])
    start = torch.randn(D, 3)
    names = [i for i in kda.implementations("conv") if not i.startswith("cuda")] if on_cpu() else [None]
    for impl in names:
        pool = torch.full((6, D, 3), NAN)
        pool[1] = start
        before = pool.clone()
        call: dict[str, Any] = {"weight": weight, "cu_seqlens": cu, "impl": impl}
        read = torch.tensor([1] * 4, dtype=width)
        write = torch.tensor([0, 5, 3, -1], dtype=width)
        out = kda.causal_conv1d_update(x, pool, state_indices=read, out_state_indices=write, **call)
        again = kda.causal_conv1d_update(x, before, state_indices=read, update_state=False, **call)
        assert same_bits(out, again)
        copies = start.expand(4, D, 3).clone()
        assert same_bits(out, kda.causal_conv1d_update(x, copies, **call))
        for n, slot in enumerate((0, 5, 3)):
            assert same_bits(pool[slot], copies[n])
        for slot in (1, 2, 4):
            assert same_bits(pool[slot], before[slot])


@pytest.mark.cuda
def test_wide_indices_have_the_bits_of_narrow_ones() -> None:
    p, h0 = serving_problem([3, 1, 4])
    kw, g = p.keywords, p.tensors["g"]
    results = []
    for width in WIDTHS:

        def wide(*x: int, dtype: torch.dtype = width) -> Tensor:
            return torch.tensor(x, dtype=dtype)

        pool = new_pool(9, h0)
        pool[[4, 0, 2]] = h0
        HV, K, V = g.shape[2], g.shape[3], h0.shape[2]
        records = kda.new_records(4, 4, p.tensors["q"].shape[2], HV, K, V)._replace(indices=wide(3, -1, 0))
        o = kda.verify_kvbuffer(**kw, state=pool, records=records, state_indices=wide(4, 0, 2))
        kda.flush_kvbuffer(pool, records, wide(2, 1, 4), state_indices=wide(4, 0, 2))
        slots = torch.tensor([[6, 7, -1, -1, -1], [8, -1, -1, -1, -1], [1, 3, 5, -1, -1]], dtype=width)
        read = {"state_indices": wide(4, 0, 2), "update_state": False}
        kept = kda.decode_mtp(**kw, state=pool, **read, snapshots=pool, snapshot_slots=slots)
        more = kda.decode_mtp(**kw, state=pool, snapshots=pool, snapshot_slots=slots, accepted=wide(2, 1, 3),
                              update_state=False)  # fmt: skip
        results.append([o, pool, kept, more, *records[:3]])
    for narrow, wide_one in zip(*results, strict=True):
        assert same_bits(narrow, wide_one)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        ([0, 1, 2], [3, 3, 4], "out_state_indices: expected every live slot once, got slot 3 twice"),
        ([0, 1, 2], [3, 1, 0], "out_state_indices: expected no slot that another sequence reads, got slot 0, which"),
        ([0, 0, 2], [0, 1, 3], "out_state_indices: expected no slot that another sequence reads, got slot 0, which"),
        ([0, 1, 2], [3, 5, 4], "out_state_indices: expected slots below 5, got 5"),
        ([0, 1, 5], [3, 1, 4], "state_indices: expected slots below 5, got 5"),
        ([0, 1, 2], [3, 2**32 + 4, -1], "out_state_indices: expected integers of 32 bits, got 4294967300"),
        ([0, -(2**32), 2], [3, 4, -1], "state_indices: expected integers of 32 bits, got -4294967296"),
        ([0, 1, 2], [3, 4], r"out_state_indices: expected shape \[3\] \(\[N\]\), got \[2\]"),
    ],
)
@pytest.mark.parametrize("op", [kda.prefill, kda.decode, kda.causal_conv1d_update])
def test_refused(op: Any, read: list[int], write: list[int], message: str) -> None:
    p, h0 = serving_problem([2, 1, 2])
    slots = {"state_indices": torch.tensor(read), "out_state_indices": torch.tensor(write)}
    with pytest.raises(ValueError, match="^" + message):
        if op is kda.causal_conv1d_update:
            op(torch.ones(3, 2, 4), torch.ones(5, 4, 3), torch.ones(4, 4), **slots)
        else:
            op(**p.keywords, state=new_pool(5, h0), **slots)


def test_what_is_not_written_is_not_refused() -> None:
    """Two padded sequences may have the same slot to write; a slot may be written that only a fresh one names."""
    p, h0 = serving_problem([2, 1, 2])
    for impl in implementations(kda.prefill):
        pool = h0.clone()
        call = {**p.keywords, "state": pool, "impl": impl}
        kda.prefill(**call, state_indices=int32(-1, -1, 0), out_state_indices=int32(1, 1, 2))
        has = torch.tensor([True, False, True])
        kda.prefill(**call, state_indices=int32(0, 1, 2), out_state_indices=int32(1, -1, 2), has_initial_state=has)


def test_slots_to_write_need_a_pool() -> None:
    p, h0 = serving_problem([2, 1, 2])
    sentence = "out_state_indices: expected a pool"
    with pytest.raises(ValueError, match=sentence):
        kda.prefill(**p.keywords, out_state_indices=int32(0, 1, 2))
    with pytest.raises(ValueError, match=sentence):
        kda.decode(**p.keywords, state=h0, update_state=False, out_state_indices=int32(0, 1, 2))


@pytest.mark.parametrize("many", [3, 50])
def test_slots_far_apart_in_a_large_pool(many: int) -> None:
    """Races are found one window of slots at a time."""
    x = torch.ones(many, 1, 1, 1)
    beta = torch.ones(many, 1, 1)
    pool = torch.zeros(400_000, 1, 1, 1)
    read, write = torch.arange(many) * 7000, torch.arange(many) * 7000 + 1
    kda.decode(x, x, x, -x, beta, pool, state_indices=read, out_state_indices=write)
    assert int(pool.count_nonzero()) == many
    write[0] = read[-1]
    with pytest.raises(
        ValueError, match=f"another sequence reads, got slot {int(read[-1])}, which sequence {many - 1}"
    ):
        kda.decode(x, x, x, -x, beta, pool, state_indices=read, out_state_indices=write)


@pytest.mark.parametrize("op", [kda.prefill, kda.decode])
def test_compiled(op: Any) -> None:
    p, h0 = serving_problem([2, 1, 2])
    eager, compiled = new_pool(5, h0, 0).contiguous(), new_pool(5, h0, 0).contiguous()
    eager[1] = compiled[1] = h0[0]
    call = {**p.keywords, "state_indices": torch.tensor([1, 1, 1]), "out_state_indices": torch.tensor([0, 4, -1])}
    expected = op(**call, state=eager)
    run = torch.compile(lambda state, **kw: op(**kw, state=state), fullgraph=True, backend="aot_eager")
    assert same_bits(run(compiled, **call), expected) and same_bits(compiled, eager)
    read_only = torch.compile(lambda state, **kw: op(**kw, state=state, update_state=False), backend="aot_eager")
    call.pop("out_state_indices")
    before = compiled.clone()
    read_only(compiled, **call)
    assert same_bits(compiled, before)

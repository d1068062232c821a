"""The same scenarios for every operator (operators.py): two inputs in turn, memory full of NaN, slots of nobody, other
streams, graphs with new data, calls that must not wait, tensors of another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from operators import OPERATORS, Memory, Operator
from places import DEVICE, HERE, all_same, captured, only_cuda, without_synchronisation
from support import Tensor, general_kernels, same_bits

CUDA = DEVICE.type == "cuda"
DECODING = ("decode", "decode_mtp", "decode_mtp_slots", "verify", "flush", "flush_all_layers", "flush_verify",
            "flush_verify_ring", "rounds")  # fmt: skip
CASES = [(name, "chosen") for name in OPERATORS] + [(name, "general") for name in DECODING]


@pytest.fixture(params=CASES, ids=lambda case: case[0] if case[1] == "chosen" else f"{case[0]}-{case[1]}")
def operator(request: pytest.FixtureRequest, environment: Callable[[str, str | None], None]) -> Operator:
    """Each operator; those of decoding also with the kernels that accept any call."""
    name, kernels = request.param
    if kernels == "general":
        environment("KDA_IMPL", general_kernels(DEVICE.type))
    return OPERATORS[name]


def refill(m: Memory, start: Memory) -> None:
    for name, x in m.items():
        if isinstance(x, Tensor):
            x.copy_(start[name])


def written(operator: Operator, m: Memory) -> list[Tensor]:
    return [m[name] for name in (*operator.outs, *operator.pools, *operator.changed)]


def called(operator: Operator, m: Memory) -> list[Tensor]:
    """Copies of what a call returns and writes."""
    return [x.clone() for x in (*operator.run(m), *written(operator, m))]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are NaN, and integers the largest: outputs, and on a GPU workspaces."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_two_inputs_in_turn(operator: Operator) -> None:
    """Each call gives the bits of its first one, whatever the other has left in caches and workspaces."""
    starts = [HERE(operator.make(seed)) for seed in range(2)]
    memories = [HERE(start) for start in starts]
    first = [called(operator, m) for m in memories]
    assert not all_same(*first)
    for turn in range(100 if CUDA else 2):
        for m, start, expected in zip(memories, starts, first, strict=True):
            refill(m, start)
            assert all_same(called(operator, m), expected), turn


def test_poison(operator: Operator) -> None:
    """What memory held that a call writes, or allocates, has no effect, and no element is left as it was."""
    start = HERE(operator.make(0))
    expected = called(operator, HERE(start))
    for name in operator.outs:
        start[name].fill_(torch.nan)
    m = HERE(start)
    with poisoned_memory():
        results = operator.run(m)
    assert all_same([*results, *written(operator, m)], expected)
    assert all(x.isfinite().all() for x in results)


def test_slots_of_nobody_and_inputs_stay(operator: Operator) -> None:
    """NaN in the slots of no request is neither read nor overwritten, and no input is."""
    m, nobodys = HERE(operator.make(0)), dict[str, Tensor]()
    for name, (at, dim) in operator.pools.items():
        free = torch.ones(m[name].shape[dim], dtype=torch.bool, device=DEVICE)
        free[m[at].flatten()[m[at].flatten() >= 0].long()] = False
        assert free.any() or name == "checkpoints"
        nobodys[name] = free.nonzero().flatten()
        if m[name].is_floating_point():
            m[name].index_fill_(dim, nobodys[name], torch.nan)
    before = HERE(m)
    results = operator.run(m)
    assert all(x.isfinite().all() for x in results)
    for name, x in m.items():
        if name in nobodys:
            free, dim = nobodys[name], operator.pools[name][1]
            assert same_bits(x.index_select(dim, free), before[name].index_select(dim, free)), name
        elif isinstance(x, Tensor) and name not in (*operator.outs, *operator.changed):
            assert same_bits(x, before[name]), name


class Eager:
    """The place of a graph on the CPU."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.replay = call


def test_new_data_in_the_same_memory(operator: Operator) -> None:
    """On a GPU a graph, captured once, is replayed with other numbers, lengths and slots: the bits of eager calls."""
    m, results = HERE(operator.make(0)), list[Tensor]()

    def call() -> None:
        results[:] = operator.run(m)

    graph: Any = captured(call) if CUDA else Eager(call)
    refill(m, HERE(operator.make(1)))
    torch.manual_seed(0)
    for turn in range(200 if CUDA else 3):
        operator.shuffle(m)
        for name in operator.outs:
            m[name].fill_(torch.nan)
        eager = HERE(m)
        graph.replay()
        assert all_same([*results, *written(operator, m)], called(operator, eager)), turn
        assert all(x.isfinite().all() for x in results), turn


@only_cuda
def test_another_stream(operator: Operator) -> None:
    start, m = (HERE(operator.make(seed)) for seed in range(2))
    expected, stream = called(operator, HERE(start)), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel that does not wait on this stream reads the numbers of the other seed
        refill(m, start)
        got = called(operator, m)
    stream.synchronize()
    assert all_same(got, expected)


@only_cuda
def test_two_streams_at_once(operator: Operator) -> None:
    starts = [HERE(operator.make(seed)) for seed in range(2)]
    memories = [HERE(start) for start in starts]
    alone = [called(operator, HERE(start)) for start in starts]
    streams = [torch.cuda.Stream() for _ in starts]
    torch.cuda.synchronize()
    for _ in range(20):
        together = []
        for m, start, stream in zip(memories, starts, streams, strict=True):
            with torch.cuda.stream(stream):
                refill(m, start)
                together.append(called(operator, m))
        torch.cuda.synchronize()
        assert all(all_same(a, b) for a, b in zip(together, alone, strict=True))


@only_cuda
def test_nothing_waits(operator: Operator) -> None:
    m = HERE(operator.make(0))
    operator.run(m)
    with without_synchronisation():
        for _ in range(3):
            operator.run(m)


@only_cuda
@pytest.mark.parametrize(("name", "of"), [(name, op) for op, x in OPERATORS.items() for name in x.elsewhere])
def test_tensors_of_another_device_are_named(name: str, of: str) -> None:
    m = HERE(OPERATORS[of].make(0))
    with pytest.raises(ValueError, match=rf"^{name}: expected device cuda:0 .*got cpu"):
        OPERATORS[of].run(m | {name: m[name].cpu()})

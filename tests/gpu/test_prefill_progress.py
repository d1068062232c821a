"""Prefill kernels whose blocks wait for one another finish, with the same bits, whatever else runs on the GPU and
whatever their workspace held before. Also long sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kda
from places import DEVICE, HERE, ORACLE, all_same, captured, only_cuda
from support import Tensor, rel_rmse, same_bits

HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
IMPLEMENTATIONS = ["cuda_prefill_chunk"]
IMPLEMENTATIONS += ["cuda_hopper_prefill_pairs", "cuda_hopper_prefill_segments"] if HOPPER else []


def tokens(H: int, T: int, seed: int = 0, slow: bool = False) -> dict[str, Any]:
    """Keywords of a call in bf16, everything fused, gates with a lower bound; ``slow``: decays of about 0.999."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    q, k, v, g = (normal(1, T, H, 128).bfloat16() for _ in range(4))
    call = {"q": q, "k": k, "v": v, "beta": normal(1, T, H).bfloat16(), "use_qk_l2norm_in_kernel": True}
    call |= {"use_beta_sigmoid_in_kernel": True}
    if slow:
        return call | {"g": torch.full((1, T, H, 128), -1e-3)}
    gate = {"A_log": normal(H) / 2, "dt_bias": normal(H, 128), "lower_bound": -5.0, "use_gate_in_kernel": True}
    return call | gate | {"g": g}


def run(call: dict[str, Any], state: Tensor, **more: Any) -> list[Tensor]:
    """Runs in place on a copy of the state."""
    state = state.clone()
    return [kda.prefill(**call, state=state, **more), state]


def states(H: int) -> Tensor:
    return torch.randn(1, H, 128, 128, device=DEVICE)


@only_cuda
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_several_at_once(impl: str) -> None:
    """Four streams, each with a call of another size: blocks of one call keep those of another from an SM."""
    calls = [(HERE(tokens(H, T, seed=H)), states(H)) for H, T in ((96, 1024), (64, 512), (12, 2048), (3, 4096))]
    alone = [run(call, state, impl=impl) for call, state in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        together = []
        for (call, state), stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                together.append(run(call, state, impl=impl))
        torch.cuda.synchronize()
        assert all(all_same(a, b) for a, b in zip(together, alone, strict=True))


@only_cuda
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("busy", [0.75, 1.0])
def test_beside_a_kernel_that_holds_most_of_the_gpu(impl: str, busy: float) -> None:
    """Blocks that take a whole SM find few free ones, or none for a while, because cuda_prefill_recurrent occupies the
    others."""
    blocks = int(torch.cuda.get_device_properties(DEVICE).multi_processor_count * busy)
    other, others = HERE(tokens(max(blocks // 8, 1), 3000)), torch.cuda.Stream()
    calls = [(HERE(tokens(H, 1024, seed=H)), states(H)) for H in (96, 40, 5)]
    alone = [run(call, state, impl=impl) for call, state in calls]
    idle = states(other["q"].shape[2])
    expected = run(other, idle, impl="cuda_prefill_recurrent")
    torch.cuda.synchronize()
    with torch.cuda.stream(others):
        beside = run(other, idle, impl="cuda_prefill_recurrent")
    together = [run(call, state, impl=impl) for call, state in calls]
    torch.cuda.synchronize()
    assert all_same(beside, expected) and all(all_same(a, b) for a, b in zip(together, alone, strict=True))


@only_cuda
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("H", [8, 96])  # with many heads, pairs of blocks of cuda_hopper_prefill_pairs pass states on
def test_workspace_may_hold_anything(impl: str, H: int) -> None:
    """Content left by an aborted launch, or by one of another size, has no effect on replays of a graph."""
    call, state = HERE(tokens(H, 1500)), states(H)
    need = kda.workspace_size(**call, state=state, impl=impl)
    workspace = torch.zeros(need, dtype=torch.uint8, device=DEVICE)
    pool, out = state.clone(), torch.empty_like(call["v"])
    graph = captured(lambda: kda.prefill(**call, state=pool, out=out, workspace=workspace, impl=impl))
    expected = run(call, state, impl=impl)
    words = workspace[: need // 4 * 4].view(torch.int32)
    left = workspace.clone()
    for what in range(12):
        if what % 4 == 0:
            workspace.fill_(0xFF)
        elif what % 4 == 1:
            words.copy_(torch.randint(0, 100, words.shape, device=DEVICE, dtype=torch.int32))
        elif what % 4 == 2:
            workspace.copy_(left)
        else:
            workspace.copy_(left.roll(64))
        pool.copy_(state)
        graph.replay()
        assert all_same([out, pool], expected), what
        left.copy_(workspace)


@only_cuda
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_thousand_calls_in_turn(impl: str) -> None:
    """Each uses the workspace of the one before, with other numbers: a block that reads too early gets the old ones."""
    calls = [(HERE(tokens(H, 300, seed=seed)), states(H)) for seed, H in enumerate((6, 6, 9))]
    need = max(kda.workspace_size(**call, state=state, impl=impl) for call, state in calls)
    workspace = torch.empty(need, dtype=torch.uint8, device=DEVICE)
    expected = [run(call, state, impl=impl) for call, state in calls]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i, (call, state) in zip(range(1000), itertools.cycle(calls), strict=False):
        got = run(call, state, impl=impl, workspace=workspace)
        for x, y in zip(got, expected[i % len(calls)], strict=True):
            wrong += (x.view(torch.uint8) != y.view(torch.uint8)).any()
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLEMENTATIONS if DEVICE.type == "cuda" else [None])
def test_slow_gates_of_65536_tokens(impl: str | None) -> None:
    """Rounding errors accumulate longest where nothing decays."""
    call = tokens(1, 65536, slow=True)
    expected, state = (torch.zeros(1, 1, 128, 128, dtype=dtype) for dtype in (torch.float64, torch.float32))
    o = kda.prefill(**ORACLE(call), state=expected, impl="reference")
    got = run(HERE(call), HERE(state), impl=impl)
    errors = [float(rel_rmse(x, y.cpu().double())) for x, y in ((o, got[0]), (expected, got[1]))]
    assert errors[0] < 0.005 and errors[1] < 0.005, errors


@only_cuda
def test_a_million_tokens() -> None:
    """One head, against the CPU; and the default for a few heads with long sequences."""
    call, state = tokens(1, 1 << 20), torch.zeros(1, 1, 128, 128)
    expected = [kda.prefill(**call, state=state), state]
    got = run(HERE(call), torch.zeros(1, 1, 128, 128, device=DEVICE))
    errors = [float(rel_rmse(x.double(), y.cpu().double())) for x, y in zip(expected, got, strict=True)]
    assert max(errors) < 0.005, errors
    assert same_bits(got[0], run(HERE(call), torch.zeros(1, 1, 128, 128, device=DEVICE))[0])


@pytest.mark.skipif(not HOPPER, reason="about the default on Hopper")
def test_batch_invariant_prefill_is_not_cut() -> None:
    """Few heads with long sequences: the default splits them, so results may differ from those next to other heads."""
    call, state, other = HERE(tokens(2, 4096)), states(2), HERE(tokens(64, 4096, seed=1))

    def chosen() -> str:
        return next(line for line in kda.explain(**call, state=state).splitlines() if line[0] == "*")

    assert "cuda_hopper_prefill_segments" in chosen() and not kda.use_batch_invariant()
    try:
        assert "cuda_hopper_prefill_pairs" in chosen()
        among = {n: torch.cat([call[n], other[n]], 2) for n in ("q", "k", "v", "g", "beta")}
        gate = {n: torch.cat([call[n], other[n]]) for n in ("A_log", "dt_bias")}
        o, h = run(call, state)
        o_among, h_among = run({**call, **among, **gate}, torch.cat([state, states(64)], 1))
        assert same_bits(o_among[:, :, :2], o) and same_bits(h_among[:, :2], h)
    finally:
        assert kda.use_batch_invariant(False)

"""Context parallelism on two ranks: the same as one device. On CUDA each rank has a GPU and they exchange by NCCL, also
in CUDA graphs; on the CPU by gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ranks as ranks_of
from distributed_token_ranks import CASES, INVARIANT, PATIENCE, RANKS, TOKENWISE, run_rank
from places import only_cuda
from support import rel_rmse, same_bits

pytestmark = ranks_of.enough_devices(RANKS)
BY_TOKEN = ("o", "dx", *(f"d{n}" for n in TOKENWISE))
Results = tuple[list[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Those of the ranks, and of one device."""
    folder = ranks_of.run(run_rank, RANKS, tmp_path_factory.mktemp("ranks"), PATIENCE)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)], torch.load(folder / "whole.pt")


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    order = torch.cat([part["at"] for part in parts]).argsort()
    return {
        n: torch.cat([part[n] for part in parts], 1)[:, order] if n in BY_TOKEN else sum(part[n] for part in parts)  # type: ignore[misc]
        for n in parts[0]
        if n != "at"
    }


def errors(expected: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    assert {n for n in expected if n != "at"} == set(got)
    return {n: rel_rmse(expected[n].float(), x.float()) for n, x in got.items()}


@pytest.mark.parametrize("name", CASES)
def test_equal_one_device(results: Results, name: str) -> None:
    """bf16 rounds states and products in other places: at the limit of math.md for each of the two calls. Sums over
    all tokens that cancel, of the gate's parameters, have a limit of their own."""
    ranks, whole = results
    found = errors(whole[name], together([r[name] for r in ranks]))
    rounded = CASES[name].options.get("dtype") == torch.bfloat16
    limits = {n: 1e-2 if rounded else 1e-4 if n in ("dA_log", "ddt_bias") else 1e-5 for n in found}
    assert {n: error for n, error in found.items() if not error <= limits[n]} == {}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_every_time(results: Results, name: str) -> None:
    """The second time, torch refuses to wait for the GPU."""
    for r in results[0]:
        assert all(same_bits(x, r[f"{name} again"][n]) for n, x in r[name].items())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", INVARIANT)
def test_bits_do_not_depend_on_ranks(results: Results, name: str, layout: str) -> None:
    ranks, _ = results
    got = together([r[f"invariant {name} {layout}"] for r in ranks])
    for r in ranks:
        alone = r[f"invariant {name} alone"]
        assert [n for n in BY_TOKEN if n in got and not same_bits(alone[n], got[n])] == []


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_layer(results: Results, layout: str) -> None:
    ranks, whole = results
    found = errors(whole["layer"], together([r[f"layer {layout}"] for r in ranks]))
    assert {
        n: error for n, error in found.items() if not error <= (1e-4 if n in ("d A_log", "d dt_bias") else 1e-5)
    } == {}


@pytest.mark.parametrize("state_rank", [None, 0, 1])
def test_prefill(results: Results, state_rank: int | None) -> None:
    ranks, whole = results
    parts = [r[f"prefill {state_rank}"] for r in ranks]
    got = together([{n: x for n, x in part.items() if n != "state"} for part in parts])
    assert rel_rmse(whole["prefill"]["o"].float(), got["o"].float()) <= 6e-3
    owners = {4: 1, 2: 1} if state_rank is None else {4: state_rank, 2: state_rank}  # both end on rank 1
    for slot in range(5):
        for rank, part in enumerate(parts):
            state, expected = part["state"][slot], whole["prefill"]["state"][slot]
            if owners.get(slot) == rank:
                assert rel_rmse(expected, state) <= 6e-3
            else:
                assert not state.any()


@only_cuda
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_in_cuda_graphs(results: Results, layout: str, backward: bool) -> None:
    """NCCL's all-gathers and all else are replayed with other inputs: the bits of the same calls without a graph."""
    for r in results[0]:
        found = r[f"graph {layout} {backward}"]
        assert len(found) == (8 if backward else 1)
        assert all(same_bits(x, y) and x.any() for x, y in found.values())

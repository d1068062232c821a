"""FLA's contract of context parallelism: its context as ``cp_context``, in the scenarios and at the limits of its own
test_cp_kda."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fla_cp_ranks import CASES, run, run_layer, run_rank
from gloo import run_ranks
from support import Tensor, rel_rmse

Results = dict[int, list[dict[str, Any]]]

# The largest differences that FLA's tests allow, for float16.
ALLOWED = {"o": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dg": 2e-2, "dbeta": 2e-2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp("fla")
        run_ranks(run_rank, (ranks, str(folder)), ranks)
        found[ranks] = [torch.load(folder / f"{ranks}_{rank}.pt") for rank in range(ranks)]
    return found


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    order = torch.cat([part["order"] for part in parts]).argsort()
    return {n: torch.cat([part[n] for part in parts], 1)[:, order] for n in parts[0] if n != "order"}


@pytest.mark.parametrize("name", CASES)
def test_scenarios_of_fla(results: Results, name: str) -> None:
    expected, got = run(CASES[name]), together([r[name] for r in results[CASES[name].ranks]])
    assert set(got) == set(ALLOWED)
    for n, x in got.items():
        assert (expected[n].float() - x.float()).abs().max() < ALLOWED[n], n
        assert rel_rmse(expected[n].float(), x.float()) < 2e-3, n  # one rounding to float16 is 3e-4


@pytest.mark.parametrize("name", CASES)
def test_layer(results: Results, name: str) -> None:
    expected, got = run_layer(CASES[name].lengths), together([r[f"layer {name}"] for r in results[CASES[name].ranks]])
    assert all(rel_rmse(expected[n], x) < 1e-5 for n, x in got.items())


def test_what_does_not_fit_is_refused_on_all_ranks(results: Results) -> None:
    first, second = (r["refusals"] for r in results[2])
    assert (
        first[0] == second[0] == ("cp_context.pre_num_ranks_dev: expected None (offsets are read once), got a tensor")
    )
    assert first[1].startswith(
        "cp_context: expected 0 ranks before and 1 after piece 0 (pre_num_ranks, post_num_ranks)"
    )
    assert second[1].startswith("cp_context: expected 1 ranks before and 0 after piece 1")
    assert first[2] == second[2]
    assert first[2].startswith(
        "tokens of a piece: expected the same on every rank, got 512 on rank 0 and 300 on rank 1"
    )

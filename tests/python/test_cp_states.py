"""Context parallelism with initial and final states: outputs, states at ends and at borders, and all gradients are
those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_ranks import TOKENWISE
from cp_state_ranks import CASES, WINDOWS, in_one_process, run_rank
from gloo import run_ranks
from support import rel_rmse

Results = tuple[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=WINDOWS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    ranks, folder = request.param, tmp_path_factory.mktemp("states")
    run_ranks(run_rank, (ranks, str(folder)), ranks)
    return ranks, [torch.load(folder / f"{ranks}_{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(results: Results, name: str, which: int) -> None:
    ranks, all_parts = results
    parts = [r[f"{name} {WINDOWS[ranks][which]}"] for r in all_parts]
    expected = in_one_process(CASES[name], [part["start"] for part in parts])
    got = {n: x for part in parts for n, x in part.items() if n.startswith("state")}
    for n in ("o", *(n for n in expected if n.startswith("d"))):
        tokenwise = n == "o" or n[1:] in TOKENWISE
        got[n] = torch.cat([p[n] for p in parts], 1) if tokenwise else torch.stack([p[n] for p in parts]).sum(0)
    assert got.keys() == expected.keys()
    errors = {n: rel_rmse(x, got[n]) for n, x in expected.items()}
    limits = {n: 1e-12 if x.dtype == torch.float64 else 1e-5 for n, x in expected.items()}
    assert {n: e for n, e in errors.items() if not e <= limits[n]} == {}

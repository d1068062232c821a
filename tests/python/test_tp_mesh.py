"""Heads on 2 and 4 ranks, and on 2 x 2 ranks with FSDP2 across the other dimension: all compute what one process
does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gloo import run_ranks
from layer_model import relative
from mesh_ranks import CASES, CUTS_OF_FUNCTIONS, MESHES, RUNS, block, in_one_process, run_rank
from tp_ranks import FUNCTIONS, run_function

Results = tuple[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=MESHES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The name of a mesh, and the results of its ranks."""
    mesh, folder = request.param, tmp_path_factory.mktemp("mesh")
    ranks = MESHES[mesh][0] * MESHES[mesh][1]
    run_ranks(run_rank, (mesh, str(folder)), ranks)
    return mesh, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_ranks_equal_one_process(results: Results, name: str, dtype: torch.dtype) -> None:
    """float64 shows that the sums are the same. float32 shows that kernels and sums over ranks add nothing to the
    rounding of torch's matrix products: given these, most results have the same bits. How torch rounds depends on the
    CPU: differences are up to 2.9e-7 on one, and 3.9e-7 on another."""
    mesh, ranks = results
    expected, limit = in_one_process(mesh, name, dtype), 1e-14 if dtype == torch.float64 else 5e-7
    for r in ranks:
        got = r[f"{name} {dtype}"]
        assert set(got) == set(expected)
        own = {n: x[r["rows"]] if n in ("o", "x") else x for n, x in expected.items()}
        errors = {n: relative(x, got[n]) for n, x in own.items()}
        wrong = {n: error for n, error in errors.items() if not error < limit}
        assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_plans_equal_one_process(results: Results, name: str) -> None:
    """A plan of torch's styles, which knows only the projections."""
    mesh, ranks = results
    expected = in_one_process(mesh, name, torch.float64)
    for r in ranks:
        got = r[f"{name} by plan"]
        assert set(got) == {n for n in expected if n in ("o", "x") or n.startswith("d ")}
        own = {n: expected[n][r["rows"]] if n in ("o", "x") else expected[n] for n in got}
        wrong = {n: error for n, x in own.items() if not (error := relative(x, got[n])) < 1e-14}
        assert not wrong
        assert r[f"{name} heads of a cache"] * MESHES[mesh][1] == block(name).attn.num_v_heads


@pytest.mark.parametrize("cut", CUTS_OF_FUNCTIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_tensors_cut_twice(results: Results, name: str, cut: str) -> None:
    if results[0] != "fsdp2_tp2":
        pytest.skip("this mesh has one dimension")
    expected = run_function(name, cut)
    for r in results[1]:
        got = r[f"{name} {cut}"]
        assert set(got) == set(expected)
        assert {n: e for n, x in expected.items() if not (e := relative(x, got[n])) < 3e-7} == {}


def test_whole_state_dicts(results: Results) -> None:
    """They go into a model that was made empty, and come out with the same bits; so does an optimizer's state."""
    given = block("plain").state_dict()
    got = results[1][0]["made empty"]  # torch gives whole state dicts to the first rank
    assert list(got["loaded"]) == list(given)
    assert all(torch.equal(got["loaded"][n], x) for n, x in given.items())
    assert all(got["optimizer"][n]["exp_avg"].shape == x.shape for n, x in given.items())


def test_an_empty_model_initialises_itself(results: Results) -> None:
    fresh = results[1][0]["made empty"]["fresh"]
    assert all(x.isfinite().all() for x in fresh.values())
    assert (fresh["attn.o_norm.weight"] == 1).all()
    assert fresh["attn.A_log"].exp().min() >= 1 and fresh["attn.A_log"].exp().max() <= 16

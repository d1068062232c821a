"""Context parallelism in one dimension of a mesh of 4 ranks: heads (``kda.tp``), rows and FSDP2 in the other one. All
compute what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cp_mesh_ranks import MESHES, RANKS, RUNS, in_one_process, run_rank
from gloo import run_ranks
from layer_model import relative

Results = list[dict[str, Any]]
DTYPES = {"f32": (torch.float32, 3e-6), "f64": (torch.float64, 1e-12)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("mesh")
    run_ranks(run_rank, (str(folder),), RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    return {name: in_one_process(dtype) for name, (dtype, _) in DTYPES.items()}


@pytest.mark.parametrize(("name", "layout", "dtype"), RUNS)
def test_ranks_equal_one_process(
    results: Results, expected: dict[str, dict[str, Tensor]], name: str, layout: str, dtype: str
) -> None:
    wanted, limit, seen = expected[dtype], DTYPES[dtype][1], 0
    for r in results:
        got = r[f"{name} {layout} {dtype}"]
        order, rows = got.pop("order"), got.pop("rows")
        own = {n: x[rows][:, order] if n in ("o", "x") else x for n, x in wanted.items()}
        seen += got["o"].numel()
        assert got.keys() == own.keys()
        assert {n: error for n, x in own.items() if not (error := relative(x, got[n])) < limit} == {}
    assert seen == wanted["o"].numel() * MESHES[name][0].get("tp", 1), "every token once, or once for each of its heads"

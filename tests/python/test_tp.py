"""Tensor parallelism over heads: ranks together compute what one process does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import kda
from gloo import run_ranks
from kda.tp import HeadParallel
from layer_model import make, relative, tokens
from support import make as make_problem
from tp_ranks import CASES, CUTS, FUNCTIONS, OTHER_NORM, run_function, run_layer, run_rank

RANKS = 2
Results = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, (RANKS, str(folder)), RANKS)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Results:
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def limit(case: str, of: str) -> float:
    """float64 shows that the sums are the same. In float32, matrix products of half the width round differently;
    test_tp_mesh.py has the limits without this. Gradients of the gate, sums over all tokens of terms of either sign,
    show that most."""
    if case == "float64":
        return 1e-14
    if of in ("d A_log", "d dt_bias"):
        return 4e-6
    return 1e-6 if of.startswith(("d ", "x")) else 3e-7


@pytest.mark.parametrize("by", ["", " by plan"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(name: str, by: str, ranks: Results) -> None:
    assert_equal(CASES[name], name, by, ranks)


def test_another_norm_gets_its_whole_gradients(ranks: Results) -> None:
    assert_equal(OTHER_NORM, "other_norm", " by plan", ranks)


def assert_equal(config: dict[str, Any], name: str, by: str, ranks: Results) -> None:
    expected = run_layer(config, by_plan=bool(by))
    for results in ranks:
        got = results[name + by]
        assert set(got) == set(expected)
        errors = {n: relative(x, got[n]) for n, x in expected.items()}
        wrong = {n: error for n, error in errors.items() if not error < limit(name, n)}
        assert not wrong


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_shards(name: str, cut: str, folder: Path) -> None:
    expected = run_function(name, cut)
    for rank in range(RANKS):
        got = torch.load(folder / f"functions_{rank}.pt")[f"{name} {cut}"]
        assert set(got) == set(expected)
        wrong = {n: e for n, x in expected.items() if not (e := relative(x, got[n])) < 3e-7}
        assert not wrong


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of only this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_names_and_marks_stay(mesh: Any) -> None:
    layer = make()
    names = list(layer.state_dict())
    parallelize_module(layer, mesh, HeadParallel())
    assert sorted(layer.state_dict()) == sorted(names)
    assert all(hasattr(p, "to_local") for p in layer.parameters()), "optimizers mix them with no plain tensors"
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay  # type: ignore[attr-defined]


def test_shards_that_are_refused(mesh: Any) -> None:
    p = make_problem(1, 3, state=False)
    cut = {n: distribute_tensor(x, mesh, [Shard(2)]) for n, x in p.tensors.items()}
    plain = "got a Tensor"
    with pytest.raises(ValueError, match=f"^k: expected a DTensor like the others, {plain}"):
        kda.chunk_kda(**cut | {"k": p.tensors["k"]})
    with pytest.raises(ValueError, match=r"^k: expected \[Shard\(dim=2\)\] on the mesh of q, got \[Shard\(dim=0\)\]"):
        kda.chunk_kda(**cut | {"k": distribute_tensor(p.tensors["k"], mesh, [Shard(0)])})
    with pytest.raises(ValueError, match=r"^q: expected Shard\(0\), Shard\(2\) of heads .*, got S\w*\(.*1\)"):
        kda.chunk_kda(**{n: distribute_tensor(x, mesh, [Shard(1)]) for n, x in p.tensors.items()})
    with pytest.raises(ValueError, match=r"^q: expected a tensor of this rank, as to_local\(\) gives it, got"):
        kda.decode(**cut)
    with pytest.raises(ValueError, match=r"^x: expected a tensor of this rank, as to_local\(\) gives it, got"):
        kda.causal_conv1d(cut["q"][:, :, 0], torch.ones(16, 4))


def test_what_cannot_be_cut(mesh: Any) -> None:
    with pytest.raises(TypeError, match=r"^HeadParallel: expected a KimiDeltaAttention, got Linear"):
        parallelize_module(nn.Linear(2, 2), mesh, HeadParallel())

    class Three:
        ndim = 1

        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match=r"^HeadParallel: expected ranks that divide 2 heads, got 3"):
        HeadParallel()._apply(make(), Three())  # type: ignore[arg-type]


def test_fewer_heads_without_a_plan_are_refused() -> None:
    layer = make()
    layer.q_proj = nn.Linear(48, 16, bias=False)  # what one of two ranks has of it
    wanted = (
        r"^q_proj: expected all heads .* kda\.tp\.HeadParallel or ColwiseParallel, got 16 of 32 channels on each of 1"
    )
    with pytest.raises(ValueError, match=wanted):
        layer(tokens(1, 3, 48))


@pytest.mark.parametrize("left_out", ["k_proj", "b_proj", "f_proj.1", "g_proj.1", "o_proj"])
def test_plans_that_leave_out_a_projection_are_refused(left_out: str, ranks: Results, folder: Path) -> None:
    for rank in range(RANKS):
        said = torch.load(folder / f"refused_{rank}.pt")[left_out]
        assert said.startswith(f"{left_out.split('.')[0]}: expected a style for heads as q_proj has"), said

"""FLA's context parallelism through our backend: ranks with windows of packed sequences, beside one call."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kda
import kda.cp
from gloo import run_ranks
from support import make, rel_rmse

LENGTHS = [30, 100, 2, 68, 56]
NAMES = ("q", "k", "v", "g", "beta")


def problem() -> Any:
    return make(K=16, V=16, gate="lower_bound", state=False, lengths=LENGTHS)


def gradient(shape: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def whole() -> dict[str, torch.Tensor]:
    p = problem()
    x = {n: t.requires_grad_() for n, t in p.tensors.items()}
    o, _ = kda.chunk_kda(**x, **p.options)
    return {"o": o.detach(), **dict(zip(x, torch.autograd.grad(o, list(x.values()), gradient(o.shape)), strict=True))}


def run_rank(rank: int, ranks: int, layout: str, folder: str) -> None:
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    import kda.fla

    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    p = problem()
    context = build_cp_context(p.options.pop("cu_seqlens"), dist.group.WORLD, layout=layout)
    tokens = window(rank, ranks, layout)
    shared = ("A_log", "dt_bias")
    x = {n: (t if n in shared else t[:, tokens]).clone().requires_grad_() for n, t in p.tensors.items()}
    o, state = chunk_kda(**x, **p.options, cp_context=context)
    assert state is None
    d = torch.autograd.grad(o, list(x.values()), gradient(p.tensors["v"].shape)[:, tokens])
    assert kda.fla.report().taken["chunk_kda"] == {"cpu float32": 1}, kda.fla.report()
    torch.save({"o": o.detach(), **dict(zip(x, d, strict=True))}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def window(rank: int, ranks: int, layout: str) -> torch.Tensor:
    pieces = [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]
    size = sum(LENGTHS) // (ranks * len(pieces))
    return torch.cat([torch.arange(i * size, (i + 1) * size) for i in pieces])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_windows_of_ranks(layout: str, tmp_path: Path) -> None:
    ranks = 4 if layout == "contiguous" else 2
    run_ranks(run_rank, (ranks, layout, str(tmp_path)), ranks)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    order = torch.cat([window(rank, ranks, layout) for rank in range(ranks)]).argsort()
    for name, expected in whole().items():
        shares = [part[name] for part in parts]
        got = sum(shares) if name in ("A_log", "dt_bias") else torch.cat(shares, 1)[:, order]
        assert rel_rmse(expected, got) < 1e-5, name


def test_there_are_borders_inside_sequences() -> None:
    starts = {a for a, _ in pairwise([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])}
    assert not {window(rank, 4, "contiguous")[0].item() for rank in (1, 2, 3)} <= starts

"""One rank's part of test_cp_mesh.py: tokens on some ranks of a mesh, heads or rows on others, parameters on both
(FSDP2). Results go to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import kda.cp
from gloo import join
from kda.tp import HeadParallel
from layer_model import make, tokens
from tp_ranks import whole

RANKS = 4
CONFIG: dict[str, Any] = {"num_heads": 4, "num_v_heads": 8, "conv_bias": True}
ROWS, TOKENS, LENGTHS = 2, 96, [20, 0, 50, 1, 25]

# Dimensions of the mesh, and where parameters are kept: None for whole on every rank.
MESHES: dict[str, tuple[dict[str, int], str | None]] = {
    "cp x tp": ({"cp": 2, "tp": 2}, None),
    "cp x tp, fsdp over cp": ({"cp": 2, "tp": 2}, "cp"),
    "dp x cp, fsdp over both": ({"dp": 2, "cp": 2}, "dp_cp"),
    "dp x cp, fsdp over dp": ({"dp": 2, "cp": 2}, "dp"),
    "fsdp over cp": ({"cp": 4}, "cp"),
}
RUNS = [(name, layout, dtype) for name in MESHES for layout in ("contiguous", "zigzag") for dtype in ("f32", "f64")]


class Block(nn.Module):
    """FSDP2 wraps blocks, as trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = make(**CONFIG)

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        return 1 * self.attn(x, **keywords)[0]


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tokens(ROWS, TOKENS, 48).to(dtype), tokens(ROWS, TOKENS, 48, seed=2).to(dtype)


def in_one_process(dtype: torch.dtype) -> dict[str, Tensor]:
    model, (x, d_o) = Block().to(dtype), data(dtype)
    x.requires_grad_()
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    o = torch.cat([model(row[None], cu_seqlens=cu) for row in x])
    (o * d_o).sum().backward()
    return {"o": o.detach(), "x": x.grad, **{f"d {n}": p.grad for n, p in model.named_parameters()}}  # type: ignore[dict-item]


def on_this_rank(mesh: DeviceMesh, kept: str | None, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    names = mesh.mesh_dim_names or ()
    model = Block().to(dtype)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"attn": HeadParallel()})
    averaged = 1
    if kept is not None:
        shards = mesh["dp", "cp"]._flatten("dp_cp") if kept == "dp_cp" else mesh[kept]
        fully_shard(model, mesh=shards)
        averaged = shards.size()
    row = mesh["dp"].get_local_rank() if "dp" in names else 0
    rows = [row] if "dp" in names else list(range(ROWS))
    offsets = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    cp = kda.cp.Context(offsets, mesh["cp"], layout=layout)
    x, d_o = data(dtype)
    outputs, dx = [], []
    for r in rows:
        own = cp.take(x[r : r + 1]).clone().requires_grad_()
        o = model(own, cp_context=cp)
        (averaged * (o * cp.take(d_o[r : r + 1])).sum()).backward()
        outputs.append(o.detach())
        dx.append(own.grad / averaged)  # type: ignore[operator]
    results: dict[str, Any] = {"o": torch.cat(outputs), "x": torch.cat(dx), "rows": rows}
    results["order"] = cp.take(torch.arange(TOKENS)[None])[0]
    others = [name for name in names if name in ("cp", "dp") and name not in (kept or "")]
    for n, p in model.named_parameters():
        grad = p.grad
        assert grad is not None
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        for name in others:  # what FSDP2 has not summed
            dist.all_reduce(local, group=mesh.get_group(name))
        results[f"d {n}"] = whole(grad).clone()
    return results


def run_rank(rank: int, folder: str) -> None:
    join(rank, RANKS, f"{folder}/store")
    results = {}
    for name, (dims, kept) in MESHES.items():
        for layout in ("contiguous", "zigzag"):
            for text, dtype in (("f32", torch.float32), ("f64", torch.float64)):
                mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
                results[f"{name} {layout} {text}"] = on_this_rank(mesh, kept, layout, dtype)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

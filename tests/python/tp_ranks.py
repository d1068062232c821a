"""One rank's part of the tensor-parallel layer and functions in test_tp.py; results go to files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from kda.nn import DraftCache
from kda.tp import HeadParallel
from layer_model import make, tokens

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 4, "expand_v": 2, "conv_bias": True},
    "recurrent": {"mode": "fused_recurrent", "lower_bound": -5.0, "conv_size": 3},
    "no_convolution": {"use_short_conv": False, "allow_neg_eigval": True},
    "width_one": {"conv_size": 1},
    "float64": {"num_v_heads": 4, "conv_bias": True, "dtype": torch.float64},
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def run_layer(config: dict[str, Any], mesh: Any = None) -> dict[str, Tensor]:
    """Outputs with and without caches and drafts, gradients, and parameters after a step of an optimizer."""
    dtype = config.get("dtype", torch.float32)
    layer = make(**{n: x for n, x in config.items() if n != "dtype"}).to(dtype)
    if mesh is not None:
        parallelize_module(layer, mesh, HeadParallel())
    x, d_o = tokens(2, 70, 48).to(dtype).requires_grad_(), tokens(2, 70, 48, seed=2).to(dtype)
    o = layer(x)[0]
    (o * d_o).sum().backward()
    results = {"o": o.detach(), "x": x.grad}
    results |= {f"d {n}": whole(p.grad).clone() for n, p in layer.named_parameters()}
    with torch.no_grad():
        cache = layer.new_cache(2)
        results["prompt"] = layer(x[:, :40], cache=cache)[0]
        results["step"] = layer(x[:, 40:41], cache=cache)[0]
        if config.get("conv_size") != 1 and dtype == torch.float32:  # drafts need a convolution, or none
            results["drafts"] = layer(x[:, 41:44], cache=DraftCache(layer, cache, 4))[0]
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    results |= {"norm": whole(norm)} | {f"new {n}": whole(p).detach() for n, p in layer.named_parameters()}
    return {n: x * 1 for n, x in results.items()}  # waits for what is still under way between ranks


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,))
    torch.save({n: run_layer(config, mesh) for n, config in CASES.items()}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

"""One rank's part of the tensor-parallel layer and functions in test_tp.py. Results go to files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kda
from gloo import answer, join
from kda.nn import DraftCache, KimiDeltaAttention
from kda.tp import HeadParallel
from layer_model import make, tokens
from support import make as make_problem

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 4, "expand_v": 2, "conv_bias": True},
    "recurrent": {"mode": "fused_recurrent", "lower_bound": -5.0, "conv_size": 3},
    "no_convolution": {"use_short_conv": False, "allow_neg_eigval": True},
    "width_one": {"conv_size": 1},
    "full_rank": {"use_full_rank_gate": True, "use_full_rank_decay": True},
    "float64": {"num_v_heads": 4, "conv_bias": True, "dtype": torch.float64},
}


OTHER_NORM: dict[str, Any] = {"other_norm": True}


class OtherNorm(torch.nn.Module):
    """In the place of the layer's, and knows nothing of ranks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale, self.shift = torch.nn.Parameter(weight.detach() * 3), torch.nn.Parameter(weight.detach() / 5)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (torch.nn.functional.rms_norm(x, x.shape[-1:], self.scale, 1e-5) + self.shift) * g.sigmoid()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def plan_of(layer: KimiDeltaAttention) -> dict[str, Any]:
    """What users write who do not know kda.tp."""
    last = [n if isinstance(getattr(layer, n), torch.nn.Linear) else f"{n}.1" for n in ("f_proj", "g_proj")]
    by_columns = {n: ColwiseParallel() for n in ("q_proj", "k_proj", "v_proj", "b_proj", *last)}
    return {**by_columns, "o_proj": RowwiseParallel()}


def run_layer(config: dict[str, Any], mesh: Any = None, by_plan: bool = False) -> dict[str, Tensor]:
    """Outputs with and without caches and drafts, gradients, and parameters after a step of an optimizer."""
    dtype = config.get("dtype", torch.float32)
    layer = make(**{n: x for n, x in config.items() if n not in ("dtype", "other_norm")}).to(dtype)
    if config.get("other_norm"):
        layer.o_norm = OtherNorm(layer.o_norm.weight)  # type: ignore[assignment]
    if mesh is not None:
        parallelize_module(layer, mesh, plan_of(layer) if by_plan else HeadParallel())
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
    if by_plan:  # optimizers refuse a mixture of DTensors and others
        return {n: x * 1 for n, x in results.items()}
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    results |= {"norm": whole(norm)} | {f"new {n}": whole(p).detach() for n, p in layer.named_parameters()}
    return {n: x * 1 for n, x in results.items()}  # waits for unfinished communication between ranks


def refusals(mesh: Any) -> dict[str, str]:
    """What the layer says to plans that leave out one projection."""
    said = {}
    for name in ("k_proj", "b_proj", "f_proj.1", "g_proj.1", "o_proj"):
        layer = make()
        parallelize_module(layer, mesh, {n: style for n, style in plan_of(layer).items() if n != name})
        said[name] = answer(partial(layer, tokens(1, 5, 48)))
    return said


# ---- functions of DTensors ----

FUNCTIONS = {"chunk_kda": kda.chunk_kda, "fused_recurrent_kda": kda.fused_recurrent_kda}
CUTS = {
    "heads": {**dict.fromkeys(("q", "k", "v", "g", "beta"), 2), "initial_state": 1, "A_log": 0, "dt_bias": 0},
    "batch": dict.fromkeys(("q", "k", "v", "g", "beta", "initial_state"), 0),
    "nothing": {},
}


def run_function(name: str, cut: str, mesh: Any = None) -> dict[str, Tensor]:
    """Outputs and all gradients; a batch of 3 is divided unevenly."""
    p = make_problem(3, 70, 2, 2, 8, 24, gate="softplus", beta="sigmoid")
    tensors = {n: x.clone() for n, x in p.tensors.items()}
    if mesh is not None:
        by = [CUTS[part] for part in cut.split(" x ")]  # for each dimension of the mesh
        tensors = {
            n: distribute_tensor(x, mesh, [Shard(dims[n]) if n in dims else Replicate() for dims in by])
            for n, x in tensors.items()
        }
    for x in tensors.values():
        x.requires_grad_()
    o, state = FUNCTIONS[name](**tensors, **p.options, output_final_state=True)
    (o.square().sum() + state.square().sum()).backward()
    return {"o": whole(o).detach(), "state": whole(state).detach()} | {n: whole(x.grad) for n, x in tensors.items()}


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store")
    mesh = init_device_mesh("cpu", (ranks,))
    torch.save(refusals(mesh), Path(folder) / f"refused_{rank}.pt")
    layers = {n: run_layer(config, mesh) for n, config in CASES.items()}
    layers |= {f"{n} by plan": run_layer(config, mesh, True) for n, config in CASES.items()}
    layers["other_norm by plan"] = run_layer(OTHER_NORM, mesh, True)
    torch.save(layers, Path(folder) / f"{rank}.pt")
    results = {f"{n} {cut}": run_function(n, cut, mesh) for n in FUNCTIONS for cut in CUTS}
    torch.save({n: {m: x * 1 for m, x in r.items()} for n, r in results.items()}, Path(folder) / f"functions_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

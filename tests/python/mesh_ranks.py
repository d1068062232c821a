"""One rank's part of the layer in test_tp_mesh.py: heads on some ranks (``kda.tp``), rows and the storage of parameters
on others (FSDP2). Results go to files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from gloo import join
from kda.nn import KimiDeltaAttention
from kda.tp import HeadParallel
from layer_model import make, tokens
from tp_ranks import FUNCTIONS, plan_of, run_function, whole

MESHES = {"tp2": (1, 2), "tp4": (1, 4), "fsdp2_tp2": (2, 2)}  # ranks of FSDP2, of HeadParallel
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 8, "expand_v": 2, "conv_bias": True, "conv_size": 3},
    "full_rank": {"use_full_rank_gate": True, "use_full_rank_decay": True, "lower_bound": -5.0},
    "recurrent": {"mode": "fused_recurrent", "allow_neg_eigval": True},
    "no_convolution": {"use_short_conv": False},
}
RUNS = [(name, dtype) for name in CASES for dtype in (torch.float32, torch.float64)]
ROWS, TOKENS = 4, 70
CUTS_OF_FUNCTIONS = ("batch x heads", "heads x batch", "nothing x heads", "batch x batch")
OPTIONS = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    """FSDP2 wraps blocks, as trainers do. A view as the output of what it wraps would make it warn."""

    def __init__(self, attn: KimiDeltaAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return 1 * self.attn(x)[0]


def block(name: str, dtype: torch.dtype = torch.float32) -> Block:
    return Block(make(num_heads=4, **CASES[name]).to(dtype))


def multiply_in_pieces(layer: KimiDeltaAttention, ranks: int) -> None:
    """Lets one process compute the matrix products that ``ranks`` ranks compute, in the same pieces. A piece rounds
    differently than the same columns of the whole product."""

    def columns(linear: nn.Linear, x: Tensor) -> Tensor:
        x = x.view_as(x)  # so the gradients of the pieces are summed before those of other projections
        biases = [None] * ranks if linear.bias is None else linear.bias.chunk(ranks)
        return torch.cat([F.linear(x, w, b) for w, b in zip(linear.weight.chunk(ranks), biases, strict=True)], -1)

    def rows(linear: nn.Linear, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(ranks, -1), linear.weight.chunk(ranks, 1), strict=True)
        products = [F.linear(part, w) for part, w in pieces]
        return torch.stack(products).sum(0)

    for name in ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj"):
        module: Any = getattr(layer, name)
        last = module if isinstance(module, nn.Linear) else module[1]
        last.forward = partial(columns, last)
    o_proj: Any = layer.o_proj
    o_proj.forward = partial(rows, o_proj)


def train(
    model: nn.Module, dtype: torch.dtype, batches: list[slice], averaged: int = 1, by_plan: bool = False
) -> dict[str, Tensor]:
    """Outputs, gradients, and the parameters after a step, for these rows of the batch, one slice after another.
    ``averaged`` is how many gradients FSDP2 takes the mean of; the sum is wanted."""
    x, d_o = (tokens(ROWS, TOKENS, 48, seed=seed).to(dtype) for seed in (1, 2))
    outputs, dx = [], []
    for rows in batches:
        own = x[rows].clone().requires_grad_()
        o = model(own)
        (averaged * (o * d_o[rows]).sum()).backward()
        outputs.append(o.detach())
        dx.append(own.grad / averaged)  # type: ignore[operator]
    results = {"o": torch.cat(outputs), "x": torch.cat(dx)}
    results |= {f"d {n}": whole(p.grad).clone() for n, p in model.named_parameters()}
    if by_plan:  # optimizers refuse a mixture of meshes
        return {n: y * 1 for n, y in results.items()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results |= {"norm": whole(norm)} | {f"new {n}": whole(p).detach() for n, p in model.named_parameters()}
    return {n: y * 1 for n, y in results.items()}  # waits for unfinished communication between ranks


def batches_of(shards: int) -> list[slice]:
    size = ROWS // shards
    return [slice(size * i, size * (i + 1)) for i in range(shards)]


def in_one_process(mesh: str, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """float64 as users would compute it. float32 in the pieces of the ranks, which otherwise round differently."""
    model, (shards, ranks) = block(name, dtype), MESHES[mesh]
    if dtype == torch.float64:
        return train(model, dtype, [slice(0, ROWS)])
    multiply_in_pieces(model.attn, ranks)
    return train(model, dtype, batches_of(shards))


# ---- one rank ----


def spread(model: Block, mesh: DeviceMesh, by_plan: bool = False) -> Block:
    """As a trainer does it: first the heads, then the parameters."""
    plan: dict[str, Any] = {"attn": HeadParallel()}
    if by_plan:
        plan = {f"attn.{n}": style for n, style in plan_of(model.attn).items()}
    parallelize_module(model, mesh["tp"], plan)
    if mesh["dp"].size() > 1:
        fully_shard(model, mesh=mesh["dp"])
    return model


def made_empty(mesh: DeviceMesh) -> dict[str, Any]:
    """A model made empty, spread, filled from a whole state dict, trained by a step and made whole again; and one
    that initialises itself."""
    given, more = block("plain").state_dict(), {}
    with torch.device("meta"):
        model, fresh = block("plain"), block("plain")
    for empty in (model, fresh):
        spread(empty, mesh).to_empty(device="cpu")
    set_model_state_dict(model, given, options=OPTIONS)
    more["loaded"] = {n: x.clone() for n, x in get_model_state_dict(model, options=OPTIONS).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(tokens(1, TOKENS, 48)).square().sum().backward()
    optimizer.step()
    more["optimizer"] = get_optimizer_state_dict(model, optimizer, options=OPTIONS)["state"]
    for module in fresh.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    more["fresh"] = {n: x * 1 for n, x in get_model_state_dict(fresh, options=OPTIONS).items()}
    return more


def run_rank(rank: int, mesh_name: str, folder: str) -> None:
    shape = MESHES[mesh_name]
    join(rank, shape[0] * shape[1], f"{folder}/store")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    own = batches_of(shape[0])[mesh["dp"].get_local_rank()]
    results: dict[str, Any] = {
        f"{name} {dtype}": train(spread(block(name, dtype), mesh), dtype, [own], shape[0]) for name, dtype in RUNS
    }
    for name in CASES:
        model = spread(block(name, torch.float64), mesh, by_plan=True)
        results[f"{name} by plan"] = train(model, torch.float64, [own], shape[0], by_plan=True)
        results[f"{name} heads of a cache"] = model.attn.new_cache(1).state.shape[1]
    if shape == (2, 2):
        for name in FUNCTIONS:
            for cut in CUTS_OF_FUNCTIONS:
                results[f"{name} {cut}"] = {n: x * 1 for n, x in run_function(name, cut, mesh).items()}
    results |= {"rows": own, "made empty": made_empty(mesh)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

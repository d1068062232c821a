"""One rank's part of test_distributed.py: training under DDP and FSDP2, and the layer with its heads on two ranks.
Also the same in one process. Results go to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tp_ranks
from gloo import join
from layer_model import make, tokens

RANKS = 2
PATIENCE = 120  # seconds for everything; half of it for one exchange
STEPS = 3
ROWS, TOKENS, HIDDEN = 2, 150, 128  # of a rank
Results = dict[str, Tensor]

# ---- what is trained ----


@dataclass(frozen=True)
class Case:
    """How to train. ``lengths`` has a list for each rank, of the sequences packed into its row; without it, each rank
    has rows of a batch."""

    wrapper: str  # "ddp", "fsdp" of each layer and the root, "fsdp_root" alone
    policy: MixedPrecisionPolicy | None = None
    autocast: bool = False
    lengths: tuple[list[int], ...] = ()
    checkpointed: bool = False


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SUMS_IN_FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNEQUAL = ([1, 64, 35], [100, 0, 3, 130, 7])
CASES = {
    "ddp": Case("ddp"),
    "ddp_autocast": Case("ddp", autocast=True),
    "ddp_checkpointed": Case("ddp", checkpointed=True),
    "ddp_packed": Case("ddp", lengths=UNEQUAL),
    "ddp_packed_autocast": Case("ddp", lengths=UNEQUAL, autocast=True),
    "ddp_rank_without_tokens": Case("ddp", lengths=([40, 30], [0])),
    "fsdp": Case("fsdp"),
    "fsdp_autocast": Case("fsdp", autocast=True),
    "fsdp_bfloat16": Case("fsdp", BFLOAT16),
    "fsdp_sums_in_float32": Case("fsdp", SUMS_IN_FLOAT32),
    "fsdp_packed": Case("fsdp", lengths=UNEQUAL),
    "fsdp_packed_bfloat16": Case("fsdp", BFLOAT16, lengths=UNEQUAL),
    "fsdp_rank_without_tokens": Case("fsdp", BFLOAT16, lengths=([40, 30], [0])),
    "fsdp_checkpointed": Case("fsdp", checkpointed=True),
    "fsdp_bfloat16_checkpointed": Case("fsdp", BFLOAT16, checkpointed=True),
    "fsdp_root": Case("fsdp_root"),
    "fsdp_root_checkpointed": Case("fsdp_root", checkpointed=True),
}


class Stack(nn.Module):
    """Two layers with norms. Everything but the layers belongs to the root."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(make(seed, hidden_size=HIDDEN, num_heads=2, head_dim=64) for seed in (1, 2))
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in self.layers)

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            run = partial(checkpoint, layer, use_reentrant=False) if self.checkpointed else layer
            x = x + run(norm(x), **keywords)[0]
        return x


class InBfloat16(nn.Module):
    """What FSDP2's policy means for one process: float32 parameters, used as bfloat16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        parameters = {n: p.bfloat16() for n, p in self.module.named_parameters()}
        o: Tensor = functional_call(self.module, parameters, (x.bfloat16(),), keywords)
        return o


def in_one_process(case: Case, device: torch.device) -> nn.Module:
    model = Stack(checkpointed=False).to(device)
    if case.wrapper != "ddp":  # FSDP2 gathers each weight to a place of its own, so projections run one by one
        for p in model.parameters():
            p.data = p.detach().clone()
    return InBfloat16(model) if case.policy else model


def on_ranks(case: Case, device: torch.device, mesh: Any) -> nn.Module:
    model = Stack(case.checkpointed).to(device)
    if case.wrapper == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    shard = partial(fully_shard, mesh=mesh, mp_policy=case.policy or MixedPrecisionPolicy())
    for layer in model.layers if case.wrapper == "fsdp" else ():
        shard(layer)
    sharded: nn.Module = shard(model)
    return sharded


# ---- training ----


def loss_of(model: nn.Module, case: Case, step: int, ranks: Sequence[int], device: torch.device) -> Tensor:
    """The loss of these ranks' tokens. The mean of the ranks' losses is the mean over all tokens, whoever has them."""
    shapes = [(1, sum(lengths)) for lengths in case.lengths] or [(ROWS, TOKENS)] * RANKS
    data = [tokens(2, *shape, HIDDEN, seed=RANKS * step + rank) for rank, shape in enumerate(shapes)]
    x, target = torch.cat([data[rank] for rank in ranks], 2 if case.lengths else 1).to(device)
    keywords = {}
    if case.lengths:
        lengths = [length for rank in ranks for length in case.lengths[rank]]
        keywords["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
        o = model(x, **keywords)
    everything = sum(part[0].numel() for part in data)
    return (o.float() - target).square().sum() * (RANKS / len(ranks) / everything)


def average(parameters: Iterable[nn.Parameter], parts: int, case: Case) -> None:
    """Turns sums of gradients into means. FSDP2 adds them in the dtype that it computes in, unless told otherwise."""
    for p in parameters:
        p.grad.div_(parts)
        if case.policy is BFLOAT16:
            p.grad.copy_(p.grad.bfloat16())


def train(model: nn.Module, case: Case, parts: Sequence[Sequence[int]], device: torch.device) -> Results:
    """Losses and gradients of each step, and the parameters at the end. Each of ``parts``, ranks whose tokens are
    taken together, has a forward and a backward of its own; a step takes their mean."""
    # With the usual eps of 1e-8, gradients that are only rounding errors would count as much as others. And foreach
    # would be chosen for tensors on CUDA but never for DTensors, whose sums would round differently.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    parameters = dict(getattr(model, "module", model).named_parameters())
    results: Results = {}
    for step in range(STEPS):
        losses = [loss_of(model, case, step, ranks, device) for ranks in parts]
        for loss in losses:
            loss.backward()
        if len(parts) > 1:
            average(parameters.values(), len(parts), case)
        results[f"loss {step}"] = torch.stack(losses).mean().detach()
        results |= {f"d {n} {step}": tp_ranks.whole(p.grad).clone() for n, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    results |= {f"new {n}": tp_ranks.whole(p).detach() for n, p in parameters.items()}
    return {n: x.cpu() for n, x in results.items()}


# ---- heads on the ranks ----

BY_HEADS: dict[str, dict[str, Any]] = {
    **{n: config for n, config in tp_ranks.CASES.items() if "dtype" not in config},  # no CUDA kernel takes float64
    "bfloat16": {"head_dim": 64, "dtype": torch.bfloat16},
}
FUNCTIONS = [(name, cut) for name in tp_ranks.FUNCTIONS for cut in tp_ranks.CUTS]


@contextmanager
def tensors_on(device: torch.device) -> Iterator[None]:
    """Inside, tensors are made there, random ones too."""
    with device, patch.object(torch, "Generator", partial(torch.Generator, device)):
        yield


def run_by_heads(device: torch.device, mesh: Any = None) -> dict[str, Results]:
    with tensors_on(device):
        results = {n: tp_ranks.run_layer(config, mesh) for n, config in BY_HEADS.items()}
        results |= {f"{name} {cut}": tp_ranks.run_function(name, cut, mesh) for name, cut in FUNCTIONS}
    return {n: {m: (x * 1).cpu() for m, x in r.items()} for n, r in results.items()}


# ---- a rank ----


def run_rank(rank: int, device_type: str, folder: str) -> None:
    """What the ranks do together goes to <rank>.pt. Then one rank does all of it as a whole, and the other in parts,
    each of the size of a rank's: whole.pt, parts.pt."""
    device = join(rank, RANKS, f"{folder}/store", PATIENCE / 2, device_type)
    mesh = init_device_mesh(device_type, (RANKS,))
    results = {n: train(on_ranks(case, device, mesh), case, [[rank]], device) for n, case in CASES.items()}
    results |= run_by_heads(device, mesh)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

    parts = [list(range(RANKS))] if rank == 0 else [[r] for r in range(RANKS)]
    alone = {n: train(in_one_process(case, device), case, parts, device) for n, case in CASES.items()}
    alone |= run_by_heads(device) if rank == 0 else {}
    torch.save(alone, Path(folder) / ("whole.pt" if rank == 0 else "parts.pt"))

"""One rank's part of test_distributed_tokens.py: kda.cp with a GPU for each rank, and the same on one GPU. Results go
to files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kda
import kda.cp
from gloo import join
from layer_model import make as make_layer
from layer_model import tokens
from support import make

RANKS = 2
PATIENCE = 300  # seconds for everything
TOKENWISE = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)  # of support.make
    keywords: dict[str, Any] = field(default_factory=dict)  # of chunk_kda
    context: dict[str, Any] = field(default_factory=dict)

    def problem(self, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        p = make(lengths=self.lengths, state=False, **self.options)
        tensors = {n: x.to(device) for n, x in p.tensors.items()}
        d_o = torch.randn(p.tensors["v"].shape, generator=torch.Generator().manual_seed(7)).to(tensors["v"])
        return tensors, {n: x for n, x in p.options.items() if n != "cu_seqlens"}, d_o


FUSED = {"gate": "softplus", "beta": "sigmoid"}
LARGE = {**FUSED, "K": 128, "V": 128, "v_first": True}
BF16 = {**LARGE, "dtype": torch.bfloat16}
ZIGZAG = {"layout": "zigzag"}
CASES = {
    "one": Case([2048], LARGE),
    "one_k_first": Case([1024], {**FUSED, "G": 2}),
    "across": Case([300, 0, 900, 1, 847], {**LARGE, "G": 2}),
    "unequal": Case([300, 900, 848], LARGE, context={"windows": [1, 2047]}),
    "without_tokens": Case([300, 900], LARGE, context={"windows": [0, 1200]}),
    "zigzag": Case([1000, 1048], LARGE, context=ZIGZAG),
    "bf16": Case([4096], BF16),
    "bf16_across": Case([1500, 3000, 1692], {**BF16, "G": 2}),
    "bf16_bounded": Case([4096], {**BF16, "gate": "lower_bound", "beta": "2sigmoid"}),
    "bf16_kept": Case([1500, 2596], BF16, {"disable_recompute": True}),
    "bf16_zigzag": Case([4096], BF16, context=ZIGZAG),
    "bf16_cut": Case([4096], BF16, context={"cp_window": 512}),
}
INVARIANT = {
    "one": Case([2048], LARGE),
    "bf16": Case([4096], BF16),
    "packed": Case([700, 2300, 1096], {**BF16, "G": 2}),
    "kept": Case([2048], BF16, {"disable_recompute": True}),
}


@contextmanager
def no_waiting(device: torch.device, refused: bool) -> Iterator[None]:
    """Inside, torch refuses what makes the host wait for the GPU."""
    if refused and device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if refused and device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def run(case: Case, device: torch.device, cp: kda.cp.Context | None, again: bool = False) -> dict[str, Tensor]:
    """``again``: the context has been used before, so nothing may wait for the GPU."""
    tensors, options, d_o = case.problem(device)
    keywords: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *case.lengths], device=device).cumsum(0)}
    at = torch.arange(sum(case.lengths))
    if cp is not None:
        tensors = {n: cp.take(x) if n in TOKENWISE else x for n, x in tensors.items()}
        d_o, at, keywords = cp.take(d_o), cp.take(at, 0), {"cp_context": cp}
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    with no_waiting(device, again):
        o, _ = kda.chunk_kda(**leaves, **options, **keywords, **case.keywords)  # type: ignore[arg-type]
        grads = torch.autograd.grad(o, list(leaves.values()), d_o)
    results = {"o": o.detach(), **{f"d{n}": x for n, x in zip(leaves, grads, strict=True)}}
    return {n: x.cpu() for n, x in results.items()} | {"at": at}


def offsets(case: Case, device: torch.device) -> Tensor:
    return torch.tensor([0, *case.lengths], device=device).cumsum(0)


# ---- the layer, and prefill ----

LENGTHS = [300, 500, 224]


def run_layer(device: torch.device, cp: kda.cp.Context | None) -> dict[str, Tensor]:
    total = sum(LENGTHS)
    layer = make_layer(hidden_size=128, num_heads=2, head_dim=64).to(device)
    x, at = tokens(1, total, 128).to(device), torch.arange(total)
    keywords: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *LENGTHS], device=device).cumsum(0)}
    if cp is not None:
        x, at, keywords = cp.take(x), cp.take(at, 0), {"cp_context": cp}
    x = x.clone().requires_grad_()
    o = layer(x, **keywords)[0]
    o.square().sum().backward()
    results = {"o": o.detach(), "dx": x.grad, **{f"d {n}": p.grad for n, p in layer.named_parameters()}}
    return {n: y.cpu() for n, y in results.items()} | {"at": at}  # type: ignore[union-attr]


def run_prefill(device: torch.device, cp: kda.cp.Context | None, state_rank: int | None) -> dict[str, Tensor]:
    case = Case([1500, 596], BF16)
    tensors, options, _ = case.problem(device)
    at, keywords = torch.arange(sum(case.lengths)), {"cu_seqlens": offsets(case, device)}
    if cp is not None:
        tensors = {n: cp.take(x) if n in TOKENWISE else x for n, x in tensors.items()}
        at, keywords = cp.take(at, 0), {"cp_context": cp, "state_rank": state_rank}  # type: ignore[dict-item]
    pool = torch.zeros(5, 2, 128, 128, device=device)
    indices = torch.tensor([4, 2], device=device)
    o = kda.prefill(**tensors, **options, state=pool, state_indices=indices, **keywords)  # type: ignore[arg-type]
    return {"o": o.cpu(), "state": pool.cpu(), "at": at}


# ---- CUDA graphs ----


def captured(device: torch.device, layout: str, backward: bool) -> dict[str, Tensor]:
    """A call in a graph, replayed with other inputs, and the same call without a graph. Differences are returned."""
    case = Case([2048], BF16)
    cp = kda.cp.Context(offsets(case, device), layout=layout)
    tensors, options, d_o = case.problem(device)
    leaves = {n: cp.take(x) if n in TOKENWISE else x for n, x in tensors.items()}
    leaves = {n: x.clone().requires_grad_(backward) for n, x in leaves.items()}
    d_o = cp.take(d_o)

    def call() -> list[Tensor]:
        o, _ = kda.chunk_kda(**leaves, **options, cp_context=cp)  # type: ignore[arg-type]
        grads = torch.autograd.grad(o, list(leaves.values()), d_o) if backward else ()
        return [o.detach(), *grads]

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()
    with torch.no_grad():
        leaves["v"].mul_(0.5)
        leaves["k"].neg_()
    graph.replay()
    replayed = [x.clone() for x in results]
    expected = call()
    torch.cuda.synchronize(device)
    return {f"{i}": torch.stack([x, y]).cpu() for i, (x, y) in enumerate(zip(expected, replayed, strict=True))}


# ---- a rank ----


def run_rank(rank: int, device_type: str, folder: str) -> None:
    device = join(rank, RANKS, f"{folder}/store", PATIENCE / 2, device_type)
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        cp = kda.cp.Context(offsets(case, device), **case.context)
        results[name] = run(case, device, cp)
        results[f"{name} again"] = run(case, device, cp, again=True)
    for name, case in INVARIANT.items():
        for layout in ("contiguous", "zigzag"):
            cp = kda.cp.Context(offsets(case, device), layout=layout, cp_invariant=True, cp_window=256)
            results[f"invariant {name} {layout}"] = run(case, device, cp)
        cp = kda.cp.Context(offsets(case, device), alone, cp_invariant=True, cp_window=256)
        results[f"invariant {name} alone"] = run(case, device, cp)
    for layout in ("contiguous", "zigzag"):
        cp = kda.cp.Context([0, 300, 800, 1024], layout=layout)  # on the host: offsets find the GPU by themselves
        assert cp.cu_seqlens.device == device
        results[f"layer {layout}"] = run_layer(device, cp)
    prompts = torch.tensor([0, 1500, 2096], device=device)
    for state_rank in (None, 0, 1):
        results[f"prefill {state_rank}"] = run_prefill(device, kda.cp.Context(prompts), state_rank)
    for layout in ("contiguous", "zigzag") if device.type == "cuda" else ():
        for backward in (False, True):
            results[f"graph {layout} {backward}"] = captured(device, layout, backward)
    if rank == 0:
        whole: dict[str, Any] = {n: run(case, device, None) for n, case in CASES.items()}
        whole |= {"layer": run_layer(device, None), "prefill": run_prefill(device, None, None)}
        torch.save(whole, Path(folder) / "whole.pt")
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

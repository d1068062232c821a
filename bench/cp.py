"""One sequence on one device and on several: times of forward, and of forward and backward, speed-ups, and memory.

    python -m bench cp --ranks 2 --json cp.json        # GPUs of this machine, by NCCL
    python -m bench cp --device cpu --case H2T2048     # processes of one thread each, by gloo

Every rank is a process of this script. Rank 0 first measures the whole sequence alone, on the same device. Times are
medians; of several ranks the slowest counts. Nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kda
import kda.cp
from kda.cp._message import Message

CASES = ("H12T65536", "H32T131072", "H96T32768")
K = V = 128
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
Call = Callable[[], Any]


def sizes_of(case: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"H(\d+)T(\d+)", case)) is None:
        raise ValueError(f"--case: expected heads and tokens like {CASES[0]}, got {case}")
    return int(found[1]), int(found[2])


def inputs(H: int, T: int, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Any], Any]:
    """Of ``tokens`` of the T tokens, with strong decay, as the layer gives them; and the gradient of the outputs."""
    random = torch.Generator(device).manual_seed(T)

    def randn(*shape: int, as_dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=as_dtype)

    x = {"q": randn(1, tokens, H, K), "k": randn(1, tokens, H, K), "v": randn(1, tokens, H, V)}
    x |= {"g": randn(1, tokens, H, K), "beta": randn(1, tokens, H)}
    x |= {"A_log": randn(H, as_dtype=torch.float32), "dt_bias": randn(H * K, as_dtype=torch.float32)}
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0, "state_v_first": True,
    }  # fmt: skip
    return {**x, **options}, randn(1, tokens, H, V)


def calls_of(x: dict[str, Any], d_o: torch.Tensor, cp: Any) -> dict[str, Call]:
    leaves = {n: x[n].detach().clone().requires_grad_() for n in LEAVES}

    def forward() -> Any:
        with torch.no_grad():
            return kda.chunk_kda(**x, cp_context=cp)

    def both() -> Any:
        o, _ = kda.chunk_kda(**{**x, **leaves}, cp_context=cp)
        return torch.autograd.grad(o, list(leaves.values()), d_o)

    return {"forward": forward, "forward and backward": both}


def exchanges(x: dict[str, Any], cp: kda.cp.Context) -> dict[str, Call]:
    """What only several ranks do."""
    H = x["q"].shape[2]
    maps = Message(x["q"], (1, H * K * (K + V)), torch.float32)
    tokenwise = {n: y for n, y in x.items() if n != "state_v_first"}

    def segment_map() -> Any:
        with torch.no_grad():
            return kda.segment_map(**tokenwise)

    return {"maps": segment_map, "all-gather": lambda: cp.gather(maps, "chunk_kda", (0, 0))()}


def seconds(call: Call, device: torch.device, repeats: int, together: bool) -> float:
    """The median; with ``together``, of the slowest rank."""
    times = []
    for turn in range(repeats + 2):  # two to warm up
        if together:
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 2:
            times.append(time.perf_counter() - begin)
    found = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    if together:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def memory(call: Call, device: torch.device) -> int | None:
    """Bytes that a call needs beyond what is there before it; None where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def measure(case: str, options: argparse.Namespace, rank: int, device: torch.device, alone: Any) -> dict[str, Any]:
    H, T = sizes_of(case)
    dtype = getattr(torch, options.dtype)
    row: dict[str, Any] = {"case": case, "H": H, "T": T, "K": K, "V": V, "dtype": options.dtype}
    one: dict[str, float] = {}
    if rank == 0:
        context = kda.cp.Context([0, T], alone, cp_invariant=True, cp_window=options.window) if options.window else None
        calls = calls_of(*inputs(H, T, T, device, dtype), context)
        one = {n: seconds(call, device, options.repeats, False) for n, call in calls.items()}
        row["bytes on 1"] = memory(calls["forward and backward"], device)
        del calls
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()
    invariant = {"cp_invariant": True, "cp_window": options.window} if options.window else {}
    cp = kda.cp.Context([0, T], layout=options.layout, **invariant)
    x, d_o = inputs(H, T, cp.tokens, device, dtype)
    calls = calls_of(x, d_o, cp)
    times = {n: seconds(call, device, options.repeats, True) for n, call in {**calls, **exchanges(x, cp)}.items()}
    row[f"bytes on {options.ranks}"] = memory(calls["forward and backward"], device)
    for n, t in times.items():
        row[f"{n}, ms on {options.ranks}"] = 1e3 * t
        if n in one:
            row |= {f"{n}, ms on 1": 1e3 * one[n], f"{n}, speed-up": one[n] / t}
    return row


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    on_cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks,
        timeout=timedelta(seconds=300), device_id=device if on_cuda else None,
    )  # fmt: skip
    alone = dist.new_group([0])
    rows = []
    for case in options.case:
        rows.append(measure(case, options, rank, device, alone))
        if rank == 0:
            print(json.dumps(rows[-1], indent=2), flush=True)
    if rank == 0 and options.json:
        about = {
            "version": kda.__version__, "torch": torch.__version__, "ranks": options.ranks, "layout": options.layout,
            "cp_window": options.window, "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        }  # fmt: skip
        Path(options.json).write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", action="append", help=f"such as {CASES[0]}; by default {', '.join(CASES)}")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous")
    parser.add_argument("--window", type=int, help="cp_window: the same bits on any number of ranks")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="a file for the results")


def run(options: argparse.Namespace) -> int:
    options.case = options.case or list(CASES)
    for case in options.case:
        sizes_of(case)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        raise ValueError(f"--ranks: expected as many CUDA devices, {torch.cuda.device_count()}, got {options.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (options, folder), options.ranks)
    return 0

"""The CPU figures of the README, measured in one run: prefill, training, decode and overheads, next to the machine's
own ceilings and FLA's naive PyTorch formulation. Nothing else should run on the machine at the same time.

    cmake --preset release && cmake --build --preset release
    KDA_LIBRARY_DIR=build/release/lib python -m bench cpu --out docs/results

The naive formulation is FLA's file fla/ops/kda/naive.py, given with --naive (it needs einops); without it that row is
left out. Times are medians over repetitions that alternate between the things compared.

Training is measured twice. First on the system's defaults, where glibc returns the memory of every step and
page-faults it in again in the next. Then in a process whose malloc keeps the memory (MALLOC_TRIM_THRESHOLD_,
MALLOC_MMAP_THRESHOLD_). PyTorch's guide to performance on CPUs recommends such an allocator in general.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kda
import kda.stages
from bench import ROOT
from bench.measure import machine, medians
from bench.peers import naive_chunk
from kda.call.flops import forward_flop
from kda.cli.arrays import Source
from kda.cli.problems import Problem, common
from source_hash import source_hash


def ceilings(build: Path, threads: int) -> dict[str, float]:
    runs = [
        json.loads(subprocess.run([build / "bench/ceilings", str(threads)], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    return {key: statistics.median(r[key] for r in runs) for key in ("fma_gflops", "read_write_gbs")}


def prefill_and_training(threads: int, naive: Any) -> dict[str, Any]:
    p = Problem(B=1, T=4096, H=8, K=128, V=128)
    x = common(p, Source())
    out = torch.empty_like(x["v"])
    state = torch.zeros(p.B, p.H, p.V, p.K)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items() if isinstance(t, torch.Tensor)}
    trained = x | leaves
    gradient = torch.randn_like(x["v"])

    def train(disable_recompute: bool) -> None:
        o, _ = kda.chunk_kda(**trained, disable_recompute=disable_recompute)
        torch.autograd.grad(o, list(leaves.values()), gradient)

    def forward_only() -> None:
        with torch.no_grad():
            kda.chunk_kda(**x)

    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: kda.prefill(**x, state=state, out=out, num_threads=threads),
        "prefill, 1 thread": lambda: kda.prefill(**x, state=state, out=out, num_threads=1),
        "forward": forward_only,
        "forward + backward": lambda: train(False),
        "forward + backward, disable_recompute": lambda: train(True),
    }
    seconds = medians(calls, 15)
    result: dict[str, Any] = {"shape": {n: getattr(p, n) for n in ("B", "T", "H", "K", "V")}, "dtype": p.dtype}
    result["ms"] = {name: t * 1e3 for name, t in seconds.items()}
    result["prefill_gflops"] = p.B * p.T * p.H * forward_flop(p.K, p.V) / seconds["prefill"] * 1e-9
    result["speedup_of_threads"] = seconds["prefill, 1 thread"] / seconds["prefill"]
    for kind in ("", ", disable_recompute"):
        result[f"training_over_forward{kind}"] = seconds[f"forward + backward{kind}"] / seconds["forward"]
    if naive is not None:
        ms = medians({"naive": naive_chunk(p, Source(), naive)}, 3)["naive"] * 1e3
        result["ms"]["FLA naive_chunk_kda"] = ms
        result["speedup_over_naive"] = ms / result["ms"]["prefill"]
    return result


def training_with_kept_memory(threads: int) -> dict[str, Any]:
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}
    command = [sys.executable, "-m", "bench", "cpu", "--threads", str(threads), "--training-only"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    ratios: dict[str, Any] = json.loads(result.stdout)
    return {k: x for k, x in ratios.items() if k.startswith("training_over_forward")}


def decode(threads: int) -> dict[str, Any]:
    N, H = 1024, 8  # 1024 states of 512 KiB: 512 MiB, much more than the caches
    x = common(Problem(B=N, T=1, H=H, K=128, V=128), Source())
    del x["state_v_first"]
    indices = torch.randperm(N, generator=torch.Generator().manual_seed(1)).int()
    out = torch.empty_like(x["v"])
    pools = {"V-first": torch.randn(N, H, 128, 128), "K-first": torch.randn(N, H, 128, 128)}
    calls: dict[str, Callable[[], object]] = {
        name: lambda pool=pool, name=name: kda.decode(  # type: ignore[misc]
            **x,
            state=pool,
            state_indices=indices,
            state_v_first=name == "V-first",
            out=out,
            num_threads=threads,
        )
        for name, pool in pools.items()
    }
    # The ceiling next to it, in turns and over the same pages: reading and writing the whole pool in place.
    calls["multiplied in place"] = lambda: pools["V-first"].mul_(1.0)
    bytes_moved = 2 * pools["V-first"].numel() * 4
    seconds = medians(calls, 15)
    result: dict[str, Any] = {"shape": {"requests": N, "H": H, "K": 128, "V": 128}, "state": "float32"}
    for name, t in seconds.items():
        result[name] = {"ms": t * 1e3, "gb_per_s": bytes_moved / t * 1e-9}
        result[name]["share_of_bandwidth"] = seconds["multiplied in place"] / t
    return result


def speculation(threads: int) -> dict[str, Any]:
    """A round of drafting, half of it accepted, next to a decode that keeps a state after every draft and copies the
    accepted one back; and verify alone."""
    N, H, T = 256, 8, 4
    pool = torch.randn(N, H, 128, 128)
    accept_len = (torch.arange(N) % T + 1).int()
    records = [kda.new_records(N, 6, H, H, 128, 128) for _ in range(2)]
    inputs = {t: common(Problem(B=N, T=t, H=H, K=128, V=128), Source()) for t in (1, T, 6)}
    outs = {t: torch.empty(N, t, H, 128, dtype=torch.bfloat16) for t in inputs}
    snapshots = torch.empty(N, T, H, 128, 128)

    def verify(t: int) -> None:
        kda.verify_kvbuffer(**inputs[t], state=pool, records=records[0], out=outs[t], num_threads=threads)

    def two_calls() -> None:
        verify(T)
        kda.flush_kvbuffer(pool, records[0], accept_len, num_threads=threads)

    def fused() -> None:
        old, new = records
        kda.flush_verify_kvbuffer(
            **inputs[T],
            state=pool,
            records=new,
            accept_len=accept_len,
            last=old,
            out=outs[T],
            num_threads=threads,
        )
        records.reverse()

    def with_snapshots() -> None:
        kda.decode_mtp(
            **inputs[T], state=pool, update_state=False, snapshots=snapshots, out=outs[T], num_threads=threads
        )
        torch.index_select(snapshots.view(N * T, -1), 0, rows, out=pool.view(N, -1))

    rows = torch.arange(N) * T + accept_len - 1
    calls: dict[str, Callable[[], object]] = {
        "verify + flush": two_calls,
        "flush_verify": fused,
        "snapshots + copy": with_snapshots,
        **{f"verify, T = {t}": lambda t=t: verify(t) for t in inputs},  # type: ignore[misc]
    }
    seconds = medians(calls, 15)
    return {
        "shape": {"requests": N, "T": T, "H": H, "K": 128, "V": 128},
        "ms": {name: t * 1e3 for name, t in seconds.items()},
        "verify_and_flush_over_snapshots": seconds["snapshots + copy"] / seconds["verify + flush"],
        "fused_over_two_calls": seconds["verify + flush"] / seconds["flush_verify"],
        "verify_6_over_1": seconds["verify, T = 6"] / seconds["verify, T = 1"],
    }


def other_operators(threads: int) -> dict[str, Any]:
    """Next to prefill of the same tokens: float32 prefill, the map of the whole sequence, the stages of the forward
    one after another, and the convolution before q, k and v."""
    p = Problem(B=1, T=4096, H=8, K=128, V=128)
    x = common(p, Source())
    out, state = torch.empty_like(x["v"]), torch.zeros(p.B, p.H, p.V, p.K)
    q, k = (torch.nn.functional.normalize(x[n].float(), dim=-1) for n in "qk")
    g, beta = kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"]), x["beta"].float().sigmoid()
    inputs = {"q": q, "k": k, "v": x["v"].float(), "g": g, "beta": beta}
    heads_first: dict[str, Any] = {name: t.transpose(1, 2).contiguous() for name, t in inputs.items()}
    w, u, o = (torch.empty(s) for s in ((1, p.H, 64, 64, p.K), (1, p.H, 64, 64, p.V), (1, p.H, p.T, p.V)))
    D = 3 * p.H * p.K
    rows, weight, pool = torch.randn(1, p.T, D).bfloat16(), torch.randn(D, 4), torch.zeros(1, D, 3)
    convolved = torch.empty_like(rows)

    def staged() -> None:
        G = kda.stages.cumsum(g)
        w, u, _, kg, Aqk, _ = kda.stages.chunk_intra(q.bfloat16(), k.bfloat16(), x["v"], G, beta)
        h, v_new, _ = kda.stages.delta_h(kg, w, u, G)
        kda.stages.fwd_o(q.bfloat16(), v_new, G, Aqk, h)

    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: kda.prefill(**x, state=state, out=out, num_threads=threads),
        "prefill_f32": lambda: kda.prefill_f32(**heads_first, w=w, u=u, o=o, num_threads=threads),
        "segment_map": lambda: kda.segment_map(**x, num_threads=threads),
        "stages of the forward": staged,
        "conv": lambda: kda.causal_conv1d_update(rows, pool, weight, out=convolved, num_threads=threads),
    }
    ms = {name: t * 1e3 for name, t in medians(calls, 9).items()}
    return {"shape": {n: getattr(p, n) for n in ("B", "T", "H", "K", "V")}, "ms": ms}


def one_long_head(threads: int) -> dict[str, Any]:
    T = 65536
    x = common(Problem(B=1, T=T, H=1, K=128, V=128), Source())
    out, state = torch.empty_like(x["v"]), torch.zeros(1, 1, 128, 128)
    calls: dict[str, Callable[[], object]] = {
        f"{n} threads": lambda n=n: kda.prefill(**x, state=state, out=out, num_threads=n)  # type: ignore[misc]
        for n in (1, threads)
    }
    seconds = medians(calls, 9)
    speedup = seconds["1 threads"] / seconds[f"{threads} threads"]
    return {
        "shape": {"T": T, "H": 1, "K": 128, "V": 128},
        "ms": {k: t * 1e3 for k, t in seconds.items()},
        "speedup": speedup,
    }


def overheads() -> dict[str, float]:
    x = common(Problem(B=1, T=1, H=1, K=16, V=16), Source())
    state, out = torch.zeros(4, 1, 16, 16), torch.empty_like(x["v"])
    indices = torch.tensor([1], dtype=torch.int32)

    def call(out: torch.Tensor | None) -> None:
        kda.decode(**x, state=state, state_indices=indices, out=out)

    seconds = medians({"with out": lambda: call(out), "without": lambda: call(None)}, 11)
    script = "import time; t = time.perf_counter(); import kda; print(time.perf_counter() - t)"
    imports = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout) for _ in range(7)
    ]
    return {
        "decode_call_us": seconds["with out"] * 1e6,
        "decode_call_without_out_us": seconds["without"] * 1e6,
        "import_ms": statistics.median(imports) * 1e3,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--naive", type=Path, help="FLA's fla/ops/kda/naive.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--training-only", action="store_true", help="print that part of the record, and nothing else")
    parser.add_argument("--out", type=Path, help="folder for cpu-<threads>-<name>.json")


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    naive = None
    if options.naive:
        spec = importlib.util.spec_from_file_location("naive", options.naive)
        assert spec and spec.loader
        naive = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(naive)

    if options.training_only:
        print(json.dumps(prefill_and_training(options.threads, None)))
        return 0
    ceiling = ceilings(options.build, options.threads)
    record: dict[str, Any] = {
        "command": "python -m bench cpu",
        "source_hash": source_hash(cuda=False),
        **machine(),
        "threads": options.threads,
        "ceilings": ceiling,
        "prefill_and_training": prefill_and_training(options.threads, naive),
        "training_with_kept_memory": training_with_kept_memory(options.threads),
        "decode": decode(options.threads),
        "speculation": speculation(options.threads),
        "one_long_head": one_long_head(options.threads),
        "other_operators": other_operators(options.threads),
        "overheads": overheads(),
    }
    work = record["prefill_and_training"]
    work["share_of_fma_peak"] = work["prefill_gflops"] / ceiling["fma_gflops"]
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "-".join(record["cpu"].lower().replace("(r)", "").split()[:3]).replace("@", "")
        (options.out / f"cpu-{name}.json").write_text(text + "\n")
    return 0

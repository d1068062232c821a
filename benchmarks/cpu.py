#!/usr/bin/env python3
"""The CPU figures of the README, measured in one run: prefill, training, decode, overheads, beside the machine's own
ceilings and FLA's naive PyTorch formulation. Nothing else should run on the machine meanwhile.

    cmake --preset release && cmake --build --preset release
    KDA_LIBRARY_DIR=build/release/lib PYTHONPATH=python python benchmarks/cpu.py --out docs/results

The naive formulation is FLA's file fla/ops/kda/naive.py, given with --naive (it needs einops); without it that row is
left out. Times are medians over repetitions that alternate between the things compared.

Training is measured twice: as the system comes, where glibc gives the memory of every step back and faults it in again
in the next, and in a process whose malloc keeps it (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_). PyTorch's guide to
performance on CPUs advises such an allocator in general.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kda

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from source_hash import source_hash  # noqa: E402

# Multiply-adds of the chunked forward per token and value head at K = V = 128, C = 64, block triangles counted as such,
# two FLOP each (math.md 9).
FORWARD_FLOP = 141_312
GATE: dict[str, Any] = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each call; the calls take turns, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def ceilings(build: Path, threads: int) -> dict[str, float]:
    runs = [
        json.loads(
            subprocess.run([build / "benchmarks/ceilings", str(threads)], capture_output=True, check=True).stdout
        )
        for _ in range(3)
    ]
    return {key: statistics.median(r[key] for r in runs) for key in ("fma_gflops", "read_write_gbs")}


def head_inputs(B: int, T: int, H: int, K: int = 128, V: int = 128) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "g": normal(B, T, H, K)}
    inputs["beta"] = normal(B, T, H)
    return {n: x.bfloat16() for n, x in inputs.items()} | {"A_log": normal(H), "dt_bias": normal(H, K)}


def prefill_and_training(threads: int, naive: Any) -> dict[str, Any]:
    B, T, H = 1, 4096, 8
    x = head_inputs(B, T, H)
    out = torch.empty_like(x["v"])
    state = torch.zeros(B, H, 128, 128)
    trained = {n: t.clone().requires_grad_() for n, t in x.items()}
    gradient = torch.randn_like(x["v"])

    def train(disable_recompute: bool) -> None:
        o, _ = kda.chunk_kda(**trained, **GATE, disable_recompute=disable_recompute)
        torch.autograd.grad(o, list(trained.values()), gradient)

    def forward_only() -> None:
        with torch.no_grad():
            kda.chunk_kda(**x, **GATE)

    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: kda.prefill(**x, **GATE, state=state, out=out, num_threads=threads),
        "prefill, 1 thread": lambda: kda.prefill(**x, **GATE, state=state, out=out, num_threads=1),
        "forward": forward_only,
        "forward + backward": lambda: train(False),
        "forward + backward, disable_recompute": lambda: train(True),
    }
    seconds = medians(calls, 15)
    result: dict[str, Any] = {"shape": {"B": B, "T": T, "H": H, "K": 128, "V": 128}, "dtype": "bfloat16"}
    result["ms"] = {name: t * 1e3 for name, t in seconds.items()}
    result["prefill_gflops"] = B * T * H * FORWARD_FLOP / seconds["prefill"] * 1e-9
    result["speedup_of_threads"] = seconds["prefill, 1 thread"] / seconds["prefill"]
    for kind in ("", ", disable_recompute"):
        result[f"training_over_forward{kind}"] = seconds[f"forward + backward{kind}"] / seconds["forward"]
    if naive is not None:
        # It takes activated inputs, so it is spared the gate, the norm and the sigmoid.
        g = kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"])
        q, k = (torch.nn.functional.normalize(x[n].float(), dim=-1).bfloat16() for n in "qk")
        beta = x["beta"].float().sigmoid()
        ms = medians({"naive": lambda: naive.naive_chunk_kda(q, k, x["v"], g, beta)}, 3)["naive"] * 1e3
        result["ms"]["FLA naive_chunk_kda"] = ms
        result["speedup_over_naive"] = ms / result["ms"]["prefill"]
    return result


def training_with_kept_memory(threads: int) -> dict[str, Any]:
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}
    command = [sys.executable, __file__, "--threads", str(threads), "--training-only"]
    result = subprocess.run(command, env=environment, capture_output=True, check=True)
    ratios: dict[str, Any] = json.loads(result.stdout)
    return {k: x for k, x in ratios.items() if k.startswith("training_over_forward")}


def decode(threads: int) -> dict[str, Any]:
    N, H = 1024, 8  # 1024 states of 512 KiB: 512 MiB, far beyond the caches
    x = head_inputs(N, 1, H)
    indices = torch.randperm(N, generator=torch.Generator().manual_seed(1)).int()
    out = torch.empty_like(x["v"])
    pools = {"V-first": torch.randn(N, H, 128, 128), "K-first": torch.randn(N, H, 128, 128)}
    calls: dict[str, Callable[[], object]] = {
        name: lambda pool=pool, name=name: kda.decode(  # type: ignore[misc]
            **x,
            **GATE,
            state=pool,
            state_indices=indices,
            state_v_first=name == "V-first",
            out=out,
            num_threads=threads,
        )
        for name, pool in pools.items()
    }
    # The ceiling beside it, in turns and over the same pages: reading and writing the whole pool in place.
    calls["multiplied in place"] = lambda: pools["V-first"].mul_(1.0)
    bytes_moved = 2 * pools["V-first"].numel() * 4
    seconds = medians(calls, 15)
    result: dict[str, Any] = {"shape": {"requests": N, "H": H, "K": 128, "V": 128}, "state": "float32"}
    for name, t in seconds.items():
        result[name] = {"ms": t * 1e3, "gb_per_s": bytes_moved / t * 1e-9}
        result[name]["share_of_bandwidth"] = seconds["multiplied in place"] / t
    return result


def overheads() -> dict[str, float]:
    x = head_inputs(1, 1, 1, 16, 16)
    state, out = torch.zeros(4, 1, 16, 16), torch.empty_like(x["v"])
    indices = torch.tensor([1], dtype=torch.int32)

    def call(out: torch.Tensor | None) -> None:
        kda.decode(**x, **GATE, state=state, state_indices=indices, out=out)

    def microseconds(fn: Callable[[], object]) -> float:
        fn()
        return statistics.median(timeit.repeat(fn, number=2000, repeat=11)) / 2000 * 1e6

    script = "import time; t = time.perf_counter(); import kda; print(time.perf_counter() - t)"
    imports = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout) for _ in range(7)
    ]
    return {
        "decode_call_us": microseconds(lambda: call(out)),
        "decode_call_without_out_us": microseconds(lambda: call(None)),
        "import_ms": statistics.median(imports) * 1e3,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--naive", type=Path, help="FLA's fla/ops/kda/naive.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--training-only", action="store_true", help="print that part of the record, and nothing else")
    parser.add_argument("--out", type=Path, help="folder for cpu-<threads>-<name>.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    naive = None
    if options.naive:
        spec = importlib.util.spec_from_file_location("naive", options.naive)
        assert spec and spec.loader
        naive = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(naive)

    if options.training_only:
        print(json.dumps(prefill_and_training(options.threads, None)))
        return
    ceiling = ceilings(options.build, options.threads)
    record: dict[str, Any] = {
        "command": "benchmarks/cpu.py",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "source_hash": source_hash(),
        "cpu": cpu_name(),
        "library": kda.info(),
        "torch": torch.__version__,
        "threads": options.threads,
        "ceilings": ceiling,
        "prefill_and_training": prefill_and_training(options.threads, naive),
        "training_with_kept_memory": training_with_kept_memory(options.threads),
        "decode": decode(options.threads),
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


if __name__ == "__main__":
    main()

"""Processes of the suite: each is shown, and its output if it fails."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from bench import ROOT

PATIENCE = 500  # seconds


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    start = time.monotonic()
    try:
        result = subprocess.run(
            command, env={**os.environ, **environment}, text=True, capture_output=True, cwd=ROOT, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as e:
        result = subprocess.CompletedProcess(command, 124, str(e.stdout), str(e.stderr))
    print("+", *command, f"({time.monotonic() - start:.0f} s)", flush=True)
    if result.returncode:
        # A sanitizer's report is in the middle, before much output that follows from it.
        report = "\n".join(line for line in result.stdout.splitlines() if line.startswith("========="))
        print(report[:6000], result.stdout[-6000:], result.stderr[-3000:], sep="\n", flush=True)
    return result


def shards(command: list[str], count: int, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs a gtest binary's tests in ``count`` processes at once. They share the GPU; the oracle takes most of their
    time."""

    def shard(i: int) -> subprocess.CompletedProcess[str]:
        return run(command, GTEST_TOTAL_SHARDS=str(count), GTEST_SHARD_INDEX=str(i), **environment)

    with ThreadPoolExecutor(count) as at_once:
        return list(at_once.map(shard, range(count)))


def of_python(**environment: str) -> dict[str, str]:
    """The environment of a process that imports kda from this tree."""
    return {
        "PYTHONPATH": f"{ROOT / 'python'}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "2",
        **environment,
    }

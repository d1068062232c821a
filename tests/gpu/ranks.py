"""Processes as ranks of a group: on CUDA each has a GPU and they exchange by NCCL, on the CPU by gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gloo import preloaded
from places import DEVICE


def enough_devices(ranks: int) -> pytest.MarkDecorator:
    too_few = DEVICE.type == "cuda" and torch.cuda.device_count() < ranks
    return pytest.mark.skipif(too_few, reason=f"needs {ranks} CUDA devices, there is {torch.cuda.device_count()}")


def run(run_rank: Callable[[int, str, str], None], ranks: int, folder: Path, patience: float) -> Path:
    """Runs run_rank(rank, device type, folder) in a process for each rank, for at most ``patience`` seconds."""
    deadline = time.monotonic() + patience
    how = "spawn" if DEVICE.type == "cuda" else preloaded()
    context = torch.multiprocessing.start_processes(
        run_rank, (DEVICE.type, str(folder)), ranks, False, start_method=how
    )
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):  # returns when one of them ends, too
            if time.monotonic() > deadline:
                pytest.fail(f"the ranks have not finished in {patience} s")
    finally:
        for process in context.processes:
            process.kill()
    return folder

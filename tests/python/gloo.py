"""Processes of tests as ranks of a group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def join(rank: int, ranks: int, store: str, seconds: float = 120, device_type: str = "cpu") -> torch.device:
    """Makes this process a rank of the default group, with one thread for torch: by gloo, or on "cuda" with a GPU of
    its own, by NCCL. ``store`` is a file that the ranks share, and ``seconds`` is how long they wait for one another.
    Returns the rank's device."""
    torch.set_num_threads(1)
    on_cuda = device_type == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
        device_id=device if on_cuda else None,
    )
    return device


def preloaded() -> str:
    """A way to start processes, without a GPU: they are forked from one that has imported what takes ranks seconds."""
    modules = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "kda.cp", "kda.nn", "kda.tp"]
    multiprocessing.set_forkserver_preload(modules)
    return "forkserver"


def run_ranks(run_rank: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Runs run_rank(rank, *arguments) in a process for each rank."""
    torch.multiprocessing.start_processes(run_rank, arguments, ranks, start_method=preloaded())


def answer(call: Callable[[], Any]) -> str:
    """The sentence with which a call is refused, or "accepted"."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "accepted"

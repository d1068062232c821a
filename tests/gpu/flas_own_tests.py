"""Runs FLA's own tests with our functions in it, in this process and in those that it spawns. The first argument is the
function of which a call must come to us, or it exits with 99; the others are pytest's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.multiprocessing
from torch.nn import functional

from bench.tuning import compiled_at_once

NOTHING_CAME = 99


def plug() -> Any:
    found: Any = importlib.import_module("kda.fla")
    assert found.plug().state == "plugged", found.plug()
    return found


def with_exact_reference(worker: Callable[..., None]) -> Callable[..., None]:
    """The reference of FLA's test of context parallelism rounds normalised q and k to bfloat16. That alone puts its dq
    0.9 % off, where the test allows 0.8 % in all. FLA's own kernels exceed it too, and its CI only warns. Here q and k
    stay in float32, and the reference is 0.17 % off."""
    assert "F" in worker.__globals__, "FLA's test has another name for torch.nn.functional"

    def normalize(x: torch.Tensor, **how: Any) -> torch.Tensor:
        return functional.normalize(x.float(), **how)

    worker.__globals__["F"] = SimpleNamespace(**{**vars(functional), "normalize": normalize})
    return worker


def on_rank(rank: int, wanted: str, worker: Callable[..., None], *args: Any) -> None:
    """In a process that a test spawns, where nothing is plugged yet."""
    plugged = plug()
    with_exact_reference(worker)(rank, *args)
    report = plugged.report()
    print(f"rank {rank}: {report}", flush=True)
    assert report.taken.get(wanted), report


def main(wanted: str, *arguments: str) -> int:
    plugged = plug()
    spawned = 0
    start = torch.multiprocessing.start_processes

    def start_plugged(worker: Callable[..., None], args: tuple[Any, ...] = (), **given: Any) -> Any:
        nonlocal spawned
        spawned += 1
        return start(on_rank, (wanted, worker, *args), **given)

    torch.multiprocessing.start_processes = start_plugged
    with compiled_at_once():
        status = int(pytest.main(list(arguments)))
    print(plugged.report())
    return status or (0 if spawned or plugged.report().taken.get(wanted) else NOTHING_CAME)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

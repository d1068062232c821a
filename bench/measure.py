"""Timing, and information about the machine. Medians of calls in turn and the machine's ceilings are the wheel's."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kda
from kda.call.arrays import torch
from kda.cli.bench import Call, ceilings, medians, synchronizer, thread_count  # noqa: F401, users name this module


def reason(error: Exception, where: str = "") -> str:
    """Why a row is missing. If something is absent or declines the call, the error's own text; otherwise ``where``
    and the error's type, too."""
    if isinstance(error, (ImportError, FileNotFoundError, NotImplementedError)):
        return str(error)
    return f"{where}{type(error).__name__}: {error}"


def note_once(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a record of measurements says about the machine."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": cpu_name(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "library": kda.info(),
        "torch": None if torch is None else torch.__version__,
        "threads": thread_count(),
    }


def in_turn(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def graph_milliseconds(call: Call, *, repeats: int = 9, flush: bool = False) -> float:
    """Median time of a call on the current CUDA device, from a graph, so that launches by the host are not included.
    The graph repeats the call until it lasts 2 ms. With ``flush`` it is one call, which finds nothing in the L2
    cache."""
    timed = _timer(flush)

    def captured(count: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        # The current stream as the outer context: it is current again afterwards even if the capture fails.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for _ in range(count):
                call()
        return graph

    def replay(graph: Any) -> float:
        return timed(graph.replay)

    call()  # compiles and tunes what the first call does
    torch.cuda.synchronize()
    graph, count = captured(1), 1
    once = [replay(graph) for _ in range(2)][1]
    if not flush and once < 2:
        count = min(math.ceil(2 / max(once, 1e-3)), 100)
        graph = captured(count)
        replay(graph)
    return statistics.median(replay(graph) for _ in range(repeats)) / count


def stream_milliseconds(call: Call, *, repeats: int = 9, flush: bool = False) -> float:
    """The same for a call that a graph cannot hold; includes waiting for launches if the host is slow."""
    timed = _timer(flush)
    timed(call)  # warms up
    return statistics.median(timed(call) for _ in range(repeats))


def host_microseconds(call: Call, *, repeats: int = 30, batch: int = 2) -> float:
    """Median time that the host needs to issue a call on the current CUDA device. A few calls in a row are timed; the
    device waits for the host, or is behind it by less than its queue holds."""

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        return (time.perf_counter() - start) / batch

    once()
    return statistics.median(once() for _ in range(repeats)) * 1e6


def least_microseconds(call: Call, *, repeats: int = 100, batch: int = 100) -> float:
    """The least time of a call on the host, for calls that give the device nothing to do. Many short runs, since others
    may use the machine."""
    runs = timeit.repeat(call, number=batch, repeat=repeats)
    return 1e6 * min(runs) / batch


def own_bytes(call: Callable[[], Sequence[Any]], peak: bool = False) -> int:
    """Memory on the GPU beyond the inputs of a call and what it returns: what is kept after it, or its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    after: int = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    return after - before - sum(x.numel() * x.element_size() for x in results)


def _timer(flush: bool) -> Callable[[Call], float]:
    """Returns a function that measures the milliseconds of a call on the current stream; ``flush`` empties the L2
    cache first."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed = torch.empty(256 << 20 if flush else 0, dtype=torch.uint8, device="cuda")

    def timed(call: Call) -> float:
        flushed.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed

    return timed


def stream_bandwidth() -> float:
    """GB/s of y = 2 x over 1 GiB on the current CUDA device, bytes read plus bytes written: the most that a
    memory-bound kernel can hope for. (The copy engine behind y.copy_(x) is slower.)"""
    x = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / graph_milliseconds(lambda: torch.mul(x, 2, out=y), flush=True) * 1e-6

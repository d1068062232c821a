"""Timing, the ceilings of the machine, and information about it: for ``python -m kda bench`` and for benchmarks/."""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kda

from ..call.arrays import torch

Call = Callable[[], object]


def reason(error: Exception, where: str = "") -> str:
    """Why a row is missing. If something is absent or declines the call, the error's own text; otherwise ``where``
    and the error's type, too."""
    if isinstance(error, (ImportError, FileNotFoundError, NotImplementedError)):
        return str(error)
    return f"{where}{type(error).__name__}: {error}"


def note_once(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def medians(
    calls: Mapping[str, Call],
    repeats: int,
    *,
    seconds: float = math.inf,
    synchronize: Call = lambda: None,
    tick: Call = lambda: None,
) -> dict[str, float]:
    """Seconds of each call. The calls take turns, so that a slow moment of the machine affects all of them. Calls
    shorter than 5 ms are timed in batches; one that took ``seconds`` altogether stops after three turns. ``tick`` is
    called after every turn of every call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    batch = dict.fromkeys(calls, 1)

    def once(name: str) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(batch[name]):
            calls[name]()
        synchronize()
        return (time.perf_counter() - start) / batch[name]

    for name in calls:
        once(name)  # warms up
        batch[name] = max(1, math.ceil(5e-3 / max(once(name), 1e-7)))
    for _ in range(repeats):
        for name, spent in times.items():
            if len(spent) < 3 or sum(spent) * batch[name] < seconds:
                spent.append(once(name))
            tick()
    return {name: statistics.median(t) for name, t in times.items()}


def thread_count() -> int:
    """The number of threads that OpenMP uses unless told otherwise."""
    words = os.environ.get("OMP_NUM_THREADS", "").split(",")
    return int(words[0]) if words[0].strip().isdecimal() else len(os.sched_getaffinity(0))


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


def synchronizer(device: str) -> Call:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


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


def ceilings(device: str = "cpu") -> dict[str, float]:
    """The rates that other software reaches here: GFLOP/s of a large float32 matrix product (bfloat16 on a GPU), and
    GB/s, read and write together, of negating in place a buffer much larger than the caches."""
    return {"GFLOP/s": max(map(_best, _products(device))), "GB/s": _best(_stream(device))}


class _Work(NamedTuple):
    amount: float
    call: Call
    synchronize: Call = lambda: None


def _best(work: _Work, seconds: float = 0.7) -> float:
    """Giga-units per second of the best of many short runs: a ceiling is what the machine does when undisturbed."""
    shortest, end = math.inf, time.perf_counter() + seconds
    work.call()
    while time.perf_counter() < end or shortest == math.inf:
        work.synchronize()
        start = time.perf_counter()
        work.call()
        work.synchronize()
        shortest = min(shortest, time.perf_counter() - start)
    return work.amount / shortest * 1e-9


def _products(device: str) -> list[_Work]:
    """NumPy's and torch's libraries differ in how well they know a processor: the better one counts."""
    n = 8192 if device == "cuda" else 1024
    works = []
    if device == "cpu":
        x = np.ones((n, n), np.float32)
        out = np.empty_like(x)
        works.append(_Work(2 * n**3, lambda: np.matmul(x, x, out=out)))
    if torch is not None:
        if device == "cpu":
            torch.set_num_threads(thread_count())
        y = torch.ones(n, n, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        z = torch.empty_like(y)
        works.append(_Work(2 * n**3, lambda: torch.mm(y, y, out=z), synchronizer(device)))
    return works


def _stream(device: str) -> _Work:
    """On the CPU, NumPy in Python threads: its loops release the interpreter lock, and use one thread each."""
    size = 1 << 27  # floats: 512 MiB
    if device == "cuda":
        return _Work(8 * size, torch.ones(size, dtype=torch.float32, device=device).neg_, torch.cuda.synchronize)
    parts, pool = np.array_split(np.ones(size, np.float32), thread_count()), ThreadPoolExecutor(thread_count())
    return _Work(8 * size, lambda: list(pool.map(lambda part: np.negative(part, out=part), parts)))

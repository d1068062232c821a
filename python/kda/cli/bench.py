"""Measures prefill, training and decode on this machine, next to the machine's own ceilings: a large matrix product,
and reading and writing memory. Times are medians. Nothing else should run at the same time. Other operators, other
projects' kernels and the published figures are measured from the repository: python -m bench, docs/bench.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import kda

from ..call import flops
from ..call.arrays import torch
from . import problems, show
from .arrays import Source, cuda_device
from .operators import forced, known
from .problems import BYTES, Problem, combinations, given_sizes, natural, size_arguments

Call = Callable[[], object]


class Bench(NamedTuple):
    prepare: Callable[[Problem, Source], Call]  # makes the inputs and returns the call to time
    work: Callable[[Problem], float]  # what the call does, in the unit of the ceiling that it is compared with:
    unit: str  # "GFLOP/s" or "GB/s"
    cases: tuple[Problem, ...]
    most_tokens: int = 1 << 40  # a row; a larger --T is meant for other operators
    needs_torch: bool = False


def _prefill(p: Problem, new: Source) -> Call:
    x = problems.serving(p, new)
    return lambda: kda.prefill(**x)


def _training(p: Problem, new: Source) -> Call:
    x = problems.training(p, new)
    d = x.pop("d_o")
    del x["d_final_state"], x["initial_state"]
    leaves = [a.requires_grad_() for a in x.values() if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return lambda: torch.autograd.grad(kda.chunk_kda(**x)[0], leaves, d)


def _decode(p: Problem, new: Source) -> Call:
    x = problems.serving(p, new)
    return lambda: kda.decode(**x)


def flop(of: str) -> Callable[[Problem], float]:
    """The work for all tokens and value heads, from a function of kda.call.flops."""
    return lambda p: p.B * p.T * p.HV * float(getattr(flops, f"{of}_flop")(p.K, p.V))


def state_bytes(p: Problem) -> float:
    """Bytes if every state is read and written once."""
    return 2 * p.N * p.HV * p.K * p.V * BYTES[p.state_dtype]


BENCHES = {
    "prefill": Bench(_prefill, flop("forward"), "GFLOP/s", (Problem(T=512), Problem(T=4096))),
    "training": Bench(
        _training, flop("training"), "GFLOP/s", (Problem(T=512), Problem(T=4096)), needs_torch=True
    ),
    "decode": Bench(_decode, state_bytes, "GB/s", tuple(Problem(B=B, T=1) for B in (1, 32, 1024)), most_tokens=16),
}  # fmt: skip


def shared_arguments(parser: argparse.ArgumentParser, operators: Iterable[str], cuda: str) -> None:
    """Of this command and of ``python -m bench``. ``cuda``: where --device is cuda by default."""
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(operators)}; all by default")
    size_arguments(parser, many=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), help=f"cuda where {cuda}, else cpu")
    parser.add_argument("--impl", metavar="NAME,..", help="force implementations, see `python -m kda info`")
    parser.add_argument("--threads", type=natural, metavar="N", help="as if OMP_NUM_THREADS were set")
    parser.add_argument("--repeats", type=natural, default=7, metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, help="a slow call stops repeating after these")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m kda bench [OPERATOR ...] [options]"
    shared_arguments(parser, BENCHES, "there is one")
    parser.add_argument("--json", action="store_true", help="for scripts, on standard output")


def run(options: argparse.Namespace) -> int:
    for name in options.operators:
        if name not in BENCHES:
            raise ValueError(f"operators: expected some of {', '.join(BENCHES)}, got {name}")
    known(options.impl, ("forward", "backward", "decode"))
    built = "cuda_decode" in kda.implementations("decode")
    device = options.device or ("cuda" if built and cuda_device() else "cpu")
    Source(device)  # reports a problem with the device before anything is measured
    given = given_sizes(options)
    if torch is None:
        given.setdefault("dtype", ["float32"])  # NumPy has no bfloat16
    names = [n for n in options.operators or BENCHES if torch is not None or not BENCHES[n].needs_torch]
    limits = ceilings(device)
    with forced(options.impl):
        rows = [
            row(name, p, device, options.repeats, options.seconds)
            for name in names
            for p in cases_of(BENCHES[name].cases, given, BENCHES[name].most_tokens)
        ]
    limits = {unit: max(rate, limits[unit]) for unit, rate in ceilings(device).items()}  # a disturbance may have passed
    if options.json:
        print(json.dumps({**kda.info(), "device": device, "ceilings": limits, "rows": rows}, indent=2))
        return 0
    print(f"{device}: {limits['GFLOP/s']:.0f} GFLOP/s matrix product, {limits['GB/s']:.1f} GB/s read + write\n")
    show.table(["operator", "case", "time", "tokens/s", "rate", "of ceiling"], [_cells(r, limits) for r in rows])
    return 0


def cases_of(own: tuple[Problem, ...], given: dict[str, list[Any]], most_tokens: int) -> list[Problem]:
    """An operator's own cases, in every combination with the given values."""
    given = {name: [v for v in values if name != "T" or v <= most_tokens] for name, values in given.items()}
    given = {name: values for name, values in given.items() if values}
    return list(dict.fromkeys(x for p in own for x in combinations(p, given)))


def row(name: str, p: Problem, device: str, repeats: int, seconds: float) -> dict[str, Any]:
    bench = BENCHES[name]
    calls = {"kda": bench.prepare(p, Source(device))}
    time = medians(calls, repeats, seconds=seconds, synchronize=synchronizer(device))["kda"]
    found = {"operator": name, "problem": asdict(p), "ms": time * 1e3, "tokens_per_s": p.B * p.T / time}
    return found | {"rate": bench.work(p) / time * 1e-9, "unit": bench.unit}


def _cells(r: dict[str, Any], limits: dict[str, float]) -> list[str]:
    p = Problem(**r["problem"])
    rate = [f"{r['rate']:.3g} {r['unit']}", f"{r['rate'] / limits[r['unit']]:.0%}"]
    return [r["operator"], f"{p.sizes}, {p.dtype}", readable(r["ms"]), f"{r['tokens_per_s']:.3g}", *rate]


def readable(ms: float) -> str:
    return f"{ms * 1e3:.3g} us" if ms < 1 else f"{ms:.3g} ms" if ms < 1e3 else f"{ms / 1e3:.3g} s"


def synchronizer(device: str) -> Call:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


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


def ceilings(device: str = "cpu") -> dict[str, float]:
    """The rates that other software reaches here: GFLOP/s of a large float32 matrix product (bfloat16 on a GPU), and
    GB/s, read and write together, of negating in place a buffer much larger than the caches."""
    n, floats = 8192 if device == "cuda" else 1024, 1 << 27
    product = max(_best(2 * n**3, call, device) for call in _products(device, n))
    return {"GFLOP/s": product, "GB/s": _best(8 * floats, _stream(device, floats), device)}


def _best(amount: float, call: Call, device: str, seconds: float = 0.7) -> float:
    """Giga-units per second of the best of many short runs: a ceiling is what the machine does when undisturbed."""
    shortest, end, synchronize = math.inf, time.perf_counter() + seconds, synchronizer(device)
    call()
    while time.perf_counter() < end or shortest == math.inf:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        shortest = min(shortest, time.perf_counter() - start)
    return amount / shortest * 1e-9


def _products(device: str, n: int) -> Iterator[Call]:
    """NumPy's and torch's libraries differ in how well they know a processor: the better one counts."""
    if device == "cpu":
        x = np.ones((n, n), np.float32)
        yield partial(np.matmul, x, x, out=np.empty_like(x))
    if torch is not None:
        if device == "cpu":
            torch.set_num_threads(thread_count())
        y = torch.ones(n, n, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        yield partial(torch.mm, y, y, out=torch.empty_like(y))


def _stream(device: str, floats: int) -> Call:
    """On the CPU, NumPy in Python threads: its loops release the interpreter lock, and use one thread each."""
    if device == "cuda":
        return torch.ones(floats, dtype=torch.float32, device=device).neg_
    parts, pool = np.array_split(np.ones(floats, np.float32), thread_count()), ThreadPoolExecutor(thread_count())
    return lambda: list(pool.map(lambda part: np.negative(part, out=part), parts))

"""Tests the installed library: every operator, with every implementation, gate, dtype and state layout, on small
random problems against the float64 oracle (the implementation `reference`, on the same rounded inputs). An error is
RMS(x - oracle) / RMS(oracle). The exit status is 1 if any error is larger than allowed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

import kda

from ..call.arrays import torch
from . import show
from .arrays import Source, copy, cuda_device, dtype_name, to_numpy, widen
from .operators import OPERATORS, current, device_of, forced, known
from .problems import DTYPES, GATES, LAYOUTS, Problem

# The most that rounding results to their dtype can cost (half a unit in the last place, RMS over an interval). No
# implementation can be required to do better.
ROUNDING = {"bfloat16": 2.0**-8 / 3**0.5, "float16": 2.0**-11 / 3**0.5}


class Case(NamedTuple):
    op: str
    problem: Problem

    def command(self, implementation: str, seed: int) -> str:
        p = self.problem
        words = f"--op {self.op} --impl {implementation} --dtype {p.dtype} --gate {p.gate} --layout {p.layout}"
        return f"python -m kda check {words}" + (f" --seed {seed}" if seed else "")


class Result(NamedTuple):
    """The result of one case with one implementation."""

    case: Case
    implementation: str
    errors: dict[str, tuple[float, float]]  # name -> measured, allowed
    problem: str = ""  # what is wrong
    skipped: str = ""  # why nothing ran

    @property
    def worst(self) -> tuple[str, float, float]:
        name = max(self.errors, key=lambda n: self.errors[n][0] / self.errors[n][1])
        return (name, *self.errors[name])

    @property
    def record(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the error is null if elements are not finite."""
        errors = {
            name: {"error": error if np.isfinite(error) else None, "allowed": allowed}
            for name, (error, allowed) in self.errors.items()
        }
        status = "skipped" if self.skipped else "failed" if self.problem else "ok"
        what = {"operator": self.case.op, "implementation": self.implementation, "problem": asdict(self.case.problem)}
        return what | {"status": status, "why": self.skipped or self.problem or None, "errors": errors}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m kda check [options]"
    parser.add_argument("--op", nargs="+", choices=OPERATORS, default=list(OPERATORS), metavar="NAME")
    parser.add_argument("--impl", nargs="+", metavar="NAME", help="see `python -m kda info`")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--gate", nargs="+", choices=GATES, default=GATES)
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--json", action="store_true", help="for scripts, on standard output: a record a case")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")


def run(options: argparse.Namespace) -> int:
    impl = ",".join(options.impl or ())
    known(impl or None, options.op)
    wanted = {op: [n for n in kda.implementations(op) if not impl or n in current(op, impl)] for op in options.op}
    cases = list(_cases(options))
    results: list[Result] = []
    with show.Progress(sum(len(wanted[case.op]) for case in cases)) as progress:
        for case in cases:
            progress.label(f"{case.op}, {case.problem.dtype}, {case.problem.gate}")
            for result in check(case, wanted[case.op], options.seed):
                results.append(result)
                progress.step()
    failed = [r for r in results if r.problem]
    ran = sum(not r.skipped for r in results)
    if options.json:
        print(json.dumps({**kda.info(), "device": _gpu(), "results": [r.record for r in results]}, indent=2))
        return 1 if failed or not ran else 0
    _print(results)
    for r in failed:
        print(f"\n{r.case.op} {r.implementation}: {r.case.problem.sizes}, {r.case.problem.options}\n  {r.problem}")
        print(f"  {r.case.command(r.implementation, options.seed)}")
    where = ", ".join(filter(None, (f"kda {kda.__version__}", kda.info()["cpu"], _gpu())))
    print(f"\n{where}: {ran - len(failed)} of {ran} cases ok, {len(results) - ran} skipped")
    return 1 if failed or not ran else 0


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if cuda_device() else None


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for op in options.op:
        entry = OPERATORS[op]
        for dtype in (d for d in options.dtype if d in entry.dtypes):
            for gate in entry.gates:
                for layout in entry.layouts:
                    if gate in options.gate and layout in options.layout:
                        for p in entry.checked + (entry.checked_in_bf16 if dtype == "bfloat16" else ()):
                            yield Case(op, replace(p, dtype=dtype, gate=gate, layout=layout))


def check(case: Case, implementations: list[str], seed: int) -> Iterator[Result]:
    """Yields one result for each implementation."""
    entry = OPERATORS[case.op]
    expected: dict[str, Any] | None = None
    for name in implementations:
        reason = _why_not(case, name)
        if reason:
            yield Result(case, name, {}, skipped=reason)
            continue
        x = entry.make(case.problem, Source(seed=seed))
        if expected is None:
            with forced("reference"):
                expected = entry.call({n: widen(a) for n, a in x.items()})
        try:
            with forced(name):
                got = entry.call({n: copy(a, device_of(name)) for n, a in x.items()})
        except NotImplementedError as error:
            yield Result(case, name, {}, skipped=str(error))
        except (ValueError, RuntimeError, MemoryError) as error:
            yield Result(case, name, {}, f"{type(error).__name__}: {error}")
        else:
            yield compare(case, name, expected, got)


def _why_not(case: Case, implementation: str) -> str:
    if torch is None and OPERATORS[case.op].needs_torch:
        return "needs torch, which is not installed"
    if torch is None and case.problem.dtype == "bfloat16":
        return "NumPy has no bfloat16, and torch is not installed"
    if device_of(implementation) == "cuda" and not cuda_device():
        return "no CUDA device that torch finds"
    return ""


def compare(case: Case, implementation: str, expected: dict[str, Any], got: dict[str, Any]) -> Result:
    """Checks that RMS errors are within what is allowed, and that no element is off by more than 8 times that,
    relative to the usual size in its row."""
    errors, problems = {}, []
    narrow = device_of(implementation) == "cuda" and case.problem.dtype == "bfloat16"
    entry = OPERATORS[case.op]
    least = max(entry.in_bf16 if narrow else 0.0, entry.in_16_bits.get(implementation, 0.0))
    for name, array in got.items():
        allowed = max(entry.allowed[name], ROUNDING.get(dtype_name(array), 0.0), least)
        ref, x = to_numpy(expected[name]), to_numpy(array)
        rms = np.sqrt(np.mean(ref**2)) if ref.size else 0.0
        usual = np.maximum(rms, np.sqrt(np.mean(ref**2, axis=-1, keepdims=True))) if ref.ndim > 1 and ref.size else rms
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(ref)):
            problems.append(f"{name}: {int((~finite).sum())} of {x.size} elements are not finite")
            errors[name] = (float("inf"), allowed)
            continue
        error = np.abs(x - ref)
        measured = float(np.sqrt(np.mean(error**2)) / (rms + 1e-8)) if ref.size else 0.0
        errors[name] = (measured, allowed)
        far = error > 8 * allowed * (usual + np.abs(ref)) + 1e-6
        if (measured > allowed and error.max() > 1e-6) or far.any():
            index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
            where = f"at {list(index)} expected {ref[index]:.6g}, got {x[index]:.6g}"
            problems.append(f"{name}: error {measured:.1e}, allowed {allowed:.1e}; {where}")
    return Result(case, implementation, errors, "; ".join(problems))


def _print(results: list[Result]) -> None:
    """Prints a row for each operator, implementation and dtype: the number of cases, and the error closest to its
    limit."""
    groups: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for r in results:
        groups.setdefault((r.case.op, r.implementation), {}).setdefault(r.case.problem.dtype, []).append(r)
    rows = []
    for (op, implementation), dtypes in groups.items():
        reasons = {r.skipped for group in dtypes.values() for r in group}
        if len(reasons) == 1 and all(reasons):
            rows.append([op, implementation, "", "0", "", "", "", f"skipped: {reasons.pop()}"])
        else:
            rows += [[op, implementation, dtype, *_cells(group)] for dtype, group in dtypes.items()]
    show.table(["operator", "implementation", "dtype", "cases", "worst", "error", "allowed", ""], rows)


def _cells(group: list[Result]) -> list[str]:
    ran = [r for r in group if not r.skipped]
    if not ran:
        return ["0", "", "", "", f"skipped: {group[0].skipped}"]
    failed = sum(bool(r.problem) for r in ran)
    worst = max((r.worst for r in ran if r.errors), key=lambda w: w[1] / w[2], default=None)
    error = ["", "", ""] if worst is None else [worst[0], f"{worst[1]:.1e}", f"{worst[2]:.1e}"]
    return [str(len(ran)), *error, f"FAILED: {failed}" if failed else "ok"]

"""The tests: C++, Python (also those for the CPU, with CUDA tensors), instructions of the emulator, fuzzer, C example,
`python -m kda check`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.record.instructions import validate
from bench.record.processes import ROOT, of_python, run, shards

# The C++ tests also run from the PTX for sm_80, as on a GPU newer than all named architectures. (torch itself
# contains no PTX.) Each call of either run is behind a kernel that writes its tensors late: tests/gpu/late_inputs.h.
# Kernels for Hopper or Blackwell alone have none.
PTX = {"CUDA_FORCE_PTX_JIT": "1", "GTEST_FILTER": "-*opper*:*lackwell*:ForwardChunkChoice.*"}
GPU_TESTS = "tests/gpu/test_gpu"  # in a built tree
DISTRIBUTED = "test_distributed*.py"  # of tests/gpu: skipped by machines with one GPU
GPU_FUZZER = "tests/gpu/fuzz_gpu"
EXAMPLE = "tests/cpp/examples/decode_gpu"
FUZZING = 90  # seconds


def gtest(binary: Path, **environment: str) -> dict[str, Any]:
    results = shards([str(binary), "--gtest_brief=1"], 8, **environment)
    ran = [re.search(r"^\[=+\] (\d+) tests? from .* ran\.", r.stdout, re.M) for r in results]
    failed = [name for r in results for name in re.findall(r"^\[  FAILED  \] (\S+?),? .*\(\d+ ms\)$", r.stdout, re.M)]
    counts = {"ran": sum(int(m[1]) for m in ran if m), "failed": len(failed)}
    return counts | {"exit": max(abs(r.returncode) for r in results)} | named(failed)


def named(failed: list[str]) -> dict[str, list[str]]:
    """Which tests failed, for the record, where any did."""
    return {"failures": sorted(failed)} if failed else {}


def pytest(folder: str, files: str = "test_*.py", **environment: str) -> dict[str, Any]:
    """Runs one process per file, several at once."""

    def one(tests: Path) -> tuple[int, list[xml.etree.ElementTree.Element]]:
        with tempfile.NamedTemporaryFile(suffix=".xml") as file:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests.relative_to(ROOT))]
            result = run([*command, f"--junitxml={file.name}"], **of_python(KDA_TEST_SKIPS="any", **environment))
            text = Path(file.name).read_text()
        suites = xml.etree.ElementTree.fromstring(text).iter("testsuite") if text else ()
        # 5 means no tests, which is fine: a file may be for another device.
        return 0 if result.returncode == 5 else result.returncode, list(suites)

    with ThreadPoolExecutor(max(6, (os.cpu_count() or 1) // 3)) as at_once:
        results = list(at_once.map(one, sorted((ROOT / folder).glob(files))))
    kinds = ("tests", "failures", "errors", "skipped")
    total = {k: sum(int(suite.get(k, 0)) for _, suites in results for suite in suites) for k in kinds}
    tests = [case for _, suites in results for suite in suites for case in suite.iter("testcase")]
    bad = [case for case in tests if case.find("failure") is not None or case.find("error") is not None]
    return {
        "ran": total["tests"] - total["skipped"],
        "failed": total["failures"] + total["errors"],
        "skipped": total["skipped"],
        "exit": max(abs(status) for status, _ in results),
        **named([f"{case.get('classname')}::{case.get('name')}" for case in bad]),
    }


def quick_tests(build: Path) -> dict[str, Any]:
    """The tests that compute-sanitizer runs, without it, and the C example."""
    return {
        "short list": gtest(build / GPU_TESTS, KDA_TEST_SHORT_LIST="memcheck"),
        "c example": example(build / EXAMPLE),
    }


def example(binary: Path) -> dict[str, Any]:
    result = run([str(binary)])
    ran = "the GPU differs" in result.stdout
    return {"ran": int(ran), "failed": int(result.returncode != 0), "exit": result.returncode}


def fuzz(binary: Path) -> dict[str, Any]:
    """Fuzzes calls at the edges for as long as there is time, with a fixed seed and with that of the day. A failure
    prints the arguments that reproduce it."""
    results = [run([str(binary), "1000000", seed, "0", "cuda", str(FUZZING // 2)]) for seed in ("1", "today")]
    made = [re.search(r"calls: (\d+) made", result.stdout) for result in results]
    return {
        "ran": sum(int(found[1]) for found in made if found),
        "failed": sum(result.returncode != 0 for result in results),
        "exit": max(abs(result.returncode) for result in results),
    }


def kda_check() -> dict[str, Any]:
    """Runs `python -m kda check`. Leaving out an implementation for this GPU is a failure, because users would
    believe that it was checked."""
    result = run([sys.executable, "-m", "kda", "check"], **of_python())
    summary = re.search(r": (\d+) of (\d+) cases ok, (\d+) skipped$", result.stdout, re.M)
    ok, ran, skipped = map(int, summary.groups()) if summary else (0, 0, 0)
    cases: dict[str, int] = {}
    for op, name, count, rest in re.findall(r"^(\w+) +(cuda_\w+) +(?:b?float\d+ +)?(\d+) +(.*)", result.stdout, re.M):
        if "needs compute capability" not in rest:
            cases[f"{op} {name}"] = cases.get(f"{op} {name}", 0) + int(count)
    unchecked = [name for name, count in cases.items() if count == 0]
    if unchecked:
        print("python -m kda check leaves out", ", ".join(unchecked), flush=True)
    failed = ran - ok + len(unchecked)
    return {"ran": ran, "failed": failed, "skipped": skipped, "exit": result.returncode or int(failed > 0)}


def instructions(build: Path) -> dict[str, Any]:
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    return validate(build, 10 * major + minor)


# By name: the function that runs the tests in a built tree.
TESTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cpp": lambda build: gtest(build / GPU_TESTS),
    "cpp from ptx": lambda build: gtest(build / GPU_TESTS, **PTX),
    "python": lambda _: pytest("tests/gpu"),
    "python on two GPUs": lambda _: pytest("tests/gpu", DISTRIBUTED),
    "python, as on the CPU": lambda _: pytest("tests/python", KDA_TEST_DEVICE="cuda"),
    "instructions": lambda build: instructions(build),
    "fuzzer": lambda build: fuzz(build / GPU_FUZZER),
    "c example": lambda build: example(build / EXAMPLE),
    "python -m kda check": lambda _: kda_check(),
}


def run_tests(build: Path, before: dict[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """Runs all tests at once, because they leave most of the GPU idle. Tests that passed at this source are not
    repeated. Those for two GPUs need them."""
    import torch

    if torch.cuda.device_count() < 2:
        wanted = [name for name in wanted if name != "python on two GPUs"]
    done = {name: result for name, result in before.items() if result["exit"] == 0}
    with ThreadPoolExecutor() as at_once:
        running = {name: at_once.submit(TESTS[name], build) for name in wanted if name not in done}
        return done | {name: result.result() for name, result in running.items()}

"""Everything that needs a GPU, in one command: C++ and Python tests (including those for the CPU, with CUDA tensors),
the emulator's instructions against the GPU's, the fuzzer, the C example, `python -m kda check`, compute-sanitizer on a
short list, benchmarks. Writes one JSON record: device, clocks, versions, test counts, timings, a hash of include/ and
src/, and the hash of each kernel that the GPU runs (tools/machine_code.py; `make build` writes them beside the build).

    cmake --preset release -DKDA_CUDA=ON && cmake --build --preset release     # here or on another machine
    python -m bench record --build build/release --out docs/results

The record is OUT/<gpu>.json. --only adds a part to the record of the same source, and --benchmarks adds rows. Entries
of records of other sources that this one lacks are kept under `earlier`, with the folders that have changed since.
Exits non-zero if any test failed; the record says which.

--only quick is for a tree whose kernels are those of the record, and whose host code is not (tools/standing.py): the
short list of the C++ tests, the C example and two rows, in two minutes. They are kept under `quick`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bench.record.processes import ROOT
from bench.record.record import Record, command_of, device, replaced, text_of
from bench.record.sanitizer import SANITIZERS, sanitizer
from bench.record.tests import GPU_TESTS, TESTS, quick_tests, run_tests
from bench.record.timings import BENCHMARKS, TUNING, benchmarks
from source_hash import folder_hashes, source_hash
from standing import KERNELS, for_architectures

QUICK_ROWS = ("H96T8192", "H32T8192")  # of prefill and training


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="a tree with tests and binding")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results")
    parser.add_argument("--only", choices=("tests", "sanitizer", "benchmarks", "quick"))
    parser.add_argument("--tests", nargs="+", choices=[*TESTS], default=[*TESTS], help="some of them")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="likewise")
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="CASE", help="of prefill, stages, layer and training, as H32T8192"
    )
    parser.add_argument("--sanitizers", nargs="+", choices=SANITIZERS, default=SANITIZERS, help="likewise")
    parser.add_argument(
        "--seconds",
        type=float,
        default=TUNING,
        help=f"for peers that tune themselves ({TUNING}); with fewer, peers' layers are not trained",
    )
    parser.add_argument("--peers", type=Path, help="a folder of kernels to measure beside ours, see docs/cli.md")


def kernels_of(build: Path, capability: str) -> dict[str, dict[str, str]]:
    """The hashes of the kernels that a GPU of this compute capability runs, by file."""
    path = build / KERNELS
    if not path.exists():
        raise ValueError(f"--build: expected {KERNELS} in it, which `make build` writes, got {build}")
    sm = f"sm_{capability.replace('.', '')}"
    return for_architectures(json.loads(path.read_text()), {sm, f"{sm}a"})


def run(options: argparse.Namespace) -> int:
    build = options.build.resolve()
    os.environ["KDA_LIBRARY_DIR"] = str(build / "lib")

    import kda
    from bench.peers import add_folder

    add_folder(options.peers)
    if options.peers:
        os.environ["KDA_PEERS"] = str(options.peers.resolve())  # for tests that compare with them
    gpu = device()
    this = {
        "source_hash": source_hash(),
        "folders": folder_hashes(),
        "kernels": kernels_of(build, gpu["compute_capability"]),
        "device": gpu,
        "library": kda.info(),
    }
    record = Record(options.out, this, command_of(options.words), goes_on=options.only is not None)
    found = record.found
    if options.only in (None, "tests"):
        found["tests"] = run_tests(build, found.get("tests", {}), options.tests)
        record.save()
    if options.only in (None, "sanitizer"):
        capability = int(found["device"]["compute_capability"].split(".")[0])
        checked = sanitizer(build / GPU_TESTS, options.sanitizers, capability)
        found["sanitizer"] = found.get("sanitizer", {}) | checked
        record.save()
    if options.only in (None, "benchmarks"):
        for rows in benchmarks(options.benchmarks, options.seconds, options.rows):
            found["benchmarks"] = replaced(found.get("benchmarks", []), rows)
            record.save()
    if options.only == "quick":
        rows = [row for some in benchmarks(("prefill", "training"), 0, QUICK_ROWS) for row in some]
        found["quick"] = {"tests": quick_tests(build), "benchmarks": rows}
        record.save()
    print(text_of(found))
    ran = sum(t["ran"] for t in found.get("tests", {}).values())
    failed = sum(t["failed"] for t in found.get("tests", {}).values())
    print(f"{record.path}\ngpu: {ran - failed} passed, {failed} failed")
    return 0 if found["passed"] else 1

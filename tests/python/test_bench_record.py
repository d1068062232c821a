"""python -m bench record: which tests it wants, runs again and keeps in its record."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from bench import ROOT
from bench.command import main
from bench.record import command, instructions, sanitizer, tests
from kda.cli import show

GPU = {"name": "A GPU", "compute_capability": "9.0"}
HOPPER_ONLY = "cuda_b was forced but needs compute capability 9.0 (Hopper)"


@pytest.mark.parametrize(
    ("second", "third", "failed"),
    [
        (["float32", "3", "o", "1e-7", "1e-5", "ok"], ["", "0", "", "", "", f"skipped: {HOPPER_ONLY}"], 0),
        (["float32", "3", "o", "1e-7", "1e-5", "ok"], ["", "0", "", "", "", "skipped: takes one token"], 1),
        (["float32", "0", "", "", "", "skipped: takes bf16"], ["bfloat16", "0", "", "", "", "skipped: few"], 2),
        (["float32", "3", "o", "1e-2", "1e-5", "FAILED: 3"], ["bfloat16", "1", "o", "1e-7", "1e-5", "ok"], 3),
    ],
)
def test_gpu_suite_wants_every_implementation_checked(
    second: list[str], third: list[str], failed: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cells = [["forward", "cpu_chunk", "float32", "4", "o", "1e-7", "1e-5", "ok"]]
    cells += [["forward", "cuda_a", *second], ["decode", "cuda_b", *third]]
    show.table(["operator", "implementation", "dtype", "cases", "worst", "error", "allowed", ""], cells)
    ran, wrong = sum(int(c[3]) for c in cells), sum(int(c[3]) for c in cells if "FAILED" in c[-1])
    print(f"\nkda 0.1.0, avx512 (built for avx512), a GPU: {ran - wrong} of {ran} cases ok, 5 skipped")
    text = capsys.readouterr().out
    monkeypatch.setattr(
        tests, "run", lambda command, **environment: subprocess.CompletedProcess(command, wrong > 0, text)
    )
    assert tests.kda_check() == {"ran": ran, "failed": failed, "skipped": 5, "exit": int(failed > 0)}
    assert ("leaves out" in capsys.readouterr().out) == (failed in (1, 2))


def test_gpu_suite_runs_the_tests_that_are_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What has passed at this source is not run again, but stays in the record."""
    ran = list[str]()
    for name in ("gtest", "pytest", "instructions", "fuzz", "example", "kda_check"):
        monkeypatch.setattr(tests, name, lambda *_, name=name, **__: ran.append(name) or {"ran": 1, "exit": 0})
    before = {"cpp": {"ran": 7, "exit": 0}, "c example": {"ran": 1, "exit": 1}}
    found = tests.run_tests(tmp_path, before, ["cpp", "c example", "python -m kda check"])
    assert sorted(ran) == ["example", "kda_check"]
    assert found == {
        "cpp": before["cpp"],
        "c example": {"ran": 1, "exit": 0},
        "python -m kda check": {"ran": 1, "exit": 0},
    }
    for GPUs in (1, 2):
        ran.clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda GPUs=GPUs: GPUs)
        left_out = {"python on two GPUs"} if GPUs == 1 else set()
        assert set(tests.run_tests(tmp_path, {}, tests.TESTS)) == set(tests.TESTS) - left_out
        assert sorted(ran) == [
            "example",
            "fuzz",
            "gtest",
            "gtest",
            "instructions",
            "kda_check",
            *["pytest"] * (1 + GPUs),
        ]


def test_gpu_suite_keeps_what_only_other_sources_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A record keeps rows and tests of other sources under `earlier`, the newest of each, with what has changed
    since."""
    row = {"what": "decode", "B": 1, "us": 2.5, "over_peer": None}
    stream = {"what": "y = 2 x", "gb_per_s": 4000.0}
    path, hashes = tmp_path / "a-gpu.json", {"src": "1", "src/cuda": "1"}
    kda.info()  # loads the library, before main() names a folder that may have none
    monkeypatch.setenv("KDA_LIBRARY_DIR", "")
    monkeypatch.setattr(command, "device", lambda: GPU)
    monkeypatch.setattr(command, "kernels_of", lambda *_: {"src/cuda/a.cu": {"sm_90 f()": hashes["src/cuda"]}})
    monkeypatch.setattr(command, "folder_hashes", lambda: dict(hashes))
    monkeypatch.setattr(command, "source_hash", lambda: "".join(hashes.values()))
    monkeypatch.setattr(
        command, "run_tests", lambda _, before, wanted: before | {n: {"ran": 1, "failed": 0, "exit": 0} for n in wanted}
    )

    def record(*options: str, rows: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        monkeypatch.setattr(command, "benchmarks", lambda *_: iter([[stream], list(rows)]))
        assert main(["record", "--out", str(tmp_path), *options]) == 0
        return json.loads(path.read_text())

    first = record("--only", "benchmarks", rows=[row, row | {"B": 2}])
    assert first["benchmarks"] == [stream, row, row | {"B": 2}] and "earlier" not in first
    again = record("--only", "benchmarks", rows=[row | {"us": 2.0}])
    assert again["benchmarks"] == [row | {"B": 2}, stream, row | {"us": 2.0}]
    assert again["command"] == "; ".join(["python -m bench record --out FOLDER --only benchmarks"] * 2)
    hashes["src/cuda"] = "2"
    second = record("--only", "tests", "--tests", "cpp")
    assert "benchmarks" not in second and list(second["tests"]) == ["cpp"]
    [earlier] = second["earlier"]
    assert earlier["changed_since"] == ["src/cuda"] and earlier["source_hash"] == "11"
    assert earlier["kernels"] == {"src/cuda/a.cu": {"sm_90 f()": "1"}}
    assert earlier["benchmarks"] == again["benchmarks"] and earlier["device"] == GPU
    hashes["src"] = "2"
    third = record("--only", "benchmarks", rows=[row])
    assert third["benchmarks"] == [stream, row]
    newer, older = third["earlier"]
    assert (newer["changed_since"], newer["tests"]) == (["src"], second["tests"]) and "benchmarks" not in newer
    assert older["changed_since"] == ["src", "src/cuda"] and older["benchmarks"] == [stream, row | {"B": 2}]
    fourth = record("--only", "benchmarks", rows=[row | {"B": 2}])
    assert [list(part["tests"]) for part in fourth["earlier"]] == [["cpp"]]


def test_the_command_needs_no_installed_package() -> None:
    """It measures a built library, with the package of this tree."""
    words = [sys.executable, "-m", "bench", "record", "--help"]
    result = subprocess.run(words, cwd=ROOT, env={}, capture_output=True, text=True)
    assert "--sanitizers" in result.stdout and not result.returncode, result.stderr


@pytest.mark.parametrize(("second", "status", "missing"), [("has", 0, []), ("has not", 1, ["decode cuda_decode"])])
def test_sanitizers_run_every_implementation(
    second: str, status: int, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of the processes has run is enough."""
    text = (
        "short list: forward cuda_a: {} run\nshort list: decode cuda_decode: {} run\n========= ERROR SUMMARY: 0 errors"
    )
    outputs = [text.format("has", "has not"), text.format("has not", second)]
    environments: list[dict[str, str]] = []

    def shards(words: list[str], count: int, **environment: str) -> list[subprocess.CompletedProcess[str]]:
        environments.append(environment)
        return [subprocess.CompletedProcess(words, 0, output, "") for output in outputs]

    monkeypatch.setattr(sanitizer, "shards", shards)
    found = sanitizer.sanitizer(Path("test_gpu"), ["memcheck", "racecheck"])
    assert found["memcheck"]["exit"] == status and found["memcheck"].get("not run", []) == missing
    assert found["racecheck"] == {"exit": 0, "summary": "ERROR SUMMARY: 0 errors"}, "it leaves some out on purpose"
    assert sorted(e["KDA_TEST_SHORT_LIST"] for e in environments) == ["memcheck", "racecheck"]
    assert sanitizer.left_out(["short list: forward cuda_hopper_a: has not run"], capability=8) == []
    blackwell = "forward cuda_blackwell_a"
    assert sanitizer.left_out([f"short list: {blackwell}: has not run"], capability=9) == []
    assert sanitizer.left_out([f"short list: {blackwell}: has not run"], capability=10) == [blackwell]


def test_instructions_are_compared_with_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones to the bit, sums and functions to their limits; those that the GPU lacks are not measured."""

    def row(name: str, kind: str, limit: float, bits: list[int] | None) -> dict[str, object]:
        return {"instruction": name, "kind": kind, "limit": limit, "needs": 80} | ({"bits": bits} if bits else {})

    def side(exact: int, total: int, part: int) -> list[dict[str, object]]:
        return [
            row("copy", "exact", 0, [1, exact]),
            row("sum", "sum", 1e-6, [0x3F800000, total]),
            row("function", "relative", 1e-6, [part]),
            row("not here", "exact", 0, None),
        ]

    one, near, far, nan = 0x3F800000, 0x3F800001, 0x3F800100, 0x7FC00000
    sides = {
        "same": (side(7, one, one), side(7, one, one)),
        "rounded": (side(7, near, near), side(7, one, one)),
        "a bit": (side(7, one, one), side(6, one, one)),
        "a sum": (side(7, far, one), side(7, one, one)),
        "a function": (side(7, one, far), side(7, one, one)),
        "NaN": (side(7, nan, one), side(7, one, one)),
    }
    for name, (gpu, emulated) in sides.items():
        given = iter([gpu, emulated] * len(instructions.SEEDS))
        monkeypatch.setattr(instructions, "table_of", lambda *_, given=given, **__: next(given))
        entry = instructions.validate(Path("build"), 90)
        fine = name in {"same", "rounded"}
        assert (entry["ran"], entry["exit"]) == (3, 0 if fine else 1), name
        assert entry["failed"] == (0 if fine else 1) and "agrees" not in entry["rows"][3], name
        assert entry["rows"][0]["numbers"] == 2 * len(instructions.SEEDS)
    assert entry["rows"][1]["error"] == "bits", "JSON has no infinity"
    with pytest.raises(ValueError, match="one source"):
        instructions.compare(sides["same"][0], sides["same"][0][:2])
    monkeypatch.setattr(instructions, "table_of", lambda *_, **__: [row("not here", "exact", 0, None)])
    assert instructions.validate(Path("build"), 90)["exit"] == 1, "nothing was measured"


def test_a_record_has_the_kernels_that_the_gpu_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--build: expected kernels\.json in it"):
        command.kernels_of(tmp_path, "9.0")
    kernels = {"a.cu": {"sm_80 f()": "1", "sm_90 f()": "2"}, "b.cu": {"sm_90a g()": "3"}, "c.cu": {"sm_100a h()": "4"}}
    (tmp_path / "kernels.json").write_text(json.dumps(kernels))
    assert command.kernels_of(tmp_path, "9.0") == {"a.cu": {"sm_90 f()": "2"}, "b.cu": {"sm_90a g()": "3"}}
    assert command.kernels_of(tmp_path, "8.0") == {"a.cu": {"sm_80 f()": "1"}}


@pytest.mark.parametrize("status", [0, 1])
def test_the_quick_list(status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is enough where only the host's code has changed: it stands beside tests and rows, and can fail."""
    kda.info()
    monkeypatch.setenv("KDA_LIBRARY_DIR", "")
    monkeypatch.setattr(command, "device", lambda: GPU)
    monkeypatch.setattr(command, "kernels_of", lambda *_: {})
    environments = list[dict[str, str]]()

    def gtest(_: Path, **environment: str) -> dict[str, Any]:
        environments.append(environment)
        return {"ran": 3, "failed": status, "exit": status}

    monkeypatch.setattr(tests, "gtest", gtest)
    monkeypatch.setattr(tests, "example", lambda _: {"ran": 1, "failed": 0, "exit": 0})
    rows = [{"what": "kda prefill", "ms": 1.0}]
    monkeypatch.setattr(
        command, "benchmarks", lambda parts, seconds, names: iter([rows] if "H96T8192" in names else [])
    )
    assert main(["record", "--out", str(tmp_path), "--only", "quick"]) == status
    found = json.loads((tmp_path / "a-gpu.json").read_text())
    assert environments == [{"KDA_TEST_SHORT_LIST": "memcheck"}]
    assert found["passed"] == (not status) and found["quick"]["benchmarks"] == rows and "tests" not in found

"""python -m bench cp runs, and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", "cp", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_record(tmp_path: Path) -> None:
    more = ["--layout", "zigzag", "--window", "64"]
    file = tmp_path / "cp.json"
    done = run("--device", "cpu", "--case", "H1T256", "--repeats", "1", "--json", str(file), *more)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    (row,) = record["rows"]
    assert (record["ranks"], row["H"], row["T"]) == (2, 1, 256)
    for call in ("forward", "forward and backward"):
        one, two = row[f"{call}, ms on 1"], row[f"{call}, ms on 2"]
        assert min(one, two) > 0 and row[f"{call}, speed-up"] == pytest.approx(one / two)
    assert min(row["maps, ms on 2"], row["all-gather, ms on 2"]) > 0


def test_wrong_arguments_are_sentences(bench_cli: Callable[..., str]) -> None:
    sentence = "--case: expected heads and tokens like H12T65536, got T256"
    assert sentence in bench_cli("cp", "--device", "cpu", "--case", "T256", status=2)
    if torch.cuda.device_count() < 9:
        assert "--ranks: expected as many CUDA devices" in bench_cli("cp", "--ranks", "9", status=2)

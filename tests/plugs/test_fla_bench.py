"""``python -m bench plugs`` on the CPU: ours through FLA and alone, and the host's time in the adapter."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import kda.fla
from bench import model
from bench import plugs_fla as plug_bench_fla
from bench.command import main
from bench.plugs import rows


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    assert main(["plugs", "--device", "cpu", "--repeats", "1", "--json", str(record)]) == 0
    text, found = capsys.readouterr().out, json.loads(record.read_text())["plugs"]
    assert [row["case"] for row in found] == [*plug_bench_fla.ON_CPU]
    assert all(case in text for case in plug_bench_fla.ON_CPU)
    for row in found:
        assert row["engine_ms"] is None  # FLA has no CPU
        assert row["through_ms"] > 0
        assert row["direct_ms"] > 0
        assert 0 < row["adapter_us"] < 500  # tens on a busy machine


def test_calls_came_to_us() -> None:
    kda.fla.report(reset=True)
    notes: list[str] = []
    assert len(list(rows("cpu", notes, repeats=1, names=("prefill H2 T256",)))) == 1
    told = kda.fla.report(reset=True)
    assert set(told.taken) == {"chunk_kda"}
    assert (told.left, notes) == ({}, [])


def test_a_language_model() -> None:
    """FLA's, which the command measures on a GPU, with random weights and our kernels."""
    parser = argparse.ArgumentParser()
    model.arguments(parser)
    words = ["--layers", "1", "--hidden", "32", "--heads", "1", "--head-dim", "16", "--vocab", "40", "--tokens", "20"]
    words += ["--batches", "1", "--new-tokens", "2", "--repeats", "1", "--device", "cpu"]
    row = model.row_of("FLA on kda", parser.parse_args(words))
    assert row["parameters"] > 0 and row["tokens_per_s"] > 0 and "token_ms_of_1" in row

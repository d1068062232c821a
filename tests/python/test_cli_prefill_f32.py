"""python -m bench prefill_f32 on a GPU: all but the timing, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from bench import measure, prefill_f32
from bench.record import timings
from benches import believe_in_gpu, command
from kda.cli import arrays, problems
from kda.cli.problems import Problem

SIZES = ["--T", "70", "--H", "2", "--K", "16", "--V", "24"]
TINY = Problem(T=70, H=2, K=16, V=24, **prefill_f32.FIXED)
HERE = [name for name in kda.implementations("prefill_f32") if not name.startswith("cuda")]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; calls run once and take two milliseconds, torch's take ten."""

    def run_once(call: Any, repeats: int, flush: bool) -> float:
        assert flush and torch.get_float32_matmul_precision() == "highest"
        call()
        return 10.0 if getattr(call, "func", None) is prefill_f32.in_torch else 2.0

    monkeypatch.setattr(prefill_f32, "DEVICE", "cpu")
    believe_in_gpu(monkeypatch, run_once)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return command(capsys, "prefill_f32")


def test_sweep() -> None:
    assert [(p.B, p.T, p.H, p.HV, p.K, p.V) for p in prefill_f32.sweep({})] == [
        (1, 2048, 16, 16, 128, 128), (1, 4096, 32, 32, 128, 128), (1, 4096, 32, 32, 64, 64),
    ]  # fmt: skip
    found = prefill_f32.sweep({"T": [70, 100], "H": [2], "dtype": ["bfloat16"], "gate": ["softplus"]})
    assert found == [Problem(T=T, H=2, **prefill_f32.FIXED) for T in (70, 100)], "float32 and activated anyway"
    assert {(p.dtype, p.gate, p.beta) for p in prefill_f32.sweep({})} == {("float32", "log", "activated")}


@pytest.mark.parametrize("chunk_size", prefill_f32.CHUNKS)
@pytest.mark.parametrize("sizes", [{}, {"T": 128, "B": 2}, {"T": 1}, {"HV": 6, "B": 2}, {"layout": "K-first"}])
def test_torch_computes_the_same(sizes: dict[str, Any], chunk_size: int) -> None:
    """Agrees with the float64 oracle, also from steps of other sizes."""
    x = problems.heads_first(replace(TINY, **{"HV": 0} | sizes), arrays.DeviceSource("cpu"))
    del x["final_state"]
    x["chunk_size"] = chunk_size
    for g in [factor * x["g"] for factor in (1.0, 0.0, 1e-3, 1.5)]:
        x["g"] = g
        final = torch.empty_like(x["initial_state"])
        o, w, u = kda.prefill_f32(**x, final_state=final, impl="reference")
        got = prefill_f32.in_torch(**x)
        for a, b in zip(got, (o, final, w, u), strict=True):
            assert a.shape == b.shape and a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
        assert prefill_f32._difference(got, (o, final, w, u)) < 1e-5


def test_command(cli: Callable[..., str], tmp_path: Path) -> None:
    record, chart = tmp_path / "x.json", tmp_path / "x.svg"
    text = cli(*SIZES, "--B", "1", "2", "--json", str(record), "--plot", str(chart))
    data = json.loads(record.read_text())
    assert data["rows"] == [] and "prefill" not in data and "serving" not in data
    contenders = [("kda", name, chunk_size) for name in HERE for chunk_size in (64, 32)] + [("torch", None, 64)]
    assert [(r["problem"]["B"], r["contender"], r["implementation"], r["chunk"]) for r in data["prefill_f32"]] == [
        (B, *contender) for B in (1, 2) for contender in contenders
    ]
    for r in data["prefill_f32"]:
        assert (
            Problem(**{**r["problem"], "lengths": ()}) == replace(TINY, B=r["problem"]["B"]) and r["timed"] == "graph"
        )
        ours = r["contender"] == "kda"
        assert (r["ms"], r["ratio"]) == ((2.0, 5.0) if ours else (10.0, None))
        assert 0 < r["difference"] < 1e-5 if ours else r["difference"] is None
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("problem"))
    assert lines[head].split() == ["problem", "what", "ms", "ratio", "difference"]
    assert lines[head + 2].startswith("B 1, T 70, H 2, K 16, V 24  kda (cpu_chunk), chunks of 64   2.000   5.00  ")
    assert "torch, chunks of 64" in text and "no row" not in text and "svg" in chart.read_text()


def test_forced(cli: Callable[..., str]) -> None:
    text = cli(*SIZES, "--impl", "reference")
    assert "kda (reference), chunks of 32" in text and "cpu_chunk" not in text
    if "cuda_stages_prefill_f32" in kda.implementations("prefill_f32"):
        text = cli(*SIZES, "--impl", "cuda_stages_prefill_f32")
        assert "no row of kda (cuda_stages_prefill_f32), chunks of 64 for B 1, T 70, H 2, K 16, V 24: " in text
        assert "torch, chunks of 64" in text


def test_what_differs_is_not_timed(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefill_f32._kda

    def wrong(x: dict[str, Any], chunk_size: int, impl: str) -> Callable[[], object]:
        call = right(x, chunk_size, impl)
        factor = {64: 1.001, 32: torch.nan}[chunk_size]
        return lambda: (*call()[:3], factor * call()[3])

    monkeypatch.setattr(prefill_f32, "_kda", wrong)
    text = cli(*SIZES, "--impl", "cpu_chunk")
    assert "24: ArithmeticError: u differs from torch's by 1.0e-03, more than 1e-04" in text
    assert "no row of kda (cpu_chunk), chunks of 32" in text and "u differs from torch's by nan" in text


def test_without_graphs(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only torch's calls run without graphs."""
    graph = measure.graph_milliseconds

    def refuses(call: Any, repeats: int, flush: bool) -> float:
        if getattr(call, "func", None) is prefill_f32.in_torch:
            raise RuntimeError("operation not permitted when stream is capturing")
        return graph(call, repeats=repeats, flush=flush)

    monkeypatch.setattr(measure, "graph_milliseconds", refuses)
    monkeypatch.setattr(measure, "stream_milliseconds", lambda call, repeats, flush: 6.0)
    record = tmp_path / "x.json"
    text = cli(*SIZES, "--impl", "cpu_chunk", "--json", str(record))
    rows = json.loads(record.read_text())["prefill_f32"]
    assert [(r["timed"], r["ms"], r["ratio"]) for r in rows] == [("graph", 2, 3), ("graph", 2, 3), ("stream", 6, None)]
    assert "torch's time is not from a graph: operation not permitted" in text


def test_precision_of_torch_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert prefill_f32.rows([TINY], [])[-1]["contender"] == "torch"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_gpu_suite_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_f32, "sweep", lambda given: [TINY])
    rows = timings.prefill_f32_timings(notes := [])
    assert not notes and [row["what"] for row in rows] == [
        *(f"kda ({name}), chunks of {C} prefill_f32" for name in HERE for C in (64, 32)),
        "torch, chunks of 64 prefill_f32",
    ]
    expected = {"B": 1, "T": 70, "HV": 2, "K": 16, "V": 24, "chunk": 64, "ms": 2.0, "ratio": 5.0, "timed": "graph"}
    assert rows[0] | expected == rows[0] and all(json.dumps(row) for row in rows)

"""The subjects of ``python -m bench`` on a GPU: their calls, rows and records, with small cases on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from bench import ROOT, layer, on_gpu, prefill, prefill_f32, serving, serving_calls, stages
from bench.cases import Case, full_name
from bench.on_gpu import ON_GPU
from bench.record import timings
from bench.subject import Rates, Run, over_peers
from benches import believe_in_gpu
from kda.cli.arrays import Source
from kda.cli.problems import Problem, heads_first

SIZES = ["--T", "70", "--H", "2", "--K", "16", "--V", "24", "--device", "cuda"]
FEW: dict[str, list[str]] = {
    "prefill": ["--gate", "lower_bound", "softplus"],
    "prefill_f32": [],
    "stages": [],
    "layer": ["--hidden", "48"],
    "training": ["--layout", "K-first", "V-first"],
    "decode": ["--T", "2", "--B", "3", "--layers", "2"],
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU. What is timed runs once, and takes two milliseconds."""

    def run_once(call: Callable[[], Any], **how: Any) -> float:
        call()
        return 2.0

    for module in (prefill, prefill_f32, stages, layer, serving_calls):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    believe_in_gpu(monkeypatch, run_once)
    monkeypatch.setattr(serving_calls, "STATES", 1 << 12)
    monkeypatch.setattr(layer, "LAYERS", 2)
    for absent in ("fla", "transformers.models.kimi_linear.configuration_kimi_linear"):  # which takes seconds to import
        monkeypatch.setitem(sys.modules, absent, None)


@pytest.mark.parametrize("name", ON_GPU)
def test_command(name: str, bench_cli: Callable[..., str], tmp_path: Path) -> None:
    """Every case has rows of kda, and a line for each peer that is not there; the record is what is printed."""
    part, subject = ON_GPU[name]
    path = tmp_path / "x.json"
    text = bench_cli(name, *SIZES, *FEW[name], "--repeats", "1", "--json", str(path))
    record = json.loads(path.read_text())
    assert record["rows"] == [] and record["command"].startswith(f"python -m bench {name} --T 70")
    found = [row | {"problem": row["problem"] | {"lengths": ()}} for row in record[part]]
    assert "kda" in {row["contender"] for row in found}
    for row in found:
        assert subject.who(row) in text and subject.case_of(row) in text
        assert row.get("ms", 2.0) > 0 and row["problem"]["H"] == 2
        assert row.get("share_of_stream_bandwidth", 0.5) > 0
    assert "no row of FLA" in text or name == "prefill_f32"
    assert "no row of FlashKDA" in text or name != "prefill"


@pytest.mark.parametrize("name", ["prefill", "stages", "layer", "training"])
def test_cases_are_chosen_by_name(name: str, bench_cli: Callable[..., str]) -> None:
    subject = ON_GPU[name][1]
    every = subject.sweep({}, [], False)
    one = subject.name_of(every[0]).split(",")[0]
    assert every[0] in subject.sweep({}, [one.lower().replace(" ", "")], False)
    assert len({subject.name_of(case) for case in every}) == len(every), "names are different"
    assert "--rows: expected some of" in bench_cli(name, *SIZES, "--rows", "H7T9", status=2)


def test_sizes_give_every_combination() -> None:
    given = {"T": [100], "H": [1, 2], "gate": ["softplus", "lower_bound"]}
    for sweep in (ON_GPU["prefill"][1].sweep, ON_GPU["training"][1].sweep):
        found = sweep(given, [], False)
        assert {(case.problem.H, case.gate) for case in found} == {
            (H, gate) for H in (1, 2) for gate in ("strong", "slow", "softplus")
        }
    assert len(serving.sweep({"T": [4], "B": [1, 8]})) == 4, "one token with each"
    assert full_name(Case(Problem(H=2, K=64, V=64, dtype="float16"), "slow")) == "H2 T4096 K64 V64 float16"


def test_wrong_words_are_sentences(bench_cli: Callable[..., str]) -> None:
    assert "--gate: expected lower_bound or softplus" in bench_cli("prefill", *SIZES, "--gate", "log", status=2)
    assert "--quick: expected prefill on cuda" in bench_cli("training", *SIZES, "--quick", status=2)
    assert "--rows: expected prefill, stages, layer or training" in bench_cli("decode", "--rows", "x", status=2)
    assert "--device: expected cpu for verify, got cuda" in bench_cli("verify", "--device", "cuda", status=2)


@pytest.mark.parametrize("name", ON_GPU)
def test_rows_of_the_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat, named by who and what, and the same keys as the rows that the record of the H200 has."""
    part, subject = ON_GPU[name]
    sizes = {"H": [2], "K": [16], "V": [24], "T": [70] if name != "decode" else [2], "B": [1], "layers": [2]}
    sizes |= {"hidden": [48]} if name == "layer" else {}
    cases = subject.sweep({n: v for n, v in sizes.items() if name == "decode" or n != "layers"}, [], False)
    small = replace(subject, sweep=lambda given, names, quick: cases)
    monkeypatch.setitem(on_gpu.ON_GPU, name, (part, small))
    notes: list[str] = []
    found = [row for rows in timings.subject_timings(name, Rates(4000.0, 8e5), notes, 1, ()) for row in rows]
    assert found and all(note.startswith("no row") for note in notes) and json.dumps(found)
    recorded = json.loads((ROOT / "docs/results/nvidia-h200.json").read_text())
    every = [row for source in (recorded, *recorded["earlier"]) for row in source.get("benchmarks", ())]
    kinds = {frozenset(row) for row in every}
    for row in found:
        assert all(not isinstance(value, dict) for value in row.values())
        assert frozenset(row) - {"error_o", "error_state"} in {kind - {"error_o", "error_state"} for kind in kinds}, row


def test_a_contender_that_breaks_leaves_a_line() -> None:
    run = Run(Rates(1.0))
    for _ in range(2):
        with run.noting("FLA", "H2 T70: "):
            raise RuntimeError("it broke")
    with run.noting("cuDNN"):
        raise NotImplementedError("knows bounded gates only")
    assert run.notes == ["no row of FLA: H2 T70: RuntimeError: it broke", "no row of cuDNN: knows bounded gates only"]


def test_ratios_are_of_the_same_case() -> None:
    rows = [
        {"case": case, "gate": gate, "contender": contender, "ms": ms}
        for case, gate, contender, ms in (
            ("a", "strong", "kda", 2.0),
            ("a", "strong", "FLA", 6.0),
            ("a", "slow", "kda", 2.0),
            ("b", "strong", "kda", 4.0),
            ("b", "strong", "FLA", 2.0),
        )
    ]
    assert [row["over_fla"] for row in over_peers(rows, ["FLA"])] == [3.0, None, None, 0.5, None]


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("chunk", prefill_f32.CHUNKS)
def test_float32_prefill_of_torch_is_right(v_first: bool, chunk: int) -> None:
    p = Problem(B=2, T=70, H=1, HV=2, K=16, V=24, dtype="float32", layout="V-first" if v_first else "K-first")
    x = heads_first(p, Source())
    del x["chunk_size"], x["final_state"]
    theirs = prefill_f32.in_torch(**x, chunk_size=chunk)
    state = torch.empty_like(x["initial_state"])
    o, w, u = kda.prefill_f32(**x, chunk_size=chunk, final_state=state)
    for a, b in zip((o, state, w, u), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_slow_gates_are_slow_in_one_channel() -> None:
    inputs = prefill.Inputs(Case(Problem(T=70, H=2, K=16, V=24, gate="lower_bound"), "slow"))
    x = inputs.x
    decay = kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"])
    torch.testing.assert_close(
        decay[..., prefill.SLOW_CHANNEL], torch.full((1, 70, 2), prefill.SLOW_DECAY), rtol=0.02, atol=0
    )
    assert decay[..., :5].mean() < -1

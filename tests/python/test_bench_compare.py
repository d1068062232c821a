"""python -m bench compare: all but the timing, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench import compare, prefill, serving_calls
from bench.prefill import Case
from benches import believe_in_gpu
from kda.cli.problems import Problem

SMALL = {"B": 3, "T": 1, "H": 2, "K": 16, "V": 24}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run once; all layers of decode take one millisecond, a prefill two."""

    def run_once(call: Callable[[], object], repeats: int, flush: bool) -> float:
        call()
        return 2.0 if flush else 1.0

    for module in (prefill, serving_calls):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(serving_calls, "STATES", 1 << 16)
    believe_in_gpu(monkeypatch, run_once)


def test_rows() -> None:
    assert compare.serving_rows(["flush_verify B=1,8 T=4", "ring decode H=12 state_dtype=bfloat16"]) == [
        ("flush_verify", {"H": 32, "T": 4, "B": 1}),
        ("flush_verify", {"H": 32, "T": 4, "B": 8}),
        ("ring decode", {"H": 12, "T": 1, "state_dtype": "bfloat16"}),
    ]
    assert compare.prefill_rows([]) == []
    found = compare.prefill_rows(["H12T2048slow", "H64T512"])
    assert {(x["case"], x["gate"]) for _, x in found} == {
        ("H12 T2048", "slow"), ("H64 T512", "strong"), ("H64 T512", "slow")
    }  # fmt: skip
    for wrong in ("encode B=1", "decode batches=1"):
        with pytest.raises(ValueError, match="--serving: "):
            compare.serving_rows([wrong])


def answers(capsys: pytest.CaptureFixture[str], *requests: str) -> list[dict[str, Any]]:
    compare.work(None, requests)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A time for a row, and another for an empty line; a reason if there is no time, and then the next row."""
    case = Case(Problem(lengths=(3, 4), H=2, K=16, V=24, gate="lower_bound"), "slow")
    monkeypatch.setattr(prefill, "sweep", lambda given, names: [case])
    row, ring = json.dumps(["decode", SMALL]), json.dumps(["ring decode", SMALL])
    layers = serving_calls.Layers(Problem(**SMALL)).count
    packed = json.dumps(["prefill", {"case": case.name, "gate": "slow"}])
    got = answers(capsys, row, "", json.dumps(["decode", {"B": 1, "H": 0}]), "", packed, "\n", ring)
    rounds = serving_calls.ring_rounds(Problem(**SMALL))
    assert [x.get("us") for x in got] == [1e3 / layers, 1e3 / layers, None, None, 2e3, 2e3, 1e3 / layers / rounds]
    assert all(got[i]["error"] for i in (2, 3))

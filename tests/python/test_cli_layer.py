"""python -m bench layer on a GPU: all but the timing, on the CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import layer, measure
from bench import run as bench
from bench.layer import Case, Rates
from bench.peers import layer as layer_peers
from bench.peers.layer import Calls, FLACache, Inputs
from bench.record import timings
from bench.record.record import identity
from benches import believe_in_gpu, command, install
from kda.cli.problems import Problem
from kda.nn import KimiDeltaAttention
from layer_model import relative

SIZES = ["--T", "70", "--H", "2", "--K", "16", "--V", "24", "--hidden", "48"]
TINY = Problem(B=2, T=70, H=2, K=16, V=24, hidden=48, **layer.FIXED)
NAME = "B1 T70 H2 K16 V24 hidden48"
RATES = Rates(800e3, 4000.0)
BEFORE, PEAK = 1000, 1 << 30
TRANSFORMERS = "transformers.models.kimi_linear.configuration_kimi_linear"


class FLALayer(KimiDeltaAttention):
    """A stand-in with the calls of FLA's layer, whose numbers are ours."""

    calls = 0

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        FLALayer.calls += 1
        assert self.training == torch.is_grad_enabled() == (not use_cache)
        assert isinstance(past_key_values, FLACache) == use_cache and self.layer_idx == 0
        assert self.A_log.dtype == self.dt_bias.dtype == torch.float32
        o, _, cache = super().forward(hidden_states, attention_mask, past_key_values, use_cache)
        return o, None, cache


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; calls run once. Ours take two milliseconds, FLA's take five."""

    def run_once(call: Any, repeats: int, flush: bool) -> float:
        before = FLALayer.calls
        call()
        assert flush in (True, False) and repeats
        return 2.0 if FLALayer.calls == before else 5.0

    monkeypatch.setattr(layer, "DEVICE", "cpu")
    monkeypatch.setattr(layer, "LAYERS", 2)
    believe_in_gpu(monkeypatch, run_once)
    monkeypatch.setattr(measure, "stream_milliseconds", lambda call, **how: 3 * run_once(call, **how))
    monkeypatch.setattr(measure, "host_microseconds", lambda call: 100 * run_once(call, 1, False))
    monkeypatch.setattr(measure, "ceilings", lambda device: {"GFLOP/s": 800e3, "GB/s": 3000.0})
    for name, result in {"memory_allocated": BEFORE, "max_memory_allocated": BEFORE + PEAK}.items():
        monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for module in ("fla", TRANSFORMERS):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return command(capsys, "layer")


def with_fla(monkeypatch: pytest.MonkeyPatch, Layer: type = FLALayer) -> None:
    install(monkeypatch, "fla.layers.kda", KimiDeltaAttention=Layer)


def case_of(what: str, **sizes: Any) -> Case:
    p = Problem(**{**TINY.__dict__, **({"T": 1} if what == "decode" else {}), **sizes})
    return Case(p, p.gate, what)


def test_sweep(cli: Callable[..., str]) -> None:
    usual = [f"prefill B1 T{T}" for T in (8192, 2048, 512)] + [f"decode B{B}" for B in (1, 8, 32, 128)]
    assert [case.name for case in layer.sweep({})] == [*usual, "training B1 T8192"]
    p = layer.sweep({})[0].problem
    assert (p.hidden, p.H, p.HV, p.K, p.V, p.dtype, p.gate) == (2304, 32, 32, 128, 128, "bfloat16", "softplus")
    assert all((case.problem.T == 1) == (case.what == "decode") for case in layer.sweep({}))
    assert [case.name for case in layer.sweep({}, ["decodeb8", "TRAINING*"])] == ["decode B8", "training B1 T8192"]
    given = {"T": [70, 1], "B": [3], "HV": [64], "gate": ["lower_bound"], "dtype": ["float16"]}
    named = [f"{what} HV64 float16" for what in ("prefill B3 T70", "decode B3", "training B3 T70")]
    assert [case.name for case in layer.sweep(given)] == named
    assert all(case.problem.gate == "softplus" for case in layer.sweep(given))
    assert "--rows: expected some of prefillB1T70H2" in cli(*SIZES, "--rows", "prefillB1T8192", status=2)


def test_command(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_fla(monkeypatch)
    record, chart = tmp_path / "x.json", tmp_path / "x.svg"
    text = cli(*SIZES, "--B", "1", "--json", str(record), "--plot", str(chart))
    data = json.loads(record.read_text())
    assert data["rows"] == [] and "training" not in data and data["product_gflop_per_s"] == 800e3
    whats = ("prefill", "decode", "training")
    assert [(r["what"], r["contender"]) for r in data["layer"]] == [(w, c) for w in whats for c in ("kda", "FLA")]
    for r in data["layer"]:
        ours, layers = r["contender"] == "kda", 2 if r["what"] == "decode" else 1
        assert (r["ms"] * layers, r["over_fla"]) == ((2.0, 2.5) if ours else (5.0, None))
        assert r["timed"] == "graph" and r["eager_ms"] == 3 * r["ms"] and r["over_transformers"] is None
        assert r["host_us"] == (100 * r["ms"] if layers == 2 else None)
        assert r["case"] == ("B1 H2 K16 V24 hidden48" if layers == 2 else NAME) and r["problem"]["hidden"] == 48
        case = Case(Problem(**{**r["problem"], "lengths": ()}), "softplus", r["what"])
        assert r["floor_ms"] == layer.floor_ms(case, RATES) == pytest.approx(r["share_of_floor"] * r["ms"])
        assert r["difference"] is None if ours else r["difference"] < 0.02
        parted = ours and r["what"] != "training"
        assert r["parts_ms"] == (dict.fromkeys(layer.PARTS, 2.0 / layers) if parted else {})
        assert ("peak_gib" in r) == ("kept_gib" in r) == (r["what"] == "training")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "a large bfloat16 matrix product: 800 TFLOP/s" in lines
    columns = "case what ms eager ms host us of the floor peak GiB kept GiB over FLA difference"
    assert columns in lines, "no column for transformers, which is absent"
    assert any(line.startswith(f"prefill {NAME} kda 2.0000 6.0000 0% 2.50") for line in lines)
    assert f"prefill {NAME}" + " 2.0000" * 5 in lines and "no row of transformers (torch): " in text
    drawing = chart.read_text()
    assert f"training {NAME}: FLA" in drawing and "norm and gate" in drawing


def test_rows(cli: Callable[..., str]) -> None:
    text = cli(*SIZES, "--B", "1", "2", "--rows", "decodeB2*")
    assert "decode B2" in text and "decode B1" not in text and "prefill" not in text


def test_forced(cli: Callable[..., str]) -> None:
    assert "kda (reference)" in cli(*SIZES, "--B", "1", "--impl", "reference")


def first(case: Case, prepare: Callable[..., Calls]) -> list[Any]:
    calls = prepare(case, layer.new_weights(case.problem), Inputs(case, "cpu"))
    with torch.inference_mode(case.what != "training"):
        return [*calls.whole()]


def test_decode_continues_a_prompt() -> None:
    case = case_of("decode", dtype="float32")
    inputs, whole = Inputs(case, "cpu"), layer.new_layer(case.problem, "cpu")
    whole.load_state_dict(layer.new_weights(case.problem))
    with torch.no_grad():
        expected = whole(torch.cat([inputs.prompt, inputs.x], 1))[0][:, -1:]
    assert relative(expected, first(case, layer.prepare_kda)[0]) < 1e-5


def test_gradients_are_those_of_all_parameters_and_the_input() -> None:
    case = case_of("training", dtype="float32")
    o, *found = first(case, layer.prepare_kda)
    own, inputs = layer.new_layer(case.problem, "cpu"), Inputs(case, "cpu")
    own.load_state_dict(layer.new_weights(case.problem))
    own(inputs.x.requires_grad_())[0].backward(inputs.d_o)
    leaves = [inputs.x, *own.parameters()]
    assert len(found) == len(leaves) and o.shape == inputs.x.shape
    for leaf, gradient in zip(leaves, found, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)
        assert gradient.any()


@pytest.mark.parametrize("what", ["prefill", "decode", "training"])
def test_transformers_computes_the_same(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, TRANSFORMERS)
    pytest.importorskip(TRANSFORMERS)
    monkeypatch.setattr(layer_peers, "kernels_of_transformers", lambda: "FLA")  # so that it is trained
    case = case_of(what, V=16, dtype="float32")
    expected, found = first(case, layer.prepare_kda), first(case, layer_peers._transformers)
    assert [relative(a, b) < 1e-4 for a, b in zip(expected[:2], found, strict=False)] == [True] * len(expected[:2])
    assert len(found) == (1 if what != "training" else 1 + 1 + 13), "the outputs; gradients of x and of 13 parameters"


@pytest.mark.parametrize("what", ["prefill", "decode", "training"])
def test_fla_gets_our_weights(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fla(monkeypatch)
    case, before = case_of(what), FLALayer.calls
    expected, found = first(case, layer.prepare_kda), first(case, layer_peers._fla)
    assert len(expected) == len(found) and FLALayer.calls > before
    for a, b in zip(expected, found, strict=True):
        assert relative(a, b) < 2e-2 and a.dtype == b.dtype


def test_where_transformers_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    suits = layer_peers._suits_transformers
    assert layer_peers.kernels_of_transformers() == "torch", "FLA is absent here"
    for case in (case_of("training", V=16), case_of("prefill", V=16, T=513)):
        with pytest.raises(NotImplementedError, match="without FLA it loops over torch's operations"):
            suits(case)
    suits(case_of("prefill", V=16, T=512))
    suits(case_of("decode", V=16, B=128))
    with pytest.raises(NotImplementedError, match="HV = H and K = V only"):
        suits(case_of("prefill"))
    install(monkeypatch, "fla.ops.kda", chunk_kda=None)
    assert layer_peers.kernels_of_transformers() == "FLA"
    suits(case_of("training", V=16))


@pytest.mark.parametrize("what", ["prefill", "decode"])
def test_parts_make_up_the_whole(what: str) -> None:
    """In decode with caches of their own, which are empty."""
    case = case_of(what)
    calls = layer.prepare_kda(case, layer.new_weights(case.problem), Inputs(case, "cpu"))
    assert tuple(calls.parts) == layer.PARTS
    own = layer.new_layer(case.problem, "cpu")
    own.load_state_dict(layer.new_weights(case.problem))
    with torch.inference_mode():
        o = own(Inputs(case, "cpu").x, cache=own.new_cache(case.problem.B))[0]
        torch.testing.assert_close(calls.parts["output projection"](), o)
        rows = calls.parts["projections"]()[0]
        q, k, v = calls.parts["convolution"]()
        assert rows.shape[2] == sum(x.flatten(2).shape[2] for x in (q, k, v))
        assert calls.parts["recurrence"]().shape == v.shape == calls.parts["norm and gate"]().shape


# ---- the floor ----


def size(*tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("sizes", [{"T": 70}, {"T": 1, "B": 3}, {"T": 70, "HV": 4, "V": 8}])
def test_bytes_of_prefill_and_decode(sizes: dict[str, int]) -> None:
    """Those of the tensors between the parts, which are what the layer makes."""
    case = case_of("decode" if sizes["T"] == 1 else "prefill", **sizes)
    own, x = layer.new_layer(case.problem, "cpu"), Inputs(case, "cpu").x
    with torch.no_grad():
        cache = own.new_cache(case.problem.B)
        rows, g, beta, gate = own._project(x)
        q, k, v = own._convolve(rows, cache)
    convolution, recurrence = size(rows, q, k, v), size(q, k, v, g, beta, v)  # o is like v
    norm = size(v, gate, gate)
    expected = size(x, x) + convolution + recurrence + norm + 2 * size(cache.conv, cache.state)
    assert layer.moved_bytes(case) == expected


def test_bytes_of_training() -> None:
    case = case_of("training")
    D, values, decays = 2 * 2 * 16 + 2 * 24, 2 * 24, 2 * 16 + 2
    forward = 2 * 48 + 2 * D + (D + decays + values) + (2 * values + values)
    norm, recurrence, convolution = 3 * values + 2 * values, D + decays + values + D + decays, 2 * D + D
    assert layer.moved_bytes(case) == 2 * 140 * (forward + 3 * 48 + norm + recurrence + convolution)


def test_floor() -> None:
    """The weights of the products are the layer's matrices. Many tokens take the time of the multiplications, few the
    time of reading the weights."""
    p = TINY
    assert layer.weight_bytes(p) == size(*(x for x in layer.new_weights(p).values() if x.ndim == 2))
    kimi = layer.sweep({})[0].problem
    matrices = 4 * 2304 * 4096 + 2 * 2304 * 128 + 2 * 128 * 4096 + 2304 * 32
    assert layer.weight_bytes(kimi) == 2 * matrices and layer.product_flop(kimi) == 2 * 8192 * matrices
    for what, times in (("prefill", 1), ("training", 3)):
        (case,) = layer.sweep({}, [f"{what}B1T8192"])
        moved = layer.moved_bytes(case) / 4000e9
        assert layer.floor_ms(case, RATES) == pytest.approx(1e3 * (times * 2 * 8192 * matrices / 800e12 + moved))
    (case,) = layer.sweep({}, ["decodeB8"])
    assert layer.floor_ms(case, RATES) == pytest.approx(1e3 * (2 * matrices + layer.moved_bytes(case)) / 4000e9)


# ---- what goes wrong ----


def test_a_layer_with_other_numbers(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(FLALayer):
        def forward(self, *args: Any, **options: Any) -> Any:
            o, *rest = super().forward(*args, **options)
            return 1.1 * o, *rest

    with_fla(monkeypatch, Other)
    text = cli(*SIZES, "--B", "1", "--rows", "prefill*")
    assert f"no row of FLA: prefill {NAME}: ArithmeticError: its outputs differ from kda's by 1.0e-01" in text


def test_a_layer_that_breaks(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FLALayer):
        def forward(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("it broke")

    with_fla(monkeypatch, Broken)
    text = cli(*SIZES, "--B", "1", "--rows", "prefill*")
    assert f"no row of FLA: prefill {NAME}: RuntimeError: it broke" in text and "kda  " in text


def test_a_call_that_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(call: Any, **how: Any) -> float:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(measure, "graph_milliseconds", refuses)
    (row,) = layer.rows([case_of("training")], RATES, notes := [])
    assert row["timed"] == "eager" and row["ms"] == row["eager_ms"] == 6.0
    assert notes[0] == (
        "training B2 T70 H2 K16 V24 hidden48: the time of kda is that of eager calls, not of a graph: not permitted"
        " when stream is capturing"
    )


def test_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fla(monkeypatch)
    cases = [case_of("prefill"), case_of("training")]
    found = layer.rows(cases, RATES, notes := [], few=True)
    assert [(r["what"], r["contender"]) for r in found] == [("prefill", "kda"), ("prefill", "FLA"), ("training", "kda")]
    assert "no rows of peers in training: FLA's kernels would tune themselves for minutes" in notes


# ---- measuring ----


def test_host_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in a row, without waiting for the device in between."""
    monkeypatch.undo()
    order: list[str] = []
    clock: Iterator[float] = iter([0.0, 1.0, 1.0, 1.4, 2.0, 2.2, 3.0, 3.6])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = measure.host_microseconds(lambda: order.append("call"), repeats=3, batch=2)
    assert found == pytest.approx(0.2e6) and order == ["wait", "call", "call"] * 4


# ---- other programs ----


def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a GPU the layer has a rate, as operators have."""
    record = tmp_path / "x.json"
    monkeypatch.setattr(bench, "_best_device", lambda operators: "cpu")
    monkeypatch.setattr("bench.measure.ceilings", lambda device: {"GFLOP/s": 1.0, "GB/s": 1.0})
    words = [*SIZES, "--dtype", "float32", "--repeats", "1", "--gate", "lower_bound", "--json", str(record)]
    command(capsys, "layer")(*words)
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["operator"], row["unit"], row["problem"]["gate"]) == ("layer", "GFLOP/s", "softplus")
    flop = layer.product_flop(TINY) / 2 + 70 * 2 * (6 * 16 * 24 + 160 * 40 + 2048)
    assert row["rate"] == pytest.approx(flop / row["ms"] * 1e-6)


def test_gpu_suite_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "sweep", lambda given, names: [case_of(what) for what in names])
    names = ["prefill", "decode", "training"]
    found = [*timings.layer_timings(4000.0, notes := [], names)]
    assert [[row["what"] for row in rows] for rows in found] == [[f"kda layer, {name}"] for name in names]
    assert all(note.startswith("no row of ") for note in notes)
    expected = {"case": "B2 T70 H2 K16 V24 hidden48", "B": 2, "T": 70, "H": 2, "HV": 2, "K": 16, "V": 24, "hidden": 48}
    assert found[0][0].items() >= expected.items() and found[0][0]["recurrence ms"] == 2.0
    for (row,) in found:
        assert json.dumps(row) and {"ms", "eager_ms", "floor_ms", "share_of_floor", "over_fla"} <= row.keys()
        slower = {name: x + 1.0 if isinstance(x, float) else x for name, x in row.items()}
        assert identity(row) == identity(slower), "no measured number identifies the row"
    assert {"peak_gib", "kept_gib"} <= found[2][0].keys()
    with_fla(monkeypatch)
    few = [*timings.layer_timings(4000.0, [], ["training"], few=True)]
    assert [row["what"] for row in few[0]] == ["kda layer, training"]

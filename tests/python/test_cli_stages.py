"""python -m bench stages on a GPU: all but the timing, on the CPU."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from bench import run as bench
from bench import stages
from bench.prefill import Case
from bench.record import timings
from benches import believe_in_gpu, command, install
from kda.cli import arrays, problems
from kda.cli.problems import Problem

TINY = Problem(T=70, H=2, K=16, V=24, layout="K-first", **stages.FIXED)
SIZES = ["--T", "70", "--H", "2", "--K", "16", "--V", "24"]
NAME = "H2 T70 K16 V24"
HERE = [name for name in kda.implementations("stage_bwd_wy_dqkg") if not name.startswith("cuda")]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; calls run once. Ours take two milliseconds, FLA's take five."""

    def run_once(call: Any, repeats: int, flush: bool) -> float:
        assert flush and len(call()) == 6
        return 5.0 if "A" in call.keywords else 2.0

    monkeypatch.setattr(stages, "DEVICE", "cpu")
    believe_in_gpu(monkeypatch, run_once)
    monkeypatch.setitem(sys.modules, "fla", None)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return command(capsys, "stages")


def fla_stage(
    q: Any, k: Any, v: Any, v_new: Any, g: Any, beta: Any, A: Any, h: Any, do: Any, dh: Any, dv: Any, scale: float,
    state_v_first: bool, chunk_size: int,
) -> Any:  # fmt: skip
    """A stand-in with FLA's signature that calls kda."""
    B, T, HV, V = v.shape
    state = (V, k.shape[3]) if state_v_first else (k.shape[3], V)
    assert chunk_size == 64 and h.shape == dh.shape == (B, -(-T // 64), HV, *state)
    assert A.dtype == k.dtype and g.dtype == torch.float32
    J, h, dh = A.float(), h.flatten(0, 1), dh.flatten(0, 1)
    return kda.stages.bwd_wy_dqkg(q, k, v, v_new, g, beta, J, h, do, dh, dv, scale, state_v_first=state_v_first)


def with_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "fla.ops.kda.chunk_bwd", chunk_kda_bwd_wy_dqkg_fused=fla_stage)


def names(cases: list[Case]) -> list[str]:
    return [stages.name_of(case) for case in cases]


def test_sweep(cli: Callable[..., str]) -> None:
    assert names(stages.sweep({})) == ["H32 T1024", "H32 T4096", "H32 T8192", "H32 B2 T8192", "H16 HV32 T8192"]
    assert {(p.dtype, p.K, p.V, p.layout, p.gate) for p in (case.problem for case in stages.sweep({}))} == {
        ("bfloat16", 128, 128, "K-first", "log")
    }
    assert {*stages.ALL} < {*names(stages.sweep({}))}
    assert names(stages.sweep({}, ["h32T8192", "H16*"])) == ["H32 T8192", "H16 HV32 T8192"]
    given = {"T": [70], "H": [1, 2], "gate": ["softplus"], "layout": ["K-first", "V-first"]}
    assert names(stages.sweep(given)) == [f"H{H} T70{layout}" for H in (1, 2) for layout in ("", " V-first")]
    assert all(case.problem.gate == "log" for case in stages.sweep(given)), "activated anyway"
    assert "--rows: expected some of H32T1024, " in cli("--rows", "H7", status=2)
    assert "--quick: expected prefill on cuda" in cli("--quick", status=2)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_fla_computes_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fla(monkeypatch)
    p = Problem(B=2, T=70, H=1, HV=2, K=16, V=24, layout=layout, **stages.FIXED)
    x = problems.wy_dqkg(p, arrays.DeviceSource("cpu"))
    expected, found = stages.prepare_kda(x, None)(), stages.prepare_fla(x)()
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all() and a.any()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # J was rounded


def test_inputs_are_those_of_the_stages_before() -> None:
    """So dv is that of the whole backward."""
    p = Problem(T=70, H=1, HV=2, K=16, V=24, dtype="float32", layout="K-first", **stages.FIXED)
    x = problems.wy_dqkg(p, arrays.DeviceSource("cpu"))
    g = torch.cat([G.diff(dim=1, prepend=torch.zeros_like(G[:, :1])) for G in x["G"].split(64, 1)], 1) * math.log(2)
    leaf = x["v"].clone().requires_grad_()
    o, _ = kda.chunk_kda(x["q"], x["k"], leaf, g, x["beta"])
    (dv,) = torch.autograd.grad(o, leaf, x["d_o"])
    torch.testing.assert_close(stages.prepare_kda(x, None)()[2], dv, rtol=1e-4, atol=1e-5)


def test_command(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_fla(monkeypatch)
    monkeypatch.setattr(stages, "ALL", (NAME,))
    record, chart = tmp_path / "x.json", tmp_path / "x.svg"
    text = cli(*SIZES, "--B", "1", "2", "--json", str(record), "--plot", str(chart))
    data = json.loads(record.read_text())
    assert data["rows"] == [] and "prefill" not in data and "training" not in data
    contenders = [*((1, "kda", name) for name in HERE), (1, "FLA", None), (2, "kda", HERE[0]), (2, "FLA", None)]
    assert [(r["problem"]["B"], r["contender"], r["implementation"]) for r in data["stages"]] == contenders
    for r in data["stages"]:
        p, ours = Problem(**{**r["problem"], "lengths": ()}), r["contender"] == "kda"
        assert r["stage"] == "bwd_wy_dqkg" and r["case"] == ("H2 B2 T70 K16 V24" if p.B == 2 else NAME)
        assert (r["ms"], r["over_fla"]) == ((2.0, 2.5) if ours else (5.0, None))
        assert r["share_of_stream_bandwidth"] == pytest.approx(r["least_bytes"] / r["ms"] * 1e-6 / 4000)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "case what ms MB of the floor over FLA" in lines
    first, peer = (f"{data['stages'][i]['least_bytes'] / 1e6:.1f}" for i in (0, len(HERE)))
    assert f"bwd_wy_dqkg, {NAME} kda ({HERE[0]}) 2.0000 {first} 0% 2.50" in lines and f"FLA 5.0000 {peer} 0%" in lines
    assert "no row" not in text and "bwd_wy_dqkg, H2 B2 T70 K16 V24: FLA" in chart.read_text()


def test_bytes() -> None:
    """Each input once and each output once: q and k of their own heads, scores and states of whole chunks."""
    p = Problem(B=2, T=70, H=1, HV=3, K=16, V=24, layout="K-first", **stages.FIXED)
    call = stages.prepare_kda(problems.wy_dqkg(p, arrays.DeviceSource("cpu")), None)
    a_token = 2 * 2 * 16 + 3 * 2 * (4 * 24 + 1) + 3 * 4 * (16 + 64)  # q k; v v_new d_o dv_new beta; G Akk_inv
    a_token += 3 * (4 * (3 * 16 + 1 + 64) + 2 * 24)  # dq dk dG dbeta dAkk; dv
    a_row = 2 * 3 * 2 * 2 * 16 * 24  # h and dh of two chunks
    assert stages.bytes_of(call, call()) == 2 * (70 * a_token + a_row)


def test_forced(cli: Callable[..., str]) -> None:
    text = cli(*SIZES, "--impl", "reference")
    assert "kda (reference)" in text and "cpu_chunk" not in text
    if "cuda_stages_backward" in kda.implementations("stage_bwd_wy_dqkg"):
        text = cli(*SIZES, "--impl", "cuda_stages_backward")
        assert "no row of kda (cuda_stages_backward): " in text, "it declines the CPU"


def test_the_next_implementation_where_one_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = stages.prepare_kda

    def declines(x: dict[str, Any], impl: str) -> Any:
        if impl == HERE[0]:
            raise NotImplementedError("it takes nothing")
        return prepare(x, impl)

    monkeypatch.setattr(stages, "prepare_kda", declines)
    rows = stages.rows([Case(TINY, "log")], 4000.0, notes := [])
    assert [row["implementation"] for row in rows] == [HERE[1]]
    assert notes[0] == f"no row of kda ({HERE[0]}): it takes nothing" and notes[1].startswith("no row of FLA: ")


def test_a_contender_that_breaks(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(**x: Any) -> Any:
        raise RuntimeError("it broke")

    install(monkeypatch, "fla.ops.kda.chunk_bwd", chunk_kda_bwd_wy_dqkg_fused=breaks)
    text = cli(*SIZES)
    assert f"no row of FLA: {NAME}: RuntimeError: it broke" in text and f"kda ({HERE[0]})" in text


def test_rows(cli: Callable[..., str]) -> None:
    text = cli(*SIZES, "--T", "70", "80", "--rows", "H2T80*")
    assert "H2 T80 K16 V24" in text and "T70" not in text


def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a GPU the stage has a rate, as other operators have."""
    record = tmp_path / "x.json"
    monkeypatch.setattr(bench, "_best_device", lambda operators: "cpu")
    monkeypatch.setattr("bench.measure.ceilings", lambda device: {"GFLOP/s": 1.0, "GB/s": 1.0})
    command(capsys, "stages")(*SIZES, "--repeats", "1", "--gate", "softplus", "--json", str(record))
    (row,) = json.loads(record.read_text())["rows"]
    p = row["problem"]
    assert (row["operator"], row["unit"], p["gate"], p["beta"]) == ("stages", "GFLOP/s", "log", "activated")
    assert row["rate"] == pytest.approx(70 * 2 * (6 * 16 * 24 + 160 * 24) / row["ms"] * 1e-6)


def test_gpu_suite_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "sweep", lambda given, names: [Case(TINY, "log")] * len(names))
    found = [*timings.stages_timings(4000.0, notes := [], ["one", "two"])]
    assert [[row["what"] for row in rows] for rows in found] == [[f"kda ({HERE[0]}) bwd_wy_dqkg"]] * 2
    assert all(note.startswith("no row of FLA: ") for note in notes)
    expected = {"case": NAME, "B": 1, "T": 70, "H": 2, "HV": 2, "K": 16, "V": 24, "ms": 2.0, "over_fla": None}
    (row,) = found[0]
    assert row | expected == row and json.dumps(row)
    assert row.keys() == {"what", "least_bytes", "share_of_stream_bandwidth", *expected}

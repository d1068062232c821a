"""python -m bench prefill on a GPU: all but the timing, on the CPU."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import kda
from bench import peers, plot, prefill
from bench.peers import prefill as prefill_peers
from bench.prefill import Case
from bench.record import timings
from benches import believe_in_gpu, command, install
from kda.cli.problems import Problem

TINY = {"H": 2, "K": 16, "V": 24}
SIZES = ["--T", "70", "--H", "2", "--K", "16", "--V", "24"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; calls run once and take two milliseconds."""

    def run_once(call: Callable[[], object], repeats: int, flush: bool) -> float:
        assert flush
        call()
        return 2.0

    monkeypatch.setattr(prefill, "DEVICE", "cpu")
    believe_in_gpu(monkeypatch, run_once)
    for package in ("fla", "cudnn"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return command(capsys, "prefill")


def names(cases: list[Case]) -> list[str]:
    return [f"{case.name}, {case.gate}" for case in cases]


def test_sweep_of_everything() -> None:
    found = prefill.sweep({})
    assert len(found) == len(set(found)) == len(set(names(found))) == 2 * len(prefill.SHAPES) + len(prefill.SOFTPLUS)
    assert names(found)[:6] == [
        f"H96 {what}, {gate}" for what in ("T8192", "6 lengths, 8192") for gate in ("strong", "slow", "softplus")
    ]
    assert {case.name for case in found if case.gate == "softplus"} == {*prefill.SOFTPLUS}
    assert {case.problem.gate for case in found} == {"lower_bound", "softplus"}
    assert {"H64 B2 T16384", "H16 8 x 2048", "H12 T65536"} <= {case.name for case in found}
    assert {case.name for case in found} >= {f"H{H} T{T}" for H in (12, 96) for T in (64, 128, 256)}
    assert {case.name for case in found if case.checked} == {f"H12 T{T}" for T in (64, 128, 256, 2048)}
    quick = prefill.sweep({}, quick=True)
    assert {case.name for case in quick} == prefill.QUICK.keys()
    assert {(case.name, case.gate) for case in quick} >= prefill.QUICK.items()


def test_sweep_of_some() -> None:
    assert names(prefill.sweep({}, ["H64T8192", "h12 t2048 SLOW"])) == [
        *(f"H64 T8192, {gate}" for gate in ("strong", "slow", "softplus")), "H12 T2048, slow",
    ]  # fmt: skip
    assert {case.problem.H for case in prefill.sweep({}, ["H96*", "*65536"])} == {96, 12}
    given = {"T": [100], "H": [1, 2], "gate": ["softplus", "lower_bound"]}
    got = names(prefill.sweep(given))
    assert sorted(got) == sorted(f"H{H} T100, {gate}" for H in (1, 2) for gate in ("strong", "slow", "softplus"))
    assert names(prefill.sweep({"B": [3], "H": [2], "HV": [4]})) == [
        "H2 HV4 B3 T8192, strong",
        "H2 HV4 B3 T8192, slow",
    ]


def test_gates() -> None:
    """The gates are what their names say."""
    p = Problem(T=100, **TINY, gate="lower_bound")
    for gate in ("strong", "slow"):
        x = prefill.Inputs(Case(p, gate)).x
        decay = kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"])
        means = decay.mean((0, 1, 2))
        slow = [n for n, mean in enumerate(means.tolist()) if mean > -0.1]
        assert slow == ([prefill.SLOW_CHANNEL] if gate == "slow" else [])
        assert ((means + 2.5).abs() < 0.5).sum() == 16 - len(slow)
        if slow:
            torch.testing.assert_close(decay[..., slow], torch.full_like(decay[..., slow], -1e-3), rtol=0.05, atol=0)


def test_bytes() -> None:
    p = Problem(B=2, T=100, H=3, HV=6)
    tokens = (2 * 3 * 128 + 6 * (128 + 2 * 128 + 1)) * 2
    assert prefill.least_bytes(p) == 200 * tokens + 2 * 2 * 6 * 128 * 128 * 4
    assert prefill.least_bytes(Problem(H=96, T=8192)) / 4.3e9 == pytest.approx(0.237, rel=0.02), "the design's floor"


def test_command(cli: Callable[..., str], tmp_path: Path) -> None:
    record, chart = tmp_path / "x.json", tmp_path / "x.svg"
    text = cli(*SIZES, "--gate", "lower_bound", "softplus", "--json", str(record), "--plot", str(chart))
    data = json.loads(record.read_text())
    assert data["stream_gb_per_s"] == 4000 and data["rows"] == [] and "serving" not in data
    here = [name for name in kda.implementations("forward") if not name.startswith("cuda")]
    assert [(r["gate"], r["implementation"]) for r in data["prefill"]] == [
        (gate, name) for gate in ("strong", "slow", "softplus") for name in here
    ]
    for r in data["prefill"]:
        p = Problem(**{**r["problem"], "lengths": ()})
        assert (r["case"], r["contender"], r["ms"], p.T) == ("H2 T70", "kda", 2.0, 70)
        assert r["least_bytes"] == prefill.least_bytes(p)
        assert r["share_of_stream_bandwidth"] == pytest.approx(r["least_bytes"] / 2e-3 / 4e12)
        assert r["over_fla"] is r["over_flashkda"] is r["over_cudnn"] is None
        assert r["times_strong"] == (None if r["gate"] == "strong" else 1.0)
        assert 0 < r["error_o"] < 6e-3 and r["error_state"] < 6e-3
    assert "case" in text and "H2 T70, slow" in text and "kda (cpu_chunk)" in text and "times strong" in text
    assert "error against float64" in text and "y = 2 x: 4000 GB/s" in text and "over FLA" not in text
    assert "no row of FlashKDA: measured with HV = H, K = V = 128 and bfloat16, sigmoid beta, V-first float32" in text
    assert "slow gates" in chart.read_text() or "svg" in chart.read_text()


def test_forced_and_packed(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SHAPES", (TINY | {"lengths": (70, 0, 3)}, TINY | {"lengths": (64, 64)}))
    text = cli("--impl", "cpu_recurrent", "--rows", "H2*")
    assert "H2 3 lengths, 73, strong  kda (cpu_recurrent)" in text and "H2 2 x 64, slow" in text
    assert "reference" not in text.split("error against")[0]
    if "cuda_prefill_chunk" in kda.implementations("forward"):
        text = cli("--impl", "cuda_prefill_chunk")
        assert "no row of kda (cuda_prefill_chunk): " in text, "it declines the CPU"


def test_refusals(cli: Callable[..., str]) -> None:
    assert "--rows: expected some of H96T8192, " in cli("--rows", "H7", status=2)
    assert "--gate: expected lower_bound or softplus for prefill on cuda" in cli("--gate", "log", status=2)
    for words in (["--quick"], ["--rows", "H12*"]):
        assert f"{words[0]}: expected prefill" in cli("--device", "cpu", *words, status=2)


def test_a_contender_that_breaks(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(inputs: prefill.Inputs) -> Callable[[], object]:
        raise RuntimeError("it broke")

    monkeypatch.setattr(prefill_peers, "PEERS", (prefill_peers.Peer("FLA", breaks),))
    monkeypatch.setattr(prefill_peers, "_usual", lambda p: None)
    text = cli(*SIZES)
    assert "no row of FLA: H2 T70, slow: RuntimeError: it broke" in text and "kda (cpu_chunk)" in text


def test_time_for_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of QUICK in their order, each followed by the cases that share its tuning; none after time is up."""
    cases = prefill.sweep({})
    order = [(c.name, c.gate) for c in prefill._tuned_first(cases, few=True)]
    assert [name for name in order if name in prefill.QUICK.items()] == [*prefill.QUICK.items()]
    rest = set(order) - set(prefill.QUICK.items())
    assert len(order) == len(set(order)) == len(prefill.QUICK) + len(rest)
    h32, h16 = order.index(("H32 T8192", "softplus")), order.index(("H16 8 x 2048", "strong"))
    assert set(order[h32 + 1 : h16]) == {("H32 T2048", "softplus"), ("H32 T32768", "softplus")}
    assert {("H64 T512", "slow"), ("H16 8 x 2048", "slow"), ("H12 T65536", "strong")} <= rest
    assert ("H32 T32768", "softplus") in rest
    assert not rest & {("H96 8 x 1024", "strong"), ("H24 T8192", "strong"), ("H64 T8192", "softplus")}
    assert prefill._tuned_first(cases, few=False) == cases
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(prefill.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(prefill, "_rows", lambda case, contenders, *_: [
        {"case": case.name, "gate": case.gate, "contender": c[0], "implementation": c[1], "ms": 1.0}
        for c in contenders if c[0] in ("FLA", "kda")
    ])  # fmt: skip
    found = prefill.rows(cases, 4000.0, notes := [], few=True, seconds=25)
    assert [(r["case"], r["gate"]) for r in found if r["contender"] == "FLA"] == [
        ("H32 T2048", "softplus"), ("H32 T8192", "softplus"),
    ]  # fmt: skip
    assert notes == ["no row of FLA from H32 T32768, softplus on: no time left"]
    assert {r["over_fla"] for r in found if r["case"] == "H32 T8192" and r["contender"] == "kda"} == {1.0, None}


def test_chart_of_everything() -> None:
    record: dict[str, Any] = {"prefill": []}
    cases = prefill.sweep({})
    contenders = [("kda", "a"), ("kda", "b"), *((peer.name, None) for peer in prefill_peers.PEERS)]
    for n, (contender, name) in enumerate(contenders):
        for case in cases:
            row = {"case": case.name, "gate": case.gate, "contender": contender, "implementation": name}
            record["prefill"].append(row | {"share_of_stream_bandwidth": n / 10})
    figure = Figure(layout="constrained")
    plot._marks(figure, record)
    assert [axis.get_title() for axis in figure.axes] == ["strong gates", "slow gates", "softplus gates"]
    points = [len(line.get_xdata()) for axis in figure.axes for line in axis.get_lines()]
    assert sum(points) == len(record["prefill"])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["kda (a)", "kda (b)", "FLA", "FlashKDA", "cuDNN"]


def test_gpu_suite_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prefill, "sweep", lambda given, names: [Case(Problem(lengths=(3, 4), **TINY, gate="lower_bound"), "strong")]
    )
    rows = timings.prefill_timings(4000.0, notes := [])
    assert all(note.startswith("no row of") for note in notes)
    here = [name for name in kda.implementations("forward") if not name.startswith("cuda")]
    assert [row["what"] for row in rows] == [f"kda ({name}) prefill" for name in here]
    expected = {"case": "H2 2 lengths, 7", "gate": "strong", "HV": 2, "K": 16, "lengths": [3, 4], "ms": 2.0}
    assert all(row | expected == row and json.dumps(row) for row in rows)


# ---- the calls of peers: stand-ins with their signatures that call kda ----


OPTIONS = dict.fromkeys(("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"), True)


def fla_chunk(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, output_final_state: bool, safe_gate: bool,
    A_log: Any, dt_bias: Any, state_v_first: bool, allow_neg_eigval: bool, lower_bound: float | None = None,
    cu_seqlens: Any = None, **options: bool,
) -> Any:  # fmt: skip
    assert output_final_state and state_v_first and not allow_neg_eigval and options == OPTIONS
    assert safe_gate == (lower_bound is not None) and dt_bias.ndim == 1
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    given = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "cu_seqlens": cu_seqlens}
    return kda.chunk_kda(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=True, state_v_first=True, **given, **options
    )


def tensor(address: Any, dtype: torch.dtype, *shape: int) -> Any:
    """The memory at an address, as a tensor."""
    size = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()
    at = address.value if isinstance(address, ctypes.c_void_p) else address
    return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=dtype).view(shape)


def flash(
    h0: int, hT: int, wide: int, packed: int, q: Any, k: Any, v: Any, g: Any, beta: Any, initial: Any, scale: Any,
    final: Any, out: Any, workspace: Any, tiles: int, tokens: int, H: int, N: int, offsets: Any, A_log: Any,
    dt_bias: Any, bound: Any, stream: Any,
) -> int:  # fmt: skip
    assert (h0, hT, wide) == (1, 1, 1) and scale.value == pytest.approx(128**-0.5) and stream.value == 7
    shape = (1, tokens, H, 128) if packed else (N, tokens // N, H, 128)
    assert tiles == (-(-tokens // 16) + N if packed else N * -(-shape[1] // 16))
    assert tensor(workspace, torch.uint8, H * tiles * 13824 + 4 * (N + 1)).fill_(0) is not None
    state = tensor(final, torch.float32, N, H, 128, 128).copy_(tensor(initial, torch.float32, N, H, 128, 128))
    x = {name: tensor(a, torch.bfloat16, *shape) for name, a in {"q": q, "k": k, "v": v, "g": g}.items()}
    x["beta"] = tensor(beta, torch.bfloat16, H, tokens).t().reshape(shape[:3])
    x |= {"A_log": tensor(A_log, torch.float32, H), "dt_bias": tensor(dt_bias, torch.float32, H, 128), **OPTIONS}
    x["lower_bound"] = bound.value * 0.6931471805599453
    if packed:
        x["cu_seqlens"] = tensor(offsets, torch.int64, N + 1)
    kda.prefill(**x, state=state, out=tensor(out, torch.bfloat16, *shape))
    return 0


def cudnn_launch(
    device: int, stream: int, q: int, k: int, v: int, g: int, beta: int, cu_seqlens: int, initial_state: int, o: int,
    final_state: int, total_tokens: int, n_seqs: int, n_heads: int, a_log: int, dt_bias: int, gate_lower_bound: float,
    flags: int,
) -> None:  # fmt: skip
    assert (device, stream, flags) == (0, 7, 7)
    shape, states = (1, total_tokens, n_heads, 128), (n_seqs, n_heads, 128, 128)
    x = {name: tensor(a, torch.bfloat16, *shape) for name, a in {"q": q, "k": k, "v": v}.items()}
    x |= {"g": tensor(g, torch.float32, *shape), "beta": tensor(beta, torch.float32, *shape[:3]), **OPTIONS}
    x |= {"A_log": tensor(a_log, torch.float32, n_heads), "dt_bias": tensor(dt_bias, torch.float32, n_heads, 128)}
    state = tensor(final_state, torch.float32, *states).copy_(tensor(initial_state, torch.float32, *states))
    out, offsets = tensor(o, torch.bfloat16, *shape), tensor(cu_seqlens, torch.int32, n_seqs + 1)
    kda.prefill(**x, state=state, out=out, cu_seqlens=offsets, lower_bound=gate_lower_bound)


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 70}, {"lengths": (70, 1, 33)}])
@pytest.mark.parametrize("gate", ["strong", "softplus"])
def test_peers_compute_the_same(
    sizes: dict[str, Any], gate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, "fla.ops.kda", chunk_kda=fla_chunk)
    flags = {"FLAG_L2NORM": 1, "FLAG_SAFE_GATE": 2, "FLAG_BETA_SIGMOID": 4}
    install(monkeypatch, "cudnn.linear_attention.hopper.cuda_host", launch=cudnn_launch, **flags)
    (tmp_path / "libfkda.so").touch()
    peers.add_folder(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: type("Library", (), {"fkda_fwd": staticmethod(flash)}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    case = Case(Problem(H=2, **sizes, gate="softplus" if gate == "softplus" else "lower_bound"), gate)
    expected = prefill.prepare_kda(prefill.Inputs(case), None)()
    for peer in prefill_peers.PEERS:
        if gate == "softplus" and peer.name != "FLA":
            with pytest.raises(NotImplementedError, match="knows gates with a lower bound only"):
                peer.prepare(prefill.Inputs(case))
            continue
        call = peer.prepare(prefill.Inputs(case))
        for _ in range(2):  # from the same states
            torch.testing.assert_close(call(), expected, rtol=1e-2, atol=1e-3, check_dtype=True)


def test_without_peers(cli: Callable[..., str], tmp_path: Path) -> None:
    text = cli("--T", "70", "--H", "1", "--peers", str(tmp_path))
    assert "no row of FLA: " in text and "no row of cuDNN: " in text
    assert f"no row of FlashKDA: {tmp_path} has no libfkda.so" in text

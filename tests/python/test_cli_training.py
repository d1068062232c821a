"""python -m bench training on a GPU: all but the timing, on the CPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import kda
from bench import measure, plot, prefill, training
from bench.peers import training as training_peers
from bench.prefill import Case, Inputs
from bench.record import timings
from bench.training_steps import LEAVES, Step
from benches import believe_in_gpu, command, install
from kda.call import library as _lib
from kda.cli.problems import Problem
from test_cli_prefill import tensor

TINY = {"H": 2, "K": 16, "V": 24}
SIZES = ["--T", "70", "--H", "2", "--K", "16", "--V", "24"]
OURS = [(impl, kept) for impl in (None, "cpu_chunk") for kept in ("h, v_new", "nothing")]
OPTIONS = dict.fromkeys(("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"), True)
BEFORE, PEAK = 1000, 1 << 30


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; calls run once. Forward takes two milliseconds, all of ours six, all of others
    twelve. Peak memory is one GiB."""

    def run_once(call: Callable[[], Any], repeats: int, flush: bool) -> float:
        assert flush
        return {1: 2.0, 1 + len(LEAVES): 6.0}.get(len(call()), 12.0)

    monkeypatch.setattr(prefill, "DEVICE", "cpu")
    monkeypatch.setattr(training, "PORTABLE", "cpu_chunk")
    believe_in_gpu(monkeypatch, run_once)
    for name, result in {"memory_allocated": BEFORE, "max_memory_allocated": BEFORE + PEAK}.items():
        monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for package in ("fla", "cudnn"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return command(capsys, "training")


def slow_peer(inputs: Inputs) -> Step:
    o = inputs.x["v"]
    return Step(lambda: [o], lambda: [o, o])


def names(cases: list[Case]) -> list[str]:
    return [f"{training.name_of(case)}, {case.gate}" for case in cases]


def test_sweep() -> None:
    assert names(training.sweep({})) == [
        *(f"H{H} T8192, {gate}" for H in (12, 32, 64) for gate in ("strong", "slow", "softplus")),
        *(
            f"{name}, strong"
            for name in (
                "H96 T8192",
                "H12 T65536",
                "H32 8 x 1024",
                "H16 HV32 T8192",
                "H32 T8192 K-first",
                "H32 T8192 K64 V64",
            )
        ),
    ]
    for case in training.sweep({}):
        assert case.problem.gate == ("softplus" if case.gate == "softplus" else "lower_bound")


def test_sweep_of_sizes(cli: Callable[..., str]) -> None:
    given = {"T": [100], "H": [1, 2], "gate": ["softplus", "lower_bound"]}
    assert sorted(names(training.sweep(given))) == sorted(
        f"H{H} T100, {gate}" for H in (1, 2) for gate in ("strong", "slow", "softplus")
    )
    assert names(training.sweep({"K": [64, 128], "V": [128], "dtype": ["bfloat16", "float16"]})) == [
        f"H32 T8192{K}{dtype}, {gate}"
        for K in (" K64 V128", "") for dtype in ("", " float16") for gate in ("strong", "slow")
    ]  # fmt: skip
    assert "--gate: expected lower_bound or softplus for training on cuda, got log" in cli("--gate", "log", status=2)
    assert "--quick: expected prefill on cuda" in cli("--quick", status=2)


def test_sweep_of_some(cli: Callable[..., str]) -> None:
    assert names(training.sweep({}, ["h32 T8192", "H12*softplus"])) == [
        "H12 T8192, softplus", *(f"H32 T8192, {gate}" for gate in ("strong", "slow", "softplus"))
    ]  # fmt: skip
    assert names(training.sweep({}, ["*K64*"])) == ["H32 T8192 K64 V64, strong"]
    assert names(training.sweep({"H": [2], "T": [70, 80]}, ["H2T80slow"])) == ["H2 T80, slow"]
    assert "--rows: expected some of H12T8192, " in cli("--rows", "H7", status=2)
    text = cli(*SIZES, "--rows", "*slow")
    assert "H2 T70 K16 V24, slow" in text and "strong" not in text


def test_k_first_states_are_trained_through(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, backward = list[Any](), _lib.library().backward

    def record(**operands: Any) -> None:
        calls.append([operands[name].shape for name in ("h0", "dhT", "dh0") if operands[name] is not None])
        backward(**operands)

    monkeypatch.setattr(_lib.library(), "backward", record)
    text = cli(*SIZES, "--layout", "K-first", "V-first")
    assert "H2 T70 K16 V24 K-first, slow" in text and "H2 T70 K16 V24, slow" in text
    assert {tuple(call) for call in calls} == {(), ((1, 2, 16, 24),) * 3}
    assert "no row of cuDNN: " in text


def test_few_cases_of_a_peer_that_tunes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*training.TUNED} < {training.name_of(case) for case in training.sweep({})}
    monkeypatch.setattr(training_peers, "PEERS", (
        training_peers.Peer("FLA", slow_peer), training_peers.Peer("cuDNN", slow_peer)
    ))  # fmt: skip
    cases = training.sweep({"H": [1, 2], "T": [70], "K": [16], "V": [24]})
    monkeypatch.setattr(training, "TUNED", ("H2 T70 K16 V24",))
    for few in (False, True):
        found = list(training.measured(cases, notes := [], few=few))
        peers = [[row["contender"] for row in rows if row["contender"] != "kda"] for rows in found]
        assert peers == [["cuDNN"] if few and case.problem.H == 1 else ["FLA", "cuDNN"] for case in cases]
        assert notes == []


def test_command(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_peers, "PEERS", (
        training_peers.Peer("FLA", slow_peer), *training_peers.PEERS[1:]
    ))  # fmt: skip
    record, chart = tmp_path / "x.json", tmp_path / "x.svg"
    text = cli(*SIZES, "--gate", "lower_bound", "softplus", "--json", str(record), "--plot", str(chart))
    data = json.loads(record.read_text())
    assert data["rows"] == [] and "prefill" not in data and "serving" not in data
    contenders = [*(("kda", *ours) for ours in OURS), ("FLA", None, None)]
    assert [(r["gate"], r["contender"], r["implementation"], r["kept"]) for r in data["training"]] == [
        (gate, *contender) for gate in ("strong", "slow", "softplus") for contender in contenders
    ]
    for r in data["training"]:
        p, ours = Problem(**{**r["problem"], "lengths": ()}), r["contender"] == "kda"
        assert r["case"] == "H2 T70 K16 V24" and (p.T, p.H, p.K, p.V) == (70, 2, 16, 24)
        assert (r["ms"], r["forward_ms"], r["backward_ms"]) == ((6.0, 2.0, 4.0) if ours else (12.0, 2.0, 10.0))
        assert (r["over_fla"], r["over_cudnn"]) == (2.0 if ours else None, None)
        assert 0.99 < r["peak_gib"] < 1
    assert [" ".join(line.split()) for line in text.splitlines() if line.startswith(("case", "H2 T70"))] == [
        "case what forward ms backward ms both ms peak GiB over FLA over cuDNN",
        *(
            f"H2 T70 K16 V24, {gate} kda, h, v_new saved 2.000 4.000 6.000 1.000 2.00"
            for gate in ("strong", "slow", "softplus")
        ),
    ]
    assert "kda, nothing saved" in text and "kda (cpu_chunk), nothing saved" in text
    assert text.count("no row of cuDNN: measured with HV = H, K = V = 128 and bfloat16, sigmoid beta") == 1
    assert "no row of FLA" not in text and "svg" in chart.read_text()


def test_what_is_saved_and_forced(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = kda.chunk_kda, _lib.library().backward
    saved, forced = list[Any](), list[Any]()

    def record_forward(disable_recompute: bool, **x: Any) -> Any:
        saved.append((os.environ.get("KDA_IMPL"), disable_recompute))
        return forward(**x, disable_recompute=disable_recompute)

    def record_backward(**operands: Any) -> None:
        forced.append(os.environ.get("KDA_IMPL"))
        backward(**operands)

    monkeypatch.setattr(kda, "chunk_kda", record_forward)
    monkeypatch.setattr(_lib.library(), "backward", record_backward)
    cli(*SIZES)
    assert [*dict.fromkeys(saved)] == [(impl, kept == "h, v_new") for impl, kept in OURS]
    assert {*forced} == {None, "cpu_chunk"} and "KDA_IMPL" not in os.environ
    forced.clear()
    text = cli(*SIZES, "--impl", "reference")
    assert {*forced} == {"reference"}
    assert "kda (reference), h, v_new saved" in text and "kda (reference), nothing" in text and "cpu_chunk" not in text
    if "cuda_backward_chunk" in kda.implementations("backward"):
        text = cli(*SIZES, "--impl", "cuda_backward_chunk")
        assert "no row of kda (cuda_backward_chunk), nothing saved: " in text, "it declines the CPU"


def test_without_peers(cli: Callable[..., str], tmp_path: Path) -> None:
    text = cli("--T", "70", "--H", "1", "--peers", str(tmp_path))
    assert "no row of FLA: " in text and "no row of cuDNN: " in text and "kda, nothing saved" in text


def test_a_contender_that_breaks(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(inputs: Inputs) -> Step:
        raise RuntimeError("it broke")

    monkeypatch.setattr(training_peers, "PEERS", (training_peers.Peer("FLA", breaks),))
    text = cli(*SIZES)
    assert "no row of FLA: H2 T70 K16 V24, slow: RuntimeError: it broke" in text and "kda, nothing saved" in text


@pytest.mark.parametrize("peak", [True, False])
def test_own_bytes(peak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the memory in use before to the peak since then, or to what is kept, without what is returned."""
    order, held = [], iter([1000, 3000])

    def memory(name: str, result: Callable[[], int] | None = None) -> None:
        def call() -> int | None:
            order.append(name)
            return result() if result else None

        monkeypatch.setattr(torch.cuda, name, call)

    for name in ("synchronize", "reset_peak_memory_stats"):
        memory(name)
    memory("memory_allocated", lambda: next(held))
    memory("max_memory_allocated", lambda: 5000)

    def both() -> list[torch.Tensor]:
        order.append("both")
        return [torch.zeros(10, 10), torch.zeros(50, dtype=torch.bfloat16)]

    assert measure.own_bytes(both, peak=peak) == (4000 if peak else 2000) - 400 - 100
    last = "max_memory_allocated" if peak else "memory_allocated"
    assert order == ["synchronize", "reset_peak_memory_stats", "memory_allocated", "both", "synchronize", last]


def test_ratios_are_of_the_same_case() -> None:
    rows = [
        {"case": case, "gate": gate, "contender": contender, "ms": ms}
        for case, gate, contender, ms in (
            ("a", "strong", "kda", 2.0), ("a", "strong", "FLA", 6.0), ("a", "strong", "cuDNN", 1.0),
            ("a", "slow", "kda", 2.0), ("b", "strong", "kda", 4.0), ("b", "strong", "FLA", 2.0),
        )
    ]  # fmt: skip
    found = training.compared(iter(rows))
    assert [(r["over_fla"], r["over_cudnn"]) for r in found] == [
        (3.0, 0.5), (None, 1 / 6), (6.0, None), (None, None), (0.5, None), (None, None),
    ]  # fmt: skip


def test_chart_of_everything() -> None:
    contenders = [*(("kda", *ours) for ours in OURS), *((peer.name, None, None) for peer in training_peers.PEERS)]
    rows = [
        {"case": training.name_of(case), "gate": case.gate, "contender": contender, "implementation": impl}
        | {"kept": kept, "forward_ms": 1.0 + n, "backward_ms": 3.0, "ms": 4.0 + n}
        for case in training.sweep({}) for n, (contender, impl, kept) in enumerate(contenders)
    ]  # fmt: skip
    figure = Figure(layout="constrained")
    plot._steps(figure, {"training": rows})
    (axis,) = figure.axes
    forward, backward = axis.containers
    for r, a, b in zip(rows, forward, backward, strict=True):
        assert (a.get_x(), a.get_width()) == (0, r["forward_ms"])
        assert (b.get_x(), b.get_width()) == (r["forward_ms"], r["backward_ms"])
        color = to_rgba("tab:blue" if r["contender"] == "kda" else "silver")
        assert a.get_facecolor() == color and b.get_facecolor() == (*color[:3], 0.5)
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert len(labels) == len(set(labels)) == len(rows)
    assert labels[:2] == ["H12 T8192, strong: kda, h, v_new saved", "H12 T8192, strong: kda, nothing saved"]
    assert labels[-1] == "H32 T8192 K64 V64, strong: cuDNN"
    assert [text.get_text() for text in axis.texts] == [f"{r['ms']:.3g}" for r in rows]


def test_gpu_suite_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Problem(lengths=(3, 4), **TINY, gate="lower_bound"), "slow")
    monkeypatch.setattr(training, "sweep", lambda given, names: [case] * len(names))
    rows, again = timings.training_timings(notes := [], ["one", "two"])
    assert [row["what"] for row in again] == [row["what"] for row in rows]
    assert all(note.startswith("no row of") for note in notes)
    labels = ("kda, h, v_new saved", "kda, nothing saved", "kda (cpu_chunk), h, v_new saved")
    assert [row["what"] for row in rows] == [
        f"{label} training" for label in (*labels, "kda (cpu_chunk), nothing saved")
    ]
    expected = {"case": "H2 2 lengths, 7 K16 V24", "gate": "slow", "B": 1, "T": 7, "H": 2, "HV": 2, "K": 16, "V": 24}
    expected |= {"lengths": [3, 4], "ms": 6.0, "forward_ms": 2.0, "backward_ms": 4.0}
    expected |= {"over_fla": None, "over_cudnn": None}
    assert all(row | expected == row and json.dumps(row) for row in rows)
    assert rows[0].keys() == {"what", "peak_gib", *expected}


# ---- the calls of peers: stand-ins with their signatures that call kda ----


def fla_chunk(
    q: Any, k: Any, v: Any, g: Any, beta: Any, safe_gate: bool, A_log: Any, dt_bias: Any, state_v_first: bool,
    allow_neg_eigval: bool, lower_bound: float | None = None, cu_seqlens: Any = None, **options: bool,
) -> Any:  # fmt: skip
    assert state_v_first and not allow_neg_eigval and options == OPTIONS
    assert safe_gate == (lower_bound is not None) and dt_bias.shape == (v.shape[2] * q.shape[3],)
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    assert all(x.requires_grad and x.is_leaf for x in (q, k, v, g, beta, A_log, dt_bias))
    given = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "cu_seqlens": cu_seqlens}
    return kda.chunk_kda(q, k, v, g, beta, **given, **options)


def read(
    q: int, k: int, v: int, g: int, beta: int, cu_seqlens: int, initial_state: int, tokens: int, N: int, H: int
) -> dict[str, Any]:
    """The inputs of both launchers: normalised keys, activated gates, zero states."""
    shape = (1, tokens, H, 128)
    x = {name: tensor(a, torch.bfloat16, *shape) for name, a in {"q": q, "k": k, "v": v}.items()}
    x |= {"g": tensor(g, torch.float32, *shape), "beta": tensor(beta, torch.float32, *shape[:3])}
    x |= {"cu_seqlens": tensor(cu_seqlens, torch.int32, N + 1)}
    x |= {"initial_state": tensor(initial_state, torch.float32, N, H, 128, 128), "state_v_first": True}
    for name in "qk":
        torch.testing.assert_close(x[name].float().norm(dim=-1), torch.ones(1, tokens, H), rtol=1e-2, atol=0)
    assert x["g"].max() <= 0 and x["beta"].min() > 0 and x["beta"].max() < 1 and not x["initial_state"].any()
    return x


def cudnn_launch(
    device: int, stream: int, q: int, k: int, v: int, g: int, beta: int, cu_seqlens: int, initial_state: int, o: int,
    final_state: int, total_tokens: int, n_seqs: int, n_heads: int,
) -> None:  # fmt: skip
    assert (device, stream) == (0, 7)
    x = read(q, k, v, g, beta, cu_seqlens, initial_state, total_tokens, n_seqs, n_heads)
    out, last = kda.chunk_kda(**x, output_final_state=True)
    tensor(o, torch.bfloat16, *out.shape).copy_(out)
    tensor(final_state, torch.float32, *last.shape).copy_(last)


def workspace_bytes(total_tokens: int, n_heads: int, n_seqs: int) -> int:
    assert n_heads == 2
    return 1000 * total_tokens + n_seqs


def cudnn_backward(
    device: int, stream: int, workspace: int, dO: int, q: int, k: int, v: int, g: int, beta: int, cu_seqlens: int,
    initial_state: int, d_final_state: int, dq: int, dk: int, dv: int, dg: int, dbeta: int, d_initial_state: int,
    total_tokens: int, n_heads: int, n_seqs: int,
) -> None:  # fmt: skip
    assert (device, stream) == (0, 7)
    tensor(workspace, torch.uint8, workspace_bytes(total_tokens, n_heads, n_seqs)).zero_()
    x = read(q, k, v, g, beta, cu_seqlens, initial_state, total_tokens, n_seqs, n_heads)
    addresses = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta, "initial_state": d_initial_state}
    leaves = [x[name].requires_grad_() for name in addresses]
    d_last = tensor(d_final_state, torch.float32, *x["initial_state"].shape)
    assert not d_last.any()
    d = tensor(dO, torch.bfloat16, *x["v"].shape), d_last
    with torch.enable_grad():
        found = torch.autograd.grad(kda.chunk_kda(**x, output_final_state=True), leaves, d)
    for leaf, address, gradient in zip(leaves, addresses.values(), found, strict=True):
        tensor(address, leaf.dtype, *leaf.shape).copy_(gradient)


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 70}, {"lengths": (70, 1, 33)}])
@pytest.mark.parametrize("gate", ["strong", "softplus"])
def test_peers_compute_the_same(sizes: dict[str, Any], gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "fla.ops.kda", chunk_kda=fla_chunk)
    hopper = "cudnn.linear_attention.hopper"
    install(monkeypatch, f"{hopper}.cuda_host", launch=cudnn_launch)
    install(monkeypatch, f"{hopper}.cuda_bwd_host", launch=cudnn_backward, workspace_bytes=workspace_bytes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    case = Case(Problem(H=2, **sizes, gate="softplus" if gate == "softplus" else "lower_bound"), gate)
    expected = training.prepare_kda(Inputs(case), None, saved=False).both()
    fla, cudnn = (peer.prepare for peer in training_peers.PEERS)
    for step in [fla(Inputs(case)), training.prepare_kda(Inputs(case), None, saved=True)]:
        torch.testing.assert_close(step.forward(), expected[:1])
        for a, b in zip(step.both(), expected, strict=True):
            torch.testing.assert_close(a, b.view_as(a), rtol=1e-2, atol=1e-3)
    if gate == "softplus":
        with pytest.raises(NotImplementedError, match="knows gates with a lower bound only"):
            cudnn(Inputs(case))
        return
    step = cudnn(Inputs(case))
    for found in (step.forward(), step.both()):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)
    d = dict(zip(("q", "k", "v", "g", "beta", "initial_state"), found[1:], strict=True))
    torch.testing.assert_close(d["v"], expected[3], rtol=1e-2, atol=1e-2)  # the other gradients are of activated inputs
    assert {name: x.dtype for name, x in d.items()} == {
        **dict.fromkeys("qkv", torch.bfloat16), **dict.fromkeys(("g", "beta", "initial_state"), torch.float32)
    }  # fmt: skip
    assert all(x.isfinite().all() and x.any() for x in d.values())


@pytest.mark.parametrize("changed", [{"HV": 4}, {"K": 64}, {"dtype": "float16"}, {"beta": "2sigmoid"}])
def test_cudnn_declines(changed: dict[str, Any]) -> None:
    case = Case(Problem(**{"H": 2, "T": 70, "gate": "lower_bound"} | changed), "strong")
    with pytest.raises(NotImplementedError, match="measured with HV = H, K = V = 128 and bfloat16"):
        training_peers.PEERS[1].prepare(Inputs(case))

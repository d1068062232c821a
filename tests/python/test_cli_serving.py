"""python -m bench decode on a GPU: all but the timing, on the CPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import kda
from bench import measure, peers, plot, serving, serving_calls
from bench.peers import serving as serving_peers
from bench.record import timings
from benches import believe_in_gpu, command, install
from kda.cli.problems import Problem

SMALL = Problem(B=3, T=4, H=2, K=16, V=24)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; calls run once, and each layer takes a microsecond."""

    def run_once(call: Callable[[], object], repeats: int) -> float:
        call()
        return 1.0

    monkeypatch.setattr(serving_calls, "DEVICE", "cpu")
    monkeypatch.setattr(serving_calls, "STATES", 1 << 16)
    believe_in_gpu(monkeypatch, run_once)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return command(capsys, "decode")


def test_sweep() -> None:
    given = {"T": [1, 2, 6, 70], "B": [5], "H": [32, 64]}
    got = [(p.HV, p.B, p.T) for p in serving.sweep(given)]
    assert got == [(32, 5, 1), (32, 5, 2), (32, 5, 6), (64, 5, 1), (64, 5, 2), (64, 5, 6)], "16 tokens at most"
    assert [(p.H, p.B, p.T) for p in serving.sweep({"dtype": ["float16"]})] == [(32, B, 1) for B in (1, 8, 32, 128)]


def test_sweep_of_everything() -> None:
    """The default sweep."""
    found = serving.sweep({})
    assert len(found) == len(set(found)) == 105
    usual = {(p.HV, p.B, p.T) for p in found if p == Problem(B=p.B, T=p.T, H=p.HV)}
    assert usual >= {(HV, 2**i, 1) for HV in (12, 24, 32, 64, 96) for i in range(9)}
    assert usual >= {(32, 2**i, T) for i in range(8) for T in (2, 3, 4, 6)}
    assert usual >= {(64, B, T) for B in (1, 8, 32, 128) for T in (2, 3, 4, 6)}
    others = [p for p in found if p != Problem(B=p.B, T=p.T, H=p.HV)]
    assert {serving.about(p) for p in others} == {
        *(f"B {B}, T {T}, H 32, K = V = 128, V-first bfloat16 states" for B in (1, 8, 32, 128) for T in (1, 4)),
        *(f"B 32, T {T}, H 32, K = V = 128, K-first float32 states" for T in (1, 4)),
        *(f"B 64, T {T}, H 12, K = V = 128, 69 layers" for T in (1, 4)),
    }


def test_command(cli: Callable[..., str], tmp_path: Path) -> None:
    record, chart = tmp_path / "x.json", tmp_path / "x.svg"
    sizes = ["--tokens", "2,3", "--batches", "1,2", "--heads", "1", "--K", "16", "--V", "16"]
    text = cli(*sizes, "--json", str(record), "--plot", str(chart))
    data = json.loads(record.read_text())
    assert data["stream_gb_per_s"] == 4000 and data["rows"] == [] and data["device"] == "a GPU"
    got = {(r["operator"], r["implementation"], r["problem"]["B"], r["problem"]["T"]) for r in data["serving"]}
    names = {op: [n for n in kda.implementations(op) if not n.startswith("cuda")] for op in ("decode", "verify")}
    assert {x for x in got if x[0] == "decode"} == {("decode", n, B, 1) for n in names["decode"] for B in (1, 2)}
    assert {x for x in got if x[0] == "verify"} == {
        ("verify", n, B, T) for n in names["verify"] for B in (1, 2) for T in (2, 3)
    }
    assert {x[0] for x in got} == serving.OPERATORS.keys()
    for r in data["serving"]:
        assert r["contender"] == "kda" and r["over_baseline"] is None
        rounds = 1 if "ring" not in r["operator"] else {1: 15, 2: 7, 3: 4}[r["problem"]["T"]]
        assert r["us"] == pytest.approx(1e3 / r["layers"] / rounds)
        least = serving.least_bytes(r["operator"], Problem(**{**r["problem"], "lengths": ()}))
        assert r["least_bytes"] == least
        assert r["share_of_stream_bandwidth"] == pytest.approx(least / (r["us"] * 1e-6) / 4e12)
    assert "problem" in text and "kda verify (reference)" in text and "kda verify + flush" in text
    table = "\n".join(line for line in text.splitlines() if not re.match(r"\[\d+/\d+\] ", line))  # without progress
    assert table.count("B 2, T 3, H 1, K = V = 16") == 1 + table.count("for B 2"), "said once"
    assert "no row of SGLang fused_sigmoid: measured with HV = H, K = V = 128 and bfloat16, softplus gate" in text
    assert "T 3" in chart.read_text() or "svg" in chart.read_text()


def test_without_sizes(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"T": [2], "B": [2], "H": [1], "K": [16], "V": [16], "layers": [5]}
    monkeypatch.setattr(serving, "EVERYTHING", (tiny, tiny | {"layout": ["K-first"], "state_dtype": ["bfloat16"]}))
    text = cli()
    assert "B 2, T 2, H 1, K = V = 16, 5 layers  " in text
    rows = text[text.index("B 2, T 2, H 1, K = V = 16, 5 layers, K-first bfloat16 states") :].splitlines()
    ratios = {row.split("kda ")[1].split("  ")[0]: row.split()[-1] for row in rows if "kda " in row}
    assert ratios["verify + flush"] == ratios["flush (reference)"] == ratios["verify with conv"] == "1.00"
    assert ratios["ring verify"] == "7.00", "rounds in the time of one"


def test_forced(cli: Callable[..., str]) -> None:
    sizes = ["--tokens", "2", "--batches", "1", "--heads", "1", "--K", "16", "--V", "16"]
    text = cli(*sizes, "--impl", "cpu_verify")
    assert "kda verify (cpu_verify)" in text and "kda verify (reference)" not in text
    assert "kda flush (cpu_flush)" in text, "an operator that has none of that name takes its own"
    if "cuda_drafts_general" in kda.implementations("verify"):
        text = cli(*sizes, "--impl", "cuda_drafts_general")
        assert "no row of kda verify (cuda_drafts_general): " in text, "it declines the CPU"


def test_without_peers(cli: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fla", "sglang", "cuda"):
        monkeypatch.setitem(sys.modules, package, None)
    sizes = ["--tokens", "2", "--batches", "1", "--heads", "1"]
    text = cli(*sizes)
    for peer in serving_peers.PEERS:
        assert f"no row of {peer.name}: " in text
    assert "libsglpd.so is looked for in the folder of --peers or KDA_PEERS, and none is given" in text
    assert f"{tmp_path} has no libsglpd.so" in cli(*sizes, "--peers", str(tmp_path))
    assert "--peers: expected a folder, got /nowhere" in cli(*sizes, "--peers", "/nowhere", status=2)
    monkeypatch.setenv("KDA_PEERS", "/elsewhere")
    assert "--peers: expected a folder, got /elsewhere" in cli(*sizes, status=2)


def test_a_peer_that_breaks(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(layers: serving.Layers) -> Callable[[], object]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(serving_peers, "PEERS", (serving_peers.Peer("somebody", True, breaks),))
    text = cli("--batches", "1,2", "--heads", "1")
    assert text.count("no row of somebody: RuntimeError: no such luck") == 1


def test_one_table_over_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 20.0, 5.0, 15.0, 8.0, 12.0, 9.0, 30.0])
    monkeypatch.setattr(measure, "graph_milliseconds", lambda call, repeats: next(times))
    monkeypatch.setattr(kda, "implementations", lambda op: [f"cpu_{op}"])
    baseline = serving_peers.Peer(serving.BASELINE[False], False, lambda layers: lambda: None)
    monkeypatch.setattr(serving_peers.Peer, "prepare", lambda self, layers: self.make(layers))
    monkeypatch.setattr(serving_peers, "PEERS", (baseline,))
    monkeypatch.setattr(serving, "_contenders", lambda p, impl, every=serving._contenders: every(p, "none"))
    rows = serving.rows(SMALL, 4000.0, notes := [])
    serving.compare(rows)
    assert notes == []
    ratios = [(serving.label(r), r["over_baseline"], r["over_plain"]) for r in rows]
    assert ratios == [
        ("kda verify (cpu_verify)", None, None),
        ("kda flush (cpu_flush)", None, None),
        ("kda flush_verify (cpu_flush_verify)", 6.0, None),
        ("kda verify + flush", 2.0, None),
        ("kda ring verify", pytest.approx(30 / 8 * 3), pytest.approx(5 / 8 * 3)),  # three rounds
        ("kda conv + verify", None, None),
        ("kda verify with conv", None, pytest.approx(12 / 9)),
        ("SGLang snapshots + scatter", 1.0, None),
    ]


def test_over_the_plain_form() -> None:
    """The comparison is with the fastest implementation of the plain form: with usual states, or without the
    optimisation."""

    def row(operator: str, name: str | None, us: float, **options: Any) -> dict[str, Any]:
        x = {"operator": operator, "contender": "kda", "implementation": name, "us": us}
        return x | {"problem": asdict(replace(SMALL, T=1, **options))}

    found = [row("decode", "a", 20.0), row("decode", "b", 12.0), row("ring decode", None, 10.0)]
    found += [row("decode", "a", 8.0, state_dtype="bfloat16"), row("ring decode", None, 5.0, state_dtype="bfloat16")]
    found += [row("decode", "b", 24.0, layout="K-first"), row("decode", "a", 9.0, layers=69)]
    serving.compare(found)
    assert [r["over_plain"] for r in found] == [None, None, 1.2, 1.5, 1.6, 0.5, None]


def test_least_bytes() -> None:
    p = Problem(B=128, T=4, H=64)
    state, tokens = 128 * 64 * 128 * 128 * 4, 128 * 4 * 64 * (5 * 128 + 1) * 2
    assert serving.least_bytes("decode", p) == serving.least_bytes("verify + flush", p) == 2 * state + tokens
    records = 128 * 4 * 64 * 3 * 128 * 4
    assert serving.least_bytes("verify", p) == state + tokens + records
    assert serving.least_bytes("flush", p) == 2 * state + records
    conv = 3 * 64 * 128 * (4 + 128 * 3) * 2
    for operator in ("conv + verify", "verify with conv"):
        assert serving.least_bytes(operator, p) == state + tokens + records + conv
    rounds = [state + tokens + (1 + n) * records for n in (1, 2, 3)]  # writes its own, reads those of n rounds
    assert serving.least_bytes("ring verify", p) == pytest.approx((sum(rounds) + state) / 3)


def test_layers() -> None:
    layers = serving.Layers(SMALL)
    assert layers.count == max(4, -(-(1 << 16) // (3 * 2 * 16 * 24 * 4)))
    assert layers.pools.shape == (layers.count, 7, 2, 24, 16) and layers.x["q"].shape == (layers.count, 3, 4, 2, 16)
    slots = layers.slots.tolist()
    assert len(set(slots)) == 3 and min(slots) >= 1 and max(slots) <= 6
    before = layers.pools.clone()
    serving_calls._verify_and_flush(layers, None)()
    changed = (layers.pools != before).flatten(2).any(-1)
    assert changed[:, slots].all() and changed.sum() == 3 * layers.count


@pytest.mark.parametrize(("T", "rounds"), [(1, 15), (3, 4), (6, 3)])
def test_a_ring_writes_the_state_once(T: int, rounds: int) -> None:
    """At its end the ring leaves what as many plain rounds leave, and until the last round nothing has been written."""
    p = replace(SMALL, T=T, dtype="float32", state_dtype="float32")
    assert serving_calls.ring_rounds(p) == rounds
    layers, plain = serving.Layers(p), serving.Layers(p)
    before, written = layers.pools.clone(), list[bool]()
    verify = kda.flush_verify_kvbuffer

    def watch(*args: Any, **kwargs: Any) -> Any:
        result = verify(*args, **kwargs)
        written.append(not torch.equal(layers.pools, before))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kda, "flush_verify_kvbuffer", watch)
        serving_calls._ring(layers, None)()
    assert written == [n >= layers.count * (rounds - 1) for n in range(layers.count * rounds)]
    for _ in range(rounds):
        serving_calls._verify_and_flush(plain, None)()
    torch.testing.assert_close(layers.pools, plain.pools, rtol=1e-4, atol=1e-4)


def test_a_convolution_inside_or_in_front() -> None:
    outs = []
    for call in (serving_calls._conv_and_verify, serving_calls._verify_with_conv):
        layers = serving.Layers(SMALL)
        call(layers, None)()
        outs.append(layers.out)
    assert torch.equal(*outs) and outs[0].isfinite().all()


def test_chart_of_everything() -> None:
    """Every row is a point, in the panel for its sizes, in the style for its label."""
    names = [("kda", operator, f"impl {n}") for operator in serving.OPERATORS for n in (1, 2)]
    names += [(peer.name, "decode" if peer.one_token else "verify + flush", None) for peer in serving_peers.PEERS]
    record: dict[str, Any] = {"serving": []}
    for p in serving.sweep({}):
        for n, (contender, operator, name) in enumerate(names):
            if (p.T == 1) == serving.OPERATORS[operator].one_token:
                row = {"contender": contender, "operator": operator, "implementation": name, "problem": asdict(p)}
                record["serving"].append(row | {"share_of_stream_bandwidth": n / 25})
    figure = Figure(layout="constrained")
    plot._curves(figure, record)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    titles = [axis.get_title() for axis in shown]
    assert len(set(titles)) == len(titles) == 19 and titles[:5] == [f"T 1, H {H}" for H in (12, 24, 32, 64, 96)]
    assert titles[-1] == "T 4, H 12, 69 layers" and "T 4, H 32, V-first bfloat16 states" in titles
    lines = [line for axis in shown for line in axis.get_lines()]
    assert sum(len(line.get_xdata()) for line in lines) == len(record["serving"])
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert set(labels) == {serving.label(row) for row in record["serving"]} == {line.get_label() for line in lines}
    styles = {name: tuple(map(str, style.values())) for name, style in plot._styles(record["serving"]).items()}
    assert len(set(styles.values())) == len(labels), "one can tell them apart"


def test_gpu_suite_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "sweep", lambda given: [SMALL, replace(SMALL, state_dtype="bfloat16")])
    rows = timings.serving_timings(4000.0, notes := [])
    assert all(note.startswith("no row of") for note in notes)
    whats = dict.fromkeys(row["what"] for row in rows)
    assert {"kda verify (reference)", "kda ring verify", "kda verify with conv"} <= whats.keys()
    sizes = {"B": 3, "T": 4, "HV": 2, "K": 16}
    assert all(row | sizes == row and row["us"] > 0 and row["least_bytes"] > 0 for row in rows)
    assert [row["states"] for row in rows] == ["V-first float32"] * len(whats) + ["V-first bfloat16"] * len(whats)
    ratios = [row["over_plain"] for row in rows if row["what"] == "kda verify + flush"]
    assert ratios == [None, pytest.approx(15 / 8)], "of 8 and of 15 layers in the same time"


# ---- the calls of peers: stand-ins with their signatures that call kda ----


OPTIONS = dict.fromkeys(("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"), True)


def fla_fwd(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, initial_state: Any, ssm_state_indices: Any,
    inplace_final_state: bool, state_v_first: bool, out: Any, allow_neg_eigval: bool, **options: bool,
) -> None:  # fmt: skip
    assert inplace_final_state and state_v_first and not allow_neg_eigval and options == OPTIONS
    bias = dt_bias.view(-1, q.shape[-1])
    kda.decode(
        q, k, v, g, beta, initial_state, A_log=A_log, dt_bias=bias, state_indices=ssm_state_indices, out=out, **options
    )


def sglang_fused(
    A_log: Any, a: Any, dt_bias: Any, softplus_beta: float, softplus_threshold: float, q: Any, k: Any, v: Any, b: Any,
    initial_state_source: Any, initial_state_indices: Any, use_qk_l2norm_in_kernel: bool, cu_seqlens: Any,
    is_kda: bool, disable_state_update: bool = False, intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None, cache_steps: int | None = None,
) -> Any:  # fmt: skip
    assert (softplus_beta, softplus_threshold, use_qk_l2norm_in_kernel, is_kda) == (1.0, 20.0, True, True)
    N, HV, K = len(initial_state_indices), v.shape[2], q.shape[3]
    assert a.shape == (1, q.shape[1], HV * K) and cu_seqlens.tolist() == [*range(0, q.shape[1] + 1, q.shape[1] // N)]
    rows = {n: x[0].unflatten(0, (N, -1)) for n, x in {"q": q, "k": k, "v": v, "beta": b}.items()}
    given = {"state": initial_state_source, "state_indices": initial_state_indices, "A_log": A_log}
    given |= {"g": a[0].unflatten(0, (N, -1)).unflatten(-1, (HV, K)), "dt_bias": dt_bias.view(HV, K), **OPTIONS}
    if intermediate_states_buffer is None:
        return kda.decode(**rows, **given)
    assert (
        disable_state_update and cache_steps == q.shape[1] // N and intermediate_state_indices.tolist() == [*range(N)]
    )
    return kda.decode_mtp(**rows, **given, update_state=False, snapshots=intermediate_states_buffer)


def sglang_scatter(pools: Any, kept: Any, slots: Any, steps: Any, rows: Any) -> None:
    pools[:, slots.long()] = kept[:, rows.long(), steps.long()]


def sglang_packed(
    mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: float, initial_state: Any, out: Any,
    ssm_state_indices: Any, use_qk_l2norm_in_kernel: bool,
) -> None:  # fmt: skip
    B, HV = b.shape
    q, k, v = mixed_qkv.view(B, 1, 3, HV, 128).unbind(2)
    given = {"A_log": A_log, "dt_bias": dt_bias.view(HV, 128), "scale": scale, "state_indices": ssm_state_indices}
    kda.decode(q, k, v, a.view(B, 1, HV, 128), b[:, None], initial_state, **given, **OPTIONS, out=out)


@pytest.mark.parametrize("T", [1, 3])
def test_peers_compute_the_same(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "fla.ops.kda.fused_recurrent", fused_recurrent_kda_fwd=fla_fwd)
    ops = "sglang.kernels.ops"
    linear = f"{ops}.attention.linear.fused_sigmoid_gating_recurrent"
    install(monkeypatch, linear, fused_sigmoid_gating_delta_rule_update=sglang_fused)
    install(monkeypatch, f"{ops}.attention.fla.fused_recurrent", fused_recurrent_kda_packed_decode=sglang_packed)
    scatter = f"{ops}.mamba.mamba_state_scatter_triton"
    install(monkeypatch, scatter, fused_mamba_state_scatter_with_mask=sglang_scatter)
    p = Problem(B=2, T=T, H=2)

    def pools_after(prepare: Callable[[serving.Layers], Callable[[], object]]) -> Any:
        layers = serving.Layers(p)
        prepare(layers)()
        return layers.pools

    ours = serving.OPERATORS["decode" if T == 1 else "verify + flush"]
    expected = pools_after(partial(ours.prepare, impl=None))
    native = ("CUDA", "cuLA")
    chosen = [x for x in serving_peers.PEERS if x.one_token == (T == 1) and not any(w in x.name for w in native)]
    assert len(chosen) == (3 if T == 1 else 1)
    for peer in chosen:
        torch.testing.assert_close(pools_after(peer.prepare), expected, rtol=1e-4, atol=1e-5)


class Driver(ModuleType):
    """Records launches."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.launches: list[tuple[Any, ...]] = []

    def cuModuleLoadData(self, data: bytes) -> tuple[int, bytes]:
        return 0, data

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, bytes]:
        assert name == b"its_name"
        return 0, module

    def CUstream(self, stream: int) -> int:
        return stream

    def cuLaunchKernel(self, function: bytes, *sizes: Any) -> tuple[int]:
        self.launches.append((function.decode(), sizes[:2], sizes[3], sizes[6]))
        return (0,)


def test_cula(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = Driver()
    install(monkeypatch, "cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    (tmp_path / "cubin").mkdir()
    for name, parameters in {"shuffle_T2_HV2_tv16": 13, "tensor_core_T2_HV2_tv4": 13, "flush_T2_HV2_B3": 6}.items():
        (tmp_path / f"cubin/{name}.cubin").write_text(name)
        about = {"name": "its_name", "nparam": parameters, "smem": parameters}
        (tmp_path / f"cubin/{name}.json").write_text(json.dumps(about))
    peers.add_folder(tmp_path)
    layers = serving.Layers(Problem(B=3, T=2, H=2))
    for kind, blocks, name in (("shuffle", 8, "shuffle_T2_HV2_tv16"), ("tensor_core", 4, "tensor_core_T2_HV2_tv4")):
        driver.launches.clear()
        serving_peers._cula(layers, kind)()
        assert driver.launches[:-1] == [(name, (6 * blocks, 1), 128, 13)] * layers.count
        assert driver.launches[-1] == ("flush_T2_HV2_B3", (6 * 16, layers.count), 32, 6)
    with pytest.raises(FileNotFoundError, match="has no cubin/shuffle_T3_HV2_tv16"):
        serving_peers._cula(serving.Layers(Problem(B=3, T=3, H=2)), "shuffle")

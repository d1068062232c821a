"""python -m kda: every command at tiny sizes, its exit status, and messages for wrong arguments."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kda
from benches import gpu_suite
from kda import _flops, _lib
from kda._version import include_directory
from kda.cli import COMMANDS, bench, explain, main, measure, operators, peers, show
from kda.cli.arrays import Source
from kda.cli.problems import Problem, common

TINY = ["--T", "70", "--H", "1", "--K", "16", "--V", "16", "--repeats", "3", "--device", "cpu"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kda", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``cli("info")`` runs the command in this process, expects ``status`` and returns what it printed."""

    def call(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        try:
            got = main(words)
        except SystemExit as stop:  # argparse
            got = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert got == status, out + err
        assert "Traceback" not in out + err
        return out + err

    return call


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the seconds that ceilings take."""
    monkeypatch.setattr(measure, "ceilings", lambda device: {"GFLOP/s": 100.0, "GB/s": 10.0})


def rows(table: str) -> list[list[str]]:
    """The cells of a plain table."""
    lines = table.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch(r"-+(  +-+)+", line))
    columns = [m.span() for m in re.finditer("-+", lines[rule])]
    body = lines[rule + 1 :]
    body = body[: body.index("")] if "" in body else body
    return [
        [line[a : b if i + 1 < len(columns) else None].strip() for i, (a, b) in enumerate(columns)] for line in body
    ]


# ---- the command ----


def test_import_kda_does_not_load_the_command() -> None:
    heavy = ("kda.cli", "rich", "matplotlib")
    code = f"import sys, kda; kda.info(); print([m for m in sys.modules if m.startswith({heavy})])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_help(cli: Callable[..., str]) -> None:
    assert all(f"{name} " in cli("--help") for name in COMMANDS)
    for name in COMMANDS:
        assert cli(name, "--help").startswith(f"usage: python -m kda {name}")


def test_info(cli: Callable[..., str]) -> None:
    words = {line.split()[0]: line for line in cli("info").splitlines()}
    assert {"version", "cpu", "cuda", *_lib._OPERATORS} == set(words)
    assert "cpu_chunk, cpu_recurrent, reference" in words["forward"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "required: command"),
        ("measure", "invalid choice: 'measure' (choose from"),
        ("info now", "unrecognized arguments: now"),
        ("check --op forwards", "invalid choice: 'forwards'"),
        ("check --dtype float64", "invalid choice: 'float64'"),
        ("check --op gate --impl cpu_chunk", "--impl: expected one of cuda_gate, cpu_gate, reference, got cpu_chunk"),
        ("check --seed x", "argument --seed: invalid int value: 'x'"),
        ("explain", "required: OPERATOR"),
        ("explain attention", "invalid choice: 'attention'"),
        ("explain forward --T 0", "argument --T: expected a number of at least 1, got '0'"),
        ("explain forward --T many", "argument --T: expected a number of at least 1, got 'many'"),
        ("explain forward --K 257", "q: expected K in 1..256, got 257"),
        ("explain forward --H 2 --HV 3", "v: expected HV a multiple of H = 2, got 3"),
        ("explain forward --dtype int8", "invalid choice: 'int8'"),
        ("explain forward --lengths 3 -1", "argument --lengths: expected a number of at least 0, got '-1'"),
        ("explain forward --checkpoint-every 63", "checkpoint_every: expected a positive multiple of 16, got 63"),
        ("explain backward --checkpoint-every 64", "expected forward, which keeps copies of states, got backward"),
        ("explain forward --drafts tree", "--drafts: expected chain for forward, got tree"),
        ("explain flush --drafts snapshots", "--drafts: expected chain or tree or ring for flush, got snapshots"),
        (
            "explain decode --impl cpu_chunk",
            "--impl: expected one of cuda_decode_sweep, cuda_decode, cpu_recurrent, reference, got cpu_chunk",
        ),
        (
            "bench attention",
            "operators: expected some of prefill, training, prefill_f32, stages, layer, segment_map, decode, verify,"
            " flush, flush_verify, conv, gate, norm_gate, got attention",
        ),
        ("bench --repeats 0", "argument --repeats: expected a number of at least 1, got '0'"),
        ("bench --threads 1.5", "argument --threads: expected a number of at least 1, got '1.5'"),
        (
            "bench --impl nobody",
            "--impl: expected one of cuda_hopper_prefill_segments, cuda_hopper_prefill_pairs, cuda_prefill_chunk,"
            " cuda_prefill_recurrent, cpu_chunk, cpu_recurrent, reference",
        ),
        ("bench gate --json /nowhere/x.json", "--json: expected a file in a folder that exists, got /nowhere/x.json"),
        ("bench gate --plot /nowhere/x.png", "--plot: expected a file in a folder that exists, got /nowhere/x.png"),
        ("bench gate --plot chart.doc", "--plot: expected a file that ends in .png, .svg or .pdf, got chart.doc"),
    ],
)
def test_wrong_arguments_are_sentences(words: str, sentence: str, cli: Callable[..., str]) -> None:
    if "cuda_gate" not in kda.implementations("gate"):
        sentence = re.sub(r"cuda_\w+, ", "", sentence)
    assert sentence in cli(*words.split(), status=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("command", ["explain gate", "bench gate"])
def test_a_device_that_is_not_there(command: str, cli: Callable[..., str]) -> None:
    sentence = "device: expected one that is here, got cuda, and torch finds no CUDA device"
    assert sentence in cli(*command.split(), "--device", "cuda", status=2)


def test_bench_knows_where_operators_run(cli: Callable[..., str]) -> None:
    sentence = "--device: expected cpu for segment_map, got cuda"
    assert sentence in cli("bench", "prefill", "segment_map", "--device", "cuda", status=2)


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    """In a copy of the package, because an installed wheel has the library next to it."""
    import shutil

    shutil.copytree(kda.__path__[0], tmp_path / "kda", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    shutil.copytree(include_directory(), tmp_path / "kda/include", dirs_exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "kda", "info"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "KDA_LIBRARY_DIR": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("python -m kda info: kda: _binding.so was not found in")


# ---- check ----


def test_every_operator_of_the_library_is_checked() -> None:
    missing = set(_lib._OPERATORS) - set(operators.OPERATORS)
    assert not missing, f"kda/cli/operators.py: expected an entry of OPERATORS for each operator, none for {missing}"


def test_check(cli: Callable[..., str]) -> None:
    text = cli("check")
    table = rows(text)
    ran = {(op, impl) for op, impl, _, cases, *_ in table if int(cases)}
    expected = {(op, impl) for op in operators.OPERATORS for impl in kda.implementations(op)}
    assert {(r[0], r[1]) for r in table} == expected
    assert expected - ran <= {x for x in expected if operators.device_of(x[1]) == "cuda"}
    for op, impl, dtype, cases, worst, error, allowed, verdict in table:
        if (op, impl) in ran:
            assert dtype in operators.OPERATORS[op].dtypes and int(cases) >= 2 and verdict == "ok"
            assert worst in operators.OPERATORS[op].allowed and float(error) <= float(allowed)
        else:
            assert verdict == "skipped: no CUDA device that torch finds"
    total = sum(int(r[3]) for r in table)
    assert re.search(rf"^kda {kda.__version__}, .*: {total} of {total} cases ok, \d+ skipped$", text, re.M)
    assert "KDA_IMPL" not in os.environ


def spoil(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the results of every implementation except the oracle."""
    entry = operators.OPERATORS[op]

    def call(x: dict[str, Any]) -> dict[str, Any]:
        results = entry.call(x)
        if os.environ["KDA_IMPL"] != "reference":
            change(results)
        return results

    monkeypatch.setitem(operators.OPERATORS, op, replace(entry, call=call))


def off(results: dict[str, Any]) -> None:
    results["o"] *= 1.01


def one_element(results: dict[str, Any]) -> None:
    results["state"].view(-1)[-1] += 0.1


def not_a_number(results: dict[str, Any]) -> None:
    results["o"][0, 0, 0, 0] = float("nan")


def fails(results: dict[str, Any]) -> None:
    raise RuntimeError("this operator broke")


def declines(results: dict[str, Any]) -> None:
    raise NotImplementedError("nobody takes this")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (off, r"o: error 1.0e-02, allowed 3.0e-03; at \[.*\] expected \S+, got \S+"),
        (one_element, r"state: error .*, allowed 1.0e-05; at \[3, 1, 63, 63\] expected"),
        (not_a_number, r"o: 1 of \d+ elements are not finite"),
        (fails, "RuntimeError: this operator broke"),
    ],
)
def test_check_finds(
    change: Callable[[dict[str, Any]], object], sentence: str, cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "decode", change)
    words = ["check", "--op", "decode", "--dtype", "float32", "--gate", "log", "--layout", "V-first"]
    text = cli(*words, "--impl", "cpu_recurrent", "reference", status=1)
    assert [r[-1] for r in rows(text)] == ["FAILED: 4", "ok"] and "4 of 8 cases ok" in text
    assert re.search(sentence, text)
    command = "python -m kda check --op decode --impl cpu_recurrent --dtype float32 --gate log --layout V-first"
    assert f"  {command}\n" in text, "how to repeat it"
    assert len(rows(cli(*command.split()[3:], status=1))) == 1
    assert "KDA_IMPL" not in os.environ


def test_check_of_nothing_is_no_success(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["check", "--op", "decode", "--impl", "cpu_recurrent", "--dtype", "float32"]
    spoil(monkeypatch, "decode", declines)
    text = cli(*words, status=1)
    assert rows(text)[0][-1] == "skipped: nobody takes this" and "0 of 0 cases ok, 24 skipped" in text
    assert "0 of 0" in cli("check", "--op", "gate", "--gate", "log", "--dtype", "float32", status=1)


HOPPER_ONLY = "cuda_b was forced but needs compute capability 9.0 (Hopper)"


@pytest.mark.parametrize(
    ("second", "third", "failed"),
    [
        (["float32", "3", "o", "1e-7", "1e-5", "ok"], ["", "0", "", "", "", f"skipped: {HOPPER_ONLY}"], 0),
        (["float32", "3", "o", "1e-7", "1e-5", "ok"], ["", "0", "", "", "", "skipped: takes one token"], 1),
        (["float32", "0", "", "", "", "skipped: takes bf16"], ["bfloat16", "0", "", "", "", "skipped: few"], 2),
        (["float32", "3", "o", "1e-2", "1e-5", "FAILED: 3"], ["bfloat16", "1", "o", "1e-7", "1e-5", "ok"], 3),
    ],
)
def test_gpu_suite_wants_every_implementation_checked(
    second: list[str], third: list[str], failed: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cells = [["forward", "cpu_chunk", "float32", "4", "o", "1e-7", "1e-5", "ok"]]
    cells += [["forward", "cuda_a", *second], ["decode", "cuda_b", *third]]
    show.table(["operator", "implementation", "dtype", "cases", "worst", "error", "allowed", ""], cells)
    ran, wrong = sum(int(c[3]) for c in cells), sum(int(c[3]) for c in cells if "FAILED" in c[-1])
    print(f"\nkda 0.1.0, avx512 (built for avx512), a GPU: {ran - wrong} of {ran} cases ok, 5 skipped")
    text, suite = capsys.readouterr().out, gpu_suite()
    monkeypatch.setattr(
        suite, "run", lambda command, **environment: subprocess.CompletedProcess(command, wrong > 0, text)
    )
    assert suite.kda_check() == {"ran": ran, "failed": failed, "skipped": 5, "exit": int(failed > 0)}
    assert ("leaves out" in capsys.readouterr().out) == (failed in (1, 2))


def test_gpu_suite_runs_the_tests_that_are_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What has passed at this source is not run again, but stays in the record."""
    suite, ran = gpu_suite(), list[str]()
    for name in ("gtest", "pytest", "fuzz", "example", "kda_check"):
        monkeypatch.setattr(suite, name, lambda *_, name=name, **__: ran.append(name) or {"ran": 1, "exit": 0})
    before = {"cpp": {"ran": 7, "exit": 0}, "c example": {"ran": 1, "exit": 1}}
    found = suite.tests(tmp_path, before, ["cpp", "c example", "python -m kda check"])
    assert sorted(ran) == ["example", "kda_check"]
    assert found == {
        "cpp": before["cpp"],
        "c example": {"ran": 1, "exit": 0},
        "python -m kda check": {"ran": 1, "exit": 0},
    }
    for GPUs in (1, 2):
        ran.clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda GPUs=GPUs: GPUs)
        left_out = {"python on two GPUs"} if GPUs == 1 else set()
        assert set(suite.tests(tmp_path, {}, suite.TESTS)) == set(suite.TESTS) - left_out
        assert sorted(ran) == ["example", "fuzz", "gtest", "gtest", "kda_check", *["pytest"] * (1 + GPUs)]


def test_gpu_suite_keeps_what_only_other_sources_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A record keeps rows and tests of other sources under `earlier`, the newest of each, with what has changed
    since."""
    suite = gpu_suite()
    row = {"what": "decode", "B": 1, "us": 2.5, "over_peer": None}
    stream = {"what": "y = 2 x", "gb_per_s": 4000.0}
    path, hashes = tmp_path / "a-gpu.json", {"src": "1", "src/cuda": "1"}
    monkeypatch.setenv("KDA_LIBRARY_DIR", "")  # main() sets it
    monkeypatch.setattr(suite, "device", lambda: {"name": "A GPU"})
    monkeypatch.setattr(suite, "folder_hashes", lambda: dict(hashes))
    monkeypatch.setattr(suite, "source_hash", lambda: "".join(hashes.values()))
    monkeypatch.setattr(
        suite, "tests", lambda _, before, wanted: before | {n: {"ran": 1, "failed": 0, "exit": 0} for n in wanted}
    )

    def record(*options: str, rows: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        monkeypatch.setattr(suite, "benchmarks", lambda *_: iter([[stream], list(rows)]))
        monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(tmp_path), *options])
        assert suite.main() == 0
        return json.loads(path.read_text())

    first = record("--only", "benchmarks", rows=[row, row | {"B": 2}])
    assert first["benchmarks"] == [stream, row, row | {"B": 2}] and "earlier" not in first
    again = record("--only", "benchmarks", rows=[row | {"us": 2.0}])
    assert again["benchmarks"] == [row | {"B": 2}, stream, row | {"us": 2.0}]
    assert again["command"] == "; ".join(["tools/gpu_suite --out FOLDER --only benchmarks"] * 2)
    hashes["src/cuda"] = "2"
    second = record("--only", "tests", "--tests", "cpp")
    assert "benchmarks" not in second and list(second["tests"]) == ["cpp"]
    [earlier] = second["earlier"]
    assert earlier["changed_since"] == ["src/cuda"] and earlier["source_hash"] == "11"
    assert earlier["benchmarks"] == again["benchmarks"] and earlier["device"] == {"name": "A GPU"}
    hashes["src"] = "2"
    third = record("--only", "benchmarks", rows=[row])
    assert third["benchmarks"] == [stream, row]
    newer, older = third["earlier"]
    assert (newer["changed_since"], newer["tests"]) == (["src"], second["tests"]) and "benchmarks" not in newer
    assert older["changed_since"] == ["src", "src/cuda"] and older["benchmarks"] == [stream, row | {"B": 2}]
    fourth = record("--only", "benchmarks", rows=[row | {"B": 2}])
    assert [list(part["tests"]) for part in fourth["earlier"]] == [["cpp"]]


def test_check_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from kda.cli import main
ops = ["forward", "decode", "verify", "flush", "flush_verify", "segment_map", "segment_merge", "conv", "conv_backward",
       "gate", "gate_backward", "norm_gate", "norm_gate_backward", "prefill_f32", "stage_chunk_intra",
       "stage_bwd_intra"]
sys.exit(main(["check", "--op", *ops, "--layout", "V-first", "--gate", "log", "softplus"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {(r[0], r[1], r[2]): r[-1] for r in rows(done.stdout)}
    assert verdicts["forward", "cpu_chunk", "float32"] == verdicts["decode", "reference", "float16"] == "ok"
    assert verdicts["gate", "cpu_gate", "float16"] == verdicts["conv", "cpu_conv", "float16"] == "ok"
    assert verdicts["forward", "cpu_chunk", "bfloat16"] == "skipped: NumPy has no bfloat16, and torch is not installed"
    assert verdicts["norm_gate", "cpu_norm_gate", "float32"] == "ok"
    assert verdicts["gate_backward", "cpu_gate", ""] == "skipped: needs torch, which is not installed"


# ---- explain ----


@pytest.mark.parametrize("op", operators.OPERATORS)
def test_explain(op: str, cli: Callable[..., str]) -> None:
    sizes = ["--T", "7", "--H", "2", "--device", "cpu"]
    lines = cli("explain", op, *sizes).splitlines()
    assert (
        lines[0].startswith(f"{op}: B ")
        and f", T 7, H 2, K = V = 128, {operators.OPERATORS[op].example.dtype}" in lines[0]
    )
    assert [line[2:].split(":")[0] for line in lines[1:-1]] == list(kda.implementations(op))
    assert sum(line[0] == "*" for line in lines[1:-1]) == 1
    assert re.fullmatch(r"workspace: \d+ bytes", lines[-1])
    for impl in (n for n in kda.implementations(op) if operators.device_of(n) == "cpu"):
        assert f"* {impl}: " in cli("explain", op, *sizes, "--impl", impl)


def test_explain_is_what_the_library_says(cli: Callable[..., str]) -> None:
    x = torch.zeros(2, 100, 2, 20)
    pool, slots = torch.zeros(3, 2, 20, 20), torch.tensor([2, 1], dtype=torch.int32)
    more: dict[str, Any] = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2, 20), "state_indices": slots}
    more |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    said = kda.explain(x, x, x, x, x[..., 0], pool, **more)
    size = kda.workspace_size(x, x, x, x, x[..., 0], pool, **more)
    sizes = ["--B", "2", "--T", "100", "--H", "2", "--K", "20", "--V", "20", "--dtype", "float32", "--device", "cpu"]
    text = cli("explain", "forward", *sizes)
    assert text.split("\n", 1)[1] == f"{said}workspace: {size} bytes\n"


def test_explain_says_why_not(cli: Callable[..., str]) -> None:
    assert "- cpu_recurrent: keeps no checkpoints [src/cpu/recurrent.cc]\n" in cli(
        "explain", "forward", "--lengths", "100", "0", "200", "--checkpoint-every", "64", "--device", "cpu"
    )
    assert "* reference: " in cli("explain", "decode", "--dtype", "float64", "--device", "cpu")
    text = cli("explain", "forward", "--dtype", "float64", "--impl", "cpu_chunk", status=1)
    assert "- cpu_chunk: float64 runs on `reference` only" in text and "*" not in text and "workspace" not in text


@pytest.mark.parametrize("op", operators.OPERATORS)
def test_explain_computes_nothing(op: str, cli: Callable[..., str]) -> None:
    """A million tokens would take long."""
    before = _lib.library()
    drafts = "verify" in op or op == "flush"
    cli("explain", op, *(("--B", "65536", "--T", "16") if drafts else ("--B", "1", "--T", "1048576")), "--H", "1")
    if not op.startswith(("conv", "norm")):  # there K and V are channels, or V may be larger
        cli("explain", op, "--K", "300", "--V", "300", status=2)
    assert _lib.library() is before, "and the library is itself again"


@pytest.mark.parametrize(
    ("op", "drafts"),
    [("decode", "snapshots"), *((op, kind) for op in ("verify", "flush", "flush_verify") for kind in ("tree", "ring"))],
)
def test_explain_of_drafts(op: str, drafts: str, cli: Callable[..., str]) -> None:
    lines = cli("explain", op, "--T", "6", "--drafts", drafts, "--device", "cpu").splitlines()
    assert lines[0].startswith(f"{op}: B 64, T 6, H 8, K = V = 128, {drafts}, bfloat16")
    assert sum(line[0] == "*" for line in lines) == 1


def test_explain_asks_for_batch_invariance(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    entry, use = operators.OPERATORS["decode"], _lib.library().use_batch_invariant

    def call(x: dict[str, Any]) -> dict[str, Any]:
        asked.append(before := use(True))
        use(before)
        return entry.call(x)

    monkeypatch.setitem(operators.OPERATORS, "decode", replace(entry, call=call))
    for already in (False, True):
        kda.use_batch_invariant(already)
        for words in ([], ["--batch-invariant"]):
            text = cli("explain", "decode", *words, "--device", "cpu")
            assert text.splitlines()[0].endswith("cpu, batch invariant" if words else "cpu")
            assert asked.pop() == (already or bool(words))
            assert kda.use_batch_invariant(already) == already, "as it was before"
    kda.use_batch_invariant(False)


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ("decode", "cuda"),
        ("decode --impl cuda_decode", "cuda"),
        ("decode --impl reference", "cpu"),
        ("decode --device cpu", "cpu"),
        ("backward", "cuda"),
        ("segment_map", "cpu"),
    ],
)
def test_explain_asks_about_the_gpu(
    words: str, device: str, cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is the default, if there is one and something that is asked about runs there."""
    if device == "cuda" and "cuda_decode" not in kda.implementations("decode"):
        pytest.skip("built without CUDA")
    real = explain.Source
    monkeypatch.setattr(explain, "Source", lambda device, seed: real("cpu", seed))
    monkeypatch.setattr(explain, "cuda_device", lambda: True)
    text = cli("explain", *words.split(), status=int("cuda_decode" in words))
    assert text.splitlines()[0].endswith(f", {device}")
    monkeypatch.setattr(explain, "cuda_device", lambda: False)
    text = cli("explain", *words.split(), status=int("cuda_decode" in words))
    assert text.splitlines()[0].endswith(", cpu")


# ---- bench ----


def test_bench(tmp_path: Path) -> None:
    """As a user calls it, with ceilings and files."""
    record, chart = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["bench", *TINY, "--B", "2", "--threads", "1", "--json", str(record), "--plot", str(chart)]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert chart.read_bytes().startswith(b"\x89PNG")
    data = json.loads(record.read_text())
    assert data["command"] == " ".join(["python -m kda", *words]) and data["threads"] == 1
    assert data["library"] == kda.info() and data["torch"] == torch.__version__ and data["device"] == "cpu"
    assert data["ceilings"].keys() == {"GFLOP/s", "GB/s"} and min(data["ceilings"].values()) > 0.1
    assert [r["operator"] for r in data["rows"]] == list(bench.BENCHES), "one of each: their sizes are the same now"
    for r in data["rows"]:
        p, entry = Problem(**{**r["problem"], "lengths": ()}), bench.BENCHES[r["operator"]]
        tokens = entry.problems[0].T if entry.most_tokens < 70 else 70
        assert p == replace(p, B=2, T=tokens, H=1, HV=1, K=16, V=16, **entry.only)
        assert r["contender"] == "kda" and r["times_kda"] == 1 and r["unit"] == entry.unit
        assert r["rate"] == pytest.approx(entry.work(p) / r["ms"] * 1e-6)
        assert r["tokens_per_s"] == pytest.approx(p.B * p.T / r["ms"] * 1e3)
    table = rows(done.stdout)
    assert [r[0] for r in table] == list(bench.BENCHES) and all(re.search(r"\d (us|ms|s)$", r[2]) for r in table)
    assert "no rows of fla.ops.kda.naive: it is not installed" in done.stdout or len(table) > len(bench.BENCHES)


@pytest.mark.usefixtures("quick")
def test_bench_sweeps(cli: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    words = ["bench", "prefill", "decode", *TINY, "--T", "1", "70", "--H", "1", "2", "--dtype", "float32"]
    cli(*words, "--B", "1", "--json", str(path))
    got = [(r["operator"], r["problem"]["T"], r["problem"]["H"]) for r in json.loads(path.read_text())["rows"]]
    assert got == [("prefill", t, h) for t in (1, 70) for h in (1, 2)] + [("decode", 1, h) for h in (1, 2)]


@pytest.mark.usefixtures("quick")
def test_bench_forces(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str | None] = []
    call = _lib.library().decode

    def decode(*arguments: Any) -> None:
        used.append(os.environ.get("KDA_IMPL"))
        call(*arguments)

    monkeypatch.setattr(_lib.library(), "decode", decode)
    cli("bench", "decode", *TINY, "--B", "1", "--impl", "reference")
    assert set(used) == {"reference"} and "KDA_IMPL" not in os.environ


NAIVE = """
import torch

def naive_chunk_kda(q, k, v, g, beta):
    assert q.shape[1] % 64 == 0, "whole chunks only"
    assert g.max() <= 0 and 0 < beta.min() and beta.max() < 1 and abs(q.float().norm(dim=-1).mean() - 1) < 0.01

def naive_recurrent_kda(q, k, v, g, beta, initial_state, output_final_state):
    assert initial_state.shape == (*v.shape[:1], v.shape[2], q.shape[3], v.shape[3])
"""


@pytest.fixture
def fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A package with FLA's name and this text as its ``fla.ops.kda.naive``."""

    def install(text: str) -> None:
        for name in [n for n in sys.modules if n.split(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)
        folder = tmp_path / "fla/ops/kda"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent, folder.parent.parent):
            (package / "__init__.py").touch()
        (folder / "naive.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.mark.usefixtures("quick")
def test_peers_beside_it(cli: Callable[..., str], fla: Callable[[str], None], tmp_path: Path) -> None:
    fla(NAIVE)
    path = tmp_path / "x.json"
    text = cli("bench", "prefill", "decode", *TINY, "--B", "2", "--T", "64", "70", "--json", str(path))
    assert [r["contender"] for r in json.loads(path.read_text())["rows"]] == [
        "kda", "FLA naive_chunk_kda", "kda", "kda", "FLA naive_recurrent_kda",
    ]  # fmt: skip
    assert "no row of FLA naive_chunk_kda for B 2, T 70, H 1, K = V = 16: AssertionError: whole chunks only" in text
    assert [r[-1] != "" for r in rows(text)] == [False, True, False, False, True], "time over kda's"
    assert "not installed" not in text


@pytest.mark.usefixtures("quick")
def test_a_peer_that_cannot_be_imported(cli: Callable[..., str], fla: Callable[[str], None]) -> None:
    fla("raise OSError('no GPU, no import')")
    text = cli("bench", "decode", *TINY, "--B", "1")
    assert "no rows of fla.ops.kda.naive: importing it fails with OSError: no GPU, no import" in text
    assert len(rows(text)) == 1


def test_peers_get_what_the_kernels_compute() -> None:
    """Activated inputs without gate, norm and sigmoid inside give the same outputs as raw inputs with them."""
    for gate, beta in (("log", "activated"), ("softplus", "sigmoid"), ("lower_bound", "2sigmoid")):
        x = common(Problem(B=1, T=70, H=2, K=16, V=24, dtype="float32", gate=gate, beta=beta), Source())
        torch.testing.assert_close(kda.prefill(**peers.activated(x)), kda.prefill(**x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick")
def test_plot_without_matplotlib(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "_measure", fails)  # the message comes before measuring
    assert "--plot: needs matplotlib, which is not installed" in cli("bench", "--plot", "x.png", status=2)


def test_bench_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from kda.cli import main
sys.exit(main(["bench", *{TINY}, "--B", "2", "--json", {str(tmp_path / "x.json")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = [r["operator"] for r in json.loads((tmp_path / "x.json").read_text())["rows"]]
    assert got == [name for name, entry in bench.BENCHES.items() if not entry.needs_torch]
    assert "no rows of training: it needs torch, which is not installed" in done.stdout and ", float32 " in done.stdout


# ---- measuring ----


def test_work() -> None:
    assert _flops.forward_flop(128, 128) == 141_312
    assert _flops.training_flop(128, 128) == 141_312 + 98_304 + 278_528
    assert _flops.segment_map_flop(128, 128) == 131_072 + 20_480 + 20_480 + 2_048
    assert _flops.prefill_f32_flop(128, 128) == 141_312 + 20_480
    assert _flops.bwd_wy_dqkg_flop(128, 128) == 98_304 + 20_480
    assert bench._conv_bytes(Problem(B=2, T=3, H=1, HV=2)) == 2 * 2 * 3 * 512 * 2


def test_medians_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order, ticks = [0.0], [], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def takes(name: str, *seconds: float) -> Callable[[], None]:
        left = [*seconds]

        def call() -> None:
            order.append(name)
            clock[0] += left.pop(0) if len(left) > 1 else left[0]

        return call

    calls = {"a": takes("a", 9, 9, 1, 3, 2, 5, 4), "b": takes("b", 10)}
    times = measure.medians(calls, 5, seconds=29, tick=lambda: ticks.append(1))
    assert times == {"a": 3, "b": 10}, "medians, without the turns that warm up"
    assert "".join(order) == "aabb" + "ab" * 3 + "aa", "b takes more than its 29 seconds"
    assert len(ticks) == 10
    order.clear()
    assert measure.medians({"c": takes("c", 1e-3)}, 3)["c"] == pytest.approx(1e-3)
    assert len(order) == 2 + 3 * 5, "short calls are timed in batches of 5 ms"


def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, threads in (("3", 3), ("4,2", 4), ("", len(os.sched_getaffinity(0)))):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert measure.thread_count() == threads


# ---- tables and progress ----


def test_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    show.table(["name", "n", "what"], [["a", "7", "[x]"], ["bb", "12", ""]])
    assert capsys.readouterr().out == "name   n  what\n----  --  ----\na      7  [x]\nbb    12\n"


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal(rich: bool) -> None:
    """Progress is drawn, with rich and without it; the table appears and keeps its brackets."""
    code = f"""
import sys
if not {rich}:
    sys.modules["rich"] = None
from kda.cli import show
with show.Progress(3) as progress:
    for i in range(3):
        progress.label(f"step {{i}}")
        progress.step()
show.table(["name", "what"], [["a", "[x]"], ["b", "FAILED: 2"]])
"""
    if rich:
        pytest.importorskip("rich")
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        shown = b""
        try:
            while piece := os.read(leader, 4096):
                shown += piece
        except OSError:  # the other end closed
            pass
    os.close(leader)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "step 2" in text and "3/3" in text and "[x]" in text
    assert ("\x1b[1;31mFAILED: 2" in text) == rich


def test_numbers_are_reproducible() -> None:
    a, b, c = (Source(seed=s).normal("float32", 5).numpy() for s in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)

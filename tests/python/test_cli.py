"""python -m kda: the command itself, check and info, its exit status, messages for wrong arguments, and tables."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kda
from benches import TINY, rows
from kda._version import include_directory
from kda.call import library as _lib
from kda.cli import COMMANDS, bench, operators, show
from kda.cli.arrays import Source
from kda.cli.problems import Problem

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
    assert {"version", "cpu", "cuda", *_lib.OPERATORS} == set(words)
    assert "cpu_chunk, cpu_recurrent, reference" in words["forward"]


@pytest.mark.usefixtures("quick")
def test_bench(cli: Callable[..., str]) -> None:
    """Ours, beside ceilings; python -m bench measures more."""
    words = ["bench", *TINY, "--B", "2"]
    found = json.loads(cli(*words, "--json"))
    assert [r["operator"] for r in found["rows"]] == list(bench.BENCHES)
    assert found["ceilings"] == {"GFLOP/s": 100.0, "GB/s": 10.0} and found["version"] == kda.__version__
    for r in found["rows"]:
        p, entry = Problem(**{**r["problem"], "lengths": ()}), bench.BENCHES[r["operator"]]
        assert (2, 1 if r["operator"] == "decode" else 70, 1, 16) == (p.B, p.T, p.H, p.K)
        assert r["rate"] == pytest.approx(entry.work(p) / r["ms"] * 1e-6) and r["unit"] == entry.unit
        assert r["tokens_per_s"] == pytest.approx(p.B * p.T / r["ms"] * 1e3)
    table = rows(cli(*words, "--T", "1", "70"))
    assert [r[0] for r in table] == ["prefill", "prefill", "training", "training", "decode"]
    assert all(re.search(r"\d (us|ms|s)$", r[2]) and r[5].endswith("%") for r in table)


def test_bench_without_torch() -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from kda.cli import bench, main
bench.ceilings = lambda device: {{"GFLOP/s": 100.0, "GB/s": 10.0}}
sys.exit(main(["bench", *{TINY}, "--B", "2"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [r[0] for r in rows(done.stdout)] == ["prefill", "decode"] and ", float32 " in done.stdout


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
        ("bench gate", "operators: expected some of prefill, training, decode, got gate"),
        ("bench --repeats 0", "argument --repeats: expected a number of at least 1, got '0'"),
        ("bench --threads 1.5", "argument --threads: expected a number of at least 1, got '1.5'"),
        ("bench --impl cpu_conv", "--impl: expected one of cuda_blackwell_prefill_segments, cuda_blackwell_prefill,"),
    ],
)
def test_wrong_arguments_are_sentences(words: str, sentence: str, cli: Callable[..., str]) -> None:
    if "cuda_gate" not in kda.implementations("gate"):
        sentence = re.sub(r"cuda_\w+, ", "", sentence)
    assert sentence in cli(*words.split(), status=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("command", ["explain gate", "bench decode"])
def test_a_device_that_is_not_there(command: str, cli: Callable[..., str]) -> None:
    sentence = "device: expected one that is here, got cuda, and torch finds no CUDA device"
    assert sentence in cli(*command.split(), "--device", "cuda", status=2)


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
    missing = set(_lib.OPERATORS) - set(operators.OPERATORS)
    assert not missing, f"kda/cli/operators.py: expected an entry of OPERATORS for each operator, none for {missing}"


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

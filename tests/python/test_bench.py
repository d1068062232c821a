"""python -m bench at tiny sizes: files, sweeps, peers, and how times are measured."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from bench import measure, peers
from bench.command import COMMANDS
from bench.operators import BENCHES
from benches import TINY, rows, run
from kda.call import flops as _flops
from kda.call import library as _lib
from kda.cli.arrays import Source
from kda.cli.problems import Problem, common

# ---- bench ----


def test_bench(tmp_path: Path) -> None:
    """As a user calls it, with ceilings and files."""
    record = tmp_path / "bench.json"
    words = [*TINY, "--B", "2", "--threads", "1", "--json", str(record)]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    data = json.loads(record.read_text())
    assert data["command"] == " ".join(["python -m bench", *words]) and data["threads"] == 1
    assert data["library"] == kda.info() and data["torch"] == torch.__version__ and data["device"] == "cpu"
    assert data["ceilings"].keys() == {"GFLOP/s", "GB/s"} and min(data["ceilings"].values()) > 0.1
    assert [r["operator"] for r in data["rows"]] == list(BENCHES), "one of each: their sizes are the same now"
    for r in data["rows"]:
        p, entry = Problem(**{**r["problem"], "lengths": ()}), BENCHES[r["operator"]]
        tokens = entry.cases[0].T if entry.most_tokens < 70 else 70
        assert p == replace(p, B=2, T=tokens, H=1, HV=1, K=16, V=16, **entry.only)
        assert r["contender"] == "kda" and r["times_kda"] == 1 and r["unit"] == entry.unit
        assert r["rate"] == pytest.approx(entry.work(p) / r["ms"] * 1e-6)
        assert r["tokens_per_s"] == pytest.approx(p.B * p.T / r["ms"] * 1e3)
    table = rows(done.stdout)
    assert [r[0] for r in table] == list(BENCHES) and all(re.search(r"\d (us|ms|s)$", r[2]) for r in table)
    assert "no rows of fla.ops.kda.naive: it is not installed" in done.stdout or len(table) > len(BENCHES)


@pytest.mark.usefixtures("quick")
def test_bench_sweeps(bench_cli: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    words = ["prefill", "decode", *TINY, "--T", "1", "70", "--H", "1", "2", "--dtype", "float32"]
    bench_cli(*words, "--B", "1", "--json", str(path))
    got = [(r["operator"], r["problem"]["T"], r["problem"]["H"]) for r in json.loads(path.read_text())["rows"]]
    assert got == [("prefill", t, h) for t in (1, 70) for h in (1, 2)] + [("decode", 1, h) for h in (1, 2)]


@pytest.mark.usefixtures("quick")
def test_bench_forces(bench_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str | None] = []
    call = _lib.library().decode

    def decode(*tensors: Any, **operands: Any) -> None:
        used.append(os.environ.get("KDA_IMPL"))
        call(*tensors, **operands)

    monkeypatch.setattr(_lib.library(), "decode", decode)
    bench_cli("decode", *TINY, "--B", "1", "--impl", "reference")
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
def fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A package with FLA's name and this text as its ``fla.ops.kda.naive``. No other test finds it."""

    def modules() -> list[str]:
        return [n for n in sys.modules if n.split(".")[0] == "fla"]

    def install(text: str) -> None:
        for name in modules():
            monkeypatch.delitem(sys.modules, name)
        folder = tmp_path / "fla/ops/kda"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent, folder.parent.parent):
            (package / "__init__.py").touch()
        (folder / "naive.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    for name in modules():
        del sys.modules[name]


@pytest.mark.usefixtures("quick")
def test_peers_beside_it(bench_cli: Callable[..., str], fla: Callable[[str], None], tmp_path: Path) -> None:
    fla(NAIVE)
    path = tmp_path / "x.json"
    text = bench_cli("prefill", "decode", *TINY, "--B", "2", "--T", "64", "70", "--json", str(path))
    assert [r["contender"] for r in json.loads(path.read_text())["rows"]] == [
        "kda", "FLA naive_chunk_kda", "kda", "kda", "FLA naive_recurrent_kda",
    ]  # fmt: skip
    assert "no row of FLA naive_chunk_kda for B 2, T 70, H 1, K = V = 16: AssertionError: whole chunks only" in text
    assert [r[-1] != "" for r in rows(text)] == [False, True, False, False, True], "time over kda's"
    assert "not installed" not in text


@pytest.mark.usefixtures("quick")
def test_a_peer_that_cannot_be_imported(bench_cli: Callable[..., str], fla: Callable[[str], None]) -> None:
    fla("raise OSError('no GPU, no import')")
    text = bench_cli("decode", *TINY, "--B", "1")
    assert "no rows of fla.ops.kda.naive: importing it fails with OSError: no GPU, no import" in text
    assert len(rows(text)) == 1


def test_peers_get_what_the_kernels_compute() -> None:
    """Activated inputs without gate, norm and sigmoid inside give the same outputs as raw inputs with them."""
    for gate, beta in (("log", "activated"), ("softplus", "sigmoid"), ("lower_bound", "2sigmoid")):
        x = common(Problem(B=1, T=70, H=2, K=16, V=24, dtype="float32", gate=gate, beta=beta), Source())
        torch.testing.assert_close(kda.prefill(**peers.activated(x)), kda.prefill(**x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick")
def test_progress_is_a_line_a_case_where_nobody_looks_on(bench_cli: Callable[..., str]) -> None:
    text = bench_cli("gate", "conv", *TINY, "--repeats", "1", "--seconds", "0.1")
    lines = [line for line in text.splitlines() if re.match(r"\[\d+/\d+\] ", line)]
    assert [line.partition("] ")[2].partition(":")[0] for line in lines] == ["ceilings", "gate", "conv", "ceilings"]


@pytest.mark.usefixtures("quick")
def test_what_was_measured_before_an_interruption_is_kept(
    bench_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(p: Problem, new: Source) -> Callable[[], object]:
        raise KeyboardInterrupt

    monkeypatch.setitem(BENCHES, "prefill", replace(BENCHES["prefill"], prepare=interrupted))
    text = bench_cli("gate", "prefill", "conv", *TINY, "--json", str(tmp_path / "x.json"), status=130)
    found: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    assert found["interrupted"] and [row["operator"] for row in found["rows"]] == ["gate"]
    assert "interrupted: the rest was not measured" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["attention"], "operators: expected some of prefill, training, prefill_f32, stages, layer, segment_map,"),
        (["--impl", "nobody"], "--impl: expected one of "),
        (["gate", "--json", "/nowhere/x.json"], "--json: expected a file in a folder that exists, got /nowhere/x.json"),
        (["plugs", "--json", "/nowhere/x.json"], "--json: expected a file in a folder that exists, got /nowhere/x"),
        (["--repeats", "0"], "argument --repeats: expected a number of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_are_sentences(words: list[str], sentence: str, bench_cli: Callable[..., str]) -> None:
    assert sentence in bench_cli(*words, status=2)


def test_help_names_the_commands(bench_cli: Callable[..., str]) -> None:
    assert all(f"  {name} " in bench_cli("--help") for name in COMMANDS)
    for name in COMMANDS:
        assert bench_cli(name, "--help").startswith(f"usage: python -m bench {name}")


# ---- measuring ----


def test_work() -> None:
    assert _flops.forward_flop(128, 128) == 141_312
    assert _flops.training_flop(128, 128) == 141_312 + 98_304 + 278_528
    assert _flops.segment_map_flop(128, 128) == 131_072 + 20_480 + 20_480 + 2_048
    assert _flops.prefill_f32_flop(128, 128) == 141_312 + 20_480
    assert _flops.bwd_wy_dqkg_flop(128, 128) == 98_304 + 20_480
    assert BENCHES["conv"].work(Problem(B=2, T=3, H=1, HV=2)) == 2 * 2 * 3 * 512 * 2


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

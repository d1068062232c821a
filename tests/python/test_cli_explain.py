"""python -m kda explain: what would run, and why not another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import kda
from kda.call import library as _lib
from kda.cli import explain, operators
from support import explained


@pytest.mark.parametrize("op", operators.OPERATORS)
def test_explain(op: str, cli: Callable[..., str]) -> None:
    sizes = ["--T", "7", "--H", "2", "--device", "cpu"]
    lines = cli("explain", op, *sizes).splitlines()
    assert (
        lines[0].startswith(f"{op}: B ")
        and f", T 7, H 2, K = V = 128, {operators.OPERATORS[op].example.dtype}" in lines[0]
    )
    assert explained(lines[1:-1]) == kda.implementations(op)
    assert sum(line[0] == "*" for line in lines[1:-1]) == 1
    assert re.fullmatch(r"workspace: \d+ bytes", lines[-1])
    for impl in (n for n in kda.implementations(op) if operators.device_of(n) == "cpu"):
        assert f"* {impl}: " in cli("explain", op, *sizes, "--impl", impl)


@pytest.mark.parametrize("op", operators.OPERATORS)
def test_explain_of_a_gpu_that_nobody_has(op: str, cli: Callable[..., str]) -> None:
    """A library without CUDA answers, too."""
    for device in ("h200", "a100", "b200"):
        lines = cli("explain", op, "--device", device).splitlines()
        assert lines[0].endswith(f", {device} with {explain.GPUS[device][1]} SMs")
        assert [line.split(":")[0] for line in lines[1:-1]][-1] == "- reference"
        assert len([line for line in lines if line.startswith("* cuda_")]) == 1
        assert re.fullmatch(r"workspace: \d+ bytes", lines[-1])


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
        ("segment_map", "cuda"),
        ("segment_map --impl cpu_segment", "cpu"),
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

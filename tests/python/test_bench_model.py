"""``python -m bench model``: a tiny language model on the CPU. FLA's needs a GPU."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import model
from kda.nn import KimiDeltaAttention

WORDS = ["--layers", "4", "--hidden", "48", "--heads", "2", "--head-dim", "16", "--vocab", "300", "--tokens", "70"]
WORDS += ["--batches", "1", "2", "--new-tokens", "3"]


@pytest.fixture
def options() -> argparse.Namespace:
    pytest.importorskip("transformers.models.kimi_linear")
    parser = argparse.ArgumentParser()
    model.arguments(parser)
    return parser.parse_args([*WORDS, "--repeats", "1", "--device", "cpu"])


def test_rows(options: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Both contenders have as many parameters, and a time for everything."""
    rows = [model.row_of(name, options) for name in ("transformers", "transformers, layers of kda")]
    assert rows[0]["parameters"] == rows[1]["parameters"] > 0
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(70e3 / row["step_ms"]) and "peak_gib" not in row
        assert min(row["first_s"], row["prompt_ms"], row["step_ms"]) > 0
        assert {"token_ms_of_1", "token_ms_of_2"} < row.keys()
    model.print_rows(rows, options)
    text = capsys.readouterr().out
    assert "4 layers of 48 channels" in text and "a token of 2, ms" in text and rows[0]["contender"] in text


def test_ours_computes_the_same(options: argparse.Namespace) -> None:
    theirs, ours = (model.build(name, options).eval() for name in ("transformers", "transformers, layers of kda"))
    assert any(isinstance(x, KimiDeltaAttention) for x in ours.modules())
    ids = torch.arange(3, 73)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-4)


def test_too_few_layers_are_a_sentence(options: argparse.Namespace) -> None:
    options.layers = 3
    with pytest.raises(ValueError, match=r"--layers: expected at least 4 for transformers, .* got 3"):
        model.build("transformers", options)


def test_a_contender_that_fails_leaves_a_line(bench_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == ["--work", "FLA"]
        return subprocess.CompletedProcess(command, 2, "", "python -m bench model: No module named 'fla'\n")

    monkeypatch.setattr(subprocess, "run", failed)
    text = bench_cli("model", *WORDS, "--device", "cpu", "--contender", "FLA")
    assert "no row of FLA: python -m bench model: No module named 'fla'" in text

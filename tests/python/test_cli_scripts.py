"""python -m kda for scripts: JSON, pipes that close, GPUs that are not present."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kda
from kda.call import library as _lib
from kda.cli import main
from kda.cli.explain import ARCHITECTURES, GPUS
from kda.cli.operators import OPERATORS

COMMAND = [sys.executable, "-m", "kda"]
SMALL = ["--T", "70", "--H", "1", "--K", "16", "--V", "16", "--device", "cpu"]


def output(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    return capsys.readouterr().out


def test_version() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kda {kda.__version__}\n"


# ---- JSON ----


def test_info_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    info = json.loads(output(capsys, "info", "--json"))
    assert {n: info[n] for n in kda.info()} == kda.info()
    assert info["implementations"] == {op: list(kda.implementations(op)) for op in _lib.OPERATORS}


def test_explain_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "forward", "--T", "100", "--H", "2", "--checkpoint-every", "64", "--device", "cpu"]
    text, record = output(capsys, *words), json.loads(output(capsys, *words, "--json"))
    lines = [f"{'*' if x['chosen'] else '-'} {x['name']}: {x['text']} [{x['file']}]" for x in record["implementations"]]
    assert text.splitlines()[1:-1] == lines
    assert text.splitlines()[-1] == f"workspace: {record['workspace_bytes']} bytes"
    assert record["operator"] == "forward" and record["problem"]["T"] == 100 and record["device"] == "cpu"
    refused = json.loads(output(capsys, *words, "--json", "--impl", "cpu_recurrent", status=1))
    assert refused["workspace_bytes"] is None and not any(x["chosen"] for x in refused["implementations"])


def test_check_in_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["check", "--op", "gate", "--dtype", "float32", "--impl", "cpu_gate", "reference", "--json"]
    record = json.loads(output(capsys, *words))
    assert record["version"] == kda.__version__ and len(record["results"]) > 2
    assert all(r["status"] == "ok" and r["why"] is None for r in record["results"])
    assert all(0 <= e["error"] <= e["allowed"] for r in record["results"] for e in r["errors"].values())
    entry = OPERATORS["gate"]

    def spoilt(x: dict[str, Any]) -> dict[str, Any]:
        return {name: y if os.environ["KDA_IMPL"] == "reference" else y + np.nan for name, y in entry.call(x).items()}

    monkeypatch.setitem(OPERATORS, "gate", replace(entry, call=spoilt))
    found = {r["implementation"]: r for r in json.loads(output(capsys, *words, status=1))["results"]}
    assert found["reference"]["status"] == "ok" and found["cpu_gate"]["status"] == "failed"
    assert "not finite" in found["cpu_gate"]["why"] and found["cpu_gate"]["errors"]["gate"]["error"] is None


# ---- pipes and files ----


def test_a_reader_that_goes_is_no_error() -> None:
    code = f"import sys; from kda.cli import main; sys.exit(main({['info']!r}))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


# ---- GPUs that are not present ----


@pytest.mark.parametrize("device", [*GPUS, "sm_86", "sm_103"])
def test_explain_for_a_gpu_that_is_not_here(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "forward", "--T", "8192", "--H", "64", "--device", device, "--json"]
    words += [] if device in GPUS else ["--sms", "50"]
    record = json.loads(output(capsys, *words))
    chosen = {x["name"]: x["chosen"] for x in record["implementations"]}
    hopper = device in ("h100", "h200")
    assert chosen["cuda_hopper_prefill_pairs"] == hopper and chosen["cuda_prefill_chunk"] == (not hopper)
    assert record["multiprocessors"] == (GPUS[device][1] if device in GPUS else 50)
    assert f"{record['compute_capability']:.1f}" in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3")
    assert "cpu" in output(capsys, "explain", "forward", "--device", "cpu").splitlines()[0], "and it is over"


@pytest.mark.parametrize(
    ("op", "heads", "own", "portable"),
    [
        ("forward", 64, "cuda_blackwell_prefill", "cuda_prefill_chunk"),
        ("forward", 12, "cuda_blackwell_prefill_segments", "cuda_prefill_chunk"),
        ("stage_bwd_wy_dqkg", 64, "cuda_blackwell_stages_wy_dqkg", "cuda_stages_backward"),
    ],
)
def test_blackwell_runs_what_ran_on_gpus_unless_asked(
    op: str,
    heads: int,
    own: str,
    portable: str,
    capsys: pytest.CaptureFixture[str],
    environment: Callable[[str, str | None], None],
) -> None:
    words = ["explain", op, "--T", "8192", "--H", str(heads), "--device", "b200"]
    for wanted in (None, "0", "", "1"):
        environment("KDA_BLACKWELL", wanted)
        text = output(capsys, *words)
        assert (f"* {own}: " in text) == (wanted == "1")
        assert (f"* {portable}: " in text) == (wanted != "1")
        assert "emulated, never run on a GPU" in text
    assert f"* {own}: " in output(capsys, *words, "--impl", own)


def test_few_long_sequences_run_by_segments_where_there_are_sms(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "forward", "--T", "65536", "--H", "12", "--device", "sm_90", "--sms"]
    for sms, name in ((132, "cuda_hopper_prefill_segments"), (12, "cuda_hopper_prefill_pairs")):
        assert f"* {name}: " in output(capsys, *words, str(sms)), f"{sms} SMs"


def test_training_with_k_first_states_runs_the_same_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """The forward that makes states again has a workspace of its own: another one would have another size."""
    words = ["explain", "backward", "--T", "8192", "--H", "32", "--gate", "lower_bound", "--device", "h200", "--layout"]
    v_first, k_first = (output(capsys, *words, layout).splitlines() for layout in ("V-first", "K-first"))
    assert any(line.startswith("* cuda_hopper_backward_chunk: ") for line in k_first)
    assert v_first[0] != k_first[0] and v_first[1:] == k_first[1:]


def test_gpus_that_nobody_has() -> None:
    for words, sentence in {
        ("--device", "sm_90"): "--sms: expected how many multiprocessors a GPU of sm_90 has, got none",
        ("--device", "h200", "--sms", "4"): "--sms: expected an architecture with it",
        ("--device", "sm_75"): "invalid choice: 'sm_75'",
    }.items():
        done = subprocess.run([*COMMAND, "explain", "decode", *words], capture_output=True, text=True)
        assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
    assert set(ARCHITECTURES.values()) >= {capability for capability, _ in GPUS.values()}


def test_calls_that_run_ignore_it() -> None:
    """An assumed GPU only affects explanations: calls on the CPU run as usual, in this thread, too."""
    code = """
import numpy as np, kda
from kda.call.library import library
x, beta = np.ones((1, 2, 1, 4), np.float32), np.ones((1, 2, 1), np.float32)
before = kda.decode(x, x, x, -x, beta)
library().assume_gpu(90, 132)
assert (kda.decode(x, x, x, -x, beta) == before).all()
print(kda.explain(x, x, x, -x, beta).count("* cuda"))
for arguments in ((70, 132), (90, 0)):
    try:
        library().assume_gpu(*arguments)
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.splitlines() == [
        "1",
        "capability: expected 0 or one of 80, 86, 89, 90, 100, 103, 120, got 70",
        "multiprocessors: expected at least 1, got 0",
    ], done.stderr

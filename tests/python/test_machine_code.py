"""Hashes of kernels (tools/machine_code.py), and which rows of a record they leave standing (tools/standing.py)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import standing
from machine_code import demangled, sections, without_counterpart

SOURCE = "int one(int x) {{ return x + {}; }} int two(int x) {{ return 2 * x; }}"


@pytest.fixture
def code_of(tmp_path: Path) -> Callable[[str], dict[str, bytes]]:
    def compile_(text: str) -> dict[str, bytes]:
        (tmp_path / "unit.cc").write_text(text)
        command = ["g++", "-O1", "-ffunction-sections", "-c", "unit.cc", "-o", "unit.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
        return dict(sections((tmp_path / "unit.o").read_bytes()))

    return compile_


def test_a_section_changes_with_its_instructions_alone(code_of: Callable[[str], dict[str, bytes]]) -> None:
    first, other = code_of(SOURCE.format(1)), code_of("// a comment\n" + SOURCE.format(3))
    assert first[".text._Z3onei"] != other[".text._Z3onei"]
    assert first[".text._Z3twoi"] == other[".text._Z3twoi"]


def test_names_are_demangled() -> None:
    assert demangled(["_Z3onei", "_ZN2ns3twoEv"]) == ["one(int)", "ns::two()"]


def test_a_renamed_kernel_has_a_counterpart() -> None:
    old = {"sm_90 a::f()": "1", "sm_90 g()": "2", "sm_80 g()": "3"}
    new = {"sm_90 b::f()": "1", "sm_90 g()": "4", "sm_80 g()": "3"}
    assert without_counterpart(old, new) == ["sm_90 g()"]
    assert without_counterpart({"sm_80 f()": "1"}, {"sm_90 f()": "1"}) == ["sm_80 f()"]


@pytest.mark.parametrize(
    ("what", "folder"),
    [
        ("kda prefill", "engine"),
        ("kda (cuda_hopper_prefill_pairs) prefill", "hopper_prefill"),
        ("kda (cuda_prefill_chunk,cuda_backward_chunk), nothing saved training", "backward"),
        ("kda (cuda_stages), chunks of 32 prefill_f32", "stages"),
        ("kda flush_verify (cuda_drafts_mma)", "drafts"),
        ("kda verify with conv", "conv"),
        ("kda decode (cuda_decode)", "decode"),
        ("kda layer, training", "norm"),
        ("host time of a decode step, parts", "decode"),
        ("norm_gate, one token", "norm"),
        ("gate_backward", "gate"),
        ("plug of vllm", "drafts"),
    ],
)
def test_rows_have_kernels(what: str, folder: str) -> None:
    assert folder in standing.folders_of(what)


@pytest.mark.parametrize("what", ["y = 2 x", "FLA training", "cuDNN prefill", "SGLang packed", "demonstration"])
def test_rows_of_others_have_none(what: str) -> None:
    assert standing.folders_of(what) == ()


@pytest.mark.parametrize("path", sorted(standing.RESULTS.glob("*nvidia*.json")), ids=lambda path: path.stem)
def test_every_row_of_ours_has_a_family(path: Path) -> None:
    record = json.loads(path.read_text())
    rows = [row["what"] for part in (record, *record.get("earlier", ())) for row in part.get("benchmarks", ())]
    ours = {what for what in rows if what.startswith(("kda", "plug", "host", "conv", "gate", "norm"))}
    assert not [what for what in ours if not standing.folders_of(what)]


def test_rows_stand_while_their_kernels_do() -> None:
    kernels = {
        "src/cuda/old/decode.cu": {"sm_90 f()": "1"},
        "src/cuda/decode/decode.cu": {"sm_90 f()": "1"},
        "src/cuda/drafts/mma.cu": {"sm_90 g()": "2", "sm_80 g()": "9"},
    }
    rows = [{"what": "kda decode"}, {"what": "kda verify"}, {"what": "kda verify"}, {"what": "y = 2 x"}]
    of_gpu = standing.for_architectures(kernels, {"sm_90"})
    part = {"date": "today", "source_hash": "ab" * 32, "kernels": of_gpu, "benchmarks": rows}

    first, *more = standing.of_part(part, {("sm_90", "1"), ("sm_90", "2")})
    assert "0 of 2 kernels changed; 3 of 3 rows stand" in first and "quick list" in more[0]
    first, *more = standing.of_part(part, {("sm_90", "1"), ("sm_90", "3")})
    assert "1 of 2 kernels changed; 1 of 3 rows stand" in first
    assert more == ["    to be measured again: kda verify (2 rows, 1 kernels changed)"]
    (old,) = standing.of_part({k: v for k, v in part.items() if k != "kernels"}, set())
    assert "3 rows, from before records had hashes" in old

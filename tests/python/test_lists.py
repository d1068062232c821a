"""Lists of operators that cannot come from the library, held to the library's own list.

The stages' tensors: test_stages.py. The operators of ``python -m kda check``: test_cli.py. Tables of operands:
test_tables.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kda
from kda import information, stages
from kda.arguments import Conv, Records
from kda.call.library import library
from kda.call.retry import _WRITTEN
from kda.call.shared import STAGES
from kda.cli.operators import _STAGES as RESULTS

ROOT = Path(__file__).resolve().parents[2]


# ---- pages ----


def test_the_readme_has_every_operator() -> None:
    table = (ROOT / "README.md").read_text().split("## What works where")[1].split("\n## ")[0]
    named = set(re.findall(r"`kda_(\w+)`", table)) | {f"stage_{name}" for name in STAGES if "`kda_stage_*`" in table}
    assert named == set(library().operators)


def names(cell: str) -> list[str]:
    """`a_b`, `.._c`, `.._d` are a_b, a_c and a_d. Links are their texts."""
    found: list[str] = []
    stem = ""
    for name in re.findall(r"[\w.]+", re.sub(r"\]\([^)]*\)", "", cell)):
        if not name.startswith(".."):
            stem = name.rpartition("_")[0]
        found.append(stem + name[2:] if name.startswith("..") else name)
    return found


def implementations_of_the_page() -> Iterator[tuple[str, list[str], list[str]]]:
    page = (ROOT / "docs/architecture.md").read_text().split("## Implementations")[1].split("### Names")[0]
    for operators, implementations in re.findall(r"^\| (?!operator)([^|]+) \| ([^|]+) \|$", page, re.M):
        if "in front" not in operators:  # Blackwell's, which come first or last
            cuda, cpu = map(names, implementations.split(";"))
            yield from ((op, [f"cuda_{n}" for n in cuda], [f"cpu_{n}" for n in cpu]) for op in names(operators))


def test_the_architectures_table_has_every_implementation() -> None:
    page = {op: cuda + cpu for op, cuda, cpu in implementations_of_the_page()}
    assert sorted(page) == sorted(library().operators)
    for op, listed in page.items():
        there = [name for name in kda.implementations(op) if not name.startswith(("cuda_blackwell_", "reference"))]
        built = [name for name in listed if any(x.startswith("cuda_") for x in there) or name.startswith("cpu_")]
        assert built == there, op


# ---- Python ----


def test_explained_operators_exist() -> None:
    assert set(information._EXPLAINED) <= set(library().operators)


@pytest.mark.parametrize("name", STAGES)
def test_results_of_stages(name: str) -> None:
    """The command names what a stage's function returns. It returns what the stage writes, in its own order."""
    python = {"hT": "final_state", "dh0": "d_initial_state"}
    written = [python.get(o.name, o.name) for o in library().operands(f"stage_{name}") if o.role != "in"]
    assert sorted(RESULTS[name].split()) == sorted(written)
    assert set(RESULTS) == set(STAGES)


# The operator behind each function that writes to arguments, and Python's names of what it writes.
POOLS = {"o": "out", "hT": "state"}
WRITING = {
    "prefill": ("forward", POOLS),
    "decode": ("decode", POOLS),
    "fused_decode": ("decode", POOLS | {"conv.state": "conv_state"}),
    "decode_mtp": ("decode", POOLS),
    "verify_kvbuffer": ("verify", {"o": "out", "hT": ""}),
    "flush_kvbuffer": ("flush", {}),
    "flush_verify_kvbuffer": ("flush_verify", POOLS),
    "causal_conv1d_update": ("conv", {"y": "out", "final_state": "state"}),
    "norm_gate": ("norm_gate", {"y": "out"}),
    "prefill_f32": ("prefill_f32", {"hT": "final_state"}),
    "bwd_intra": ("stage_bwd_intra", {}),
}


@pytest.mark.parametrize("function", WRITING)
def test_what_functions_write(function: str) -> None:
    """A retry with views makes none of what the call writes."""
    op, python = WRITING[function]
    parameters = set(inspect.signature(getattr(stages if op.startswith("stage_") else kda, function)).parameters)
    if "conv" in parameters:
        parameters |= {f"conv.{field}" for field in Conv._fields}
    parameters |= {f"records.{field}" for field in Records._fields if "records" in parameters}
    written = {python.get(o.name, o.name) for o in library().operands(op) if o.role != "in"}
    assert _WRITTEN[function] - {"workspace"} == written & parameters
    assert set(WRITING) == set(_WRITTEN)

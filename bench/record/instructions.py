"""Validates the emulator's instructions: random inputs of every wrapper of src/cuda/ptx, here on the GPU and there in
the emulator (tests/gpu/ptx_table.cc, built for both).

    python bench/record/instructions.py build/release/tests/emulator/ptx_table_emulated     # without a GPU

The latter holds the emulator to itself, in other orders of warps: it tests the program and the comparison.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ON_GPU, EMULATED = "tests/gpu/ptx_table", "tests/emulator/ptx_table_emulated"  # in a built tree
SEEDS = (1, 2, 3)
Row = dict[str, Any]


def f32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def error(kind: str, got: int, expected: int) -> float:
    """How far two numbers are apart: of sums plainly, else as a part of the expected one. 0 for the same bits."""
    if got == expected:
        return 0.0
    if kind == "exact":
        return math.inf
    a, b = f32(got), f32(expected)
    if (math.isnan(a) and math.isnan(b)) or a == b:
        return 0.0
    apart = abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
    return apart if kind == "sum" else apart / abs(b) if b else math.inf


def compare(gpu: Sequence[Row], emulated: Sequence[Row]) -> list[Row]:
    """A row for each instruction: how many numbers, how many differ in a bit, the largest error and its limit."""
    if [row["instruction"] for row in gpu] != [row["instruction"] for row in emulated]:
        raise ValueError("the two programs are not of one source")
    rows: list[Row] = []
    for a, b in zip(gpu, emulated, strict=True):
        row: Row = {"instruction": a["instruction"], "needs": a["needs"], "kind": a["kind"], "limit": a["limit"]}
        if "bits" in a and "bits" in b:
            if len(a["bits"]) != len(b["bits"]) or not a["bits"]:
                raise ValueError(f"{a['instruction']}: {len(a['bits'])} and {len(b['bits'])} numbers")
            errors = [error(a["kind"], x, y) for x, y in zip(a["bits"], b["bits"], strict=True)]
            different = sum(x != y for x, y in zip(a["bits"], b["bits"], strict=True))
            row |= {"numbers": len(errors), "different": different, "error": max(errors)}
            row["agrees"] = row["error"] <= a["limit"]
        rows.append(row)
    return rows


def joined(tables: Sequence[list[Row]]) -> list[Row]:
    """The tables of several seeds as one."""
    rows = [dict(row) for row in tables[0]]
    for other in tables[1:]:
        for row, more in zip(rows, other, strict=True):
            if "agrees" in row:
                row |= {key: row[key] + more[key] for key in ("numbers", "different")}
                row |= {"error": max(row["error"], more["error"]), "agrees": row["agrees"] and more["agrees"]}
    return rows


def table_of(program: Path, seed: int, **environment: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.jsonl"
        subprocess.run([str(program), str(file), str(seed)], check=True, env={**os.environ, **environment})
        return [json.loads(line) for line in file.read_text().splitlines()]


def validate(build: Path, capability: int) -> Row:
    """Runs both programs of a built tree, and returns the entry of the record."""
    arch = {"KDA_EMULATOR_ARCH": str(capability)}
    try:
        rows = joined(
            [compare(table_of(build / ON_GPU, seed), table_of(build / EMULATED, seed, **arch)) for seed in SEEDS]
        )
    except (OSError, ValueError, subprocess.CalledProcessError) as e:
        print("instructions:", e, flush=True)
        return {"ran": 0, "failed": 1, "exit": 1}
    measured = [row for row in rows if "agrees" in row]
    wrong = [row["instruction"] for row in measured if not row["agrees"]]
    for name in wrong:
        print("instructions: the emulator differs from the GPU in", name, flush=True)
    finite = [{k: v if v != math.inf else "bits" for k, v in row.items()} for row in rows]
    return {"ran": len(measured), "failed": len(wrong), "exit": int(bool(wrong) or not measured), "rows": finite}


def main() -> int:
    program = Path(sys.argv[1])
    wrong = 0
    for arch in ("80", "90", "100"):
        sides = [
            table_of(program, 1, KDA_EMULATOR_ARCH=arch, KDA_EMULATOR_SEED=order, KDA_TEST_EXACT_MEMORY="1")
            for order in ("1", "2")
        ]
        rows = compare(*sides)
        measured = [row for row in rows if "agrees" in row]
        different = [row["instruction"] for row in measured if row["different"]]
        print(
            f"sm_{arch}: {len(measured)} of {len(rows)} instructions, {len(different)} depend on the order", different
        )
        wrong += len(different) + (not measured)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The machine code of kernels for Blackwell, which no GPU has run: what the compiler says of it, and what is in it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from early_accesses import disassembly
from machine_code import find

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/release"
NO_DISASSEMBLER = "cuobjdump or nvdisasm not found: tools/setup.sh test installs them"


@dataclass
class Unit:
    """A file, how many kernels it has, and what is in their machine code: so often, or at least so often."""

    file: str
    kernels: int
    counts: dict[str, int]
    least: dict[str, int]


UNITS = (
    # bf16 and f16, each with a gate of 16 bits and in f32. Three steps of a chunk: 8, 2 and 4 products of 16 numbers,
    # each step with a commit.
    Unit(
        "engine/blackwell_prefill.cu",
        kernels=4,
        counts={"UTCHMMA": 4 * 14, "UTCBAR": 4 * 3},
        least={"LDTM": 4 * 4, "STTM": 4 * 4, "UTMALDG": 1, "UTMASTG": 1, "HMMA": 1},
    ),
    # The same four. Steps of a chunk for b and for M, 8, 2 and 2 products, of one with outputs, 8, 2 and 4, and 24 that
    # apply a map; a commit each.
    Unit(
        "engine/blackwell_prefill_segments.cu",
        kernels=4,
        counts={"UTCHMMA": 4 * (12 + 12 + 14 + 24), "UTCBAR": 4 * (3 + 3 + 3 + 1)},
        least={"LDTM": 4 * 11, "STTM": 4 * 10, "UTMALDG": 1, "UBLKCP": 1, "UTMASTG": 1, "HMMA": 1},
    ),
    # V-first and K-first, each with K of 128 and 64. Of w S 8 or 4 products, of kg^T v_new 4, with a commit each.
    Unit(
        "blackwell_stages/delta_h.cu",
        kernels=4,
        counts={"UTCHMMA": 2 * 12 + 2 * 8, "UTCBAR": 4 * 2, "HMMA": 0},
        least={"LDTM": 4 * 2, "STTM": 4, "UTMALDG": 4 * 3, "UBLKCP": 4, "UTMASTG": 4, "STSM": 4},
    ),
    # The same with 4 products more, of qG^T d_o.
    Unit(
        "blackwell_stages/bwd_delta_h.cu",
        kernels=4,
        counts={"UTCHMMA": 2 * 16 + 2 * 12, "UTCBAR": 4 * 2, "HMMA": 0},
        least={"LDTM": 4 * 2, "STTM": 4, "UTMALDG": 4 * 5, "UBLKCP": 4, "UTMASTG": 4, "STSM": 4},
    ),
    # A loop over the channels of q E and S, 4 products of Aqk v_new, and one commit.
    Unit(
        "blackwell_stages/fwd_o.cu",
        kernels=1,
        counts={"UTCBAR": 1, "HMMA": 0},
        least={"UTCHMMA": 5, "LDTM": 1, "UTMALDG": 5, "STSM": 1},
    ),
    # V-first and K-first. x twice 4 products, three with states and two with x 8 each; commits behind x and behind all.
    # Nine tensors come by TMA, each as two boxes, the gates as four.
    Unit(
        "blackwell_stages/wy_dqkg.cu",
        kernels=2,
        counts={"UTCHMMA": 2 * 48, "UTCBAR": 2 * 2, "HMMA": 0},
        least={"LDTM": 2 * 12, "UTMALDG": 2 * 20, "UTCATOMSWS": 2 * 2},
    ),
)


@dataclass
class Compiled:
    """The kernels of a unit for sm_100a, and what the compiler has said."""

    unit: Unit
    code: Path
    said: str


def command_of(file: str) -> list[str]:
    """How `make build` compiles a file: ccache has what it made, and what the compiler said, by the same options."""
    output = f"CMakeFiles/kda_cuda_blackwell.dir/src/cuda/{file}.o"
    if not (BUILD / output).exists():
        pytest.skip("built without CUDA")
    commands = ["cmake", "--build", str(BUILD), "--", "-t", "commands", output]
    lines = subprocess.run(commands, capture_output=True, text=True, check=True).stdout.splitlines()
    return shlex.split(lines[-1])


@pytest.fixture(scope="module", params=UNITS, ids=lambda unit: Path(unit.file).stem)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    unit: Unit = request.param
    command = command_of(unit.file)
    code = tmp_path_factory.mktemp("blackwell") / "unit.o"
    command[command.index("-o") + 1] = str(code)
    command[command.index("-MF") + 1] = str(code.with_suffix(".d"))
    done = subprocess.run(command, cwd=BUILD, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Compiled(unit, code, done.stdout + done.stderr)


def test_ptxas_neither_spills_nor_warns(compiled: Compiled) -> None:
    said = compiled.said
    assert "warning" not in said.lower() and not re.search(r"\(C\d+\)", said), said
    cuobjdump = find("cuobjdump")
    if not cuobjdump:
        pytest.skip(NO_DISASSEMBLER)
    used = subprocess.run([cuobjdump, "-res-usage", compiled.code], capture_output=True, text=True, check=True).stdout
    local = re.findall(r"REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", used)
    assert local == [("0", "0")] * compiled.unit.kernels, used


def test_products_are_those_of_tensor_memory(compiled: Compiled) -> None:
    if not find("cuobjdump") or not find("nvdisasm"):
        pytest.skip(NO_DISASSEMBLER)
    kernels = disassembly(compiled.code)
    count = Counter(kernel.instruction(place).name.split(".")[0] for kernel in kernels for place in kernel.lines)
    assert {name: count[name] for name in compiled.unit.counts} == compiled.unit.counts, count
    assert not [name for name, least in compiled.unit.least.items() if count[name] < least], count
    assert not count["LDL"] and not count["STL"], "nothing is in local memory"

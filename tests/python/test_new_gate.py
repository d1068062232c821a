"""Another form of the gate does not compile until every place that computes gates has it, and these are few files."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATABASE = ROOT / "build/release/compile_commands.json"

# Where a form is looked at, each with a unit that reads it. kda.h has its number.
PLACES = {
    "include/kda/kda.h": "",
    "src/contract/gate_form.h": "src/contract/rules.cc",
    "src/reference/math.h": "src/reference/forward.cc",
    "src/cpu/simd-inl.h": "src/cpu/gate.cc",
    "src/cuda/gate/gate.h": "src/cuda/gate/gate.cu",
    "src/cuda/call/token.h": "src/cuda/decode/snapshots.cu",
}


def with_another_form(root: Path) -> None:
    """Copies the sources, with a fourth form that nobody computes."""
    for folder in ("include", "src", "tests/emulator", "tests/one_isa"):
        shutil.copytree(ROOT / folder, root / folder)
    header, forms = root / "include/kda/kda.h", root / "src/contract/gate_form.h"
    number = re.compile(r"(KDA_GATE_LOWER_BOUND = 2) ")
    header.write_text(number.sub(r"\1, KDA_GATE_ANOTHER = 3 ", header.read_text()))
    text = forms.read_text()
    last = "  kLowerBound = KDA_GATE_LOWER_BOUND,\n"
    assert last in text and "kLastGateForm = KDA_GATE_LOWER_BOUND" in text
    text = text.replace(last, last + "  kAnother = KDA_GATE_ANOTHER,\n")
    forms.write_text(text.replace("kLastGateForm = KDA_GATE_LOWER_BOUND", "kLastGateForm = KDA_GATE_ANOTHER"))


def errors_of(unit: str, root: Path) -> set[str]:
    """The files of which g++ says that they are wrong. CUDA files are read as the emulator compiles them."""
    commands = (
        shlex.split(entry["command"]) for entry in json.loads(DATABASE.read_text()) if entry["file"] == str(ROOT / unit)
    )
    command = next(c for c in commands if "g++" in c[0] or "g++" in c[1])
    command = [word.replace(str(ROOT), str(root)) for word in command if word != "-c"]
    command[command.index("-o") + 1] = "/dev/null"
    said = subprocess.run([*command, "-fsyntax-only", "-Werror=switch"], capture_output=True, text=True, cwd=root)
    assert said.returncode, f"{unit} compiles although a form is missing"
    return {str(Path(file).relative_to(root)) for file in re.findall(r"^(\S+?):\d+:\d+: error", said.stderr, re.M)}


@pytest.mark.skipif(not DATABASE.exists(), reason="nothing was built here")
def test_a_form_that_nobody_computes_does_not_compile(tmp_path: Path) -> None:
    with_another_form(tmp_path)
    units = [unit for unit in PLACES.values() if unit]
    with ThreadPoolExecutor() as pool:
        found = dict(zip(units, pool.map(lambda unit: errors_of(unit, tmp_path), units), strict=True))
    for file, unit in PLACES.items():
        assert not unit or file in found[unit], f"{file} takes another form for one that it knows"
    assert set().union(*found.values()) <= PLACES.keys()
    assert len(PLACES) <= 6


def test_no_other_file_looks_at_the_form() -> None:
    """A table gives its range, and one operator always has the logarithm."""
    others = {"src/contract/tables.h", "src/cpu/prefill_f32.cc"}
    files = (path for suffix in ("h", "cc", "cu") for path in (ROOT / "src").rglob(f"*.{suffix}"))
    found = {str(path.relative_to(ROOT)) for path in files if re.search(r"KDA_GATE_|GateForm::", path.read_text())}
    assert found - PLACES.keys() == others

"""The examples in the documents run, links lead somewhere, and records belong to this source."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import warnings
from pathlib import Path

import pytest

import kda
from benches import rows
from kda.cli import check, main, operators
from source_hash import source_hash

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "HACKING.md", "python/README.md")
DOCUMENTS = [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in DOCUMENTS
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S))
]

COMMANDS = [
    pytest.param(*command, id=command[0], marks=pytest.mark.slow if command[0] == "check" else ())
    for path in DOCUMENTS
    for block in re.findall(r"^```console\n(.*?)^```", path.read_text(), re.M | re.S)
    for command in re.findall(r"^\$ python -m kda (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
    assert "check" in [command.values[0] for command in COMMANDS]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str) -> None:
    exec(compile(code, "<example>", "exec"), {})


def expect_all_checked(text: str) -> None:
    """Output of ``python -m kda check``: every implementation of every operator is in it, and right if it ran."""
    table = rows(text)
    ran = {(op, impl) for op, impl, _, cases, *_ in table if int(cases)}
    expected = {(op, impl) for op in operators.OPERATORS for impl in kda.implementations(op)}
    assert {(r[0], r[1]) for r in table} == expected
    assert expected - ran <= {x for x in expected if operators.device_of(x[1]) == "cuda"}
    for op, impl, dtype, cases, worst, error, allowed, verdict in table:
        if (op, impl) in ran:
            assert dtype in operators.OPERATORS[op].dtypes and int(cases) >= 1 and verdict == "ok"
            assert worst in operators.OPERATORS[op].allowed and float(error) <= float(allowed)
        else:
            assert verdict == "skipped: no CUDA device that torch finds"
    total = sum(int(r[3]) for r in table)
    assert re.search(rf"^kda {kda.__version__}, .*: {total} of {total} cases ok, \d+ skipped$", text, re.M)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("words", "output"), COMMANDS)
def test_command_prints_this(
    words: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is this text, with ``...`` for anything; numbers may differ."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "LAYOUTS", check.LAYOUTS[:1])  # a third of the cases, with every operator and dtype
    monkeypatch.setattr(check, "GATES", check.GATES[:2])
    assert main(shlex.split(words)) == 0
    printed, errors = capsys.readouterr()
    plain = [re.sub(r"-{2,}", "--", re.sub(r"\d[\d.]*(e[+-]\d+)?", "0", text)) for text in (output, printed)]
    checker = doctest.OutputChecker()
    assert checker.check_output(*plain, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), printed
    if words == "check":  # takes long, so all that is to be seen in it is looked for here
        expect_all_checked(printed + errors)
    assert "Traceback" not in errors and "KDA_IMPL" not in os.environ


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


@pytest.mark.parametrize("record", sorted((ROOT / "docs/results").glob("*.json")), ids=lambda p: p.stem)
def test_record_belongs_to_this_source(record: Path) -> None:
    stored = json.loads(record.read_text())["source_hash"]
    assert re.fullmatch(r"[0-9a-f]{64}", stored)
    if stored != source_hash(ROOT, cuda=not record.name.startswith("cpu")):
        warnings.warn(f"{record.name} was measured on another version of include/ and src/", stacklevel=1)


def test_the_version_is_written_once() -> None:
    """The version is in kda.h. The package, pyproject.toml and CMake read it from there."""
    import kda

    header = (ROOT / "include/kda/kda.h").read_text()
    numbers = [re.search(rf"KDA_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(m.group(1) for m in numbers if m)
    assert kda.__version__ == kda.info()["version"] == version
    sources = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *(ROOT / "python/kda").glob("*.py")]
    assert [p.name for p in sources if f'"{version}"' in p.read_text() or f"VERSION {version}" in p.read_text()] == []
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()

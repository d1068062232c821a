"""Prints options of compilers and linkers for C and C++ programs that use the library, and where find_package(kda)
looks. If a path has a space, options are quoted for the shell: eval cc program.c "$(python -m kda config ..)"."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from .._version import include_directory
from ..call.library import library_file

# The folder in the wheel; programs that use a build tree or `cmake --install` do not need this command.
_CMAKE = "lib/cmake/kda"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m kda config [--cflags] [--libs] [--cmakedir]"
    parser.add_argument("--cflags", action="store_true", help="where the header is: -I...")
    parser.add_argument("--libs", action="store_true", help="the library, and for programs where it is")
    parser.add_argument("--cmakedir", action="store_true", help="for cmake -Dkda_DIR=...: kdaConfig.cmake is there")


def run(options: argparse.Namespace) -> int:
    words = []
    if options.cflags:
        words.append(f"-I{include_directory()}")
    if options.libs:
        library = library_file()
        words += [str(library), f"-Wl,-rpath,{library.parent}"]
    if options.cmakedir:
        words.append(str(_cmake_directory()))
    if not words:
        raise ValueError("expected some of --cflags, --libs, --cmakedir, got none")
    # Options are words of a command line. A folder alone is what people put between quotes or append to.
    print(words[0] if options.cmakedir and len(words) == 1 else shlex.join(words))
    return 0


def _cmake_directory() -> Path:
    folder = library_file().parent / _CMAKE
    if not (folder / "kdaConfig.cmake").is_file():
        raise ValueError(f"--cmakedir: expected an installed wheel, got the build tree {library_file().parent}")
    return folder

"""The command ``python -m bench``: one of COMMANDS, or operators to measure."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from bench import ROOT

# A module has arguments(parser) and run(options), which returns the exit status.
COMMANDS = {
    "plugs": ("bench.plugs", "engines (FLA, SGLang, vLLM) beside kda through the engines' own interfaces"),
    "model": ("bench.model", "a whole language model: training, a prompt and generated tokens"),
    "forward_stages": ("bench.forward_stages", "the stages of the forward and prefill_f32 on a GPU"),
    "cp": ("bench.cp", "one sequence on one device and on several"),
    "cpu": ("bench.cpu", "the CPU figures of the README"),
    "record": ("bench.record.command", "all tests, sanitizers and timings of a GPU, into its record"),
    "tables": ("bench.tables.command", "the tables of pages, from the records and the library"),
    "compare": ("bench.compare", "builds of the library against each other on a GPU"),
}
OF_THIS_TREE = ("record", "compare")  # they name a built library, and the package beside it is this tree's


def use_this_tree(words: Sequence[str]) -> None:
    """For this process, the package is this tree's where the command or the environment names a built library."""
    if (words and words[0] in OF_THIS_TREE) or os.environ.get("KDA_LIBRARY_DIR"):
        sys.path.insert(0, str(ROOT / "python"))


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words and words[0] in COMMANDS else ""
    from kda.cli import set_threads, status_of

    set_threads(words)

    module = importlib.import_module(COMMANDS[name][0] if name else "bench.run")
    prog = f"python -m bench {name}".rstrip()
    about = (
        "\n".join(["", "commands:", *(f"  {n:<14} {what}" for n, (_, what) in COMMANDS.items())]) if not name else ""
    )
    parser = argparse.ArgumentParser(
        prog=prog, description=module.__doc__, epilog=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.arguments(parser)
    options = parser.parse_args(words[1:] if name else words)
    options.words = words  # for records
    return status_of(prog, lambda: module.run(options))

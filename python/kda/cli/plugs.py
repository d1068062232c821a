"""Tells which engines are installed, which of them run on our kernels after the adapter of each has been imported, and
why the others do not. See docs/plugs.md."""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from dataclasses import asdict

from ..plugs import engines


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 1 if an engine that is installed was refused."""
    found = [try_out(engine) for engine in engines.ENGINES]
    if options.json:
        print(json.dumps([asdict(plug) for plug in found], indent=2))
    else:
        for plug in found:
            version = f" {plug.version}" if plug.version else ""
            print(f"{plug.engine}{version}: {plug.state}")
            for line in plug.reasons:
                print(f"  {line}")
            for path in plug.takes:
                print(f"  takes {path}")
    return int(any(plug.state == "refused" for plug in found))


def try_out(engine: str) -> engines.Plug:
    """Imports the adapter, as a user would, unless the engine is not installed."""
    if engines.installed(engine) is None:
        return engines.Plug(engine, None, "not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the refusal, which is printed
        return importlib.import_module(engines.ENGINES[engine].adapter).plug()

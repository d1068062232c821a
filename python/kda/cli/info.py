"""Shows version, CPU instruction set, CUDA, and the implementations of each operator in order of preference."""

from __future__ import annotations

import argparse
import json

import kda

from ..call.library import OPERATORS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts, on standard output")


def run(options: argparse.Namespace) -> int:
    if options.json:
        operators = {op: kda.implementations(op) for op in OPERATORS}
        print(json.dumps({**kda.info(), "implementations": operators}, indent=2))
        return 0
    lines = {**kda.info()} | {op: ", ".join(kda.implementations(op)) for op in OPERATORS}
    width = max(map(len, lines))
    for key, value in lines.items():
        print(f"{key:<{width}}  {value}")
    return 0

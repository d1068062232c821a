"""Version, CPU instruction set, CUDA, and the implementations of each operator in order of preference."""

from __future__ import annotations

import argparse

import kda
from kda._lib import _OPERATORS


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    lines = {**kda.info()} | {op: ", ".join(kda.implementations(op)) for op in _OPERATORS}
    width = max(map(len, lines))
    for key, value in lines.items():
        print(f"{key:<{width}}  {value}")
    return 0

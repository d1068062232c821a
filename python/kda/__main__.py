"""``python -m kda info``: what is installed and what it finds on this machine."""

from __future__ import annotations

import argparse

import kda


def info() -> None:
    lines = {**kda.info()}
    for op in ("forward", "backward", "decode", "gate", "gate_backward"):
        lines[op] = ", ".join(kda.implementations(op))
    width = max(map(len, lines))
    for key, value in lines.items():
        print(f"{key:<{width}}  {value}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kda", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("info", help="version, CPU instruction set, CUDA, implementations").set_defaults(run=info)
    parser.parse_args().run()


if __name__ == "__main__":
    main()

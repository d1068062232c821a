"""Which implementation of an operator would run a call of these sizes and options, and why not the others: one line
each, `*` before the chosen one. Nothing is computed. Exit status 1 if none takes the call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kda import _lib

from .arrays import Source, torch
from .operators import OPERATORS, forced, known
from .problems import given_sizes, natural, size_arguments, whole


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m kda explain OPERATOR [options]"
    parser.add_argument("op", choices=OPERATORS, metavar="OPERATOR", help=f"one of {', '.join(OPERATORS)}")
    size_arguments(parser)
    parser.add_argument(
        "--lengths",
        type=whole,
        nargs="+",
        metavar="T",
        default=argparse.SUPPRESS,
        help="of sequences packed into a row",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=natural,
        metavar="TOKENS",
        default=argparse.SUPPRESS,
        help="forward: copies of the state",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--impl", metavar="NAME", help="force an implementation, see `python -m kda info`")


def run(options: argparse.Namespace) -> int:
    entry = OPERATORS[options.op]
    if entry.needs_torch and torch is None:
        raise ImportError(f"{options.op} needs torch, which is not installed")
    known(options.impl, [options.op])
    given = given_sizes(options)
    if torch is None:
        given.setdefault("dtype", "float32")  # NumPy has no bfloat16
    if "lengths" in given:
        given["lengths"] = tuple(given["lengths"])
    problem = replace(entry.example, **({"HV": 0} if "H" in given else {}) | given)
    found: dict[str, tuple[str, int | None]] = {}
    with forced(options.impl), explaining(found):
        entry.call(entry.make(problem, Source(options.device, seed=None)))
    text, workspace = found[options.op]
    print(f"{options.op}: {problem.sizes}, {problem.options}, {options.device}")
    print(text.rstrip())
    if workspace is not None:
        print(f"workspace: {workspace} bytes")
    return 0 if workspace is not None else 1


@contextmanager
def explaining(found: dict[str, tuple[str, int | None]]) -> Iterator[None]:
    """Inside, calls of the library run nothing and leave here what it says about them: each operator, its ``_explain``
    and its ``_workspace`` take the same arguments."""
    real = _lib.library()

    class Explaining:
        def __getattr__(self, op: str) -> Callable[..., None]:
            def explain(*arguments: Any) -> None:
                try:
                    workspace = getattr(real, f"{op}_workspace")(*arguments)
                except NotImplementedError:
                    workspace = None
                found[op] = (getattr(real, f"{op}_explain")(*arguments), workspace)

            return explain

    _lib._library = Explaining()  # type: ignore[assignment]
    try:
        yield
    finally:
        _lib._library = real

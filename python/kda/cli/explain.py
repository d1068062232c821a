"""Which implementation of an operator would run a call of these sizes and options, and why not the others: one line
each, `*` before the chosen one. Nothing is computed. Exit status 1 if none takes the call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import kda
from kda import _lib

from .arrays import Source, cuda_device, torch
from .operators import OPERATORS, device_of, forced, known
from .problems import DRAFTS, given_sizes, natural, size_arguments, whole


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
    parser.add_argument(
        "--drafts",
        choices=DRAFTS,
        default=argparse.SUPPRESS,
        help="verify, flush, flush_verify: a chain (by default), a tree, or a ring of records;"
        " decode: snapshots of the state after each token",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="as after kda.use_batch_invariant()")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one that OPERATOR runs on")
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
    kinds = [kind for kind in DRAFTS if kind in {"chain", *(p.drafts for p in entry.checked)}]
    if given.get("drafts", "chain") not in kinds:
        raise ValueError(f"--drafts: expected {' or '.join(kinds)} for {options.op}, got {given['drafts']}")
    problem = replace(entry.example, **({"HV": 0} if "H" in given else {}) | given)
    device = options.device or _best_device(options.op, options.impl)
    found: dict[str, tuple[str, int | None]] = {}
    with batch_invariant(options.batch_invariant), forced(options.impl), explaining(found):
        entry.call(entry.make(problem, Source(device, seed=None)))
    text, workspace = found[options.op]
    invariant = ", batch invariant" if options.batch_invariant else ""
    print(f"{options.op}: {problem.sizes}, {problem.options}, {device}{invariant}")
    print(text.rstrip())
    if workspace is not None:
        print(f"workspace: {workspace} bytes")
    return 0 if workspace is not None else 1


def _best_device(op: str, impl: str | None) -> str:
    """A user of a GPU asks about the GPU, unless nothing that is asked about runs there."""
    names = kda.implementations(op) if impl is None else [impl]
    return "cuda" if cuda_device() and any(device_of(name) == "cuda" for name in names) else "cpu"


@contextmanager
def batch_invariant(enabled: bool) -> Iterator[None]:
    """Inside, calls ask for bits that depend on nothing else; not enabled, it changes nothing."""
    before = enabled and kda.use_batch_invariant()
    try:
        yield
    finally:
        if enabled:
            kda.use_batch_invariant(before)


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

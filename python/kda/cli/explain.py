"""Shows which implementation of an operator would run a call of these sizes and options, and why not the others: one
line each, `*` before the chosen one, and in brackets the file where its code begins. Nothing is computed. The exit
status is 1 if none takes the call."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import kda

from ..call import library
from ..call.library import batch_invariant
from .arrays import Source, cuda_device, torch
from .operators import OPERATORS, device_of, forced, known
from .problems import DRAFTS, given_sizes, natural, size_arguments, whole

# Compute capability (times ten) and multiprocessors, from the vendors' data sheets.
GPUS = {"a100": (80, 108), "rtx4090": (89, 128), "h100": (90, 132), "h200": (90, 132), "b200": (100, 148)}
ARCHITECTURES = {f"sm_{capability}": capability for capability in (80, 86, 89, 90, 100, 103, 120)}


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
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", *GPUS, *ARCHITECTURES),
        metavar="DEVICE",
        help="cpu, cuda (where there is one that OPERATOR runs on), or a GPU that need not be here: "
        + ", ".join((*GPUS, *ARCHITECTURES)),
    )
    parser.add_argument("--sms", type=natural, metavar="N", help="multiprocessors of a GPU named by its architecture")
    parser.add_argument("--json", action="store_true", help="for scripts, on standard output")
    parser.add_argument("--impl", metavar="NAME,..", help="force implementations, see `python -m kda info`")


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
    if "checkpoint_every" in given and options.op != "forward":
        raise ValueError(f"--checkpoint-every: expected forward, which keeps copies of states, got {options.op}")
    kinds = [kind for kind in DRAFTS if kind in {"chain", *(p.drafts for p in entry.checked)}]
    if given.get("drafts", "chain") not in kinds:
        raise ValueError(f"--drafts: expected {' or '.join(kinds)} for {options.op}, got {given['drafts']}")
    problem = replace(entry.example, **({"HV": 0} if "H" in given else {}) | given)
    device = options.device or _best_device(options.op, options.impl)
    gpu = _gpu(device, options.sms)
    found: dict[str, tuple[str, int | None]] = {}
    same_bits = batch_invariant() if options.batch_invariant else nullcontext()
    with assuming(gpu), same_bits, forced(options.impl), explaining(found):
        entry.call(entry.make(problem, Source("cpu" if gpu else device, seed=None)))
    text, workspace = found[options.op]
    if options.json:
        what = {"operator": options.op, "problem": asdict(problem), "device": device}
        if gpu:
            what |= {"compute_capability": gpu[0] / 10, "multiprocessors": gpu[1]}
        what |= {"batch_invariant": options.batch_invariant, "implementations": _implementations(text)}
        print(json.dumps(what | {"workspace_bytes": workspace}, indent=2))
    else:
        sms = f" with {gpu[1]} SMs" if gpu else ""
        invariant = ", batch invariant" if options.batch_invariant else ""
        print(f"{options.op}: {problem.sizes}, {problem.options}, {device}{sms}{invariant}")
        print(text.rstrip())
        if workspace is not None:
            print(f"workspace: {workspace} bytes")
    return 0 if workspace is not None else 1


def _gpu(device: str, sms: int | None) -> tuple[int, int] | None:
    """Compute capability (times ten) and SMs of a GPU, which need not be present."""
    if device in ARCHITECTURES:
        if sms is None:
            raise ValueError(f"--sms: expected how many multiprocessors a GPU of {device} has, got none")
        return ARCHITECTURES[device], sms
    if sms is not None:
        raise ValueError(f"--sms: expected an architecture with it ({', '.join(ARCHITECTURES)}), got {device}")
    return GPUS.get(device)


def _implementations(text: str) -> list[dict[str, Any]]:
    """Parses the lines with which the library explains a call."""
    found = []
    for line in text.splitlines():
        name, _, reason = line[2:].removesuffix("]").partition(": ")
        reason, _, file = reason.rpartition(" [")
        found.append({"name": name, "chosen": line[0] == "*", "text": reason, "file": file})
    return found


def _best_device(op: str, impl: str | None) -> str:
    """The GPU if there is one, unless nothing that is asked about runs there."""
    names = kda.implementations(op) if impl is None else impl.split(",")
    return "cuda" if cuda_device() and any(device_of(name) == "cuda" for name in names) else "cpu"


@contextmanager
def assuming(gpu: tuple[int, int] | None) -> Iterator[None]:
    """Inside, the library explains calls on CPU arrays as if they were made on this GPU."""
    if gpu:
        library.library().assume_gpu(*gpu)
    try:
        yield
    finally:
        if gpu:
            library.library().assume_gpu(0, 0)


@contextmanager
def explaining(found: dict[str, tuple[str, int | None]]) -> Iterator[None]:
    """Inside, calls of the library run nothing and store in ``found`` what it says about them: an operator's
    ``_explain`` and ``_workspace`` take the same operands as the operator."""
    real = library.library()

    class Explaining:
        def __getattr__(self, op: str) -> Callable[..., None]:
            def explain(*tensors: Any, **operands: Any) -> None:
                try:
                    workspace = getattr(real, f"{op}_workspace")(*tensors, **operands)
                except NotImplementedError:
                    workspace = None
                found[op] = (getattr(real, f"{op}_explain")(*tensors, **operands), workspace)

            return explain

    library._library = Explaining()  # type: ignore[assignment]
    try:
        yield
    finally:
        library._library = real

"""Triton's kernels come in variants. The first call of such a kernel compiles each of them and times it, one after the
other: FLA's training step has 200, which takes three minutes. Here they are compiled all at once."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

LONGEST = 300  # seconds of a child


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """Within it, Triton's variants of a kernel are compiled by a process for each core, before Triton times the first.
    It then finds them in its cache. Which variants there are, how they are timed and which one is taken stays Triton's
    business."""
    triton: Any = sys.modules.get("triton")
    if triton is None or not hasattr(os, "fork"):  # no contender has imported it, so none is tuned
        yield
        return
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    active = importlib.import_module("triton.runtime.driver").driver.active
    prune = autotuner.prune_configs

    def compile_all(kernel: Any, given: dict[str, Any]) -> Any:
        """Called with the arguments of a first call, for the variants that are to be timed."""
        variants = prune(kernel, given)
        if len(variants) > 1:
            _compile(kernel, given, variants, active)
        return variants

    autotuner.prune_configs = compile_all
    try:
        yield
    finally:
        autotuner.prune_configs = prune


def _compile(kernel: Any, given: dict[str, Any], variants: Sequence[Any], active: Any) -> None:
    """Threads would wait for each other: half of a compilation is Python. A variant that does not compile is left to
    Triton, which finds out again."""
    cores = min(len(os.sched_getaffinity(0)), len(variants))
    device, target = active.get_current_device(), active.get_current_target()
    children = []
    for i in range(cores):
        if child := os.fork():
            children.append(child)
            continue
        try:  # in a child, in which CUDA may not be called
            signal.alarm(LONGEST)
            active.get_current_device = lambda: device
            active.get_current_target = lambda: target
            active.get_current_stream = lambda device: 0
            for variant in variants[i::cores]:
                with suppress(Exception):
                    kernel.fn.run(*kernel.nargs.values(), **given | {"warmup": True}, **variant.all_kwargs())
        finally:
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)

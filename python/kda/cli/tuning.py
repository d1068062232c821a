"""Triton's kernels come in variants. The first call of such a kernel compiles each of them and times it, one after the
other: FLA's training step has 200, which takes three minutes. Here they are compiled all at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """Within it, Triton compiles the variants of a kernel on all cores, before it times the first. It then finds them
    in its cache. Which variants there are, how they are timed and which one is taken stays Triton's business."""
    triton: Any = sys.modules.get("triton")
    if triton is None:  # no contender has imported it, so none is tuned
        yield
        return
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs

    def compile_all(kernel: Any, given: dict[str, Any]) -> Any:
        """Called with the arguments of a first call, for the variants that are to be timed."""
        variants = prune(kernel, given)
        # A variant that does not compile is left to Triton, which finds out again.
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            for variant in variants:
                kernel.fn.run(*kernel.nargs.values(), **given | {"warmup": True}, **variant.all_kwargs())
        return variants

    autotuner.prune_configs = compile_all
    try:
        yield
    finally:
        autotuner.prune_configs = prune

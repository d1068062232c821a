"""``pytest.mark.usefixtures("kernels")`` runs a test with the kernels that the library chooses, and again with those
that accept any call. ``"untuned"`` spares FLA's tuning."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from support import general_kernels

GENERAL = general_kernels(os.environ.get("KDA_TEST_DEVICE", "cuda"))


@pytest.fixture(params=["chosen", GENERAL])
def kernels(request: pytest.FixtureRequest, environment: Callable[[str, str | None], None]) -> None:
    if request.param != "chosen":
        environment("KDA_IMPL", request.param)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of FLA runs as the first of its variants that fits the GPU. Their results differ by rounding at
    most, and to compile and time all 200 takes minutes.

    Triton's Autotuner holds the kernels with variants, from which FLA derives its own. On the first call with certain
    sizes it asks ``prune_configs`` which variants to time. It stores its choice on disk under the names of those, so
    that no benchmark finds a choice made here."""
    if importlib.util.find_spec("triton") is None:
        return
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs

    def first_that_runs(kernel: Any, given: dict[str, Any]) -> list[Any]:
        variants = prune(kernel, given)
        for variant in variants:  # the time of one that needs too much shared memory is infinite
            if math.isfinite(kernel._bench(*kernel.nargs.values(), config=variant, **given)[0]):
                return [variant]
        return variants

    def run_once(kernel: Any, call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        call()
        return [0.0] * len(quantiles)

    monkeypatch.setattr(autotuner, "prune_configs", first_that_runs)
    monkeypatch.setattr(autotuner, "do_bench", run_once)

"""kda.prefill against FLA, FlashKDA and cuDNN, and gradients of kda.chunk_kda against FLA's, where they are installed
or in the folder of KDA_PEERS: the same results, except for rounding on both sides. (``python -m kda bench prefill``
shows how far each is from float64.)"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest

from kda.cli import peers, prefill, prefill_peers, training, training_peers
from kda.cli.problems import Problem
from places import only_cuda
from support import rel_rmse

pytestmark = only_cuda


@pytest.fixture(autouse=True)
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


TOLERANCE = 0.012  # relative RMS: theirs are up to 7e-3 from float64, ours 3e-3
LENGTHS = (300, 1, 64, 447, 188)
CASES = [
    prefill.Case(Problem(H=12, gate="softplus" if gate == "softplus" else "lower_bound", lengths=LENGTHS), gate)
    for gate in ("strong", "slow", "softplus")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.gate}".replace(" ", "_"))
@pytest.mark.parametrize("peer", prefill_peers.PEERS, ids=lambda peer: peer.name)
def test_same_outputs(peer: prefill_peers.Peer, case: prefill.Case) -> None:
    peers.add_folder(None)
    inputs = prefill.Inputs(case)
    try:
        call = peer.prepare(inputs)
    except (ImportError, FileNotFoundError, NotImplementedError) as reason:
        pytest.skip(str(reason))
    ours, theirs = prefill.prepare_kda(inputs, None)(), call()
    for name, x, y in zip(("o", "state"), ours, theirs, strict=True):
        difference = rel_rmse(x, y.view_as(x))
        assert difference < TOLERANCE, f"{name} of {peer.name}, {case.name}, {case.gate}: {difference:.1e}"


# The bounds of FLA's own tests.
GRADIENTS = {"dq": 0.008, "dk": 0.008, "dv": 0.008, "dg": 0.02, "dbeta": 0.02, "dA_log": 0.02, "ddt_bias": 0.02}


@pytest.mark.parametrize("saved", [False, True], ids=["nothing_saved", "saved"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.gate}".replace(" ", "_"))
def test_same_gradients(case: prefill.Case, saved: bool) -> None:
    peers.add_folder(None)
    [fla] = [peer for peer in training_peers.PEERS if peer.name == "FLA"]
    try:
        theirs = fla.prepare(prefill.Inputs(case)).both()
    except ImportError as reason:
        pytest.skip(str(reason))
    ours = training.prepare_kda(prefill.Inputs(case), None, saved).both()
    for name, x, y in zip(("o", *(f"d{n}" for n in training.LEAVES)), ours, theirs, strict=True):
        difference = rel_rmse(x, y.view_as(x))
        assert difference < GRADIENTS.get(name, TOLERANCE), f"{name}, {case.name}, {case.gate}: {difference:.1e}"

"""kda.prefill against FLA, FlashKDA and cuDNN, and gradients of kda.chunk_kda against FLA's, where they are installed
or in the folder of KDA_PEERS: the same results, except for rounding on both sides. (``python -m bench prefill``
shows how far each is from float64.)"""

from __future__ import annotations

import pytest

from bench import peers, prefill, training
from bench.peers import prefill as prefill_peers
from bench.peers import training as training_peers
from bench.training_steps import LEAVES
from kda.cli.problems import Problem
from places import only_cuda
from support import rel_rmse

pytestmark = [only_cuda, pytest.mark.usefixtures("untuned")]


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
    for name, x, y in zip(("o", *(f"d{n}" for n in LEAVES)), ours, theirs, strict=True):
        difference = rel_rmse(x, y.view_as(x))
        assert difference < GRADIENTS.get(name, TOLERANCE), f"{name}, {case.name}, {case.gate}: {difference:.1e}"

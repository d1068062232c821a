"""kda.prefill against FLA, FlashKDA and cuDNN where they are installed or in the folder of KDA_PEERS: the same
outputs and final states, except for rounding on both sides. (``python -m kda bench prefill`` shows how far each is
from float64.)"""

from __future__ import annotations

import pytest

from kda.cli import peers, prefill, prefill_peers
from kda.cli.problems import Problem
from places import only_cuda
from support import rel_rmse

pytestmark = only_cuda

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

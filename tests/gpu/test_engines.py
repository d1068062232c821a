"""SGLang's and vLLM's own kernels beside ours, through their interfaces: the same results, except for rounding on both
sides. Then what only a GPU shows: graphs, and that the adapters launch no kernels of their own. The engines are
installed, or ``tools/fetch_engines.py --kernels`` has brought their files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure, plugs_serving
from bench.plugs_serving import Case, Contender, Tensors
from kda.plugs.declined import gpu_why_not
from places import only_cuda
from support import rel_rmse

pytestmark = only_cuda

FOLDER = Path(os.environ.get("KDA_ENGINES", Path(__file__).resolve().parents[2] / "build" / "engines"))
TOLERANCE = 0.012  # relative RMS, as in test_peers.py
Pair = tuple[Contender, Contender]

CASES = [
    Case("prefill", (300, 1, 64, 447, 188), H=4),
    Case("prefill", (300, 1, 64, 447, 188), H=4, lower_bound=None),
    Case("prefill", (63, 15, 16, 17, 1), H=4, state_dtype="bfloat16"),
    Case("prefill, states kept", (300, 130, 64, 447, 188), H=4),
    Case("prefill, states kept", (65, 200), H=4, state_dtype="bfloat16"),
    Case("mixed batch", (200, *(1,) * 30), H=8),
    Case("decode", (1,) * 33, H=8),
    Case("decode", (1,) * 5, H=8, lower_bound=None, state_dtype="bfloat16"),
    Case("verify + commit", (4,) * 7, H=8),
    Case("verify + commit", (8,) * 3, H=8, lower_bound=None),
]


@pytest.fixture(scope="module", params=list(plugs_serving.VERSIONS))
def contenders(request: pytest.FixtureRequest) -> Iterator[Pair]:
    try:
        with plugs_serving.engine(request.param, FOLDER) as pair:
            yield pair
    except ImportError as reason:
        pytest.skip(str(reason))


def prepared(contender: Contender, case: Case) -> tuple[Tensors, Callable[[], Any]]:
    if case.phase not in contender.prepare:
        pytest.skip(f"{contender.name} has no such phase")
    x = Tensors(case)
    return x, contender.prepare[case.phase](x)


def output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def test_this_gpu_is_served() -> None:
    assert gpu_why_not(torch.cuda.current_device()) is None


def test_workers_may_be_forked_after_plugging() -> None:
    """vLLM plugs before it forks them, and a fork of a process that has asked CUDA for anything has no CUDA."""
    program = """
import os, torch, kda.call.library
assert kda.call.library.built_with_cuda()
worker = os.fork()
if worker == 0:
    os._exit(0 if torch.ones(1, device="cuda").item() == 1 else 1)
assert os.waitpid(worker, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {c.lower_bound} {c.state_dtype}".replace(" ", "_"))
def test_same_results(contenders: Pair, case: Case) -> None:
    """The pool is compared whole: slots that no request has must be as they were, too."""
    own, ours = contenders
    x, theirs = prepared(own, case)
    y, call = prepared(ours, case)
    wanted, got = output(theirs()), output(call())
    assert rel_rmse(x.pool, y.pool) < TOLERANCE
    if isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
        assert rel_rmse(wanted, got.view_as(wanted)) < TOLERANCE


def test_states_kept_on_the_way(contenders: Pair) -> None:
    """Point 1 and 2 of SGLang's contract, against SGLang's kernel: rows that nobody wants stay as they were."""
    own = contenders[0]
    if own.name != "SGLang":
        pytest.skip("of SGLang's interface")
    case, states = Case("prefill, states kept", (300, 63, 65, 128), H=4), []
    for contender in contenders:
        call: Any = prepared(contender, case)[1]
        state = call.keywords["track_state"].fill_(7.0)
        call()
        states.append(state)
    assert (states[1][1] == 7).all() and rel_rmse(*states) < TOLERANCE


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5], CASES[6], CASES[8]], ids=lambda c: c.phase)
def test_graphs(contenders: Pair, case: Case) -> None:
    """Point 8: a captured call follows what SGLang and vLLM refill between replays: inputs, slots, chunks to keep."""
    ours = contenders[1]
    x, call = prepared(ours, case)
    given = getattr(call, "keywords", {})
    if "extend_seq_lens_cpu" in given:  # SGLang passes no lengths under a graph
        given["extend_seq_lens_cpu"] = None
    written = [x.pool, *(given[name] for name in ("track_state", "initial_state") if name in given)]
    before = [t.clone() for t in written]

    def start() -> None:
        for t, kept in zip(written, before, strict=True):
            t.copy_(kept)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = output(call())
    for round_ in range(3):
        x.mixed.normal_()
        x.beta.normal_()
        x.slots.copy_(x.slots.roll(1))
        if (chunks := given.get("track_chunk_idx")) is not None:
            chunks.copy_(torch.where(chunks >= 1, 1 + (chunks + round_) % chunks.clamp(min=1), chunks))
        start()
        graph.replay()
        results = [*(t.clone() for t in written), *([result.clone()] if result is not None else [])]
        start()
        eager = output(call())
        wanted = [*written, *([eager] if eager is not None else [])]
        assert all(torch.equal(a, b) for a, b in zip(wanted, results, strict=True))


def kernels_of(call: Callable[[], Any]) -> list[str]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {c.lower_bound} {c.state_dtype}".replace(" ", "_"))
def test_no_copies(contenders: Pair, case: Case) -> None:
    """The adapters launch our kernels and nothing else: tables of a batch are made in its first layer."""
    ours = contenders[1]
    x, call = prepared(ours, case)
    names = kernels_of(ours.adapter(case.phase, x) or call)
    foreign = [name for name in names if "at::" in name or "Memcpy" in name]
    assert names and not foreign, foreign


def test_host_time_of_the_adapters(contenders: Pair) -> None:
    """In empty tensors, whose making takes 0.6 us on a fast host and several times as long on a slow one. The least of
    many short runs, since others may use the machine."""
    ours = contenders[1]
    empty = measure.least_microseconds(lambda: torch.empty(1))
    for phase in ("prefill", "decode", "verify + commit"):
        call = ours.adapter(phase, Tensors(next(c for c in CASES if c.phase == phase)))
        if call is None:
            continue
        with torch.inference_mode():  # as the engines run
            us = plugs_serving.adapter_microseconds(ours, call)
        print(f"{contenders[0].name} {phase}: {us:.1f} us, an empty tensor {empty:.1f} us")
        assert us < 12 * empty, (phase, us, empty)

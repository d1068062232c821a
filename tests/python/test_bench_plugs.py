"""``bench.plugs_serving``: its calls of our kernels through the engines' interfaces, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from bench import measure, plugs_serving
from bench.plugs_serving import Case, Contender, Tensors
from sglang_server import sglang
from vllm_layers import vllm

SMALL = [
    Case("prefill", (70, 1, 20), H=2),
    Case("prefill, states kept", (130, 63), H=2),
    Case("mixed batch", (65, *(1,) * 3), H=1, lower_bound=None),
    Case("decode", (1,) * 3, H=2, state_dtype="bfloat16"),
    Case("verify + commit", (3,) * 2, H=2),
]


@pytest.fixture(params=["sglang", "vllm"])
def ours(request: pytest.FixtureRequest) -> Iterator[Contender]:
    with sglang() if request.param == "sglang" else vllm():
        yield (plugs_serving._sglang if request.param == "sglang" else plugs_serving._vllm)()[1]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.phase)
def test_calls(case: Case, ours: Contender) -> None:
    """States are those of kda.prefill on the same tensors, whichever engine asks."""
    if case.phase not in ours.prepare:
        pytest.skip("vLLM's functions keep no states on the way")
    x, same = Tensors(case, "cpu"), Tensors(case, "cpu")
    result: Any = ours.prepare[case.phase](x)()
    outputs = [y for y in (result if isinstance(result, tuple) else [result]) if isinstance(y, torch.Tensor)]
    assert all(y.isfinite().all() for y in outputs)
    kda.prefill(
        same.q, same.k, same.v, same.g, same.beta, same.pool, state_indices=same.slots, cu_seqlens=same.cu,
        A_log=same.A_log, dt_bias=same.dt_bias, lower_bound=case.lower_bound, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    if case.phase == "verify + commit" and "kda.plugs.vllm_functions" in ours.parts:
        return  # that writes states of its own, not the pool
    assert torch.allclose(x.pool.float(), same.pool.float(), rtol=1e-2, atol=1e-2)


def test_time_of_the_adapter(ours: Contender) -> None:
    x = Tensors(SMALL[3], "cpu")
    call = ours.prepare["decode"](x)
    before = x.pool.clone()
    assert 0 < plugs_serving.adapter_microseconds(ours, call, 2, 10) < 1000
    assert torch.equal(x.pool, before)  # the kernels were left out
    call()
    assert not torch.equal(x.pool, before)


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(ImportError, match="no rows of vllm: it is not installed"),
        plugs_serving.engine("vllm", tmp_path),
    ):
        pass


def test_rows_of_bench_plugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of both contenders become one, and an engine that is not there a note."""
    from bench import plugs as plug_bench

    def rows(package: str, cases: Any, notes: list[str]) -> list[dict[str, Any]]:
        if package == "vllm":
            raise ImportError("no rows of vllm: it is not installed")
        both = [("SGLang", 30.0, {}), ("kda", 10.0, {"adapter_us": 4.0, "over_engine": 3.0})]
        return [{"case": c.name, "contender": name, "us": us, **more} for c in cases for name, us, more in both]

    monkeypatch.setattr(plugs_serving, "rows", rows)
    notes: list[str] = []
    name = "decode H=32 B=8"
    [row] = plug_bench._serving_rows(notes, (name,), ("sglang", "vllm"))
    assert (row["case"], row["engine_ms"], row["through_ms"], row["over_engine"]) == (name, 0.03, 0.01, 3.0)
    assert notes == ["no rows of vllm: it is not installed"]


def test_cases_have_the_sizes_asked_for() -> None:
    found = plugs_serving.cases()
    assert {len(c.lengths) for c in found if c.phase == "decode"} >= {1, 256}
    assert {c.lengths[0] for c in found if c.phase == "verify + commit"} == set(range(2, 9))
    assert {c.phase for c in found} == set(plugs_serving.PHASES) and len(found) == len({c.name for c in found})
    assert 0 < len(plugs_serving.cases(quick=True)) < len(found)


@pytest.mark.parametrize("phase", ["prefill", "prefill, states kept", "decode", "verify + commit"])
def test_host_time_of_the_adapters(ours: Contender, phase: str) -> None:
    """In empty tensors, as tests/gpu has it. A call makes one, its output, and takes 4 to 9."""
    x = Tensors(next(case for case in SMALL if case.phase == phase), "cpu")
    call = ours.adapter(phase, x) if phase in ours.prepare else None
    if call is None:
        pytest.skip("vLLM's functions keep no states on the way, and its prefill in place is kda.prefill itself")
    with torch.inference_mode():  # as the engines run
        us = plugs_serving.adapter_microseconds(ours, call)
    empty = measure.least_microseconds(lambda: torch.empty(1))
    assert us < 12 * empty, (us, empty)

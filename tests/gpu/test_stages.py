"""kda.stages and kda.prefill_f32 with CUDA tensors: numbers of the float64 oracle, and promises about launches,
graphs and streams."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kda
import kda.compiled_stages
from kda import stages
from places import (
    DEVICE,
    HERE,
    ORACLE,
    Place,
    all_same,
    captured,
    matches,
    only_cuda,
    without_synchronisation,
)
from support import Problem, Tensor, cotangents, make, same_bits, wild

TOKENWISE = ("q", "k", "v", "g", "beta")
PLAIN: dict[str, Any] = {"l2norm": False}  # keys that already have length 1, decays and activated beta


def by_stages(place: Place, p: Problem) -> dict[str, Tensor]:
    x, state = place(p.tensors), {"state_v_first": p.options["state_v_first"]}
    how: dict[str, Any] = {"impl": place.impl, "cu_seqlens": place(p.options.get("cu_seqlens"))}
    q, k, v, g, beta = (x[n] for n in TOKENWISE)
    G = stages.cumsum(g, **how)
    w, u, _, kg, Aqk, Akk_inv = stages.chunk_intra(q, k, v, G, beta, **how)
    again = stages.recompute_w_u(k, v, beta, Akk_inv, G, q, **how)
    assert same_bits(again[0], w) and same_bits(again[1], u) and same_bits(again[3], kg)
    h, v_new, last = stages.delta_h(kg, w, u, G, x.get("initial_state"), True, **state, **how)
    return {"o": stages.fwd_o(q, v_new, G, Aqk, h, **state, **how), "state": last}


def gradients_by_stages(place: Place, p: Problem) -> dict[str, Tensor]:
    x, state, scale = place(p.tensors), {"state_v_first": p.options["state_v_first"]}, p.tensors["q"].shape[3] ** -0.5
    how: dict[str, Any] = {"impl": place.impl, "cu_seqlens": place(p.options.get("cu_seqlens"))}
    q, k, v, g, beta = (x[n] for n in TOKENWISE)
    d_o, d_state = map(place, cotangents(p))
    G = stages.cumsum(g, **how)
    w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(q, k, v, G, beta, **how)
    h, v_new, _ = stages.delta_h(kg, w, u, G, x.get("initial_state"), **state, **how)
    dAqk, dv_local = stages.bwd_local(v_new, d_o, Aqk, scale, **how)
    dh, dh0, dv_new = stages.bwd_delta_h(qG, kg, w, G, d_o, dv_local, d_state, scale, **state, **how)
    dq, dk, dv, dbeta, dG, dAkk = stages.bwd_wy_dqkg(
        q, k, v, v_new, G, beta, Akk_inv, h, d_o, dh, dv_new, scale, **state, **how
    )
    dq, dk, dbeta, dG = stages.bwd_intra(q, k, G, beta, dAqk, dAkk, dq, dk, dbeta, dG, **how)
    dg = stages.cumsum_backward(dG, g, **how)
    return {"dq": dq, "dk": dk, "dv": dv, "dbeta": dbeta, "dg": dg, "dinitial_state": dh0}


def near(expected: dict[str, Tensor], got: dict[str, Tensor], budget: float) -> None:
    for name, x in got.items():
        y, x = expected[name].double().cpu(), x.double().cpu()
        assert x.isfinite().all(), name
        error = (x - y).square().mean().sqrt() / (y.square().mean().sqrt() + 1e-8)
        assert error <= budget, f"{name}: {error:.2e} of {budget:.0e}"


# ---- numbers ----


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(("K", "V"), [(1, 5), (60, 100), (64, 64), (128, 128), (256, 200)])
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 8e-3)])
def test_stages_are_forward(dtype: torch.dtype, budget: float, K: int, V: int, v_first: bool) -> None:
    for sizes in ({"B": 2, "T": 150}, {"lengths": [65, 0, 9, 64], "tail": 3}):
        p = make(H=2, G=2, K=K, V=V, dtype=dtype, v_first=v_first, **PLAIN, **sizes)
        near(by_stages(ORACLE, p), by_stages(HERE, p), budget)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(("K", "V"), [(1, 5), (60, 100), (64, 64), (128, 128)])
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 5e-5), (torch.bfloat16, 2e-2)])
def test_stages_are_backward(dtype: torch.dtype, budget: float, K: int, V: int, v_first: bool) -> None:
    for sizes in ({"B": 2, "T": 150}, {"lengths": [65, 0, 9, 64], "tail": 3}):
        p = make(H=2, G=2, K=K, V=V, dtype=dtype, v_first=v_first, **PLAIN, **sizes)
        near(gradients_by_stages(ORACLE, p), gradients_by_stages(HERE, p), budget)


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 5e-4), (torch.bfloat16, 8e-3)])
def test_wild_gates(dtype: torch.dtype, budget: float) -> None:
    p = wild(make(1, 200, 2, K=128, V=128, dtype=dtype, **PLAIN))
    near(by_stages(ORACLE, p), by_stages(HERE, p), budget)


def heads_first(place: Place, p: Problem) -> list[Tensor]:
    return [place(p.tensors[n]).transpose(1, 2).contiguous() for n in TOKENWISE]


def prefill(place: Place, p: Problem, chunk: int, v_first: bool) -> dict[str, Tensor]:
    state = place(p.tensors["initial_state"])
    how = {"initial_state": state, "final_state": state, "state_v_first": v_first, "impl": place.impl}
    o, w, u = kda.prefill_f32(*heads_first(place, p), chunk, **how)
    return {"o": o, "state": state, "o_w": w, "o_u": u}


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("size", [64, 128, 20])
def test_prefill_f32(size: int, chunk: int, v_first: bool) -> None:
    for T in (1, 64, 130, 192):
        p = make(2, T, 1, 3, size, size, v_first=v_first, **PLAIN)
        matches(prefill, p, chunk, v_first, what=T)
    matches(prefill, wild(make(1, 200, 2, K=size, V=size, v_first=v_first, **PLAIN)), chunk, v_first)


def test_the_torch_operator() -> None:
    p = make(2, 130, 2, K=64, V=64, **PLAIN)
    x = heads_first(HERE, p)
    expected = kda.prefill_f32(*x, 32)
    got = torch.ops.kda_prefill.forward(*x, 32)
    assert all_same(expected, got) and all(t.device.type == DEVICE.type for t in got)
    o, w, u = (torch.full_like(t, math.nan) for t in expected)
    assert torch.ops.kda_prefill.forward(*x, 32, w, u, o)[0] is o
    assert all_same(expected, (o, w, u))
    compiled = torch.compile(lambda *x: torch.ops.kda_prefill.forward(*x, 32), fullgraph=True, backend="aot_eager")
    assert all_same(expected, compiled(*x))


# ---- launches ----


@only_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs(dtype: torch.dtype) -> None:
    """Captured once, replayed with new content of the memory."""
    p = make(lengths=[65, 0, 9, 64, 200], tail=30, H=2, G=2, K=128, V=128, dtype=dtype, **PLAIN)
    x = {n: HERE(p.tensors[n]) for n in TOKENWISE}
    cu = HERE(p.options["cu_seqlens"])
    result: dict[str, Tensor] = {}

    def call() -> dict[str, Tensor]:
        q, k, v, g, beta = (x[n] for n in TOKENWISE)
        G = stages.cumsum(g, cu_seqlens=cu)
        w, u, _, kg, Aqk, _ = stages.chunk_intra(q, k, v, G, beta, cu_seqlens=cu)
        h, v_new, last = stages.delta_h(kg, w, u, G, None, True, cu_seqlens=cu)
        return {"o": stages.fwd_o(q, v_new, G, Aqk, h, cu_seqlens=cu), "state": last}

    graph = captured(lambda: result.update(call()))
    torch.manual_seed(0)
    for _ in range(50):
        x["v"].normal_()
        cu[1:] = (torch.rand(5, device=DEVICE) * 400).long().clamp(max=x["v"].shape[1]).sort().values
        graph.replay()
        assert all_same(result, call())


@only_cuda
def test_nothing_waits() -> None:
    p = make(lengths=[65, 9], H=2, K=64, V=64, **PLAIN)
    q, k, v, g, beta = (HERE(p.tensors[n]) for n in TOKENWISE)
    cu, x = HERE(p.options["cu_seqlens"]), heads_first(HERE, p)
    with without_synchronisation():
        G = stages.cumsum(g, cu_seqlens=cu)
        w, u, _, kg, Aqk, _ = stages.chunk_intra(q, k, v, G, beta, cu_seqlens=cu)
        h, v_new, _ = stages.delta_h(kg, w, u, G, cu_seqlens=cu)
        stages.fwd_o(q, v_new, G, Aqk, h, cu_seqlens=cu)
        kda.prefill_f32(*x, 32)


@only_cuda
def test_runs_on_torchs_current_stream() -> None:
    p = make(1, 300, 4, K=128, V=128, **PLAIN)
    x = heads_first(HERE, p)
    expected = kda.prefill_f32(*x, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel that does not wait on this stream reads v before it is computed
        got = kda.prefill_f32(*x[:2], x[2] * 2 / 2, *x[3:], 64)
    stream.synchronize()
    assert all_same(expected, got)


@only_cuda
def test_repeated_launches_give_the_same_bits() -> None:
    p = make(1, 1000, 8, K=128, V=128, dtype=torch.bfloat16, **PLAIN)
    first = by_stages(HERE, p)
    for _ in range(20):
        assert all_same(first, by_stages(HERE, p))


@only_cuda
@pytest.mark.parametrize("name", ["k", "beta", "Aqk", "cu_seqlens"])
def test_arrays_of_another_device_are_named(name: str) -> None:
    x = torch.zeros(1, 70, 2, 8, device=DEVICE)
    call: dict[str, Any] = {
        "q": x,
        "k": x,
        "v": x,
        "G": x,
        "beta": x[..., 0],
        "cu_seqlens": torch.tensor([0, 70]).to(DEVICE),
    }
    if name == "Aqk":
        with pytest.raises(ValueError, match=r"^Aqk: expected device cuda:0 .*got cpu"):
            stages.fwd_o(x, x, x, torch.zeros(1, 70, 2, 64), torch.zeros(2, 2, 8, 8, device=DEVICE))
    else:
        with pytest.raises(ValueError, match=rf"^{name}: expected device cuda:0 .*got cpu"):
            stages.chunk_intra(**{**call, name: call[name].cpu()})

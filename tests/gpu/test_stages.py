"""kda.stages and kda.prefill_f32 with CUDA tensors: numbers of the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from kda import stages
from places import DEVICE, HERE, ORACLE, Place, matches, only_cuda
from stages_together import backward, forward
from support import Problem, Tensor, cotangents, make, wild

TOKENWISE = ("q", "k", "v", "g", "beta")
PLAIN: dict[str, Any] = {"l2norm": False}  # keys that already have length 1, decays and activated beta


def ran(place: Place, p: Problem) -> tuple[Any, ...]:
    """(o, final_state, saved) of the forward there, and the arguments of the backward."""
    values, h0 = place(p.tensors), place(p.tensors.get("initial_state"))
    x = tuple(values[n] for n in TOKENWISE)
    how = {"state_v_first": p.options["state_v_first"]}
    packed = {"impl": place.impl, "cu_seqlens": place(p.options.get("cu_seqlens"))}
    scale = x[0].shape[3] ** -0.5
    o, final_state, saved = forward(x, h0, scale, how, packed)
    return o, final_state, (x, saved, *map(place, cotangents(p)), scale, how, packed)


def by_stages(place: Place, p: Problem) -> dict[str, Tensor]:
    o, final_state, _ = ran(place, p)
    return {"o": o, "state": final_state}


def gradients_by_stages(place: Place, p: Problem) -> dict[str, Tensor]:
    names = [*(f"d{n}" for n in TOKENWISE), "dinitial_state"]
    return dict(zip(names, backward(*ran(place, p)[2]), strict=True))


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


# ---- refusals ----


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

"""kda.norm_gate with CUDA tensors: numbers of the float64 oracle, gradients, and bitwise promises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kda
from kda.nn import RMSNormGated
from places import DEVICE, HERE, Place, all_same, matches, spaced
from support import Tensor, same_bits

Call = dict[str, Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
    random = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    return {"x": x, "gate": gate, "weight": (0.5 + torch.rand(shape[-1], generator=random)).to(dtype)}


def forward(place: Place, p: Call, **options: Any) -> dict[str, Tensor]:
    return {"o": kda.norm_gate(**place(p), **options, impl=place.impl)}


def gradients(place: Place, p: Call, **options: Any) -> dict[str, Tensor]:
    leaves = {n: x.requires_grad_() for n, x in place(p).items()}
    y = kda.norm_gate(**leaves, **options, impl=place.impl)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(p["x"].dtype).to(y)
    return dict(zip((f"d{n}" for n in leaves), torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


@pytest.mark.parametrize("D", [1, 7, 8, 64, 128, 200, 256, 1000, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers(dtype: torch.dtype, D: int) -> None:
    p = inputs(3, 7, 5, D, dtype=dtype)
    for activation, absent in itertools.product(("sigmoid", "silu"), ((), ("weight",), ("gate", "weight"))):
        some = {n: x for n, x in p.items() if n not in absent}
        matches(forward, some, activation=activation, what=(activation, absent))
        matches(gradients, some, activation=activation, eps=1e-2, what=(activation, absent))


def test_many_rows() -> None:
    """More than the GPU has in flight, and more than one run of each block."""
    for D in (64, 128, 72):
        p = inputs(2, 4000, 8, D, dtype=torch.bfloat16)
        matches(forward, p, what=D)
        matches(gradients, p, what=D, rounding=3)


def test_rows_of_any_size() -> None:
    for size in (1e-30, 1e-18, 1e10, 1e20, 1e37):
        p = inputs(2, 3, 4, 128)
        p["x"] *= size
        matches(forward, p, eps=0.0, what=size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_at_any_offset(dtype: torch.dtype) -> None:
    """Rows that are aligned to their elements only have the bits of those that are aligned."""
    p = HERE(inputs(2, 9, 4, 128, dtype=dtype))
    want = kda.norm_gate(**p)
    for name in ("x", "gate"):
        view, _ = spaced(p[name])
        assert same_bits(kda.norm_gate(**p | {name: view}), want), name
    for at in (0, 1, 8):  # a gate in a packed projection
        row = torch.full((2, 9, 4 * 128 * 2 + 16), torch.nan, dtype=dtype, device=DEVICE)
        gate = row[..., at : at + 512].copy_(p["gate"].flatten(2)).unflatten(2, (4, 128))
        assert same_bits(kda.norm_gate(**p | {"gate": gate}), want), at
    out, memory = spaced(p["x"])
    before = memory.clone()
    assert same_bits(kda.norm_gate(**p, out=out), want)
    assert same_bits(memory[..., :3], before[..., :3]) and same_bits(memory[..., -2:], before[..., -2:])
    x = p["x"].clone()
    assert same_bits(kda.norm_gate(x, p["gate"], p["weight"], out=x), want), "in place"


def test_a_row_does_not_know_the_others() -> None:
    p = HERE(inputs(2, 50, 4, 128, dtype=torch.bfloat16))
    want = kda.norm_gate(**p)
    few = {n: x[1:, 3:5, :2] if n != "weight" else x for n, x in p.items()}
    assert same_bits(kda.norm_gate(**few), want[1:, 3:5, :2])
    p["x"][0, 1, 2, 3], p["gate"][0, 2, 3, 4] = torch.nan, torch.inf
    got = kda.norm_gate(**p)
    assert got[0, 1, 2].isnan().all()
    got[0, 1, 2], got[0, 2, 3] = want[0, 1, 2], want[0, 2, 3]
    assert same_bits(got, want)


@pytest.mark.parametrize("shape", [(2, 3, 4, 128), (2, 3, 4, 8), (5, 8)])
def test_compiled(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    p, activation = inputs(*shape), {"activation": "silu"}
    want, slopes = forward(HERE, p, **activation), gradients(HERE, p, **activation)
    norm = RMSNormGated(shape[-1], activation="swish").to(DEVICE)
    norm.weight.data = HERE(p["weight"])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x, gate = HERE(p["x"]), HERE(p["gate"])
    assert same_bits(compiled(x, gate), want["o"]) and same_bits(norm(x, gate), want["o"])
    monkeypatch.setattr(kda, "norm_gate", torch.compile(kda.norm_gate, fullgraph=True, backend="aot_eager"))
    assert all_same(forward(HERE, p, **activation), want) and all_same(gradients(HERE, p, **activation), slopes)
    kda.norm_gate(**HERE(p) | {"x": x}, **activation, out=x)
    assert same_bits(x, want["o"])

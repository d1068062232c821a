"""More requests than a grid has rows of (65,535): each is served, and nothing behind the last one is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from drafting import int32
from kda import stages
from places import DEVICE, HERE, spaced
from support import Problem, Tensor, make

N = 65540
MANY: dict[str, Any] = {"H": 1, "G": 1, "l2norm": False, "v_first": True, "dtype": torch.bfloat16, "state": False}


def few_times_many(x: Tensor, dim: int = 0) -> Tensor:
    """Request n is that of n modulo their number: what one does, all like it do."""
    times = -(-N // x.shape[dim])
    return torch.cat([x] * times, dim).narrow(dim, 0, N)


def all_alike(x: Tensor, few: Tensor) -> None:
    for n0 in range(0, N, few.shape[0]):
        part = x[n0 : n0 + few.shape[0]]
        assert torch.equal(part, few[: part.shape[0]]), n0


@pytest.mark.parametrize("impl", [n for n in kda.implementations("forward") if n.startswith(("cuda_", "cpu_chunk"))])
def test_prefill(impl: str) -> None:
    if impl.startswith("cuda_") != (DEVICE.type == "cuda"):
        pytest.skip("an implementation of another device")
    if impl.endswith("sm90"):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")
        sizes = {"K": 128, "V": 128}
    else:
        sizes = {"K": 64, "V": 64}
    few = HERE(make(7, 1, **MANY, **sizes))

    def run(p: Problem) -> tuple[Tensor, Tensor]:
        """o, and all the memory around it."""
        out, memory = spaced(torch.full_like(p.tensors["v"], torch.nan))
        kda.prefill(**p.keywords, out=out, impl=impl)
        return out, memory

    expected, _ = run(few)
    got, memory = run(few.having(**{n: few_times_many(few.tensors[n]) for n in ("q", "k", "v", "g", "beta")}))
    all_alike(got, expected)
    assert memory[..., [0, 1, 2, -2, -1]].isnan().all()


def test_delta_h() -> None:
    few = HERE(make(7, 1, **MANY, K=64, V=64)).tensors

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        G = stages.cumsum(x["g"])
        w, u, _, kg, *_ = stages.chunk_intra(*(x[n] for n in ("q", "k", "v")), G, x["beta"])
        return list(stages.delta_h(kg, w, u, G, state_v_first=True)[:2])

    for got, expected in zip(run({n: few_times_many(x) for n, x in few.items()}), run(few), strict=True):
        all_alike(got, expected)


def test_state_of_the_convolution_rolls_on() -> None:
    """In decode and in a flush; all layers at once have as many rows."""
    K = V = 8
    D = 2 * K + V
    random = torch.Generator().manual_seed(1)
    few = {"x": torch.randn(7, 1, D, generator=random), "state": torch.randn(7, D, 3, generator=random)}
    weight, bias = HERE(torch.randn(D, 4, generator=random)), HERE(torch.randn(D, generator=random))
    g, beta = HERE(-torch.rand(7, 1, 1, K, generator=random)), HERE(torch.rand(7, 1, 1, generator=random))

    def run(x: Tensor, state: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rolled, memory = spaced(state)
        pool = torch.zeros(len(x), 1, V, K, device=DEVICE)
        conv = kda.Conv(x=x, weight=weight, bias=bias, state=rolled, indices=int32(*range(len(x))).to(DEVICE))
        o = kda.decode_mtp(
            q=None, k=None, v=None, g=g, beta=beta, state=pool, conv=conv, H=1, K=K, V=V, state_indices=None
        )
        return o, rolled, memory

    expected = run(HERE(few["x"]), HERE(few["state"]), g, beta)
    got = run(*(few_times_many(t) for t in (HERE(few["x"]), HERE(few["state"]), g, beta)))
    all_alike(got[0], expected[0])
    all_alike(got[1], expected[1])
    assert got[2][..., [0, 1, 2, -2, -1]].isnan().all()

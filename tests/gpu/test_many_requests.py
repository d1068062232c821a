"""More requests, or requests and layers, than a grid has rows (65,535): each is served, and nothing after the last
one is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from drafting import NAN
from kda import stages
from places import DEVICE, HERE
from support import Tensor, make

N = 65540
MANY: dict[str, Any] = {"H": 1, "G": 1, "l2norm": False, "v_first": True, "dtype": torch.bfloat16, "state": False}


def many(few: Tensor, count: int = N) -> Tensor:
    """Request n is a copy of request n modulo their number."""
    return torch.cat([few] * -(-count // len(few)))[:count]


def roomy(
    shape: tuple[int, ...], behind: int, x: float = NAN, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A tensor, and the ``behind`` unused rows that follow it in memory: all x."""
    memory = torch.full((shape[0] + behind, *shape[1:]), x, dtype=dtype, device=DEVICE)
    return memory[: shape[0]], memory[shape[0] :]


@pytest.mark.parametrize("impl", [n for n in kda.implementations("forward") if n.startswith(("cuda_", "cpu_chunk"))])
def test_prefill(impl: str) -> None:
    if impl.startswith("cuda_") != (DEVICE.type == "cuda"):
        pytest.skip("an implementation of another device")
    for name, capability in (("hopper", (9, 0)), ("blackwell", (10, 0))):
        if name in impl and torch.cuda.get_device_capability() != capability:
            pytest.skip(f"needs compute capability {capability}")
    size = 128 if "hopper" in impl else 64
    few = make(7, 1, **MANY, K=size, V=size)
    expected = kda.prefill(**{**HERE.call(few), "impl": impl})
    call = HERE.call(few.having(**{n: many(few.tensors[n]) for n in ("q", "k", "v", "g", "beta")}))
    out, behind = roomy((N, 1, 1, size), 65535, dtype=expected.dtype)
    kda.prefill(**{**call, "impl": impl}, out=out)
    assert torch.equal(out, many(expected)) and behind.isnan().all()


def test_delta_h() -> None:
    few = HERE(make(7, 1, **MANY, K=64, V=64)).tensors

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        G = stages.cumsum(x["g"])
        w, u, _, kg, *_ = stages.chunk_intra(*(x[n] for n in ("q", "k", "v")), G, x["beta"])
        return list(stages.delta_h(kg, w, u, G, state_v_first=True)[:2])

    for got, expected in zip(run({n: many(x) for n, x in few.items()}), run(few), strict=True):
        assert torch.equal(got, many(expected))


def test_flush_of_all_layers_rolls_the_convolution_on() -> None:
    layers, n, size = 3, 21850, 8
    D = 3 * size
    random = torch.Generator().manual_seed(1)
    x, past = (torch.randn(7, *shape, generator=random) for shape in ((2, D), (D, 3)))
    rolled, behind = roomy((layers, n, D, 3), 3, 7.0)
    rolled.copy_(many(HERE(past), n))
    pools = torch.zeros(layers, n, 1, size, size, device=DEVICE)
    records = kda.new_records(n, 2, 1, 1, size, size, layers=layers, device=DEVICE)
    accepted = torch.full((n,), 2, dtype=torch.int32, device=DEVICE)
    given = many(HERE(x), n).expand(layers, n, 2, D).contiguous()
    kda.flush_kvbuffer_all_layers(pools, records, accepted, conv_x=given, conv_state=rolled)
    expected = torch.cat([past[..., 2:], x.transpose(1, 2)], -1)
    assert torch.equal(rolled.cpu(), many(expected, n).expand(layers, n, D, 3)) and (behind == 7).all()

"""kda.segment_map and kda.segment_merge with CUDA tensors: numbers of the float64 oracle, and segments that make a
whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import kda
from places import DEVICE, FORMS, HERE, ORACLE, Place, all_same, matches
from support import Problem, Tensor, cotangents, make, rel_rmse, same_bits

SIZES = [(20, 36), (64, 64), (128, 64), (128, 128), (256, 200)]
LENGTHS = [70, 0, 1, 65]


def maps(place: Place, p: Problem, want: str = "Mbd", impl: str | None = None) -> dict[str, Tensor]:
    d_o = cotangents(p)[0] if "d" in want else None
    call = place.call(p.having(initial_state=None), d_o=d_o) | ({"impl": impl} if impl else {})
    return {name: x for name, x in kda.segment_map(**call, want=want)._asdict().items() if x is not None}


def allowed(p: Problem) -> float:
    """math.md's gate of gradients where operands have 16 bits, else float32's."""
    return 1e-5 if DEVICE.type == "cpu" or p.tensors["q"].dtype == torch.float32 else 8e-3


def near(expected: dict[str, Tensor], got: dict[str, Tensor], most: float, what: Any = "") -> None:
    assert expected.keys() == got.keys()
    for name, x in got.items():
        assert x.dtype == torch.float32
        # Of an identity that has decayed almost to nothing, operands of 16 bits leave the smallest number of f16.
        tiny = name == "M" and most > 1e-5 and (expected[name] - x.cpu()).abs().max() <= 2.0**-24
        assert tiny or rel_rmse(expected[name], x.cpu()) < most, (name, what)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("K", "V"), SIZES)
def test_numbers(form: str, K: int, V: int) -> None:
    options: dict[str, Any] = {"H": 2, "G": 2, "v_first": True} | FORMS[form]
    for rows in ({"B": 2, "T": 70}, {"B": 1, "T": 140, "lengths": LENGTHS, "tail": 4})[K == 256 :]:
        p = make(**options | rows, K=K, V=V)
        near(maps(ORACLE, p), maps(HERE, p), allowed(p), rows)


def test_each_alone_and_the_same_twice() -> None:
    """By one implementation. (Which one is best depends on what is wanted: Hopper's has no d of a gate in float32.)"""
    for dtype, impl in ((torch.float32, "cuda_segment_recurrent"), (torch.bfloat16, "cuda_segment_chunk")):
        used = impl if DEVICE.type == "cuda" else None
        p = make(2, 150, 1, 2, 128, 128, dtype=dtype, l2norm=True)
        everything = maps(HERE, p, impl=used)
        for want in ("M", "b", "d", "Mb", "bd", "Md", "Mbd"):
            got = maps(HERE, p, want, used)
            assert all_same(got, {name: everything[name] for name in want}), want
        assert maps(HERE, p, "") == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
def test_segments_make_the_whole(dtype: torch.dtype, v_first: bool) -> None:
    """Of any lengths. The states between them carry outputs, the final state and the gradient of the first one."""
    K, V = (64, 128) if dtype == torch.bfloat16 else (20, 36)
    whole = HERE(make(1, 240, 1, 2, K, V, gate="softplus", dtype=dtype, l2norm=True, v_first=v_first))
    d_o, dhT = (HERE(x) for x in cotangents(whole))
    most = allowed(whole)
    leaf = whole.tensors["initial_state"].clone().requires_grad_()
    o, hT = kda.chunk_kda(**{**whole.keywords, "initial_state": leaf}, output_final_state=True)
    dh0 = torch.autograd.grad((o, hT), leaf, (d_o, dhT))[0]
    for ends in ([0, 240], [0, 64, 128, 240], [0, 1, 1, 100, 239, 240]):
        parts = whole.having(cu_seqlens=torch.tensor(ends, device=DEVICE), initial_state=None)
        M, b, d = kda.segment_map(**parts.keywords, d_o=d_o, want="Mbd")
        states = kda.segment_merge(M, b, leaf.detach()[0], state_v_first=v_first)
        assert rel_rmse(hT[0], states[-1]) < most
        gradients = kda.segment_merge(M, d, dhT[0], reverse=True, state_v_first=v_first)
        assert rel_rmse(dh0[0], gradients[0]) < most
        pieces, _ = kda.chunk_kda(**{**parts.keywords, "initial_state": states[:-1].to(leaf.dtype)})
        assert rel_rmse(o, pieces) < 3 * most
        assert [b - a for a, b in pairwise(ends)].count(0) == sum(bool((x == 0).all()) for x in b.flatten(1))


def merging(P: int, HV: int, K: int, V: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(P)
    M, b = torch.randn(P, HV, K, K, generator=random) / K**0.5, torch.randn(P, HV, V, K, generator=random)
    return {"M": M, "b": b, "h0": torch.randn(HV, V, K, generator=random)}


def merged(place: Place, x: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return {"o": kda.segment_merge(**place(x), **options, impl=place.impl)}


@pytest.mark.parametrize("sizes", [(0, 2, 8, 8), (64, 3, 128, 128), (7, 40, 64, 128), (3, 2, 256, 200), (5, 1, 33, 7)])
def test_merge(sizes: tuple[int, int, int, int]) -> None:
    x = merging(*sizes)
    for reverse in (False, True):
        matches(merged, x, reverse=reverse, what=("reverse", reverse))
    turned = {"M": x["M"]} | {n: x[n].mT.contiguous() for n in ("b", "h0")}
    states = merged(HERE, turned, state_v_first=False)["o"]
    assert same_bits(states.mT.contiguous(), merged(HERE, x)["o"])


def test_under_torch_compile() -> None:
    p = HERE(make(1, 70, 1, 2, 64, 64, gate="softplus", state=False, v_first=True))
    d_o = cotangents(p)[0].to(DEVICE)

    def f(d_o: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        M, b, d = kda.segment_map(**keywords, d_o=d_o, want="Mbd")
        return M, b, d, kda.segment_merge(M, b, d[0])

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert all_same(f(d_o, **p.keywords), compiled(d_o, **p.keywords))

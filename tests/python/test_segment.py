"""kda.segment_map and kda.segment_merge: against the float64 recurrence and its autograd, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kda
from support import Problem, Tensor, cotangents, cpu_implementations, make, oracle, rel_rmse, same_bits, wild

GATES = ("log", "softplus", "lower_bound")


def maps(p: Problem, **more: Any) -> Any:
    """The maps of the problem's sequences, including d."""
    keywords = p.having(initial_state=None).keywords
    return kda.segment_map(**keywords, d_o=cotangents(p)[0], want="Mbd", **more)


def expected_maps(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """From the recurrence in float64: it is affine in h0, and autograd gives the transpose."""
    p64 = p.map(Tensor.double)
    v = p64.tensors["v"]
    N, HV, K, V = p.sequences, v.shape[2], p.tensors["q"].shape[3], v.shape[3]
    v_first = p.options["state_v_first"]

    def final(h0: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return oracle(p64.having(initial_state=h0.transpose(-1, -2) if v_first else h0, v=v))[:2]

    def layout(S: Tensor) -> Tensor:
        return S.transpose(-1, -2) if v_first else S

    zero = v.new_zeros(N, HV, K, V).requires_grad_()
    o, b = final(zero, v)
    d_o = cotangents(p)[0].double()
    d = torch.autograd.grad(o, zero, d_o)[0] if o.requires_grad else torch.zeros_like(zero)
    unit = torch.eye(K, dtype=torch.float64).expand(N, HV, K, K)
    _, M = final(unit, v.new_zeros(*v.shape[:3], K))
    return layout(M) if v_first else M, b.detach(), layout(d)


@pytest.mark.parametrize("impl", cpu_implementations("segment_map"))
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 65]])
def test_against_the_recurrence(impl: str, gate: str, v_first: bool, lengths: list[int] | None) -> None:
    p = make(2, 70, 1, 2, 20, 36, gate=gate, beta="sigmoid", v_first=v_first, lengths=lengths, tail=3)
    for expected, got in zip(expected_maps(p), maps(p, impl=impl), strict=True):
        assert got.dtype == torch.float32 and rel_rmse(expected, got) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    p = make(1, 66, 1, 2, 8, 12, dtype=dtype, gate="softplus")
    for expected, got in zip(expected_maps(p), maps(p), strict=True):
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert rel_rmse(expected, got) < 1e-5


def test_wild_gates() -> None:
    p = wild(make(1, 200, 1, 1, 16, 24))
    for expected, got in zip(expected_maps(p), maps(p), strict=True):
        assert rel_rmse(expected, got) < 1e-5


def test_numpy() -> None:
    p = make(1, 70, state=False, v_first=True)
    arrays = {n: x.numpy() for n, x in p.tensors.items()}
    got, expected = kda.segment_map(**arrays, **p.options), kda.segment_map(**p.keywords)
    assert isinstance(got.M, np.ndarray) and np.array_equal(got.M, expected.M) and np.array_equal(got.b, expected.b)
    states = kda.segment_merge(got.M, got.b)
    assert isinstance(states, np.ndarray) and np.array_equal(states[1], got.b[0])


@pytest.mark.parametrize("impl", cpu_implementations("segment_merge"))
@pytest.mark.parametrize("reverse", [False, True])
def test_merge(impl: str, reverse: bool) -> None:
    random = torch.Generator().manual_seed(0)
    M, b = torch.randn(4, 3, 20, 20, generator=random) / 5, torch.randn(4, 3, 36, 20, generator=random)
    h0 = torch.randn(3, 36, 20, generator=random)
    S, expected = h0.double(), [h0.double()]
    for i in reversed(range(4)) if reverse else range(4):
        S = S @ (M[i].double() if reverse else M[i].double().transpose(-1, -2)) + b[i].double()
        expected.append(S)
    got = kda.segment_merge(M, b, h0, reverse=reverse, impl=impl)
    assert rel_rmse(torch.stack(expected[::-1] if reverse else expected), got) < 1e-6
    k_first = kda.segment_merge(
        M, b.transpose(-1, -2).contiguous(), h0.transpose(-1, -2).contiguous(), reverse=reverse, state_v_first=False,
        impl=impl,
    )  # fmt: skip
    assert same_bits(k_first.transpose(-1, -2).contiguous(), got)


def test_under_torch_compile() -> None:
    p = make(1, 70, 1, 2, 8, 12, gate="softplus", state=False, v_first=True)
    d_o = cotangents(p)[0]

    def f(d_o: Tensor, **keywords: Any) -> tuple[Any, Tensor]:
        M, b, d = kda.segment_map(**keywords, d_o=d_o, want="Mbd")
        return kda.segment_map(**keywords), kda.segment_merge(M, b, d[0])

    eager, compiled = f(d_o, **p.keywords), torch.compile(f, fullgraph=True)(d_o, **p.keywords)
    assert compiled[0].d is None
    for x, y in zip((*eager[0][:2], eager[1]), (*compiled[0][:2], compiled[1]), strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("lengths", [None, [10, 0, 7]])
def test_operators_pass_opcheck(dtype: torch.dtype, v_first: bool, lengths: list[int] | None) -> None:
    p = make(1, 20, 1, 2, 4, 6, state=False, dtype=dtype, lengths=lengths, tail=3)
    t = p.tensors
    packed = p.options.get("cu_seqlens")
    call = (t["q"], t["k"], t["v"], t["g"], t["beta"], None, None, packed, 0, 0, True, int(not v_first), 0.0, 0.5)
    for d_o, M, b in ((cotangents(p)[0], True, True), (None, True, False), (None, False, False)):
        torch.library.opcheck(torch.ops.kda.segment_map.default, (*call, d_o, M, b, None, 0))
    M, b, _ = torch.ops.kda.segment_map(*call, None, True, True, None, 0)
    for h0, reverse in ((None, False), (b[0], True)):
        torch.library.opcheck(torch.ops.kda.segment_merge.default, (M, b, h0, reverse, v_first, None, 0))


def test_other_lengths_compile_nothing_anew() -> None:
    torch._dynamo.reset()
    fast = torch.compile(kda.segment_map, fullgraph=True, backend="aot_eager")
    for i, T in enumerate((70, 64, 200)):
        p = make(1, T, 1, 2, 8, 12, gate="softplus", state=False)
        for n in ("q", "k", "v", "g", "beta"):
            torch._dynamo.mark_dynamic(p.tensors[n], 1)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(**p.keywords)
        assert all(same_bits(a, b) for a, b in zip(got[:2], kda.segment_map(**p.keywords)[:2], strict=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"want": "x"}, "want: expected some of the letters M, b, d, got 'x'"),
        ({"want": None}, "want: expected some of the letters M, b, d, got None"),
        ({"want": "Md"}, "d_o: expected with d among what is wanted, and only then, got want='Md'"),
        ({"d_o": torch.zeros(1, 10, 2, 24)}, "d_o: expected with d among what is wanted, and only then, got want='Mb'"),
        ({"d_o": torch.zeros(1, 9, 2, 24), "want": "d"}, "d_o: expected shape [1,10,2,24] like v, got [1,9,2,24]"),
        ({"k": torch.zeros(1, 10, 2, 15)}, "k: expected shape [1,10,2,16] like q, got [1,10,2,15]"),
        ({"cu_seqlens": torch.tensor([0, 11])}, "cu_seqlens[1]: expected at most T = 10, got 11"),
        (
            {"impl": "cpu_chunk"},
            f"impl: expected one of {', '.join(kda.implementations('segment_map'))}, got cpu_chunk",
        ),
        ({"num_threads": -1}, "num_threads: expected >= 0, got -1"),
    ],
)
def test_map_refuses(changes: dict[str, Any], sentence: str) -> None:
    keywords = {**make(1, 10, state=False).keywords, **changes}
    with pytest.raises(ValueError) as refusal:
        kda.segment_map(**keywords)
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"M": torch.zeros(2, 1, 4, 5)}, "M: expected shape [2,1,4,4] ([P,HV,K,K]), got [2,1,4,5]"),
        ({"M": torch.zeros(2, 4, 4)}, "M: expected 4 dimensions, got shape [2, 4, 4]"),
        ({"M": None}, "M: expected an array, got None"),
        ({"b": torch.zeros(2, 1, 6)}, "b: expected 4 dimensions, got shape [2, 1, 6]"),
        ({"b": torch.zeros(3, 1, 6, 4)}, "b: expected shape [2,1,6,4] ([..,HV,V,K], V-first), got [3,1,6,4]"),
        ({"h0": torch.zeros(2, 6, 4)}, "h0: expected shape [1,6,4] ([..,HV,V,K], V-first), got [2,6,4]"),
        ({"state_v_first": False}, "b: expected shape [2,1,4,4] ([..,HV,K,V], K-first), got [2,1,6,4]"),
        ({"b": torch.zeros(2, 1, 6, 4, dtype=torch.bfloat16)}, "b: expected float32, got bfloat16"),
    ],
)
def test_merge_refuses(changes: dict[str, Any], sentence: str) -> None:
    keywords = {"M": torch.zeros(2, 1, 4, 4), "b": torch.zeros(2, 1, 6, 4), "h0": torch.zeros(1, 6, 4), **changes}
    with pytest.raises(ValueError) as refusal:
        kda.segment_merge(**keywords)
    assert str(refusal.value).startswith(sentence)

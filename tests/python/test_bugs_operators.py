"""More of bugs.md: what the convolution, segment maps, stages and the float32 prefill can show on a CPU."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kda
from calls import BASES, WRITTEN, function
from kda import stages
from support import Tensor, far_memory, make, rel_rmse, same_bits, saturated

all_of_them = pytest.mark.parametrize("name", BASES)


def call(name: str, kw: dict[str, Any]) -> list[Tensor]:
    """Copies of what is returned and what is written. What is never written becomes 0: states of chunks that no
    sequence has."""
    r = function(name)(**kw)
    own = [kw[n] for n in WRITTEN.get(name, ())]
    tensors = [*(r if isinstance(r, tuple) else (r,)), *own]
    tensors = [x.detach().clone() for x in tensors if x is not None]
    if name in ("delta_h", "bwd_delta_h"):
        tensors[0][2:] = 0
    return tensors


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@all_of_them
def test_bug_02_43_same_bits_from_any_thread(name: str) -> None:
    """One after another, at the same time, and with any number of threads inside."""
    expected = call(name, BASES[name]())
    with ThreadPoolExecutor(4) as pool:
        assert all(equal(expected, x) for x in pool.map(lambda _: call(name, BASES[name]()), range(40)))
    if "num_threads" in inspect.signature(function(name)).parameters:
        assert all(equal(expected, call(name, {**BASES[name](), "num_threads": n})) for n in (1, 2, 3, 7))


@all_of_them
def test_bug_42_inputs_are_unchanged(name: str) -> None:
    kw, same = BASES[name](), BASES[name]()
    function(name)(**kw)
    for n, x in kw.items():
        if isinstance(x, Tensor) and n not in WRITTEN.get(name, ()):
            assert same_bits(x, same[n]), n


@all_of_them
def test_bug_34_nothing_is_read_beyond_a_row(name: str) -> None:
    """Every float array is a slice of a wider one full of NaN."""

    def padded(x: Tensor) -> Tensor:
        return torch.full((*x.shape[:-1], x.shape[-1] + 5), math.nan)[..., : x.shape[-1]].copy_(x)

    vectors = ("A_log", "dt_bias", "bias")
    kw = {n: padded(x) if isinstance(x, Tensor) and x.is_floating_point() and n not in vectors else x
          for n, x in BASES[name]().items()}  # fmt: skip
    assert equal(call(name, BASES[name]()), call(name, kw))


def far_apart(x: Tensor, memory: Tensor, at: int, dim: int, stride: int) -> Tensor:
    strides = [stride if d == dim else s for d, s in enumerate(x.contiguous().stride())]
    for d in range(dim):  # of size 1
        strides[d] = 0
    return memory[at:].as_strided(x.shape, strides).copy_(x)


def test_bug_06_convolution_of_tokens_beyond_2_31_elements() -> None:
    stride = 2**30 + 2048
    memory = far_memory(3 * stride + 2**16)
    random = torch.Generator().manual_seed(0)
    x, weight, d_y = (torch.randn(*s, generator=random) for s in ((1, 4, 6), (6, 4), (1, 4, 6)))
    far_x, far_out = (far_apart(t, memory, at, 1, stride) for t, at in ((x, 0), (d_y, 64)))
    results = []
    for inputs in (x, far_x):
        leaves = [t.detach().requires_grad_() for t in (inputs, weight)]
        y, _ = kda.causal_conv1d(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, d_y)])
    assert equal(*results)
    kda.causal_conv1d_update(far_x, torch.zeros(1, 6, 3), weight, out=far_out)
    assert same_bits(far_out.contiguous(), results[0][0])


def test_bug_05_convolution_states_beyond_2_31_elements() -> None:
    stride = 2**30 + 2048
    pool = far_memory(3 * stride + 2**16).as_strided((4, 6, 3), (stride, 3, 1)).zero_()
    near, slots = torch.zeros(4, 6, 3), torch.tensor([3, 1], dtype=torch.int32)
    x, weight = torch.randn(2, 5, 6), torch.randn(6, 4)
    for _ in range(2):
        a, b = (kda.causal_conv1d_update(x, state, weight, state_indices=slots) for state in (near, pool))
        assert same_bits(a, b) and same_bits(near, pool.contiguous())


def test_bug_06_stages_and_float32_prefill_of_tokens_beyond_2_31_elements() -> None:
    stride = 2**30 + 2048
    memory = far_memory(3 * stride + 2**16)
    p = make(1, 4, 1, 2, 4, 6, l2norm=False, state=False)
    x = [p.tensors[n] for n in ("q", "k", "v", "g", "beta")]
    far = [far_apart(t, memory, 64 * i, 1, stride) for i, t in enumerate(x)]
    near_map, far_map = (kda.segment_map(*t) for t in (x, far))
    assert same_bits(near_map.M, far_map.M) and same_bits(near_map.b, far_map.b)
    near, distant = (kda.prefill_f32(*(a.transpose(1, 2) for a in t), 32) for t in (x, far))
    assert equal(list(near), list(distant))
    results = []
    for q, k, v, g, beta in (x, far):
        G = stages.cumsum(g)
        results.append([G, *stages.chunk_intra(q, k, v, G, beta), stages.cumsum_backward(g)])
    assert equal(*results)


@pytest.mark.parametrize("where", ["x", "initial_state"])
def test_bug_04_nan_of_one_sequence_or_channel_in_the_convolution(where: str) -> None:
    """A slot that is reused must not see its old content either."""
    kw = {"x": torch.randn(1, 9, 6), "weight": torch.randn(6, 4), "initial_state": torch.randn(3, 6, 3)}
    kw["cu_seqlens"] = torch.tensor([0, 4, 5, 9])
    y, last = kda.causal_conv1d(**kw, output_final_state=True)
    bad = {**kw, where: kw[where].clone()}
    bad[where][(0, 4, 2) if where == "x" else (1, 2, 2)] = math.nan  # sequence 1, channel 2
    got, end = kda.causal_conv1d(**bad, output_final_state=True)
    assert got[0, 4, 2].isnan() and got.isnan().sum() == 1
    assert same_bits(got.nan_to_num(0), torch.where(got.isnan(), 0, y))
    assert not end[[0, 2]].isnan().any() and not end[1, [0, 1, 3, 4, 5]].isnan().any() and same_bits(end[0], last[0])
    pool = torch.full((3, 6, 3), math.nan)
    fresh = kda.causal_conv1d_update(
        kw["x"], pool, kw["weight"], cu_seqlens=kw["cu_seqlens"], has_initial_state=torch.zeros(3, dtype=torch.bool)
    )
    assert fresh.isfinite().all() and pool.isfinite().all()


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta", "d_o"])
def test_bug_04_nan_of_one_sequence_in_maps(argument: str) -> None:
    p = make(H=1, G=2, K=4, V=6, lengths=[70, 3, 66], state=False)
    kw = p.keywords | {"d_o": p.tensors["v"].clone(), "want": "Mbd"}
    bad = {**kw, argument: kw[argument].clone()}
    bad[argument][:, 71] = math.nan
    for x, y in zip(kda.segment_map(**kw), kda.segment_map(**bad), strict=True):
        assert same_bits(x[[0, 2]], y[[0, 2]])


def test_bug_15_16_20_stages_and_float32_prefill_with_saturated_gates() -> None:
    for p in (
        saturated(make(1, 200, 2, 1, 16, 24, l2norm=False, state=False)),
        make(1, 200, 2, 1, 16, 24, l2norm=False),
    ):
        x = [p.tensors[n].clone() for n in ("q", "k", "v", "g", "beta")]
        if "initial_state" in p.tensors:
            x[3][:] = -5.0
        expected = kda.prefill(*x)
        G = stages.cumsum(x[3])
        w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(*x[:3], G, x[4])
        h, v_new, _ = stages.delta_h(kg, w, u, G)
        o = stages.fwd_o(x[0], v_new, G, Aqk, h)
        assert all(t.isfinite().all() for t in (G, w, u, qG, kg, Aqk, Akk_inv, o))
        assert rel_rmse(expected, o) < 1e-5
        rows = [t.transpose(1, 2) for t in x]
        for chunk in (32, 64):
            assert rel_rmse(expected.transpose(1, 2), kda.prefill_f32(*rows, chunk)[0]) < 1e-5


@pytest.mark.parametrize("name", [n for n in BASES if "cu_seqlens" in BASES[n]()])
def test_bug_40_new_offsets_in_the_same_memory(name: str) -> None:
    cu = BASES[name]()["cu_seqlens"]
    before = call(name, BASES[name]() | {"cu_seqlens": cu})
    cu[1:] -= 1  # and the same number of chunks
    after = call(name, BASES[name]() | {"cu_seqlens": cu})
    assert equal(after, call(name, BASES[name]() | {"cu_seqlens": cu.clone()})) and not equal(before, after)


SCALED: dict[str, Callable[[float], Tensor]] = {
    "segment_map": lambda s: kda.segment_map(**BASES["segment_map"]() | {"scale": s}).d,
    "prefill_f32": lambda s: kda.prefill_f32(**BASES["prefill_f32"]() | {"scale": s})[0],
    "fwd_o": lambda s: stages.fwd_o(**BASES["fwd_o"]() | {"scale": s, "Aqk": torch.zeros(1, 70, 2, 64)}),
    "chunk_intra": lambda s: stages.chunk_intra(**BASES["chunk_intra"]() | {"scale": s})[4],
    "bwd_local": lambda s: stages.bwd_local(**BASES["bwd_local"]() | {"scale": s})[0],
}


@pytest.mark.parametrize("name", SCALED)
def test_bug_44_scale_is_a_factor(name: str) -> None:
    assert same_bits(4 * SCALED[name](0.5), SCALED[name](2.0))


@pytest.mark.parametrize("name", ["causal_conv1d", "causal_conv1d_update", "segment_map", "cumsum", "bwd_intra"])
def test_bug_12_rows_behind_the_last_sequence_are_not_read(name: str) -> None:
    kw, bad = BASES[name](), BASES[name]()
    end, T = int(kw["cu_seqlens"][-1]), kw.get("x", kw.get("g", kw.get("q"))).shape[1]  # type: ignore[union-attr]
    for n, x in bad.items():
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[1] == T and n not in WRITTEN.get(name, ()):
            x[:, end:] = math.nan
    assert equal(call(name, kw), call(name, bad))

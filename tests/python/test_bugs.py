"""Bugs that other KDA kernels had in practice (bugs.md lists all 44 and what covers each)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from support import (
    Problem,
    Tensor,
    assert_close,
    cotangents,
    far_memory,
    kda_oracle,
    make,
    reference,
    rel_rmse,
    run,
    same_bits,
    saturated,
)

NAN = float("nan")
SERVING = [pytest.param(op, marks=pytest.mark.cuda) for op in (kda.prefill, kda.decode)]
serving = pytest.mark.parametrize("op", SERVING, ids=lambda f: f.__name__)
training = pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda], ids=lambda f: f.__name__)


def stateless(p: Problem) -> tuple[Problem, Tensor]:
    return p.having(initial_state=None), p.tensors["initial_state"]


# ---- stale memory, slots, layouts ----


@serving
def test_bug_01_nothing_stale_in_the_state_of_an_empty_sequence(op: Callable[..., Tensor]) -> None:
    p, h0 = stateless(make(H=1, G=2, gate="softplus", lengths=[0, 70, 0, 3, 0], v_first=True))
    has = torch.zeros(5, dtype=torch.bool)
    first = None
    for i in range(100):
        op(**make(1, 64, seed=i, v_first=True, state=False).keywords)  # leaves its numbers in every scratch buffer
        state = torch.full_like(h0, NAN)
        o = op(**p.keywords, state=state, has_initial_state=has)
        assert not state[[0, 2, 4]].any()
        first = first or (o, state)
        assert same_bits(o, first[0]) and same_bits(state, first[1])


@pytest.mark.cuda
@training
def test_bug_02_two_inputs_in_turn(function: Callable[..., Any]) -> None:
    problems = [make(1, 300, 3, dtype=torch.bfloat16, gate="lower_bound", seed=i) for i in (0, 1)]
    first = [run(function, p) for p in problems]
    for _ in range(100):
        for p, expected in zip(problems, first, strict=True):
            got = run(function, p)
            assert all(same_bits(expected[n], got[n]) for n in expected)


@serving
def test_bug_03_state_layout(op: Callable[..., Tensor]) -> None:
    """With K = V shapes do not reveal the layout: one token k = e1, v = 5 e2 must land in [v = 2, k = 1], or [k, v]
    K-first."""
    one = torch.zeros(1, 1, 1, 4)
    q, k, v = one.clone(), one.clone(), one.clone()
    k[..., 1], v[..., 2] = 1, 5
    for v_first, index in ((True, (2, 1)), (False, (1, 2))):
        state = torch.zeros(1, 1, 4, 4)
        op(q, k, v, one, torch.ones(1, 1, 1), state, state_v_first=v_first)
        assert state[0, 0][index] == 5 and state.sum() == 5
    # Short prompts hide the bug; a carried asymmetric state does not.
    p, h0 = stateless(make(1, 150, 1, 1, 16, 16, v_first=True))
    whole, state = h0.clone(), h0.clone()
    o = op(**p.keywords, state=whole)
    parts = [op(**p.map(lambda x, a=a, b=b: x[:, a:b]).keywords, state=state) for a, b in ((0, 37), (37, 150))]  # type: ignore[misc]
    assert_close({"o": o, "final_state": whole}, {"o": torch.cat(parts, 1), "final_state": state})


@serving
def test_bug_04_nan_stays_where_it_is(op: Callable[..., Tensor]) -> None:
    p, h0 = stateless(make(H=1, G=2, gate="softplus", lengths=[70, 5, 65], v_first=True))
    clean, poisoned = h0.clone(), h0.clone()
    poisoned[1] = NAN
    expected, got = op(**p.keywords, state=clean), op(**p.keywords, state=poisoned)
    assert same_bits(got[:, :70], expected[:, :70]) and same_bits(got[:, 75:], expected[:, 75:])
    assert same_bits(poisoned[[0, 2]], clean[[0, 2]]) and got[:, 70:75].isnan().all()


@pytest.mark.parametrize("op", [kda.prefill, kda.decode], ids=lambda f: f.__name__)
def test_bug_06_tokens_beyond_2_31_elements(op: Callable[..., Tensor]) -> None:
    """Four tokens 2^30 elements apart, in inputs and outputs."""
    p, h0 = stateless(make(1, 4, 1, 2, 4, 6, v_first=True))
    stride = 2**30 + 2048
    memory, far, at = far_memory(3 * stride + 2**16), {}, 0
    for n in ("q", "k", "v", "g", "beta", "out"):
        x = torch.zeros_like(p.tensors["v"]) if n == "out" else p.tensors[n]
        far[n] = memory[at:].as_strided(x.shape, (0, stride, *x.stride()[2:])).copy_(x)
        at += x[0, 0].numel()
    state, far_state = h0.clone(), h0.clone()
    expected = op(**p.keywords, state=state)
    assert same_bits(op(**{**p.keywords, **far}, state=far_state), expected) and same_bits(state, far_state)


def test_bug_06_gradients_of_tokens_beyond_2_31_elements() -> None:
    p = make(1, 4, 1, 2, 4, 6)
    stride = 2**30 + 2048
    memory, far, at = far_memory(3 * stride + 2**16), {}, 0
    for n in ("q", "k", "v", "g", "beta"):
        x = p.tensors[n]
        far[n] = memory[at:].as_strided(x.shape, (0, stride, *x.stride()[2:])).copy_(x).requires_grad_()
        at += x[0, 0].numel()
    near = {n: p.tensors[n].clone().requires_grad_() for n in far}
    for leaves in (far, near):
        kda.chunk_kda(**{**p.keywords, **leaves})[0].square().sum().backward()
    assert all(same_bits(near[n].grad, far[n].grad) for n in far)  # type: ignore[arg-type]


@pytest.mark.cuda
def test_bug_07_changing_slots_and_lengths() -> None:
    """A thousand steps over one pool, with other sequences in other rows each time, against a pool of plain copies."""
    random, slots = torch.Generator().manual_seed(0), 6
    p, h0 = stateless(make(6, 200, 1, 2, 4, 6, gate="softplus", v_first=True))
    inputs = {n: p.tensors[n] for n in ("q", "k", "v", "g", "beta")}
    pool, copies, seen = h0.clone(), h0.clone(), torch.zeros(slots, dtype=torch.long)
    for _ in range(1000):
        n = int(torch.randint(1, slots + 1, (), generator=random))
        chosen = torch.randperm(slots, generator=random)[:n]
        live = torch.rand(n, generator=random) < 0.8
        step = {m: x[chosen, seen[chosen] % 200].unsqueeze(1) for m, x in inputs.items()}
        o = kda.decode(**{**p.keywords, **step}, state=pool, state_indices=torch.where(live, chosen, -1).int())
        for i, slot in enumerate(chosen.tolist()):
            if live[i]:
                alone = {m: x[i : i + 1] for m, x in step.items()}
                assert same_bits(o[i : i + 1], kda.decode(**{**p.keywords, **alone}, state=copies[slot : slot + 1]))
        assert not o[~live].any()
        seen[chosen[live]] += 1
    assert same_bits(pool, copies)


# ---- gates ----


@pytest.mark.cuda
@training
@pytest.mark.parametrize("bound", [-5.0, -1.0, -0.01])
def test_bug_15_saturated_gates(function: Callable[..., Any], bound: float) -> None:
    p = make(1, 130, 1, 1, 32, 32)
    alternating = p.having(
        g=torch.where(torch.arange(130).view(1, 130, 1, 1) % 2 == 0, bound, 0.0).expand(1, 130, 1, 32)
    )
    for q in (saturated(p, bound), saturated(p, 0.0), alternating):
        assert_close(reference(q), run(function, q), 2)


@pytest.mark.cuda
@training
@pytest.mark.parametrize("T", [64, 128])
def test_bug_16_a_whole_chunk_at_the_bound_from_the_raw_gate(function: Callable[..., Any], T: int) -> None:
    p = make(1, T, 1, 1, 32, 32, gate="lower_bound", dtype=torch.bfloat16)
    p = p.having(g=torch.full_like(p.tensors["g"], 50), dt_bias=None)  # sigmoid(50) = 1: g = -5
    assert_close(reference(p), run(function, p), {"dg": 2, "dA_log": math.inf})


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_bug_17_gradients_of_saturated_gates_are_finite(gate: str) -> None:
    for raw in (-100.0, 100.0):
        p = make(1, 200, 4, 2, 32, 32, gate=gate, beta="sigmoid")
        p = p.having(g=torch.where(torch.rand(p.tensors["g"].shape) < 0.9, raw, p.tensors["g"]))
        assert all(x.isfinite().all() for x in run(kda.chunk_kda, p).values())


@pytest.mark.parametrize("size", [2.0**7, 2.0**13])
def test_bug_18_gate_gradient_from_large_gradients(size: float) -> None:
    """Powers of two, so that bfloat16 rounds nothing before the kernel."""
    p = make(1, 200, 1, 2, 32, 32, dtype=torch.bfloat16, gate="lower_bound")

    def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **kw: tuple(size * x for x in function(**kw))

    expected = run(scaled(kda_oracle), p.map(Tensor.double), grads=cotangents(p))
    assert_close(expected, run(scaled(kda.chunk_kda), p))


@pytest.mark.cuda
@training
def test_bug_19_unbounded_gates(function: Callable[..., Any]) -> None:
    p = make(1, 130, 1, 2, 32, 32, gate="softplus")
    steep = p.having(A_log=torch.full((2,), math.log(16.0)), dt_bias=torch.full((64,), 5.0))
    assert_close(reference(steep), run(function, steep), {"dA_log": 80, "ddt_bias": 80, "dg": 10})
    p = saturated(make(1, 130, 1, 2, 32, 32), -50.0)
    assert_close(reference(p), run(function, p), {"dg": 10})


@serving
def test_bug_20_cumulative_gates_that_underflow(op: Callable[..., Tensor]) -> None:
    """Sixteen tokens of g = -30: exp of their sum is 0 in float32, but every ratio that matters is not."""
    p = saturated(make(1, 16, 1, 2, 32, 32, v_first=True), -30.0)
    expected = reference(p, backward=False)
    p, state = stateless(p)
    assert_close(expected, {"o": op(**p.keywords, state=state), "final_state": state})


@pytest.mark.cuda
def test_bug_21_the_two_gates_are_two_formulas() -> None:
    x = torch.linspace(-8, 8, 41).view(41, 1, 1)
    softplus = kda.fused_kda_gate(x, torch.zeros(1))
    bounded = kda.fused_kda_gate(x, torch.zeros(1), lower_bound=-5.0)
    assert torch.allclose(softplus, -torch.nn.functional.softplus(x), rtol=1e-5)
    assert torch.allclose(bounded, -5 * x.sigmoid(), rtol=1e-5)
    assert not torch.allclose(bounded, softplus.clamp(min=-5), atol=0.1)


@pytest.mark.cuda
@pytest.mark.parametrize("remainder", range(64))
def test_bug_22_partial_chunks(remainder: int) -> None:
    """Rows that pad a chunk must not go through the gate or sigmoid: sigmoid(0) and gate(0) are not 0."""
    for lengths in ([64 + remainder, remainder], [remainder]):
        p = make(H=1, G=1, K=8, V=8, gate="softplus", beta="sigmoid", lengths=lengths)
        assert_close(reference(p), run(kda.chunk_kda, p), {"dA_log": 10, "ddt_bias": 10})


# ---- shapes ----


@pytest.mark.cuda
@training
def test_bug_25_and_36_head_sizes_end_at_256(function: Callable[..., Any]) -> None:
    assert function(**make(1, 3, 1, 1, 256, 256).keywords)[0].isfinite().all()
    for K, V, name in ((257, 8, "q"), (512, 512, "q"), (8, 257, "v"), (0, 8, "q"), (8, 0, "v")):
        with pytest.raises(ValueError, match=f"^{name}: expected [KV] in 1..256, got"):
            function(**make(1, 3, 1, 1, K, V).keywords)


@serving
def test_bug_26_a_last_sequence_of_one_token(op: Callable[..., Tensor]) -> None:
    for lengths in ([8191, 1], [1, 2, 15, 16, 17, 63, 64, 65, 1], [65, 1, 64, 1]):
        p, h0 = stateless(make(H=1, K=8, V=8, gate="softplus", lengths=lengths, v_first=True))
        state, last = h0.clone(), h0[-1:].clone()
        o = op(**p.keywords, state=state)
        tail = {n: p.tensors[n][:, -1:] for n in ("q", "k", "v", "g", "beta")}
        assert same_bits(o[:, -1:], op(**p.having(**tail, cu_seqlens=None).keywords, state=last))
        assert same_bits(state[-1:], last)


@serving
@pytest.mark.parametrize("T", [0, 5])
def test_bug_27_all_sequences_empty(op: Callable[..., Tensor], T: int) -> None:
    p, h0 = stateless(make(lengths=[0, 0, 0], tail=T, v_first=True))
    state = h0.clone()
    o = op(**p.keywords, state=state)
    assert list(o.shape) == [1, T, 2, 24] and not o.any() and same_bits(state, h0)
    op(**p.keywords, state=state, has_initial_state=torch.zeros(3, dtype=torch.bool))
    assert not state.any(), "a fresh sequence of no tokens ends in zeros"


@pytest.mark.cuda
def test_bug_34_nothing_is_read_beyond_the_heads() -> None:
    for K, V in ((60, 100), (3, 5), (33, 17)):
        p = make(1, 70, 1, 2, K, V, gate="softplus", l2norm=False)

        def padded(x: Tensor) -> Tensor:
            return torch.full((*x.shape[:-1], x.shape[-1] + 5), NAN)[..., : x.shape[-1]].copy_(x)

        q = p.having(**{n: padded(p.tensors[n]) for n in (*"qkvg", "initial_state")})
        expected, outputs = run(kda.chunk_kda, p), kda.chunk_kda(**q.keywords, output_final_state=True)
        assert same_bits(expected["o"], outputs[0]) and same_bits(expected["final_state"], outputs[1])
        got = run(kda.chunk_kda, q)
        assert all(same_bits(expected[n], got[n]) for n in expected)


@pytest.mark.cuda
@training
@pytest.mark.parametrize("G", [2, 4])
def test_bug_35_grouped_values_are_repeated_heads(function: Callable[..., Any], G: int) -> None:
    p = make(1, 70, 2, G, 16, 24, gate="softplus")
    repeated = p.having(**{n: p.tensors[n].repeat_interleave(G, 2) for n in "qk"})
    a, b = run(function, p), run(function, repeated)
    for n in {"dq", "dk"} & a.keys():
        assert rel_rmse(b.pop(n).unflatten(2, (2, G)).sum(3), a.pop(n)) < 1e-6
    assert all(same_bits(a[n], b[n]) for n in a)


@training
def test_bug_33_gradients_through_a_split(function: Callable[..., Any]) -> None:
    """Two calls joined by the state have the same gradients as one, segment by segment."""
    p = make(1, 150, 1, 2, 16, 24, gate="softplus")

    def split(**kw: Any) -> tuple[Tensor, Tensor]:
        outs, state = [], kw.pop("initial_state")
        for a, b in ((0, 64), (64, 101), (101, 150)):
            part = {n: kw[n][:, a:b] for n in ("q", "k", "v", "g", "beta")}
            o, state = function(**{**kw, **part}, initial_state=state)
            outs.append(o)
        return torch.cat(outs, 1), state

    assert_close(reference(p), run(split, p))

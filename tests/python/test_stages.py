"""kda.stages put together: the whole forward and backward against the float64 recurrence and its autograd. Also the
stages as torch operators, kda.prefill_f32 and torch.ops.kda_prefill."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

import kda
import kda.operators.stages
from kda import stages
from kda.call.library import library
from kda.call.shared import STAGES
from stages_together import backward, forward
from support import (
    Problem,
    Tensor,
    assert_close,
    cotangents,
    cpu_implementations,
    gate,
    make,
    reference,
    run_examples,
    same_bits,
    saturated,
    take_operators,
    wild,
)

GATES = ("log", "softplus", "lower_bound")
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def activated(p: Problem, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The inputs of the stages, as differentiable functions of those of kda.chunk_kda: q, k, v, g, beta."""
    q, k, v, g, beta = (leaves[n] for n in ("q", "k", "v", "g", "beta"))
    if p.options["use_qk_l2norm_in_kernel"]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if p.options.get("use_gate_in_kernel"):
        g = gate(g, leaves.get("A_log"), leaves.get("dt_bias"), p.options.get("lower_bound"))
    if p.options.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if p.options["allow_neg_eigval"] else 1)
    return q, k, v, g, beta


def whole(p: Problem, impl: str | None = None) -> dict[str, Tensor]:
    """The results that support.run gives for kda.chunk_kda, computed by stages."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in p.tensors.items()}
    h0 = leaves.pop("initial_state", None)
    x = activated(p, leaves)
    values = tuple(t.detach() for t in x)
    scale = p.options.get("scale", x[0].shape[3] ** -0.5)
    how = {"state_v_first": p.options["state_v_first"]}
    packed = {"cu_seqlens": p.options.get("cu_seqlens"), "impl": impl}
    o, hT, saved = forward(values, None if h0 is None else h0.detach(), scale, how, packed)
    d_o, d_state = (d.to(t) for d, t in zip(cotangents(p), (values[2], hT), strict=True))
    *gradients, dh0 = backward(values, saved, d_o, d_state, scale, how, packed)
    pairs = [(a, d.to(a)) for a, d in zip(x, gradients, strict=True)]
    d_leaves = torch.autograd.grad([a for a, _ in pairs], list(leaves.values()), [d for _, d in pairs])
    results = {"o": o, "final_state": hT} | {f"d{n}": y for n, y in zip(leaves, d_leaves, strict=True)}
    return results | ({} if h0 is None else {"dinitial_state": dh0})


# ---- all stages together ----


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("lengths", "G"), [(None, 1), (None, 3), ([70, 0, 1, 130], 2)])
def test_forward_and_backward(gate: str, v_first: bool, lengths: list[int] | None, G: int) -> None:
    p = make(2, 100, 1, G, 20, 36, gate=gate, beta="2sigmoid", v_first=v_first, lengths=lengths, tail=5, scale=0.25)
    assert_close(reference(p), whole(p), slack=4)
    wide = p.map(Tensor.double)
    assert_close(reference(wide), whole(wide, "reference"), what="the oracle's stages")


@pytest.mark.parametrize("recipe", [wild, saturated])
def test_extreme_gates(recipe: Any) -> None:
    """-inf, -3000 and 0 side by side: G is a sum of clamped steps, which keeps a few digits less."""
    p = recipe(make(1, 200, 2, K=20, V=36))
    assert_close(reference(p), whole(p), slack=50)


@pytest.mark.parametrize("gate", GATES)
def test_stored_as_bfloat16(gate: str) -> None:
    p = make(1, 200, 2, 2, 64, 64, dtype=torch.bfloat16, gate=gate, l2norm=False)
    results = {n: x.bfloat16() for n, x in whole(p).items()}  # held to its gates
    assert_close(reference(p), results, slack=1.5)  # the gates assume one rounding, and here stages round, too


def test_no_tokens_and_no_state() -> None:
    for p in (make(2, 0, state=False), make(0, 5, state=False), make(lengths=[0, 0], tail=3)):
        results = whole(p)
        assert not results["o"].any() and results["o"].shape == p.tensors["v"].shape


# ---- single stages ----


def test_numpy_arrays() -> None:
    p = make(1, 70, 1, 2, 8, 12)
    x = [p.tensors[n].numpy() for n in ("q", "k", "v", "g", "beta")]
    x[0], x[1] = x[0] / 8, x[1] / 8
    o, hT, saved = forward(tuple(x), None, 0.5, {}, {})
    assert all(type(a) is np.ndarray for a in (o, hT, *saved))
    tensors = forward(tuple(map(torch.from_numpy, x)), None, 0.5, {}, {})
    assert np.array_equal(o, tensors[0].numpy()) and np.array_equal(hT, tensors[1].numpy())
    zeros = [np.zeros_like(a) for a in (o, hT)]
    for a in backward(tuple(x), saved, *zeros, 0.5, {}, {}):
        assert type(a) is np.ndarray and not a.any()


def test_outputs_of_16_bits_are_where_the_classic_split_has_them() -> None:
    p = make(1, 70, 1, 2, 8, 12, dtype=torch.bfloat16, l2norm=False)
    x = tuple(p.tensors[n] for n in ("q", "k", "v", "g", "beta"))
    G = stages.cumsum(x[3])
    w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(*x[:3], G, x[4])
    h, v_new, hT = stages.delta_h(kg, w, u, G, output_final_state=True)
    assert {t.dtype for t in (w, u, qG, kg, Aqk, h, v_new)} == {torch.bfloat16}
    assert {t.dtype for t in (G, Akk_inv, hT)} == {torch.float32}
    again = stages.recompute_w_u(x[1], x[2], x[4], Akk_inv, G, x[0])
    assert all(same_bits(a, b) for a, b in zip(again, (w, u, qG, kg), strict=True))
    assert stages.recompute_w_u(x[1], x[2], x[4], Akk_inv, G)[2] is None


def test_padding_is_zeroed_and_states_of_nobody_are_left() -> None:
    p = make(1, 140, 1, 2, 8, 12, l2norm=False)
    x = tuple(p.tensors[n] for n in ("q", "k", "v", "g", "beta"))
    packed = {"cu_seqlens": torch.tensor([0, 3, 70])}  # 3 chunks; room for 140 // 64 + 2
    o, _, saved = forward(x, None, 0.5, {}, packed)
    assert saved[3].shape[0] == 4 and o.shape[1] == 140
    outputs = [o, *saved[:3], saved[4], *backward(x, saved, o, torch.zeros(2, 2, 8, 12), 0.5, {}, packed)[:5]]
    assert not any(t[:, 70:].any() for t in outputs)
    added_to = [torch.full((1, 140, 2, 8), math.nan) for _ in range(3)]
    for t in added_to:
        t[:, :70] = 0
    dbeta = torch.full((1, 140, 2), math.nan)
    dbeta[:, :70] = 0
    dA = torch.zeros(1, 140, 2, 64)
    stages.bwd_intra(*x[:2], saved[0], x[4], dA, dA.clone(), added_to[0], added_to[1], dbeta, added_to[2], **packed)
    assert not any(t.any() for t in (*added_to, dbeta))

    h, v_new = torch.full((4, 2, 8, 12), 7.0), torch.empty_like(x[2])
    w, u, _, kg, *_ = stages.chunk_intra(*x[:3], saved[0], x[4], **packed)
    kda.call.library.library().stage_delta_h(
        **packed, state_layout=1, kg=kg, w=w, u=u, G=saved[0], h=h, v_new=v_new
    )  # fmt: skip
    assert (h[3] == 7).all() and not (h[:3] == 7).all(-1).any()


def test_refusals() -> None:
    x = torch.zeros(1, 70, 2, 8)
    beta = x[..., 0]
    for wrong, message in [
        (lambda: stages.cumsum(x[0]), r"^g: expected 4 dimensions"),
        (
            lambda: stages.cumsum(x, cu_seqlens=torch.tensor([0, 71])),
            r"^cu_seqlens\[1\]: expected at most T = 70, got 71",
        ),
        (lambda: stages.chunk_intra(x, x, x, x, beta, 0.0), r"^scale: expected a number other than 0"),
        (lambda: stages.chunk_intra(x, x[:, :9], x, x, beta), r"^(k|w|qG): expected shape"),
        (lambda: stages.chunk_intra(x, x, x, x.bfloat16(), beta), r"^G: expected float32, got bfloat16"),
        (lambda: stages.delta_h(x, x, x, x, x), r"^initial_state: expected shape \[1,2,8,8\]"),
        (lambda: stages.fwd_o(x, x, x, x, x), r"^Aqk: expected shape \[1,70,2,64\]"),
        (lambda: stages.cumsum(x, impl="nobody"), r"^impl: expected one of .*cpu_chunk, reference, got nobody"),
        (lambda: stages.cumsum(object()), r"^g: expected an array, got object"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(NotImplementedError, match="float64 runs on `reference` only"):
        stages.cumsum(x.double(), impl="cpu_chunk")


def test_every_stage_is_documented_and_typed() -> None:
    for name in STAGES:
        function = getattr(stages, name)
        assert len((inspect.getdoc(function) or "").splitlines()[0]) > 20, name
        assert all(a.annotation is not inspect.Parameter.empty for a in inspect.signature(function).parameters.values())
        assert cpu_implementations(f"stage_{name}") == ["cpu_chunk", "reference"]
    result = run_examples(stages)
    assert result.failed == 0 and result.attempted > 10


# ---- as torch operators ----


@pytest.mark.parametrize("lengths", [None, [65, 1, 64]])
def test_stages_are_proper_operators(lengths: list[int] | None) -> None:
    p = make(1, 70, 1, 2, 4, 6, lengths=lengths, l2norm=False)
    calls: dict[str, dict[str, Any]] = {}
    run = kda.call.graph.run_operator

    def record(name: str, **arguments: Any) -> None:
        calls[name] = arguments
        run(name, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        take_operators(patch)
        patch.setattr(kda.call.graph, "run_operator", record)
        whole(p)
    assert set(calls) == {f"stage_{stage}" for stage in STAGES}
    for name, arguments in calls.items():
        # opcheck must not compare memory that is never written.
        filled = {
            n: a.nan_to_num(0) if isinstance(a, Tensor) and a.is_floating_point() else a for n, a in arguments.items()
        }
        torch.library.opcheck(getattr(torch.ops.kda, name).default, (), filled, test_utils=OPCHECKS)


@pytest.mark.parametrize("lengths", [None, [3, 0, 66]])
def test_compiled_stages(lengths: list[int] | None) -> None:
    p = make(1, 69, 1, 2, 8, 12, lengths=lengths, v_first=True, dtype=torch.bfloat16, l2norm=False)
    x = tuple(p.tensors[n] for n in ("q", "k", "v", "g", "beta"))
    d_o, d_state = cotangents(p)
    packed = {"cu_seqlens": p.options.get("cu_seqlens")}

    def both(h0: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        o, hT, saved = forward(x, h0, 0.5, {"state_v_first": True}, packed)
        return o, hT, *backward(x, saved, d_o, d_state, 0.5, {"state_v_first": True}, packed)

    expected = both(p.tensors["initial_state"], *x)
    torch._dynamo.reset()
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(p.tensors["initial_state"], *x)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_other_lengths_compile_nothing_anew(packed: bool) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor | None) -> Tensor:
        o: Tensor = forward((q, k, v, g, beta), None, 0.5, {}, {"cu_seqlens": cu})[0]
        return o

    torch._dynamo.reset()
    fast = torch.compile(f, fullgraph=True, backend="aot_eager")
    for i, T in enumerate((70, 200, 130)):
        p = make(1, T, 1, 2, 8, 12, l2norm=False)
        x = [p.tensors[n] for n in ("q", "k", "v", "g", "beta")]
        for t in x:
            torch._dynamo.mark_dynamic(t, 1)
        cu = torch.tensor([0, 3, T - 1]) if packed else None
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(*x, cu)
        assert same_bits(got, f(*x, cu))


# ---- prefill_f32 ----


def heads_first(p: Problem) -> list[Tensor]:
    return [p.tensors[n].transpose(1, 2) for n in ("q", "k", "v", "g", "beta")]


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize(("G", "K", "V"), [(1, 64, 64), (1, 128, 128), (3, 20, 36)])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_prefill_f32(chunk_size: int, G: int, K: int, V: int, v_first: bool, dense: bool) -> None:
    p = make(2, 130, 1, G, K, V, l2norm=False, v_first=v_first)
    expected = reference(p, backward=False)
    x = [t.contiguous() if dense else t for t in heads_first(p)]
    state = p.tensors["initial_state"].clone()
    o, w, u = kda.prefill_f32(*x, chunk_size, initial_state=state, final_state=state, state_v_first=v_first)
    assert_close(expected, {"o": o.transpose(1, 2), "final_state": state})
    chunks = math.ceil(130 / chunk_size)
    assert w.shape == (2, G, chunks, chunk_size, K) and u.shape == (2, G, chunks, chunk_size, V)
    assert not w[:, :, -1, 130 % chunk_size :].any() and not u[:, :, -1, 130 % chunk_size :].any()

    tokens_first = [t.transpose(1, 2) for t in x]
    G_ = stages.cumsum(tokens_first[3].contiguous())
    if chunk_size == 64:  # the stages' w and u
        w_, u_, *_ = stages.chunk_intra(*tokens_first[:3], G_, tokens_first[4])
        for ours, theirs in ((w, w_), (u, u_)):
            flat = ours.flatten(2, 3)[:, :, :130].transpose(1, 2)
            assert torch.allclose(flat, theirs, atol=1e-5)
        pool = p.tensors["initial_state"].clone()
        assert same_bits(o.transpose(1, 2), kda.prefill(*tokens_first, pool, state_v_first=v_first))
        assert same_bits(state, pool), "the bits of kda.prefill"


def test_prefill_f32_writes_given_buffers() -> None:
    x = heads_first(make(1, 70, 2, 1, 8, 12, l2norm=False))
    expected = kda.prefill_f32(*x, 32)
    given = tuple(torch.full_like(t, math.nan) for t in expected)
    got = kda.prefill_f32(*x, 32, given[1], given[2], given[0])
    assert all(a is b and same_bits(a, c) for a, b, c in zip(got, given, expected, strict=True))
    arrays = kda.prefill_f32(*(t.numpy() for t in x), 32)
    assert all(isinstance(a, np.ndarray) and np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))


def test_prefill_f32_refusals() -> None:
    x = heads_first(make(1, 70, 2, 1, 8, 12))
    with pytest.raises(ValueError, match=r"^chunk_size: expected 32 or 64, got 16$"):
        kda.prefill_f32(*x, 16)
    with pytest.raises(ValueError, match=r"^w: expected shape \[1,2,3,32,8\]"):
        kda.prefill_f32(*x, 32, torch.zeros(1, 2, 2, 64, 8))
    with pytest.raises(ValueError, match=r"^q: expected float32, got bfloat16$"):
        kda.prefill_f32(x[0].bfloat16(), *x[1:])
    with pytest.raises(ValueError, match=r"^scale: expected a number other than 0, got 0$"):
        kda.prefill_f32(*x, scale=0)
    with pytest.raises(ValueError, match=r"^q: expected 4 dimensions"):
        kda.prefill_f32(x[0][0], *x[1:])
    with pytest.raises(ValueError, match=r"chunk_size: expected 32 or 64, got 48"):
        torch.ops.kda_prefill.forward(*x, 48)


@pytest.mark.parametrize("state", [False, True])
def test_prefill_f32_is_a_proper_operator(state: bool) -> None:
    ops = torch.ops.kda_prefill
    p = make(1, 70, 2, 1, 8, 12, l2norm=False, v_first=True)
    x = [t.contiguous() for t in heads_first(p)]
    h0 = p.tensors["initial_state"]
    options = {"initial_state": h0, "final_state": torch.zeros_like(h0), "scale": 0.5} if state else {}
    torch.library.opcheck(ops.forward.default, (*x, 32), options, test_utils=OPCHECKS)
    o, w, u = ops.forward(*x, 32)
    buffers = tuple(torch.zeros_like(t) for t in (w, u, o))
    torch.library.opcheck(ops.write.default, (*x, 32, *buffers), options, test_utils=OPCHECKS)
    expected = kda.prefill_f32(*x, 32)
    assert all(same_bits(a, b) for a, b in zip((o, w, u), expected, strict=True))


@pytest.mark.cuda
def test_the_operator_writes_to_given_buffers() -> None:
    x = [t.contiguous() for t in heads_first(make(1, 70, 2, 1, 8, 12, l2norm=False))]
    expected = kda.prefill_f32(*x, 32)
    w, u, o = (torch.full_like(expected[i], math.nan) for i in (1, 2, 0))
    got = torch.ops.kda_prefill.forward(*x, 32, w, u, o)
    assert all(a is b and a.device == x[0].device for a, b in zip(got, (o, w, u), strict=True))
    for given in ((w, u, o), (None, u, None), (None, None, None)):
        for t in (w, u, o):
            t.fill_(math.nan)
        assert all(
            same_bits(a, b) for a, b in zip(torch.ops.kda_prefill.forward(*x, 32, *given), expected, strict=True)
        )

    def graph(w: Tensor, u: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        o, w_, u_ = torch.ops.kda_prefill.forward(*x, 32, w, u, None)
        return o + 1, w_ + 1, u_ + w[..., :1]

    for backend in ("aot_eager",) if w.is_cuda else ("aot_eager", "inductor"):
        torch._dynamo.reset()
        w.fill_(math.nan), u.fill_(math.nan)
        eager = graph(w, u, *x)
        w.fill_(math.nan), u.fill_(math.nan)
        compiled = torch.compile(graph, fullgraph=True, backend=backend)(w, u, *x)
        assert same_bits(w, expected[1]) and same_bits(u, expected[2])
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(eager, compiled, strict=True))


def test_compiled_prefill_f32() -> None:
    p = make(1, 70, 2, 1, 8, 12, l2norm=False, v_first=True)
    x, h0 = heads_first(p), p.tensors["initial_state"]

    def in_place(state: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        return kda.prefill_f32(*x, 32, initial_state=state, final_state=state)

    def by_operator(state: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        final = torch.empty_like(state)
        results = torch.ops.kda_prefill.forward(*x, 32, initial_state=state, final_state=final)
        state.copy_(final)
        return results

    expected_state = h0.clone()
    expected = in_place(expected_state, *x)
    for f in (in_place, by_operator):
        torch._dynamo.reset()
        state = h0.clone()
        got = torch.compile(f, fullgraph=True, backend="aot_eager")(state, *x)
        assert all(same_bits(a, b) for a, b in zip((*got, state), (*expected, expected_state), strict=True))


def test_tensors_are_those_of_the_librarys_tables() -> None:
    """Registering torch's operators must not load the library, so ``STAGES`` says again what its tables say."""
    assert [f"stage_{name}" for name in STAGES] == [op for op in library().operators if op.startswith("stage_")]
    for name, text in STAGES.items():
        given, written = (part.split() for part in text.split("->"))
        operands = [o for o in library().operands(f"stage_{name}") if o.type == "tensor" and o.name != "cu_seqlens"]
        assert [o.name for o in operands] == [x.rstrip("?") for x in given + written], name
        assert [o.role != "in" for o in operands] == [False] * len(given) + [True] * len(written), name
        assert [o.optional for o in operands] == [x.endswith("?") for x in given + written], name

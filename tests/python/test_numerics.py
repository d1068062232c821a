"""Every implementation against the float64 recurrence in PyTorch (support.py): outputs and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kda
from support import (
    BUDGETS,
    Problem,
    Tensor,
    assert_close,
    budget,
    cpu_implementations,
    gate,
    half_masked,
    identical_keys,
    implementations_here,
    make,
    on_tensor_cores,
    oracle,
    recurrence,
    reference,
    rel_rmse,
    rounded,
    run,
    saturated,
    uniform,
    wild,
    with_zeros,
)

GATES = ("log", "softplus", "lower_bound")
BETAS = ("activated", "sigmoid", "2sigmoid")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRAINING = [("chunk_kda", f, b) for f in cpu_implementations("forward") for b in cpu_implementations("backward")] + [
    ("fused_recurrent_kda", d, b) for d in cpu_implementations("decode") for b in cpu_implementations("backward")
]


# ---- the oracle itself ----


def test_the_oracle_reproduces_a_computation_by_hand() -> None:
    """K = V = 1, two tokens: S1 = .5*2 + .25*(3 - .5*2*.5)*.5 = 1.3125, and so on (all exact in binary)."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    q, k, v = one * torch.tensor([2.0, 1.0]).view(1, 2, 1, 1), one / 2, one * torch.tensor([3.0, 1.0]).view(1, 2, 1, 1)
    g, beta = one * math.log(0.5), torch.tensor([[[0.25], [1.0]]], dtype=torch.float64)
    o, states = recurrence(q, k, v, g, beta, 2 * torch.ones(1, 1, 1, 1, dtype=torch.float64))
    first = 1.0 + 0.5 * 0.25 * (3 - 0.5 * 1.0)
    second = 0.5 * first + 0.5 * (1 - 0.5 * 0.5 * first)
    assert states[1].item() == pytest.approx(first, abs=1e-15) and states[2].item() == pytest.approx(second, abs=1e-15)
    assert o.flatten().tolist() == pytest.approx([2 * first, second], abs=1e-15)


def reference_problem(gate_form: str, beta: str, **changes: Any) -> Problem:
    # scale and lower_bound are float32 in the C ABI: numbers that are exact in float32 keep float64 results exact.
    sizes: dict[str, Any] = {"B": 2, "T": 20, "H": 2, "G": 2, "K": 3, "V": 5, "scale": 0.25}
    return make(**{**sizes, "gate": gate_form, "beta": beta, **changes}).map(Tensor.double)


@pytest.mark.parametrize("gate_form", GATES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, [3, 0, 66, 1]])
def test_the_reference_is_the_oracle_to_1e_10(
    gate_form: str, beta: str, v_first: bool, lengths: list[int] | None
) -> None:
    p = reference_problem(gate_form, beta, v_first=v_first, lengths=lengths, l2norm=not v_first)
    expected = reference(p)
    for function in (kda.chunk_kda, kda.fused_recurrent_kda):
        for impl in ("reference", None):  # float64 has no other implementation
            assert_close(expected, run(function, p, impl=impl), what=function.__name__)


@pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda])
@pytest.mark.parametrize("gate_form", GATES)
@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(function: Callable[..., Any], gate_form: str, beta: str) -> None:
    p = reference_problem(gate_form, beta, B=1, T=4, H=1, K=2, V=3, v_first=beta == "sigmoid")
    names = list(p.tensors)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return function(**dict(zip(names, tensors, strict=True)), **p.options, output_final_state=True)

    assert torch.autograd.gradcheck(call, [x.clone().requires_grad_() for x in p.tensors.values()], atol=1e-7)


@pytest.mark.parametrize("lower_bound", [None, -2.0])
def test_gradcheck_of_the_gate(lower_bound: float | None) -> None:
    x, A_log, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(5, 2, 3), (2,), (6,)])

    def call(*a: Tensor) -> Tensor:
        return kda.fused_kda_gate(*a, lower_bound=lower_bound, output_dtype=torch.float64)

    assert torch.autograd.gradcheck(call, (x, A_log, bias), atol=1e-7)


# ---- training, every pair of implementations ----


@pytest.mark.parametrize(("name", "forward", "backward"), TRAINING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_form", GATES)
def test_training(
    name: str, forward: str, backward: str, dtype: torch.dtype, gate_form: str, force: Callable[..., None]
) -> None:
    if "reference" in (forward, backward) and dtype == torch.float16:
        pytest.skip("the reference reads float16 as it reads bfloat16; its numbers are tested in float64")
    beta = BETAS[GATES.index(gate_form)]
    p = make(2, 81, 2, 2, 20, 33, dtype=dtype, gate=gate_form, beta=beta, v_first=gate_form == "log")
    force(forward, backward)
    assert_close(reference(p), run(getattr(kda, name), p), what=f"{name} {forward} {backward}")


def times(p: Problem, factor: float) -> Problem:
    return p.having(g=factor * p.tensors["g"])


RECIPES: dict[str, tuple[Callable[[], Problem], float | dict[str, float]]] = {  # and how much worse errors may be
    "rand": (lambda: uniform(make(1, 200, 1, 2, 60, 64)), 1),
    "decay_0.1": (lambda: make(1, 200, 1, 2, 64, 60, decay=0.1), 1),
    "decay_10": (lambda: make(1, 200, 1, 2, 64, 60, decay=10), 1),
    "half_masked": (lambda: half_masked(make(1, 200, 1, 1, 64, 64, decay=0.1)), 1),
    "gates_at_the_bound": (lambda: saturated(make(1, 200, 1, 2, 64, 64)), 2),
    "identical_keys": (lambda: identical_keys(make(1, 260, 1, 1, 64, 64)), 1),
    "identical_keys_beta_2": (lambda: identical_keys(make(1, 260, 1, 1, 64, 64), 1.94), 1),
    "wild": (lambda: wild(make(1, 200, 1, 2, 64, 64)), 1),
    "zeros": (lambda: with_zeros(make(1, 200, 1, 2, 64, 64, l2norm=False)), 1),
    "beta_0": (lambda: make(1, 70, 1, 1, 64, 64).having(beta=torch.zeros(1, 70, 1)), 1),
    "eight_value_heads": (lambda: make(1, 70, 1, 8, 16, 16, gate="softplus"), 1),
    "largest_heads": (lambda: make(1, 70, 1, 1, 256, 256, gate="lower_bound"), 1),
    "odd_heads": (lambda: make(1, 70, 1, 1, 100, 3, gate="softplus"), 1),
    "long": (lambda: make(1, 1000, 1, 1, 32, 32, decay=10), 1),
    # The gradient of a gate of -3000 is 0; its remaining error is multiplied by 3000 in dA_log. The gate is 0.008.
    "wild_softplus": (
        lambda: times(make(1, 200, 1, 2, 32, 32, gate="softplus"), 1000),
        {"dg": 10, "ddt_bias": 80, "dA_log": 80},
    ),
}


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_recipes(recipe: str, dtype: torch.dtype, force: Callable[..., None]) -> None:
    make_problem, slack = RECIPES[recipe]
    p = make_problem()
    p = p.having(**{n: p.tensors[n].to(dtype) for n in "qkv"})
    expected = reference(p)
    for impl in implementations_here("forward"):
        if impl == "reference":
            continue
        force(impl, implementations_here("backward")[0])
        assert_close(expected, run(kda.chunk_kda, p), slack, f"chunk_kda {impl}")
    assert_close(expected, run(kda.fused_recurrent_kda, p, backward=False), what="fused_recurrent_kda")


# ---- shapes and options at random ----

NEAR_CHUNKS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 79, 80, 81, 127, 128, 129]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    lengths = draw(
        st.none() | st.lists(st.sampled_from(NEAR_CHUNKS), min_size=1, max_size=5).filter(lambda x: sum(x) < 200)
    )
    K = draw(st.integers(1, 40) | st.sampled_from([60, 64, 100]))
    p = make(
        B=draw(st.integers(1, 3)),
        T=draw(st.sampled_from(NEAR_CHUNKS)),
        H=draw(st.integers(1, 3)),
        G=draw(st.sampled_from([1, 1, 2, 3])),
        K=K,
        V=draw(st.integers(1, 40) | st.sampled_from([60, 64, 100])),
        dtype=draw(st.sampled_from(DTYPES)),
        gate=draw(st.sampled_from(GATES)),
        beta=draw(st.sampled_from(BETAS)),
        l2norm=K > 1 and draw(st.booleans()),  # a single number divided by its size has no gradient left to compare
        scale=draw(st.sampled_from([None, 0.3, 1.0, -2.0])),
        state=draw(st.booleans()),
        v_first=draw(st.booleans()),
        lengths=lengths,
        tail=draw(st.sampled_from([0, 0, 1, 20])),
        seed=draw(st.integers(0, 10)),
    )
    if lengths is not None and draw(st.booleans()):
        p = p.having(cu_seqlens=p.options["cu_seqlens"].int())
    if "A_log" in p.tensors:
        drop = {n: None for n in ("A_log", "dt_bias") if draw(st.booleans())}
        p = p.having(**drop) if "lower_bound" in p.options or "A_log" not in drop else p
    if "lower_bound" in p.options:
        p = p.having(lower_bound=draw(st.sampled_from([-5.0, -1.0, -0.1])))
    if draw(st.booleans()):
        p = p.having(g=p.tensors["g"].to(draw(st.sampled_from(DTYPES))))
    return p


@pytest.mark.cuda
@settings(max_examples=100)
@given(problems(), st.sampled_from(["chunk_kda", "fused_recurrent_kda"]), st.booleans())
def test_any_shape(p: Problem, name: str, keep: bool) -> None:
    more = {"disable_recompute": keep} if name == "chunk_kda" else {}
    # Gradients of A_log and dt_bias are sums that may cancel by chance: 0.008 for the former.
    slack = {**dict.fromkeys(BUDGETS, 2.0), "dA_log": 80.0, "ddt_bias": 10.0}
    got = run(getattr(kda, name), p, **more)
    if on_tensor_cores(p):
        slack = {n: max(slack[n], 2 * rounded(n, x.dtype)) for n, x in got.items()}
    assert_close(reference(p), got, slack, name)


# ---- equal things are equal ----


def test_disable_recompute_keeps_what_it_says() -> None:
    """Besides the inputs, K*V/16 + 4*V + 512 bytes per token and value head; without it K*V/128."""
    p = make(2, 1024, 1, 2, 32, 48)
    sizes = []
    for keep in (False, True):
        saved: list[int] = []

        def pack(x: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(x.numel() * x.element_size())
            return x

        leaves = {n: x.clone().requires_grad_() for n, x in p.tensors.items()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kda.chunk_kda(**leaves, **p.options, disable_recompute=keep)
        sizes.append(sum(saved))
    inputs = sum(x.numel() * x.element_size() for x in p.tensors.values())
    assert sizes[0] - inputs == 2 * 1024 * 2 * (32 * 48 // 128)
    assert sizes[1] - inputs == 2 * 1024 * 2 * (32 * 48 // 16 + 4 * 48 + 512)


def test_backward_needs_memory_linear_in_tokens() -> None:
    """Backward starts from states every 512 tokens, so its workspace does not grow with T at all."""
    from kda.call.library import library

    def workspace(T: int, h_every: int) -> int:
        x = torch.zeros(1, T, 1, 128)
        h = torch.zeros(-(-T // (64 * h_every)), 1, 128, 128) if h_every else None
        options = (0, 0, False, 0, 0.0, 1.0)
        dv = torch.zeros_like(x)  # a call without gradients needs no memory
        return library().backward_workspace(
            x, x, x, x, x[..., 0], options=options, d_o=x, h=h, dv=dv, h_every=h_every, num_threads=1
        )

    assert workspace(65536, 8) == workspace(512, 8) < 4 * 2**20
    assert workspace(65536, 0) < 2 * workspace(32768, 0) < 2**29


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_state_layouts_agree(name: str) -> None:
    p = make(2, 100, 1, 2, 20, 36, gate="softplus")
    h0 = p.tensors["initial_state"]
    flipped = p.having(state_v_first=True, initial_state=h0.transpose(-1, -2).contiguous())
    a, b = run(getattr(kda, name), p), run(getattr(kda, name), flipped, grads=None)
    expected = reference(flipped)
    assert_close(expected, b)
    assert_close(
        {"o": a["o"], "final_state": a["final_state"].transpose(-1, -2)}, {n: b[n] for n in ("o", "final_state")}
    )


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("form", ["activations", "norm"])
def test_fused_equals_separate(name: str, form: str) -> None:
    """Gate, beta and norm inside the kernel or before it: 1e-5, including gradients."""
    p = make(2, 100, 1, 2, 20, 36, gate="softplus", beta="2sigmoid")

    def separate(**kw: Any) -> tuple[Tensor, Tensor]:
        if form == "activations":
            kw["g"] = kda.fused_kda_gate(kw["g"], kw.pop("A_log"), kw.pop("dt_bias"))
            kw["beta"] = 2 * kw["beta"].sigmoid()
            for flag in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"):
                kw.pop(flag)
        else:
            kw["q"], kw["k"] = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (kw["q"], kw["k"]))
            kw["use_qk_l2norm_in_kernel"] = False
        return getattr(kda, name)(**kw)

    assert_close({n: x.double() for n, x in run(separate, p).items()}, run(getattr(kda, name), p))


# ---- serving and the gate ----


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_form", GATES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_serving(op: str, dtype: torch.dtype, gate_form: str, state_dtype: torch.dtype) -> None:
    for v_first in (True, False):
        p = make(
            1,
            0,
            2,
            2,
            20,
            36,
            dtype=dtype,
            gate=gate_form,
            beta="sigmoid",
            v_first=v_first,
            lengths=[70, 0, 1, 65],
            tail=3,
        )
        h0 = p.tensors["initial_state"].to(state_dtype)
        o, final_state, _ = oracle(p.having(initial_state=h0).map(Tensor.double))
        p = p.having(initial_state=None)
        for impl in implementations_here("forward" if op == "prefill" else "decode"):
            state = h0.clone()
            got = {"o": getattr(kda, op)(**p.keywords, state=state, impl=impl), "final_state": state}
            assert_close({"o": o, "final_state": final_state}, got, what=f"{op} {impl}")


@pytest.mark.parametrize("impl", cpu_implementations("gate"))
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("with_A_log", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(
    impl: str, lower_bound: float | None, with_A_log: bool, dtype: torch.dtype, force: Callable[..., None]
) -> None:
    """1e-5 forward and 1e-4 backward, over the whole range of arguments: models start where z < -7."""
    if lower_bound is None and not with_A_log:
        pytest.skip("softplus needs A_log")
    force(impl)
    names = ["x", "A_log", "dt_bias"] if with_A_log else ["x", "dt_bias"]
    x = (torch.linspace(-35, 35, 2 * 50 * 3 * 20).view(2, 50, 3, 20)).to(dtype)
    leaves = dict(
        zip(
            names,
            [x, torch.tensor([-1.0, 0.0, 0.7]), torch.randn(60)] if with_A_log else [x, torch.randn(60)],
            strict=True,
        )
    )

    def grads(function: Callable[..., Tensor], kind: torch.dtype | None) -> tuple[Tensor, ...]:
        own = {n: t.to(kind or t.dtype).requires_grad_() for n, t in leaves.items()}
        g = function(own["x"], own.get("A_log"), own["dt_bias"], lower_bound)
        d = torch.linspace(0.5, 1.5, g.numel()).view(g.shape).to(g.dtype)
        return g.detach(), *torch.autograd.grad(g, list(own.values()), d)

    expected, got = grads(gate, torch.float64), grads(kda.fused_kda_gate, None)
    assert got[0].dtype == torch.float32
    assert (got[0].double() / expected[0] - 1).abs().max() < 1e-5, "every element, relative"
    for name, ref, d in zip(names, expected[1:], got[1:], strict=True):
        assert rel_rmse(ref, d) < (1e-4 if d.dtype == torch.float32 else 2 * budget("dg", d.dtype)), name

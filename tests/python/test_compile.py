"""The operators under torch.compile: registered as torch requires, and with the same bits as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kda
import kda.operators
from kda.call.options import make_options
from support import Problem, Tensor, make, same_bits

GATES = ("log", "softplus", "lower_bound")
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
both = pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda], ids=lambda f: f.__name__)
ops = torch.ops.kda


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **more: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **more)


def operands(p: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The operators' inputs and options (with the flat A_log and dt_bias that the Python functions pass)."""
    t, opt, (HV, K) = p.tensors, p.options, p.tensors["g"].shape[2:]
    bias = t["dt_bias"].view(HV, K) if "dt_bias" in t else None
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    in_kernel = tuple(opt.get(name, False) for name in flags)
    numbers = (t.get("A_log"), opt.get("scale"), opt.get("lower_bound"))
    options = make_options(*numbers, in_kernel, opt.get("allow_neg_eigval", False), opt["state_v_first"])
    return (*(t[n] for n in ("q", "k", "v", "g", "beta")), t.get("A_log"), bias), options


# ---- the registration, checked by torch ----

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "log": lambda: make(2, 5, 1, 2, 4, 6),
    "softplus_v_first": lambda: make(1, 70, 1, 1, 4, 6, gate="softplus", beta="sigmoid", v_first=True),
    # No tail, and lengths that fill all T / 64 + N rows of h: opcheck also compares the rest, which is never written.
    "lower_bound_varlen": lambda: make(K=4, V=6, gate="lower_bound", beta="2sigmoid", lengths=[1, 65, 1]),
    "no_A_log_no_state": lambda: make(1, 5, K=4, V=6, gate="lower_bound", state=False).having(A_log=None, dt_bias=None),
    "bfloat16": lambda: make(1, 5, K=4, V=6, dtype=torch.bfloat16, gate="softplus"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("final_state", "h_every", "recurrent"), [(True, 1, False), (True, 8, False), (False, 0, False), (True, 8, True)]
)
def test_forward_is_a_proper_operator(problem: str, final_state: bool, h_every: int, recurrent: bool) -> None:
    p = PROBLEMS[problem]()
    inputs, options = operands(p.map(lambda x: x.clone().requires_grad_()))
    h0 = p.tensors["initial_state"].clone().requires_grad_() if "initial_state" in p.tensors else None
    run_options = (final_state, h_every, recurrent, None)
    arguments = (*inputs, h0, p.options.get("cu_seqlens"), *options, *run_options)
    # With fewer gradients wanted the graph differs.
    torch.library.opcheck(ops.forward.default, arguments, test_utils=OPCHECKS)
    fewer = tuple(x.detach() if isinstance(x, Tensor) and i not in (0, 3) else x for i, x in enumerate(arguments))
    torch.library.opcheck(ops.forward.default, fewer, test_utils=OPCHECKS)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("h_every", [0, 1, 8])
def test_backward_is_a_proper_operator(problem: str, h_every: int) -> None:
    p = PROBLEMS[problem]()
    inputs, options = operands(p)
    both_states = (p.tensors.get("initial_state"), p.options.get("cu_seqlens"))
    o, state, *kept = ops.forward(*inputs, *both_states, *options, True, h_every, False, None)
    saved = [x if x.dim() > 1 else None for x in kept]
    present = [x is not None for x in (*inputs, both_states[0])]
    for d_state in (torch.randn_like(state), None):
        for wanted in (present, [p and i % 2 == 0 for i, p in enumerate(present)]):
            arguments = (*inputs, *both_states, *options, *saved, h_every, torch.randn_like(o), d_state, wanted)
            torch.library.opcheck(ops.backward.default, arguments, test_utils=OPCHECKS)


@pytest.mark.parametrize("problem", [n for n in PROBLEMS if n != "no_A_log_no_state"])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_serving_operators_are_proper(op: str, problem: str) -> None:
    p = PROBLEMS[problem]()
    inputs, options = operands(p)
    state, cu = p.tensors["initial_state"], p.options.get("cu_seqlens")
    N = state.shape[0]
    out, run_options = torch.zeros_like(p.tensors["v"]), (None, 0)
    slots, has = torch.arange(N, dtype=torch.int32), torch.ones(N, dtype=torch.bool)
    for more, written in (((None, None, 0), (None, True)), ((slots, has, 1), (slots.long(), True))):
        extra = (
            ((None, None, 0),) if op == "decode" else ((None, None, 0), (torch.zeros_like(state), slots.view(N, 1), 64))
        )
        for checkpoints in extra:
            arguments = (
                *inputs,
                cu,
                *options,
                state,
                *more,
                out,
                *(checkpoints if op == "prefill" else ()),
                *run_options,
                *written,
                *((slots,) if op == "prefill" and checkpoints[0] is not None else (None,) * (op == "prefill")),
            )
            torch.library.opcheck(getattr(ops, op).default, arguments, test_utils=OPCHECKS)


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_operators_are_proper(form: int, dtype: torch.dtype) -> None:
    x, A_log, bias = torch.randn(5, 2, 4, dtype=dtype), torch.randn(2), torch.randn(2, 4)
    for a, b in ((A_log, bias), (A_log, None), (None, bias)):
        if form == 1 and a is None:
            continue
        leaves = tuple(t if t is None else t.clone().requires_grad_() for t in (x, a, b))
        torch.library.opcheck(ops.gate.default, (*leaves, form, -5.0, torch.float32, None), test_utils=OPCHECKS)
        torch.library.opcheck(
            ops.gate_backward.default, (x, a, b, torch.randn(x.shape), form, -5.0), test_utils=OPCHECKS
        )


# ---- compiled equals eager ----


@both
@pytest.mark.parametrize("wanted", [("q",), ("v", "initial_state"), ("A_log",), ()])
def test_some_gradients(function: Callable[..., Any], wanted: tuple[str, ...]) -> None:
    p = make(1, 70, 1, 2, 8, 12, gate="softplus")

    def results(f: Callable[..., Any]) -> list[Tensor | None]:
        leaves = {n: x.clone().requires_grad_(n in wanted) for n, x in p.tensors.items()}
        o, state = f(**leaves, **p.options)
        assert state is None
        if wanted:
            o.square().sum().backward()
        return [o.detach(), *(x.grad for x in leaves.values())]

    for a, b in zip(results(function), results(compiled(function)), strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or same_bits(a, b)


def test_inside_a_model() -> None:
    """Between other operations, including their gradients; inductor generates the code around the operator."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 70, 32), (torch.randn(32, 5 * 32) / 6).requires_grad_()

    def model(x: Tensor) -> Tensor:
        q, k, v, g, b = (x @ weight).chunk(5, -1)
        q, k, v, g = (t.view(2, 70, 4, 8) for t in (q, k, v, g))
        g = kda.fused_kda_gate(g, torch.zeros(4), lower_bound=-5.0)
        o, _ = kda.chunk_kda(q, k, v, g, b[..., :4], use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        return x + o.flatten(2).tanh()

    losses = [f(x).square().mean() for f in (model, compiled(model, "inductor"))]
    grads = [torch.autograd.grad(loss, weight)[0] for loss in losses]
    # inductor's own tanh and sums differ from eager's in the last bits.
    assert torch.allclose(*losses, rtol=1e-6) and torch.allclose(*grads, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("op", [kda.prefill, kda.decode], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_serving(op: Callable[..., Tensor], backend: str) -> None:
    """State, checkpoints and out are written in place, and later operations of the graph see that."""
    p = make(H=1, G=2, K=8, V=12, gate="softplus", beta="sigmoid", v_first=True, lengths=[3, 66, 0])
    h0, indices = p.tensors["initial_state"], torch.tensor([2, -1, 0], dtype=torch.int32)
    p, has = p.having(initial_state=None), torch.tensor([True, False, False])

    def step(state: Tensor, checkpoints: Tensor, out: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
        more = {"checkpoints": checkpoints, "checkpoint_slots": indices.view(3, 1)} if op is kda.prefill else {}
        before = state[0].clone()
        o = op(**inputs, state=state, state_indices=indices, has_initial_state=has, out=out, **more)
        made = op(**inputs, state=state)
        return o + 1, made, state.clone(), state[0] - before

    def results(f: Callable[..., Any]) -> list[Tensor]:
        own = h0.clone(), torch.full_like(h0, float("nan")), torch.full_like(p.tensors["v"], float("nan"))
        return [*f(*own, **p.keywords), *own]

    expected, got = results(step), results(compiled(step, backend))
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


def test_workspace_is_refused() -> None:
    p = make(1, 5, K=4, V=4, state=False)
    with pytest.raises(Exception, match="workspace"):
        compiled(kda.prefill)(**p.keywords, workspace=torch.zeros(1 << 16))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate(lower_bound: float | None, dtype: torch.dtype) -> None:
    def results(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in (torch.ones(2, 5, 2, 4, dtype=dtype), torch.ones(2), torch.ones(8))]
        g = f(*leaves, lower_bound, dtype)
        return g, *torch.autograd.grad(g.sum(), leaves)

    expected, got = results(kda.fused_kda_gate), results(compiled(kda.fused_kda_gate))
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(expected, got, strict=True))


@both
@pytest.mark.parametrize("varlen", [False, True])
def test_dynamic_lengths_compile_once(function: Callable[..., Any], varlen: bool) -> None:
    fast = compiled(function)
    for i, T in enumerate((70, 64, 65, 3, 200)):
        p = make(1, T, 1, 2, 8, 12, gate="softplus", lengths=[T - 2, 2] if varlen else None)
        leaves = {n: x.clone().requires_grad_() for n, x in p.tensors.items()}
        for n in ("q", "k", "v", "g", "beta"):
            torch._dynamo.mark_dynamic(leaves[n], 1)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            o, state = fast(**leaves, **p.options, output_final_state=True)
            (o.square().sum() + state.sum()).backward()

        def eager(p: Problem = p, leaves: dict[str, Tensor] = leaves) -> dict[str, Tensor]:
            own = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
            o, state = function(**own, **p.options, output_final_state=True)
            (o.square().sum() + state.sum()).backward()
            return {"o": o.detach(), **{n: x.grad for n, x in own.items() if x.grad is not None}}

        expected = eager()
        assert same_bits(expected.pop("o"), o.detach())
        for n, d in expected.items():
            assert leaves[n].grad is not None and same_bits(d, leaves[n].grad), f"T={T}: d{n}"  # type: ignore[arg-type]


def test_dynamic_serving_compiles_once() -> None:
    fast = compiled(kda.prefill)
    for i, T in enumerate((70, 64, 129, 5)):
        p = make(2, T, 1, 2, 8, 12, gate="softplus", v_first=True)
        h0 = p.tensors["initial_state"]
        p = p.having(initial_state=None)
        for n in ("q", "k", "v", "g", "beta"):
            torch._dynamo.mark_dynamic(p.tensors[n], 1)
        a, b = h0.clone(), h0.clone()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(**p.keywords, state=a)
        assert same_bits(got, kda.prefill(**p.keywords, state=b)) and same_bits(a, b)


def test_export() -> None:
    p = make(1, 70, 1, 2, 8, 12, gate="softplus")

    class Layer(torch.nn.Module):
        def forward(self, **inputs: Any) -> Tensor:
            return kda.chunk_kda(**inputs, **p.options)[0]

    program = torch.export.export(Layer(), (), p.tensors)
    assert "kda.forward" in str(program.graph)
    assert same_bits(program.module()(**p.tensors), kda.chunk_kda(**p.keywords)[0])

"""kda.causal_conv1d: against torch's convolution, its gradients, states, as an operator, and refusals. Pools,
padding and packed sequences are in tests/gpu/test_conv.py, for either device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import kda
import kda.operators
from support import cpu_implementations

Tensor = torch.Tensor
LENGTHS = [3, 0, 1, 2, 140, 4]


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool) -> Tensor:
    """One row of tokens, computed by torch in the dtype of its arguments."""
    keep = weight.shape[1] - 1
    past = x.new_zeros(x.shape[0], x.shape[2], keep) if state is None else state
    y = F.conv1d(torch.cat([past, x.transpose(1, 2)], 2), weight[:, None], bias, groups=weight.shape[0])
    return (F.silu(y) if silu else y).transpose(1, 2)


def problem(W: int = 4, D: int = 10, B: int = 2, T: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(W + D + T)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "initial_state": (B, D, W - 1)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / (b.double().norm() + 1e-8))


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("absent", [(), ("bias",), ("initial_state",), ("bias", "initial_state")])
def test_values_and_gradients(W: int, activation: str | None, absent: tuple[str, ...]) -> None:
    p = {name: x for name, x in problem(W).items() if name not in absent}
    leaves = {name: x.double().requires_grad_() for name, x in p.items()}
    y = expected(leaves["x"], leaves["weight"], leaves.get("bias"), leaves.get("initial_state"), activation == "silu")
    inputs = {name: x.clone().requires_grad_() for name, x in p.items()}
    got, last = kda.causal_conv1d(**inputs, activation=activation, output_final_state=True)
    assert relative(got, y) < 1e-6
    assert torch.equal(last, p["x"][:, 1 - W :].transpose(1, 2))
    dy, d_last = torch.randn_like(got), torch.randn_like(last)
    all_inputs = torch.cat([leaves["x"].transpose(1, 2)[:, :, 1 - W :]], 2)
    torch.autograd.backward([y, all_inputs], [dy.double(), d_last.double()])
    torch.autograd.backward([got, last], [dy, d_last])
    for name, x in inputs.items():
        assert x.grad is not None and relative(x.grad, leaves[name].grad) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    p = problem(dtype=dtype)
    y, last = kda.causal_conv1d(**p, output_final_state=True)
    wide = kda.causal_conv1d(**{name: x.float() for name, x in p.items()})[0]
    assert y.dtype == last.dtype == dtype and torch.equal(y, wide.to(dtype))
    inputs = {name: x.clone().requires_grad_() for name, x in p.items()}
    kda.causal_conv1d(**inputs)[0].sum().backward()
    assert all(x.grad is not None and x.grad.dtype == dtype for x in inputs.values())


def test_float64_and_gradcheck() -> None:
    p = {name: x.requires_grad_() for name, x in problem(D=3, T=5, dtype=torch.float64).items()}

    def both(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        return kda.causal_conv1d(x, weight, bias, state, output_final_state=True)

    assert torch.autograd.gradcheck(both, tuple(p.values()))


def test_any_strides() -> None:
    p = problem()
    y, last = kda.causal_conv1d(**p, output_final_state=True)
    wide = torch.randn(2, 7, 30)
    wide[..., 10:20] = p["x"]
    by_rows = p["initial_state"].transpose(1, 2).contiguous().transpose(1, 2)
    weight = p["weight"].t().contiguous().t()
    again, end = kda.causal_conv1d(wide[..., 10:20], weight, p["bias"], initial_state=by_rows, output_final_state=True)
    assert torch.equal(again, y) and torch.equal(end, last)
    transposed = p["x"].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kda.causal_conv1d(transposed, p["weight"], p["bias"], p["initial_state"])[0], y)


def test_expanded_and_negated_gradients() -> None:
    x, weight = torch.randn(1, 5, 3, requires_grad=True), torch.randn(3, 4)
    (first,) = torch.autograd.grad(kda.causal_conv1d(x, weight)[0].sum(), x)
    y = kda.causal_conv1d(x, weight)[0]
    (second,) = torch.autograd.grad(y, x, torch.complex(torch.zeros_like(y), -torch.ones_like(y)).conj().imag)
    assert torch.equal(first, second)


def test_only_the_final_state_has_a_gradient() -> None:
    x, weight = torch.randn(1, 5, 3, requires_grad=True), torch.randn(3, 4)
    kda.causal_conv1d(x, weight, output_final_state=True)[1].sum().backward()
    assert x.grad is not None and torch.equal(x.grad[0, :, 0], torch.tensor([0.0, 0, 1, 1, 1]))


# ---- NumPy ----


def test_numpy() -> None:
    p = problem()
    y, last = kda.causal_conv1d(**p, output_final_state=True)
    arrays = {name: x.numpy() for name, x in p.items()}
    got, end = kda.causal_conv1d(**arrays, output_final_state=True)
    assert isinstance(got, np.ndarray) and np.array_equal(got, y.numpy()) and np.array_equal(end, last.numpy())
    state = arrays["initial_state"].copy()
    out = np.empty_like(arrays["x"])
    got = kda.causal_conv1d_update(arrays["x"], state, arrays["weight"], arrays["bias"], out=out)
    assert got is out
    assert np.array_equal(got, y.numpy()) and np.array_equal(state, last.numpy())


# ---- under torch.compile ----

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absent", [(), ("bias", "initial_state")])
@pytest.mark.parametrize("final_state", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_operators_are_proper(dtype: torch.dtype, absent: tuple[str, ...], final_state: bool, packed: bool) -> None:
    p = problem(dtype=dtype)
    if packed:
        p["x"] = p["x"][:1]
    tensors = tuple(None if name in absent else x.requires_grad_() for name, x in p.items())
    cu = torch.tensor([0, 2, 6]) if packed else None
    torch.library.opcheck(torch.ops.kda.conv.default, (*tensors, cu, True, final_state, None), test_utils=OPCHECKS)
    plain = tuple(None if t is None else t.detach() for t in tensors)
    wanted = [t is not None for t in tensors]
    dy, d_last = torch.randn_like(p["x"]), torch.randn_like(p["initial_state"]) if final_state else None
    arguments = (*plain, cu, True, dy.detach(), None if d_last is None else d_last.detach(), wanted)
    torch.library.opcheck(torch.ops.kda.conv_backward.default, arguments, test_utils=OPCHECKS)


def test_update_is_a_proper_operator() -> None:
    p = problem()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    arguments = (p["x"], p["weight"], p["bias"], None, p["initial_state"], slots, None, 0, torch.zeros_like(p["x"]))
    for written in (None, slots):
        kept = (
            (None, None, None, 0)
            if written is None
            else (torch.zeros(2, *p["initial_state"].shape[1:]), slots.view(2, 1), slots, 16)
        )
        call = (*arguments, True, None, 0, written, True, *kept)
        torch.library.opcheck(torch.ops.kda.conv_update.default, call, test_utils=OPCHECKS)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("packed", [True, False])
def test_other_lengths_compile_nothing_anew(packed: bool) -> None:
    def f(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, cu: Tensor | None) -> Any:
        y, last = kda.causal_conv1d(x, weight, bias, state, output_final_state=True, cu_seqlens=cu)
        return kda.causal_conv1d_update(y, state.clone(), weight, cu_seqlens=cu), last

    fast = compiled(f)
    for i, T in enumerate((7, 200, 3)):
        p = problem(B=1, T=T)
        torch._dynamo.mark_dynamic(p["x"], 1)
        arguments = (*p.values(), torch.tensor([0, T - 1]) if packed else None)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, f(*arguments), strict=True))


# ---- refusals ----

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "relu"}, "activation: expected 'silu', 'swish' or None, got 'relu'"),
    "rank of x": ({"x": torch.zeros(2, 10)}, "x: expected 3 dimensions"),
    "weight of another size": ({"weight": torch.zeros(9, 4)}, r"weight: expected shape \[10,4\]"),
    "too wide": ({"weight": torch.zeros(10, 5), "initial_state": None}, r"weight: expected W in 2..4, got 5"),
    "conv1d's weight": ({"weight": torch.zeros(10, 1, 4)}, "weight: expected 2 dimensions"),
    "bias of another size": ({"bias": torch.zeros(9)}, r"bias: expected shape \[10\]"),
    "FLA's state": ({"initial_state": torch.zeros(2, 10, 4)}, r"initial_state: expected shape \[2,10,3\]"),
    "integers": ({"x": torch.zeros(2, 7, 10, dtype=torch.int32)}, "x: expected float32 or bfloat16 or float16"),
    "packed rows": ({"cu_seqlens": torch.tensor([0, 7])}, r"cu_seqlens: expected one row"),
    "implementation": ({"impl": "cpu_gate"}, r"impl: expected one of (cuda_conv, )?cpu_conv, reference, got cpu_gate"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    changes, sentence = REFUSALS[case]
    with pytest.raises(ValueError, match=sentence):
        kda.causal_conv1d(**{**problem(), **changes})


def test_update_refuses_shared_slots() -> None:
    p = problem()
    slots = torch.tensor([1, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="state_indices: expected every live slot once, got slot 1 twice"):
        kda.causal_conv1d_update(p["x"], p["initial_state"], p["weight"], state_indices=slots)


def test_implementations() -> None:
    for op in ("conv", "conv_backward"):
        assert cpu_implementations(op) == ["cpu_conv", "reference"]

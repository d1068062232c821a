"""chunk_kda and fused_recurrent_kda as drop-ins for fla.ops.kda: views, torch's modes, gradients, empty calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from kda.call.options import H_EVERY
from support import Tensor, assert_close, cotangents, kda_oracle, make, run, same_bits

both = pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda], ids=lambda f: f.__name__)


@both
def test_any_strides(function: Callable[..., Any]) -> None:
    p = make(2, 70, 2, 2, gate="softplus", beta="sigmoid")
    expected = run(function, p)

    def spread(x: Tensor) -> Tensor:  # the same numbers, no dimension dense
        return (
            torch.empty(*(2 * n for n in x.shape))
            .fill_(float("nan"))[tuple(slice(None, None, 2) for _ in x.shape)]
            .copy_(x)
        )

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    d_o, d_state = cotangents(p)
    for view in (spread, turned):
        leaves = {n: view(x).detach().requires_grad_() for n, x in p.tensors.items()}
        assert not leaves["q"].is_contiguous()
        o, final_state = function(**leaves, **p.options, output_final_state=True)
        assert o.is_contiguous() and final_state.is_contiguous()
        grads = torch.autograd.grad((o, final_state), list(leaves.values()), (view(d_o), view(d_state)))
        got = {"o": o, "final_state": final_state, **{f"d{n}": x for n, x in zip(leaves, grads, strict=True)}}
        assert all(same_bits(expected[n], got[n]) for n in expected), view.__name__


@both
def test_expanded_gradients(function: Callable[..., Any]) -> None:
    p = make(2, 70)

    def grads(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = {n: x.clone().requires_grad_() for n, x in p.tensors.items()}
        o, final_state = function(**leaves, **p.options, output_final_state=True)
        return torch.autograd.grad(loss(o, final_state), list(leaves.values()))

    expanded = grads(lambda o, s: o.sum() + s.sum())
    dense = grads(lambda o, s: (o * torch.ones_like(o)).sum() + (s * torch.ones_like(s)).sum())
    assert all(same_bits(a, b) for a, b in zip(expanded, dense, strict=True))


@both
def test_lazily_negated_gradients(function: Callable[..., Any]) -> None:
    """Autograd can also pass backward a view with a pending sign: the result must be right, or an error."""
    p = make(1, 20)
    leaves = {n: x.clone().requires_grad_() for n, x in p.tensors.items()}
    o, _ = function(**leaves, **p.options)
    d_o = cotangents(p)[0]
    expected = torch.autograd.grad(o, leaves["v"], -d_o, retain_graph=True)[0]
    try:
        got = torch.autograd.grad(o, leaves["v"], torch._neg_view(d_o))[0]
    except ValueError:
        return
    assert same_bits(expected, got)


@both
def test_inputs_are_unchanged(function: Callable[..., Any]) -> None:
    p = make(2, 70, gate="lower_bound", beta="2sigmoid")
    leaves = {n: x.clone().requires_grad_() for n, x in p.tensors.items()}
    o, final_state = function(**leaves, **p.options, output_final_state=True)
    (o.sum() + final_state.square().sum()).backward()
    assert all(same_bits(p.tensors[n], x.detach()) and x._version == 0 for n, x in leaves.items())


@both
@pytest.mark.parametrize("wanted", [("q",), ("v", "beta"), ("g", "A_log"), ("dt_bias", "initial_state"), ()])
def test_gradients_only_where_required(function: Callable[..., Any], wanted: tuple[str, ...]) -> None:
    p = make(1, 70, 1, 2, gate="softplus")
    all_of_them = run(function, p)
    leaves = {n: x.clone().requires_grad_(n in wanted) for n, x in p.tensors.items()}
    o, final_state = function(**leaves, **p.options, output_final_state=True)
    assert o.requires_grad == final_state.requires_grad == bool(wanted)
    if wanted:
        torch.autograd.backward((o, final_state), cotangents(p))
    for n, x in leaves.items():
        assert (x.grad is None) == (n not in wanted), n
        assert x.grad is None or same_bits(x.grad, all_of_them[f"d{n}"]), n


@both
@pytest.mark.parametrize("of", ["o", "final_state"])
def test_gradient_of_one_result_only(function: Callable[..., Any], of: str) -> None:
    p = make(1, 70, 1, 2, gate="softplus")

    def only(call: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        def f(**kw: Any) -> tuple[Tensor, Tensor]:
            o, s = call(**kw)
            return (o, s.detach()) if of == "o" else (o.detach(), s)

        return f

    expected = run(only(kda_oracle), p.map(Tensor.double), grads=cotangents(p))
    assert_close(expected, run(only(function), p))


@both
def test_nothing_is_kept_where_gradients_are_disabled(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def spy(call: Any, final_state: bool, h_every: int, **rest: Any) -> Any:
        kept.append(h_every)
        return run_forward(call, final_state, h_every, **rest)

    run_forward = kda.autograd.run_forward
    monkeypatch.setattr(kda.autograd, "run_forward", spy)
    p = make(1, 70, gate="softplus", dtype=torch.float32)
    p.tensors["A_log"].requires_grad_()  # a layer's parameter, as in evaluation
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            function(**p.tensors, **p.options)
    assert kept == [0, 0, H_EVERY]


@both
def test_modes(function: Callable[..., Any]) -> None:
    p = make(1, 70, dtype=torch.float32)
    leaves = {n: x.clone().requires_grad_() for n, x in p.tensors.items()}
    expected = function(**leaves, **p.options)[0]
    assert expected.requires_grad
    with torch.no_grad():
        quiet = function(**leaves, **p.options)[0]
    with torch.inference_mode():
        quieter = function(**leaves, **p.options)[0]
    with torch.autocast("cpu", torch.bfloat16):
        cast = function(**leaves, **p.options)[0]
    assert not quiet.requires_grad and quieter.is_inference()
    for o in (quiet, quieter, cast):
        assert o.dtype == torch.float32 and same_bits(expected.detach(), o.detach())


@pytest.mark.cuda
@both
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"lengths": []}, {"lengths": [0, 0]}])
def test_nothing_to_do(function: Callable[..., Any], sizes: dict[str, Any]) -> None:
    p = make(**{"B": 2, "T": 5, **sizes})
    got = run(function, p)
    assert got["o"].numel() == 0
    assert same_bits(got["final_state"], p.tensors["initial_state"]), "no token leaves the state as it was"
    assert "dinitial_state" not in got or same_bits(got["dinitial_state"], cotangents(p)[1])

"""There are first derivatives only: differentiating a gradient raises an error, whatever other path there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
import kda.convolution
from support import Tensor, make, take_operators

REFUSED = r"^second derivatives: expected a gradient that is not differentiated again"
Function = Callable[..., Tensor]


def _layer(function: Callable[..., Any]) -> tuple[Function, dict[str, Tensor]]:
    p = make(1, 10, 2, 1, 8, 8, gate="softplus", beta="sigmoid")

    def run(**tensors: Tensor) -> Tensor:
        o, state = function(**tensors, **p.options, output_final_state=True)
        return torch.as_tensor(o.square().sum() + state.sum())

    return run, p.tensors


def _gate() -> tuple[Function, dict[str, Tensor]]:
    x = {"g": torch.randn(2, 3, 2, 4), "A_log": torch.randn(2), "dt_bias": torch.randn(2, 4)}
    return lambda **tensors: kda.fused_kda_gate(**tensors).square().sum(), x


def _conv() -> tuple[Function, dict[str, Tensor]]:
    x = {"x": torch.randn(2, 5, 6), "weight": torch.randn(6, 4), "bias": torch.randn(6)}
    x["initial_state"] = torch.randn(2, 6, 3)

    def run(**tensors: Tensor) -> Tensor:
        y, last = kda.causal_conv1d(**tensors, output_final_state=True)
        return torch.as_tensor(y.square().sum() + last.sum())

    return run, x


def _norm() -> tuple[Function, dict[str, Tensor]]:
    x = {"x": torch.randn(2, 3, 2, 5), "gate": torch.randn(2, 3, 2, 5), "weight": torch.randn(5)}
    return lambda **tensors: kda.norm_gate(**tensors).square().sum(), x


FUNCTIONS: dict[str, Callable[[], tuple[Function, dict[str, Tensor]]]] = {
    "chunk_kda": lambda: _layer(kda.chunk_kda),
    "fused_recurrent_kda": lambda: _layer(kda.fused_recurrent_kda),
    "fused_kda_gate": _gate,
    "causal_conv1d": _conv,
    "norm_gate": _norm,
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture(params=["eager", "operators"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "operators":
        take_operators(monkeypatch)
    return str(request.param)


def leaves_of(tensors: dict[str, Tensor], *wanted: str) -> dict[str, Tensor]:
    return {n: x.clone().requires_grad_(n in wanted) for n, x in tensors.items()}


@every_function
def test_every_input_with_another_way_to_the_loss(name: str, form: str) -> None:
    run, tensors = FUNCTIONS[name]()
    for argument in tensors:
        leaves = leaves_of(tensors, argument)
        x = leaves[argument]
        for loss in (run(**leaves) + (x**3).sum(), run(**leaves)):
            (d,) = torch.autograd.grad(loss, x, create_graph=True)
            with pytest.raises(NotImplementedError, match=REFUSED):
                torch.autograd.grad((d * x).sum(), x, retain_graph=True)
            with pytest.raises(NotImplementedError, match=REFUSED):
                (d * x).sum().backward()


@every_function
def test_a_parameter_of_which_another_gradient_depends(name: str, form: str) -> None:
    """d (df/dx) / dy, as in gradient penalties."""
    run, tensors = FUNCTIONS[name]()
    names = list(tensors)
    for a in names:
        for b in names:
            leaves = leaves_of(tensors, a, b)
            (d,) = torch.autograd.grad(run(**leaves), leaves[a], create_graph=True)
            with pytest.raises(NotImplementedError, match=REFUSED):
                torch.autograd.grad(d.sum() + leaves[b].sum(), leaves[b])


@every_function
def test_the_gradient_that_came_in(name: str, form: str) -> None:
    """d (df/dx) / d(df/do): backward is linear in it, and refuses that as well."""
    run, tensors = FUNCTIONS[name]()
    first = next(iter(tensors))
    leaves, seed = leaves_of(tensors, first), torch.ones((), requires_grad=True)
    (d,) = torch.autograd.grad(run(**leaves), leaves[first], seed, create_graph=True)
    with pytest.raises(NotImplementedError, match=REFUSED):
        torch.autograd.grad(d.sum() + seed, seed)


@every_function
def test_first_derivatives_with_create_graph(name: str, form: str) -> None:
    """The results have the same bits, and operations outside of the layer may be differentiated twice."""
    run, tensors = FUNCTIONS[name]()
    leaves = leaves_of(tensors, *tensors)
    plain = torch.autograd.grad(run(**leaves), list(leaves.values()))
    kept = torch.autograd.grad(run(**leaves), list(leaves.values()), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    other = torch.ones(3, requires_grad=True)
    (d,) = torch.autograd.grad(run(**leaves) + (other**3).sum(), other, create_graph=True)
    (second,) = torch.autograd.grad(d.sum(), other)
    assert torch.equal(second, 6 * other)


def test_activation_checkpointing_unpacks_once() -> None:
    from torch.utils.checkpoint import checkpoint

    run, tensors = FUNCTIONS["chunk_kda"]()
    leaves = leaves_of(tensors, *tensors)
    expected = torch.autograd.grad(run(**leaves), list(leaves.values()))
    for create_graph in (False, True):
        loss = checkpoint(lambda *x: run(**dict(zip(leaves, x, strict=True))), *leaves.values(), use_reentrant=False)
        got = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@every_function
def test_compiled(name: str) -> None:
    """In compiled graphs torch raises the error; for an input that a graph saves as it is, kda does."""
    run, tensors = FUNCTIONS[name]()
    first = "A_log" if name == "fused_kda_gate" else next(iter(tensors))
    leaves = leaves_of(tensors, first)
    x = leaves[first]
    loss = torch.compile(run, fullgraph=True, backend="aot_eager")(**leaves) + (x**3).sum()
    (d,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"double backward|{REFUSED}"):
        torch.autograd.grad(d.square().sum(), x)


@every_function
def test_exported(name: str) -> None:
    run, tensors = FUNCTIONS[name]()

    class Model(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> Tensor:
            return run(**tensors)

    first = next(iter(tensors))
    leaves = leaves_of(tensors, first)
    x = leaves[first]
    program = torch.export.export(Model(), (leaves,)).module()
    (expected,) = torch.autograd.grad(run(**leaves), x)
    (d,) = torch.autograd.grad(program(leaves) + 0 * x.sum(), x, create_graph=True)
    assert torch.allclose(d, expected)
    with pytest.raises(NotImplementedError, match=REFUSED):
        torch.autograd.grad(d.square().sum(), x)


@every_function
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_are_refused(name: str, transform: str) -> None:
    run, tensors = FUNCTIONS[name]()
    (first, x), *rest = tensors.items()

    def f(x: Tensor) -> Tensor:
        return run(**{first: x, **dict(rest)})

    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(f)(x),
        "vmap": lambda: torch.vmap(f)(torch.stack([x, x])),
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
    }
    said = {
        "grad": r"^torch\.func\.grad: expected torch\.autograd\.grad or backward\(\)",
        "vmap": r"^torch\.vmap: expected one call with the examples as rows of its batch dimension B",
        "jvp": r"^torch\.func\.jvp: expected reverse mode",
    }
    with pytest.raises(NotImplementedError, match=said[transform]):
        calls[transform]()

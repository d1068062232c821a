"""Backward under another autocast than forward: it runs in the state of its forward."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

import kda
import kda.cp
import kda.functions
import kda.operators
from layer_model import make as make_layer
from layer_model import relative, tokens
from support import Tensor, same_bits
from training_calls import TRAINING, leaves_of, loss_of

LAYERS: dict[str, dict[str, Any]] = {
    "low rank": {},
    "full rank": {"use_full_rank_gate": True, "use_full_rank_decay": True},
    "token by token": {"mode": "fused_recurrent"},
}


def gradients(y: Tensor, leaves: list[Tensor], autocast: bool) -> list[Any]:
    for x in leaves:
        x.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y.backward()  # type: ignore[no-untyped-call]
    return [x.grad for x in leaves]


def functions() -> dict[str, Any]:
    """All Functions of autograd in the package, by name."""
    found: dict[str, Any] = {}
    for package in (kda.call, kda.layer, kda.cp):
        for name in [m.name for m in pkgutil.iter_modules(package.__path__)]:
            importlib.import_module(f"{package.__name__}.{name}")
    kinds = [torch.autograd.Function]
    while kinds:
        kinds += (below := kinds.pop().__subclasses__())
        found |= {x.__name__: x for x in below if x.__module__.startswith("kda.")}
    return found


def test_every_function_keeps_the_state_of_its_forward() -> None:
    """``first_derivatives`` brings it back, and fails where forward has not kept it."""
    found = functions()
    assert found.keys() >= {"KDAFunction", "LayerFunction", "JointLinear", "Linear", "ContextParallelFunction"}
    copies = {"Concatenation", "_NoSecondDerivatives"}  # they compute nothing
    without = {name for name, x in found.items() if not hasattr(x.backward, "__wrapped__")}
    assert without == copies
    assert all("ctx.autocast" in inspect.getsource(found[name].forward) for name in found.keys() - copies)


@pytest.mark.parametrize("name", TRAINING)
def test_functions(name: str) -> None:
    function, keywords = TRAINING[name]()
    leaves = [x.requires_grad_() for x in leaves_of(keywords)]
    expected = gradients(loss_of(function(**keywords)), leaves, autocast=False)
    got = gradients(loss_of(function(**keywords)), leaves, autocast=True)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("config", LAYERS)
def test_the_layer(config: str, packed: bool) -> None:
    """From its output on; maps that run one by one are torch's own, whose backward follows autocast around it."""
    layer, x = make_layer(**LAYERS[config]), tokens(2, 70, 48).requires_grad_()
    if not packed:  # what load_state_dict(assign=True) leaves
        layer.load_state_dict({n: nn.Parameter(p.detach().clone()) for n, p in layer.named_parameters()}, assign=True)
    leaves = [x, *layer.parameters()]
    expected = gradients(loss_of(layer(x)[0]), leaves, autocast=False)
    got = gradients(loss_of(layer(x)[0]), leaves, autocast=True)
    assert all(d.dtype == torch.float32 for d in got)
    if config == "token by token":  # two maps of torch's own
        assert max(relative(a, b) for a, b in zip(expected, got, strict=True)) < 0.01
    else:
        assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("frozen", ["x", "o_proj.weight", "q_proj.weight", "f_proj.1.weight"])
def test_some_gradients_of_the_layer(frozen: str) -> None:
    layer, x = make_layer(), tokens(2, 70, 48).requires_grad_(frozen != "x")
    for name, p in layer.named_parameters():
        p.requires_grad_(name != frozen)
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    expected = gradients(loss_of(layer(x)[0]), leaves, autocast=False)
    got = gradients(loss_of(layer(x)[0]), leaves, autocast=True)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("forward", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward", [None, torch.bfloat16])
def test_the_state_in_a_backward(
    forward: torch.dtype | None, backward: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(1, 20, 48, requires_grad=True), torch.randn(48, 4, requires_grad=True)
    states: list[torch.dtype | None] = []
    run = kda.autograd.run_conv_backward

    def look(*given: Any, **named: Any) -> Any:
        states.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return run(*given, **named)

    monkeypatch.setattr(kda.autograd, "run_conv_backward", look)
    with torch.autocast("cpu", forward, enabled=forward is not None):
        y, _ = kda.causal_conv1d(x, weight)
    with torch.autocast("cpu", backward, enabled=backward is not None):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu") == (backward is not None), "afterwards as before"
    assert states == [forward]


@pytest.mark.parametrize("apart", [False, True])
def test_the_joint_product_of_a_graph(apart: bool) -> None:
    """A graph that was made without autocast, and runs under it."""
    layer, x = make_layer(), tokens(20, 48)
    weights = [m.weight.detach().clone() if apart else m.weight.detach() for m in (layer.q_proj, layer.k_proj)]
    operators, dy = torch.ops.kda, tokens(20, 64, seed=2)

    def results() -> list[Tensor]:
        y = operators.joint_linear(x, weights)
        return [y[:, :64], *operators.joint_linear_backward(x, weights, dy, [True, True, True])]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        got = results()
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.allclose(expected[0], x @ torch.cat(weights).T, atol=1e-5)

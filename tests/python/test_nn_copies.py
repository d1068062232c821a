"""Copies of a layer run their own weights, whatever torch or the layer keeps beside them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kda.nn import KimiDeltaAttention, RMSNormGated, ShortConvolution
from kda.transformers import LayerInTransformers
from layer_model import float64_parameters, make, model, relative, tokens
from test_nn_packed import is_packed, pickled
from test_nn_steps import advanced, assert_general_bits


@pytest.fixture(autouse=True)
def _compiler_forgets() -> Iterator[None]:
    yield
    torch.compiler.reset()


def averaged(layer: KimiDeltaAttention) -> Any:
    return torch.optim.swa_utils.AveragedModel(layer).module


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, pickled, averaged]


def changed(layer: KimiDeltaAttention) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.25)


@torch.no_grad()
def assert_as_its_parameters_say(layer: KimiDeltaAttention) -> None:
    x = tokens(1, 9, 48)
    assert relative(model(float64_parameters(layer), x[0].double(), layer), layer(x)[0][0]) < 3e-6


@pytest.mark.parametrize("how", COPIES, ids=lambda f: f.__name__)
def test_copies_of_a_compiled_layer(how: Callable[[Any], Any]) -> None:
    layer = make()
    layer.compile(backend="eager")
    assert_as_its_parameters_say(layer)
    other = how(layer)
    assert "_compiled_call_impl" not in vars(other) and "_compiled_call_impl" in vars(layer)
    for one in (other, layer):
        changed(one)
        assert_as_its_parameters_say(layer)
        assert_as_its_parameters_say(other)


@pytest.mark.parametrize("how", COPIES, ids=lambda f: f.__name__)
def test_copies_after_steps(how: Callable[[Any], Any]) -> None:
    layer, x = make(), tokens(1, 1, 48)
    assert_general_bits(layer, x, advanced(layer))
    assert layer.step_weights is not None
    other = how(layer)
    assert other.step_weights is None
    caches = advanced(layer), advanced(other)
    for one in (other, layer):
        changed(one)
        assert_general_bits(layer, x, caches[0])
        assert_general_bits(other, x, caches[1])
        assert_as_its_parameters_say(one)


def test_copies_keep_what_modules_keep() -> None:
    """The layer adds nothing to the state of a module, and takes nothing away that another class adds."""

    class More(KimiDeltaAttention):
        def __getstate__(self) -> dict[str, Any]:
            return {**super().__getstate__(), "more": 3}

    layer = More(hidden_size=48, num_heads=2, head_dim=16)
    layer.note = "mine"
    layer.compile(backend="eager")
    for other in (copy.copy(layer), copy.deepcopy(layer)):
        assert other.more == 3 and other.note == "mine"
        assert vars(other).keys() - vars(layer).keys() <= {"more", "step_weights"}
        assert vars(layer).keys() - vars(other).keys() == {"_compiled_call_impl"}


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_copies_of_other_compiled_modules(how: Callable[[Any], Any]) -> None:
    for module in (ShortConvolution(8), RMSNormGated(8), nn.Sequential(make())):
        module.compile(backend="eager")
        other = how(module)
        assert "_compiled_call_impl" not in vars(other)
        assert all(torch.equal(x, other.state_dict()[name]) for name, x in module.state_dict().items())


def test_a_compiled_layer_of_transformers() -> None:
    torch.manual_seed(0)
    layer = LayerInTransformers(hidden_size=48, num_heads=2, head_dim=16)
    layer.compile(backend="eager")
    x = tokens(1, 9, 48)
    with torch.no_grad():
        layer(x)
        other = copy.deepcopy(layer)
        other.o_proj.weight.zero_()
        assert not other(x).any() and layer(x).any()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), layer(x))


def test_a_parametrized_layer_is_copied_without_steps() -> None:
    """Torch copies its attributes one by one."""
    layer, x = make(), tokens(1, 1, 48)
    cache = advanced(layer)
    assert_general_bits(layer, x, cache)

    class Double(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * value

    parametrize.register_parametrization(layer, "A_log", Double())
    assert layer.step_weights is not None
    other = copy.deepcopy(layer)
    assert other.step_weights is None
    with torch.no_grad():
        other.o_proj.weight.zero_()
        assert not other(x, cache=advanced(other))[0].any()


def test_replicas_of_a_layer_do_not_step_with_its_weights() -> None:
    """Such as those of nn.DataParallel have all its attributes, and parameters of their own."""
    layer, x = make(), tokens(1, 1, 48)
    assert_general_bits(layer, x, advanced(layer))
    replica = KimiDeltaAttention.__new__(KimiDeltaAttention)
    replica.__dict__ = {**vars(layer), "_modules": dict(layer._modules), "_parameters": dict(layer._parameters)}
    replica.o_proj = nn.Linear(32, 48, bias=False)
    nn.init.zeros_(replica.o_proj.weight)
    with torch.no_grad():
        assert not replica(x, cache=advanced(layer))[0].any()
        assert layer(x, cache=advanced(layer))[0].any()


def test_copies_are_packed() -> None:
    layer = make()
    layer.compile(backend="eager")
    assert all(is_packed(how(layer)) for how in (copy.copy, copy.deepcopy, pickled, averaged))

"""The layer computes parts from their parameters only if a call of them would do the same. So any change of any part
shows, in training, prefill, steps and drafts. The right values are those of the model in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

from kda.layer.bypass import calls_differ
from kda.nn import KimiDeltaAttention, RMSNormGated, ShortConvolution
from layer_model import float64_parameters, make, model, relative, tokens
from test_nn_packed import graph
from test_nn_replaced import CONVS, MAPS, assert_is
from test_nn_steps import advanced, assert_general_bits, counted

LEAVES = (*MAPS, *CONVS, "o_norm")
PAIRS = ("f_proj", "g_proj")


def twice(part: Any) -> Callable[..., Tensor]:
    """The part's forward with twice its weight."""
    kind = type(part)

    def forward(*args: Any, **given: Any) -> Tensor:
        kept = {name: getattr(part, name) for name in ("bias", "eps", "activation") if hasattr(part, name)}
        return kind.forward(SimpleNamespace(**kept, weight=2 * part.weight), *args, **given)

    return forward


class Wrapper(nn.Module):
    """Hands on what its base has, as adapters do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.run = base, twice(base)

    def __getattr__(self, name: str) -> Any:
        found = self._modules.get("base")
        return super().__getattr__(name) if name in ("base", "run") else getattr(found, name)

    def forward(self, *args: Any, **given: Any) -> Tensor:
        return self.run(*args, **given)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


# ---- changes of a part, after which it computes with twice its weight ----


def wrapped(layer: nn.Module, name: str) -> None:
    layer.set_submodule(name, Wrapper(layer.get_submodule(name)))


def derived(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    kind = type(part)

    def forward(self: nn.Module, *args: Any, **given: Any) -> Tensor:
        self.__class__ = kind
        try:
            return twice(self)(*args, **given)
        finally:
            self.__class__ = other

    other = part.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def own_forward(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    part.forward = twice(part)


def hooked(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    run = twice(part)
    state: list[Tensor | None] = []

    def before(_: Any, args: Any, given: Any) -> None:  # the second run must start from the state of the first
        state[:] = [given["state"].clone() if given.get("state") is not None else None]

    def after(_: Any, args: Any, given: Any, y: Tensor) -> Tensor:
        if state[0] is not None:
            with torch.no_grad():
                given["state"].copy_(state[0])
        return run(*args, **given)

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after, with_kwargs=True)


def compiled(layer: nn.Module, name: str) -> None:
    """What ``compile()`` of a module sets."""
    part: Any = layer.get_submodule(name)
    part._compiled_call_impl = twice(part)


def parametrized(layer: nn.Module, name: str) -> None:
    parametrize.register_parametrization(layer.get_submodule(name), "weight", Double())


def an_attribute(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    weight = 2 * part.weight.detach()
    del part.weight
    part.weight = weight  # type: ignore[assignment]


def a_buffer(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    weight = 2 * part.weight.detach()
    del part.weight
    part.register_buffer("weight", weight)


def weight_norm(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(part)
    with torch.no_grad():
        part.weight_g.mul_(2)


CHANGES = [wrapped, derived, own_forward, compiled, hooked, parametrized, an_attribute, a_buffer, weight_norm]


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_part(change: Callable[[nn.Module, str], None], name: str) -> None:
    layer = make()
    p, eps = float64_parameters(layer), layer.o_norm.eps
    p[f"{name}.weight"] = 2 * p[f"{name}.weight"]
    change(layer, name)
    layer.o_norm.eps = eps  # for the model
    assert_is(layer, p, copies=False)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_part_that_is_changed_between_steps(change: Callable[[nn.Module, str], None]) -> None:
    for name in LEAVES:
        layer, changed, x = make(), make(), tokens(1, 2, 48)
        cache = advanced(layer)
        assert_general_bits(layer, x[:, :1], cache)
        with torch.no_grad():
            changed.get_submodule(name).weight.mul_(2)
            other = changed.new_cache(1)
            other.conv.copy_(cache.conv)  # type: ignore[union-attr]
            other.state.copy_(cache.state)
            expected = changed(x[:, 1:], cache=other)[0]
            change(layer, name)
            assert relative(expected, layer(x[:, 1:], cache=cache)[0]) < 1e-6, name


@pytest.mark.parametrize("name", PAIRS)
def test_a_changed_pair(name: str) -> None:
    """The two halves of a low-rank map stand in an nn.Sequential, which may be changed itself."""

    class Other(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def hook(*found: Any) -> Tensor:
        y: Tensor = 2 * found[-1]
        return y

    for change in ("derived", "own forward", "hooked", "wrapped"):
        layer = make()
        p, pair = float64_parameters(layer), layer.get_submodule(name)
        for parameter in (f"{name}.1.weight", f"{name}.1.bias"):
            p[parameter] = 2 * p.get(parameter, torch.zeros(1))
        if change == "derived":
            pair.__class__ = Other
        elif change == "own forward":
            run = pair.forward
            pair.forward = lambda x, run=run: 2 * run(x)
        elif change == "hooked":
            pair.register_forward_hook(hook)
        else:
            layer.set_submodule(name, nn.Sequential(pair, Double()))
        assert_is(layer, p, copies=False)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Sequential, ShortConvolution, RMSNormGated])
def test_a_changed_class(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools put another forward into a class. Here it doubles all outputs of one part."""
    layer, changed = make(), {nn.Linear: "b_proj", nn.Sequential: "f_proj", ShortConvolution: "v_conv1d"}
    part, forward = layer.get_submodule(changed.get(kind, "o_norm")), kind.forward
    x = tokens(1, 9, 48)
    cache = advanced(layer)
    assert_general_bits(layer, x[:, :1], cache)

    def other(self: Any, *args: Any, **given: Any) -> Tensor:
        y = forward(self, *args, **given)
        return 2 * y if self is part else y

    for run in (
        lambda: layer(x)[0],
        lambda: torch.no_grad()(layer)(x)[0],
        lambda: torch.no_grad()(layer)(x, cache=layer.new_cache(1))[0],
        lambda: torch.no_grad()(layer)(x[:, :3], cache=advanced(layer))[0],
        lambda: torch.no_grad()(layer)(x[:, :1], cache=advanced(layer))[0],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, "forward", lambda *a, **k: 2 * forward(part, *a, **k), raising=False)
            expected = run()
        assert relative(expected, run()) > 1e-3
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "forward", other)
            assert relative(expected, run()) < 1e-6


# ---- hooks that only watch ----


@contextmanager
def watching(layer: nn.Module, kind: str) -> Iterator[set[str]]:
    """The names of the parts of which a hook of all modules is told."""
    names, seen = {id(part): name for name, part in layer.named_modules()}, set[str]()

    def hook(part: nn.Module, *_: Any) -> None:
        seen.add(names.get(id(part), "?"))

    register: dict[str, Any] = {
        "forward": torch_module.register_module_forward_hook,
        "forward, always": lambda f: torch_module.register_module_forward_hook(f, always_call=True),
        "forward, by keyword": lambda f: torch_module.register_module_forward_hook(f, with_kwargs=True),
        "before forward": torch_module.register_module_forward_pre_hook,
        "backward": torch_module.register_module_full_backward_hook,
        "before backward": torch_module.register_module_full_backward_pre_hook,
    }
    handle = register[kind](hook)
    try:
        yield seen
    finally:
        handle.remove()
    assert not calls_differ()
    torch_module._global_forward_hooks_with_kwargs.clear()  # torch leaves them there


FORWARD = ("forward", "forward, always", "forward, by keyword", "before forward")


@pytest.mark.parametrize("config", [{}, {"use_full_rank_gate": True, "use_full_rank_decay": True}, {"conv_size": 1}])
@pytest.mark.parametrize("kind", [*FORWARD, "backward", "before backward"])
def test_hooks_of_all_modules_see_every_part(kind: str, config: dict[str, Any]) -> None:
    layer, x = make(**config), tokens(1, 20, 48).requires_grad_()
    parts = {name for name, _ in layer.named_modules()}
    expected, cache = layer(x)[0], layer.new_cache(1)
    with watching(layer, kind) as seen:
        o = layer(x)[0]
        o.sum().backward()
    assert seen == parts
    assert relative(expected, o) < 1e-6
    with torch.no_grad():
        for piece in (x, x[:, :3], x[:, :1], x[:, :1]):
            for given in (None, cache):
                with watching(layer, kind) as seen:
                    layer(piece, cache=given)
                assert seen == (parts if kind in FORWARD else set())


@pytest.mark.parametrize("name", [*LEAVES, *PAIRS])
def test_hooks_of_backward_run(name: str) -> None:
    for kind in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        layer, seen = make(), list[int]()
        getattr(layer.get_submodule(name), kind)(lambda *_, seen=seen: seen.append(1))
        layer(tokens(1, 20, 48).requires_grad_())[0].sum().backward()
        assert seen == [1]


@pytest.mark.parametrize("name", ["v_conv1d", "o_norm"])
def test_a_compiled_part_runs_compiled(name: str) -> None:
    """Torch compiles no nn.Linear and no nn.Sequential in this way."""
    layer, x, seen = make(), tokens(1, 20, 48), list[int]()

    def backend(graph: Any, _: Any) -> Any:
        return lambda *inputs: (seen.append(1), graph(*inputs))[1]

    expected = layer(x)[0]
    cache = advanced(layer)
    assert_general_bits(layer, x[:, :1], cache)
    layer.get_submodule(name).compile(backend=backend)
    o = layer(x)[0]
    assert relative(expected, o) < 1e-6 and seen
    with torch.no_grad():
        for piece, given in ((x, None), (x[:, :3], layer.new_cache(1)), (x[:, :1], cache)):
            before = len(seen)
            layer(piece, cache=given)
            assert len(seen) > before
    torch.compiler.reset()


# ---- the rates of the decay ----


def rate_parametrized(layer: KimiDeltaAttention, name: str) -> Tensor:
    parametrize.register_parametrization(layer, name, Double())
    return layer.parametrizations[name].original  # type: ignore[index, union-attr, return-value]


def rate_pruned(layer: KimiDeltaAttention, name: str) -> Tensor:
    prune.custom_from_mask(layer, name, (torch.arange(len(getattr(layer, name))) % 3 > 0).float())
    return getattr(layer, f"{name}_orig")


def rate_attribute(layer: KimiDeltaAttention, name: str) -> Tensor:
    value = nn.Parameter(getattr(layer, name).detach().clone())
    delattr(layer, name)
    object.__setattr__(layer, name, value)
    return value


@pytest.mark.parametrize("change", [rate_parametrized, rate_pruned, rate_attribute], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_rates_that_something_computes(name: str, change: Callable[[KimiDeltaAttention, str], Tensor]) -> None:
    """They follow what they are computed from: nothing keeps what the first step has read."""
    layer, x = make(), tokens(1, 24, 48)
    p = float64_parameters(layer)
    source = change(layer, name)
    cache = layer.new_cache(1)
    with torch.no_grad():
        layer(x[:, :1], cache=cache)
    for _ in range(2):
        with torch.no_grad():
            source.add_(0.5)
            for hook in layer._forward_pre_hooks.values():  # prune computes in one
                hook(layer, ())
            p[name] = getattr(layer, name).detach().double()
            cache = layer.new_cache(1)
            steps = torch.cat([layer(token, cache=cache)[0] for token in x.split(1, 1)], 1)
            expected = model(p, x[0].double(), layer)
            for o in (steps, layer(x)[0], layer(x, cache=layer.new_cache(1))[0]):
                assert relative(expected, o[0]) < 3e-6
    layer(x)[0].square().sum().backward()
    assert source.grad is not None and source.grad.abs().sum() > 0


def test_rates_that_something_computes_keep_32_bits() -> None:
    layer = make()
    source = rate_parametrized(layer, "A_log"), rate_pruned(layer, "dt_bias")
    layer.bfloat16()
    assert [p.dtype for p in source] == [torch.float32] * 2
    assert all(p._no_weight_decay for p in source)  # type: ignore[attr-defined]
    assert layer(tokens(1, 5, 48).bfloat16())[0].dtype == torch.bfloat16


# ---- parts of the same class in other forms ----


def test_a_map_of_another_size_is_refused() -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = make()
        layer.set_submodule(name, nn.Linear(48, 16, bias=False))
        for x in (tokens(1, 20, 48), tokens(1, 20, 48).requires_grad_()):
            with pytest.raises((ValueError, RuntimeError)):
                layer(x)


def test_one_convolution_with_a_bias() -> None:
    layer = make()
    layer.k_conv1d = ShortConvolution(32, bias=True)
    with torch.no_grad():
        layer.k_conv1d.bias.add_(0.5)  # type: ignore[union-attr]
    assert_is(layer, float64_parameters(layer))


def test_a_layer_without_changes_takes_the_short_ways() -> None:
    layer, x = make(), tokens(1, 20, 48)
    assert "LayerFunction" in graph(layer(x)[0])
    with torch.no_grad(), counted() as found:
        layer(x[:, :1], cache=advanced(layer))
    assert found == [1]


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@torch.no_grad()
def test_a_compiled_layer_calls_what_has_to_be_called() -> None:
    """What is there when it is compiled, and, as for other modules, another forward that comes later."""
    layer, x = make(), tokens(1, 20, 48)
    p = float64_parameters(layer)
    with watching(layer, "forward") as seen:
        torch.compile(layer, backend="eager")(x)
    assert seen >= {name for name, _ in layer.named_modules()}
    torch.compiler.reset()
    p["v_proj.weight"] = 2 * p["v_proj.weight"]
    run = torch.compile(layer, backend="eager")
    hooked(layer, "v_proj")
    assert relative(model(p, x[0].double(), layer), run(x)[0][0]) < 3e-6
    own_forward(layer, "b_proj")
    p["b_proj.weight"] = 2 * p["b_proj.weight"]
    assert relative(model(p, x[0].double(), layer), run(x)[0][0]) < 3e-6
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_weights() -> None:
    layer, x = make(), tokens(1, 20, 48)
    with torch.no_grad():
        expected = layer(x)[0]
        for name in ("q_proj", "f_proj.0", "o_proj"):
            part = layer.get_submodule(name)
            part.weight = nn.Parameter(part.weight.detach().to_sparse_csr(), requires_grad=False)  # type: ignore[arg-type]
        assert relative(expected, layer(x)[0]) < 1e-6
        layer.float().pack_weights()

"""Steps of one token with a cache keep what is the same in every step. They have the bits of the general way, and
notice whatever changes in between."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from kda.layer import step
from kda.nn import KDACache, KimiDeltaAttention, RMSNormGated
from layer_model import make, tokens
from test_nn import CONFIGS
from test_nn_packed import CHANGES, Scaled, pickled

GENERAL = {"no_convolution", "full_ranks"}  # the last has a gate that runs by itself


@contextmanager
def generally() -> Iterator[None]:
    """Without quick steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kda.nn.quick_step", lambda *_: None)
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Lists the quick steps."""
    found: list[int] = []
    run = step._step

    def noted(*arguments: Any) -> Tensor | None:
        o = run(*arguments)
        found.extend([1] if o is not None else [])
        return o

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_step", noted)
        yield found


def advanced(layer: KimiDeltaAttention, B: int = 1) -> KDACache:
    """A cache that has seen some tokens."""
    cache = layer.new_cache(B)
    with torch.no_grad(), generally():
        layer(tokens(B, 9, 48).to(layer.o_proj.weight.dtype), cache=cache)
    return cache


def assert_general_bits(layer: KimiDeltaAttention, x: Tensor, cache: KDACache, quick: bool = True) -> None:
    """Runs a step with the cache, which has the bits of the general way; ``quick``: is it a quick one?"""
    other = copy.deepcopy(cache)
    with torch.no_grad(), generally():
        expected = layer(x, cache=other)[0]
    with torch.no_grad(), counted() as found:
        o = layer(x, cache=cache)[0]
    assert len(found) == quick
    assert torch.equal(o, expected) and torch.equal(cache.state, other.state)
    assert (cache.conv is None and other.conv is None) or torch.equal(cache.conv, other.conv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_of_the_general_way(name: str, dtype: torch.dtype) -> None:
    layer = make(**CONFIGS[name]).to(dtype)
    layer.A_log.data, layer.dt_bias.data = layer.A_log.float(), layer.dt_bias.float()
    for B in (1, 3, 0):
        cache, x = advanced(layer, B), tokens(B, 6, 48, seed=2).to(dtype)
        for t in range(6):
            assert_general_bits(layer, x[:, t : t + 1], cache, quick=name not in GENERAL)


def test_a_gate_in_sixteen_bits() -> None:
    """It is converted in every step."""
    layer, x = make().to(torch.bfloat16), tokens(1, 1, 48).to(torch.bfloat16)
    layer.A_log.data, layer.dt_bias.data = layer.A_log.bfloat16(), layer.dt_bias.bfloat16()
    cache = advanced(layer)
    assert_general_bits(layer, x, cache)
    layer.A_log.data.mul_(1.5)
    assert_general_bits(layer, x, cache)


# ---- changes between steps ----


def norm_weight(layer: KimiDeltaAttention) -> None:
    layer.o_norm.weight = nn.Parameter(layer.o_norm.weight * 1.5)


class TwiceTheNorm(RMSNormGated):
    def forward(self, x: Tensor, gate: Tensor, *, mesh: Any = None) -> Tensor:
        return 2 * super().forward(x, gate, mesh=mesh)


def other_norm(layer: KimiDeltaAttention) -> None:
    layer.o_norm = TwiceTheNorm(layer.head_v_dim)


def gate(layer: KimiDeltaAttention) -> None:
    layer.A_log.data = layer.A_log.detach() + 1


def bias_of_the_gate(layer: KimiDeltaAttention) -> None:
    layer.dt_bias = nn.Parameter(layer.dt_bias.detach() + 1)


def second_half(layer: KimiDeltaAttention) -> None:
    layer.f_proj[1] = nn.Linear(16, 32, bias=True)  # type: ignore[index, operator]


def more_halves(layer: KimiDeltaAttention) -> None:
    layer.g_proj.insert(1, nn.Linear(16, 16))  # type: ignore[operator]


def convolution(layer: KimiDeltaAttention) -> None:
    layer.k_conv1d.weight.data = layer.k_conv1d.weight.detach() * 1.5


def new_bias(layer: KimiDeltaAttention) -> None:
    layer.o_proj.bias = nn.Parameter(torch.ones(48))


def output_projection(layer: KimiDeltaAttention) -> None:
    layer.o_proj = Scaled(layer.o_proj)  # type: ignore[assignment]


def turned_memory(layer: KimiDeltaAttention) -> None:
    weight = layer.f_proj[1].weight  # type: ignore[index]
    turned = weight.detach().view(16, 32).t()
    assert turned.shape == weight.shape and turned.data_ptr() == weight.data_ptr()
    weight.data = turned


def option(layer: KimiDeltaAttention) -> None:
    layer.allow_neg_eigval = True


def bound(layer: KimiDeltaAttention) -> None:
    layer.lower_bound = -4.0


def norm_options(layer: KimiDeltaAttention) -> None:
    layer.o_norm.eps, layer.o_norm.activation = 0.5, "silu"


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(layer: KimiDeltaAttention) -> None:
    parametrize.register_parametrization(layer.g_proj[1], "weight", Twice())  # type: ignore[index]


def other_dtype_and_back(layer: KimiDeltaAttention) -> None:
    layer.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        layer.q_proj.weight.mul_(1.5)


MORE = [
    norm_weight, other_norm, gate, bias_of_the_gate, second_half, more_halves, convolution, new_bias, output_projection,
    turned_memory, option, bound, norm_options, parametrized, other_dtype_and_back,
]  # fmt: skip


@pytest.mark.parametrize("change", [*CHANGES, *MORE], ids=lambda f: f.__name__)
def test_changes_are_noticed(change: Callable[[KimiDeltaAttention], None]) -> None:
    layer, x = make(), tokens(1, 2, 48)
    cache = advanced(layer)
    assert_general_bits(layer, x[:, :1], cache)
    old, new = copy.deepcopy(cache), copy.deepcopy(cache)
    with torch.no_grad():
        before = layer(x[:, 1:], cache=old)[0]
    change(layer)
    with torch.no_grad():
        with generally():
            expected = layer(x[:, 1:], cache=new)[0]
        o = layer(x[:, 1:], cache=cache)[0]
    assert not torch.equal(expected, before), "the change has no effect, so the test shows nothing"
    assert torch.equal(o, expected) and torch.equal(cache.state, new.state)


@pytest.mark.parametrize("name", [name for name, _ in make().named_modules() if name])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "forward"])
def test_hooks_run(name: str, kind: str) -> None:
    layer, x, seen = make(), tokens(1, 1, 48), list[int]()
    cache, module = advanced(layer), layer.get_submodule(name)
    assert_general_bits(layer, x, cache)
    if kind == "forward":
        run: Any = module.forward
        module.forward = lambda *a, **k: [seen.append(1), run(*a, **k)][1]  # type: ignore[func-returns-value]
    else:
        handle = getattr(module, f"register_{kind}")(lambda *_: seen.append(1))
    with torch.no_grad():
        layer(x, cache=cache)
    assert seen == [1]
    if kind == "forward":
        del module.forward
    else:
        handle.remove()
    assert_general_bits(layer, x, cache)


def test_hooks_of_all_modules_run() -> None:
    layer, x, seen = make(), tokens(1, 1, 48), list[type]()
    cache = advanced(layer)
    assert_general_bits(layer, x, cache)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert_general_bits(layer, x, cache, quick=False)
    finally:
        handle.remove()
    modules = [type(module) for module in layer.modules()]
    assert all(seen.count(kind) == 2 * modules.count(kind) for kind in modules)  # two steps, and all parts in each


def test_other_parameters_for_one_call() -> None:
    layer, x = make(), tokens(1, 1, 48)
    cache = advanced(layer)
    assert_general_bits(layer, x, cache)
    others = {name: p.detach() * 1.5 for name, p in layer.named_parameters()}
    old, new = copy.deepcopy(cache), copy.deepcopy(cache)
    with torch.no_grad():
        o = torch.func.functional_call(layer, others, (x,), {"cache": old})[0]
        layer.load_state_dict(others)
        with generally():
            expected = layer(x, cache=new)[0]
    assert torch.allclose(o, expected, atol=1e-5) and torch.allclose(old.state, new.state, atol=1e-5)


# ---- caches, copies and modes ----


def test_caches_take_turns() -> None:
    layer, x = make(), tokens(2, 1, 48)
    caches = [advanced(layer), advanced(layer, 2)]
    for cache in caches * 3:
        assert_general_bits(layer, x[: cache.state.shape[0]], cache)
    cache = caches[1]
    cache.batch_select_indices(torch.tensor([1, 0, 1]))  # replaces its tensors
    assert_general_bits(layer, tokens(3, 1, 48), cache)
    cache.reorder(torch.tensor([2, 2, 0]))
    assert_general_bits(layer, tokens(3, 1, 48), cache)
    other = make(1, num_v_heads=4)  # of other sizes, but with a cache that fits neither
    with torch.no_grad(), pytest.raises(ValueError, match="state"):
        other(tokens(3, 1, 48), cache=cache)
    assert_general_bits(layer, tokens(3, 1, 48), cache)


def test_a_step_changes_no_output_of_an_earlier_one() -> None:
    layer, x = make(), tokens(1, 2, 48)
    cache = advanced(layer)
    with torch.no_grad():
        first = layer(x[:, :1], cache=cache)[0]
        kept = first.clone()
        second = layer(x[:, 1:], cache=cache)[0]
    assert torch.equal(first, kept) and not torch.equal(first, second) and not first._is_view()


def test_a_dict_of_caches() -> None:
    layer, x = make(layer_idx=3), tokens(1, 1, 48)
    caches: dict[int, Any] = {3: advanced(layer)}
    other = copy.deepcopy(caches[3])
    with torch.no_grad(), counted() as found:
        o, _, held = layer(x, past_key_values=caches, use_cache=True)
        assert held is caches and len(found) == 1
        with generally():
            assert torch.equal(o, layer(x, cache=other)[0])


def test_tensors_of_inference_mode() -> None:
    layer, x = make(), tokens(1, 4, 48)
    cache, other = advanced(layer), advanced(layer)
    with counted() as found:
        for t, mode in enumerate((torch.inference_mode, torch.no_grad) * 2):
            with mode():
                o = layer(x[:, t : t + 1], cache=cache)[0]
                with generally():
                    assert torch.equal(o, layer(x[:, t : t + 1], cache=other)[0])
                assert o.is_inference() == (mode is torch.inference_mode)
    assert len(found) == 4
    with torch.inference_mode():
        inside = layer.new_cache(1)
        layer(x[:, :1], cache=inside)


def test_written_states_have_new_versions() -> None:
    layer = make()
    cache = advanced(layer)
    before = cache.state._version, cache.conv._version  # type: ignore[union-attr]
    with torch.no_grad(), counted() as found:
        layer(tokens(1, 1, 48), cache=cache)
    assert len(found) == 1
    assert cache.state._version > before[0] and cache.conv._version > before[1]  # type: ignore[union-attr]


def test_copies_and_files_hold_nothing_of_steps() -> None:
    layer, x, size = make(), tokens(1, 1, 48), []
    for _ in range(2):
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        size.append(len(buffer.getvalue()))
        cache = advanced(layer)
        assert_general_bits(layer, x, cache)
    assert size[0] == size[1]
    for other in (copy.deepcopy(layer), copy.copy(layer), pickled(layer)):
        assert other.step_weights is None
        assert_general_bits(other, x, advanced(other))
    assert copy.deepcopy(cache).step_memory is None and cache.step_memory is not None
    layer.to(torch.float64)
    assert layer.step_weights is None, "the old memory stays alive"


def test_other_ways_of_torch() -> None:
    layer, x = make(), tokens(1, 1, 48)
    cache = advanced(layer)
    assert_general_bits(layer, x, cache)
    with FlopCounterMode(display=False) as counter:
        assert_general_bits(layer, x, cache, quick=False)
    assert counter.get_total_flops() > 0
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), counted() as found:
        layer(x, cache=cache)
    assert not found
    o = layer(x, cache=cache)[0]  # with gradients
    assert o.requires_grad
    assert_general_bits(layer, x, cache)
    assert_general_bits(layer, nn.Parameter(x), cache, quick=False)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda c: (c.conv, c.state.repeat(2, 1, 1, 1)), "cache: expected one for 1 sequences, got one for 2"),
        (lambda c: (c.conv, c.state[:, :, :-1]), "x: expected D"),
        (lambda c: (c.conv[:, :-1], c.state), "conv_state"),
        (lambda c: (c.conv, c.state.to(torch.int32)), "state"),
        (lambda c: (c.conv, torch._neg_view(c.state)), "state: expected memory as it reads"),
    ],
)
def test_refusals_are_those_of_the_general_way(wrong: Callable[[KDACache], tuple[Any, Any]], sentence: str) -> None:
    layer, x = make(), tokens(1, 1, 48)
    cache = KDACache(*wrong(advanced(layer)))
    said = []
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match=sentence) as error:
            layer(x, cache=cache)
        said.append(str(error.value))
        with torch.no_grad(), generally(), pytest.raises(ValueError, match=sentence) as error:
            layer(x, cache=cache)
        said.append(str(error.value))
    assert len(set(said)) == 1

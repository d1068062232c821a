"""kda.nn in functions that backward runs again: right, or refused if a cache has advanced in the meantime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kda.nn import KDACache, KimiDeltaAttention, ShortConvolution
from layer_model import float64_parameters, make, model, relative, tokens


def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, policy)
KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not_reentrant": {"use_reentrant": False},
    "to_the_end": {"use_reentrant": False, "early_stop": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
REFUSED = (
    r"(past_key_values|state): expected None in a function that backward runs again \(use_cache=False with gradient"
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(layer: torch.nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in layer.parameters())]


def used_cache(layer: KimiDeltaAttention) -> KDACache:
    cache = layer.new_cache(1)
    with torch.no_grad():
        layer(tokens(1, 9, 48, seed=3), cache=cache)
    return cache


def twice(layer: KimiDeltaAttention, x: Tensor) -> Tensor:
    """Uses a cache that the function makes itself."""
    cache = layer.new_cache(1)
    first, _, _ = layer(x[:, :12], cache=cache)
    return torch.cat([first, layer(x[:, 12:], cache=cache)[0]], 1)


@kinds
def test_what_the_function_makes_itself_is_right(kind):
    """Against the float64 model. The cache carries values but no gradients, so its second half starts from
    constants."""
    layer, x = make(), tokens(1, 20, 48)
    p, x64 = float64_parameters(layer), x.double().requires_grad_()
    model(p, x64[0], layer).square().sum().backward()
    want = [x64.grad, *(w.grad for w in p.values())]
    for run in (lambda x: layer(x)[0], lambda x: layer(x, use_cache=True)[0]):
        got = gradients(layer, lambda x, run=run: checkpoint(run, x, **kind), x)
        assert max(relative(a, b) for a, b in zip(want, got, strict=True)) < 5e-5
    plain = gradients(layer, lambda x: twice(layer, x), x)
    again = gradients(layer, lambda x: checkpoint(lambda x: twice(layer, x), x, **kind), x)
    assert max(relative(a, b) for a, b in zip(plain, again, strict=True)) < 1e-6


@kinds
@pytest.mark.parametrize("how", ["cache", "past_key_values", "dict", "no_convolution"])
def test_a_cache_from_outside_is_refused(kind, how):
    layer, x = make(layer_idx=3, use_short_conv=how != "no_convolution"), tokens(1, 20, 48)
    cache, once = used_cache(layer), used_cache(layer)
    layer(x, cache=once)
    name, held = ("past_key_values", {3: cache}) if how == "dict" else (how, cache)
    run = functools.partial(layer, **{name if name in ("cache", "past_key_values") else "cache": held})
    with pytest.raises(ValueError, match=REFUSED):
        gradients(layer, lambda x: checkpoint(lambda x: run(x)[0], x, **kind), x)
    assert relative(once.state, cache.state) < 1e-6  # advanced once, by the first run
    assert cache.conv is None or torch.equal(once.conv, cache.conv)


@kinds
def test_a_cache_in_a_frozen_part_is_refused(kind):
    layer, head, x = make(), torch.nn.Linear(48, 3), tokens(1, 20, 48)
    cache = used_cache(layer)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            h, _, _ = layer(x, cache=cache)
        return head(h + x)

    with pytest.raises(ValueError, match=REFUSED):
        checkpoint(run, x.requires_grad_(), **kind).sum().backward()


@kinds
def test_a_state_of_the_convolution_from_outside_is_refused(kind):
    torch.manual_seed(0)
    conv, x, state = ShortConvolution(6), tokens(1, 9, 6), tokens(1, 6, 3, seed=2)
    with pytest.raises(ValueError, match=REFUSED):
        gradients(conv, lambda x: checkpoint(lambda x: conv(x, state), x, **kind), x)
    plain = gradients(conv, lambda x: conv(x, initial_state=tokens(1, 6, 3, seed=2)), x)
    again = gradients(
        conv, lambda x: checkpoint(lambda x: conv(x, initial_state=tokens(1, 6, 3, seed=2)), x, **kind), x
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_without_checkpoints_a_cache_may_be_used_with_gradients():
    """Also in several pieces before one backward, and with a cache made in a backward pass."""
    layer, x = make(), tokens(1, 20, 48)
    cache, again = used_cache(layer), used_cache(layer)
    want = gradients(layer, lambda x: layer(x, cache=cache)[0], x)
    compiled = torch.compile(lambda x, cache: layer(x, cache=cache)[0], backend="aot_eager_decomp_partition")
    got = gradients(layer, lambda x: compiled(x, again), x)
    assert max(relative(a, b) for a, b in zip(want, got, strict=True)) < 1e-6
    assert relative(cache.state, again.state) < 1e-6
    made = []
    x.requires_grad_().register_hook(lambda g: made.append(used_cache(layer)))
    x.sum().backward()
    layer(tokens(1, 3, 48), cache=made[0])  # no backward pass is running any more


def test_the_operator_is_a_proper_one():
    import kda.operators  # noqa: F401  # registers it

    for state in (tokens(2, 3, 4, 5), tokens(2, 3, 8)[:, :, 2:5]):
        torch.library.opcheck(torch.ops.kda.old_state.default, (state,))
        copy = torch.ops.kda.old_state(state)
        assert torch.equal(copy, state)
        assert copy.data_ptr() != state.data_ptr()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", ["checkpoint", "compile"])
def test_compiled(reentrant, outside):
    """A compiled layer in a checkpoint, where none of its Python runs again, and a checkpoint in a compiled
    function."""
    layer, x = make(), tokens(1, 20, 48)
    cache = used_cache(layer)

    def checkpointed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(run, x, use_reentrant=reentrant)

    def with_cache(x: Tensor) -> Tensor:
        return layer(x, cache=cache)[0]

    if outside == "checkpoint":
        run = functools.partial(checkpointed, torch.compile(with_cache, backend="aot_eager"))
    else:
        run = torch.compile(functools.partial(checkpointed, with_cache), backend="aot_eager")
    with pytest.raises(ValueError, match=REFUSED):
        gradients(layer, run, x)

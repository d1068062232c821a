"""Parts of the layer that something has replaced: quantised, adapted or offloaded modules are called as they are."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda.nn import DraftCache, KimiDeltaAttention, ShortConvolution, causal_conv_silu
from layer_model import float64_parameters, in_pieces, make, model, relative, tokens

MAPS = ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1")
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


class Packed(nn.Module):
    """int8 rows and scales, as quantisers of weights leave them. It has no attribute ``weight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.register_buffer("scales", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("qweight", (weight / self.scales).round().to(torch.int8))
        self.bias = linear.bias

    def real(self) -> Tensor:
        return self.qweight * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.real().to(x.dtype), self.bias)


class Doubled(nn.Module):
    """In the place of a convolution, which it holds: that with twice its weights."""

    def __init__(self, base: ShortConvolution) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:  # adapters hand on what their base has
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return causal_conv_silu(x, 2 * self.weight.squeeze(1), self.bias, **given)


class DoubledKind(ShortConvolution):
    def forward(self, x: Tensor, **given: Any) -> Tensor:  # type: ignore[override]
        return causal_conv_silu(x, 2 * self.weight.squeeze(1), self.bias, **given)


class Norm(nn.Module):
    """With the two arguments of FLA's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(weight.detach() * 3)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.scale, 1e-5) * g.sigmoid()


def quantised(layer: KimiDeltaAttention, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The parameters that mean the same, in float64."""
    p = float64_parameters(layer)
    for name in names:
        packed = Packed(layer.get_submodule(name))
        layer.set_submodule(name, packed)
        p[f"{name}.weight"] = packed.real().double()
    return p


def assert_is(layer: KimiDeltaAttention, p: dict[str, Tensor], copies: bool = True) -> None:
    """The layer is the model of these parameters in training, prefill, few tokens, steps and drafts, and so is a
    copy, unless it shares what something has put into the layer."""
    x = tokens(2, 24, 48).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    expected = torch.stack([model(p, row, layer) for row in x64])
    o = layer(x)[0]
    assert relative(expected, o) < 3e-6
    (dx,) = torch.autograd.grad(o.sum(), x)
    assert relative(torch.autograd.grad(expected.sum(), x64)[0], dx) < 2e-5
    cache = layer.new_cache(2)
    assert relative(expected, in_pieces(layer, x, [15, 3, 1, 1, 1, 3], cache)) < 3e-6
    with torch.no_grad():
        assert not copies or relative(expected, copy.deepcopy(layer)(x)[0]) < 3e-6
        for fused in (True, False):
            _, _, cache = layer(x[:, :15], use_cache=True)
            drafts = DraftCache(layer, cache, 4, fused=fused)
            layer(torch.cat([x[:, 15:17], -x[:, :2]], 1), cache=drafts)  # two are right, and two are not
            drafts.accept(torch.tensor([2, 2], dtype=torch.int32))
            assert relative(expected[:, 17:21], layer(x[:, 17:21], cache=drafts)[0]) < 3e-6
            drafts.accept(torch.tensor([4, 4], dtype=torch.int32))
            drafts.flush()
            assert relative(expected[:, 21:], layer(x[:, 21:], cache=cache)[0]) < 3e-6


@pytest.mark.parametrize("names", [*((name,) for name in MAPS), MAPS], ids=lambda names: "+".join(names))
def test_maps_without_a_weight(names: tuple[str, ...]) -> None:
    layer = make()
    assert_is(layer, quantised(layer, names))


def test_quantised_by_torch() -> None:
    """Its modules have a method ``weight``, and round the inputs, too."""
    layer, x = make().eval(), tokens(1, 24, 48)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        narrow = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
        expected = layer(x)[0]
        assert 0 < relative(expected, narrow(x)[0]) < 0.1
        assert 0 < relative(expected, in_pieces(narrow, x, [20, 3, 1], narrow.new_cache(1))) < 0.1


@pytest.mark.parametrize("kind", [Doubled, DoubledKind])
@pytest.mark.parametrize("names", [("v_conv1d",), CONVS], ids=lambda names: "+".join(names))
def test_convolutions(names: tuple[str, ...], kind: type) -> None:
    layer = make()
    p = float64_parameters(layer)
    for name in names:
        conv: Any = layer.get_submodule(name)
        other = kind(conv) if kind is Doubled else kind(conv.weight.shape[0])
        if kind is DoubledKind:
            other.load_state_dict(conv.state_dict())
        layer.set_submodule(name, other)
        p[f"{name}.weight"] = 2 * p[f"{name}.weight"]
    assert_is(layer, p)


def test_a_hooked_convolution_sees_drafts() -> None:
    layer = make()
    p = float64_parameters(layer)
    p["k_conv1d.weight"] = 2 * p["k_conv1d.weight"]
    conv = layer.k_conv1d.requires_grad_(False)

    def scale(factor: float) -> Any:
        def hook(module: Any, *_: Any) -> None:
            module.weight.data = module.weight.data * factor

        return hook

    conv.register_forward_pre_hook(scale(2))
    conv.register_forward_hook(scale(0.5))
    assert_is(layer, p)


def test_the_norm() -> None:
    layer = make()
    p = float64_parameters(layer)
    layer.o_norm, eps = Norm(layer.o_norm.weight), layer.o_norm.eps  # type: ignore[assignment]
    p["o_norm.weight"] = 3 * p["o_norm.weight"]
    layer.o_norm.eps = eps  # for the model
    assert_is(layer, p)


def test_a_decay_of_three_maps() -> None:
    layer = make()
    p = float64_parameters(layer)
    first, last = layer.f_proj
    middle = nn.Linear(16, 16, bias=False)
    p["f_proj.0.weight"] = middle.weight.detach().double() @ p["f_proj.0.weight"]
    layer.f_proj = nn.Sequential(first, middle, last)
    assert_is(layer, p)


# ---- offloaded ----


def offload(layer: nn.Module) -> None:
    """Keeps every module's own parameters on ``meta`` while it does not run, as accelerate's hooks do."""
    for module in layer.modules():
        kept = {name: p.detach() for name, p in module._parameters.items() if p is not None}

        def forward(*args: Any, module: Any = module, kept: Any = kept, run: Any = module.forward, **given: Any) -> Any:
            module._parameters.update({name: nn.Parameter(p) for name, p in kept.items()})
            try:
                return run(*args, **given)
            finally:
                module._parameters.update({name: nn.Parameter(p.to("meta")) for name, p in kept.items()})

        if kept:
            module.forward = forward
            module._parameters.update({name: nn.Parameter(p.to("meta")) for name, p in kept.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded(dtype: torch.dtype) -> None:
    layer, x = make(layer_idx=0).to(dtype), tokens(2, 24, 48).to(dtype)
    close = 2e-6 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        expected, plain = layer(x)[0], layer.new_cache(2)
        offload(layer)
        assert layer.q_proj.weight.is_meta and layer.A_log.is_meta
        assert relative(expected, layer(x)[0]) < close
        caches: dict[int, Any] = {}
        for cache in (None, caches, layer.new_cache(2, like=x), layer.new_cache(2, device="cpu")):
            pieces, held = [], cache
            for piece in x.split([15, 3, 1, 5], 1):
                o, _, held = layer(piece, past_key_values=held, use_cache=True)
                pieces.append(o)
            assert relative(expected, torch.cat(pieces, 1)) < close
            own = held[0] if isinstance(held, dict) else held
            for name in ("conv", "state"):
                like, got = getattr(plain, name), getattr(own, name)
                assert (got.dtype, got.shape, got.stride()) == (like.dtype, like.shape, like.stride())
        with pytest.raises(ValueError, match=r"^cache: expected one on cpu like hidden_states .*, got one on meta"):
            layer(x, cache=layer.new_cache(2))


def test_dtypes_of_caches() -> None:
    layer = make().to(torch.bfloat16)
    assert layer.new_cache(1).conv.dtype == torch.bfloat16
    assert layer.new_cache(1, dtype=torch.float16).conv.dtype == torch.float16
    wide = layer.new_cache(1, dtype=torch.float64)
    assert (wide.conv.dtype, wide.state.dtype) == (torch.float64, torch.float64)
    assert layer.new_cache(1, device="meta").state.is_meta
    with pytest.raises(ValueError, match=r"^dtype: expected bfloat16, float16, float32 or float64, got torch\.int8"):
        layer.new_cache(1, dtype=torch.int8)
    for name in CONVS:  # without a weight, hidden_states tell
        layer.set_submodule(name, nn.Identity())
    quantised(layer, ("o_proj",))
    assert layer.new_cache(1, like=tokens(1, 1, 48).half()).conv.dtype == torch.float16
    assert layer.new_cache(1).conv.dtype == torch.bfloat16  # as the norm


@pytest.mark.parametrize("name", ["f_proj.1", "g_proj.1"])
def test_hooks_of_second_halves_see_batches(name: str) -> None:
    """As in an ``nn.Sequential`` that torch calls: ``[B, T, n]``, forward and backward."""
    layer, x = make(), tokens(2, 7, 48).requires_grad_()
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    seen: list[tuple[int, ...]] = []

    def look(_module: nn.Module, given: Any, made: Any) -> None:
        seen.extend(tuple(t.shape) for t in (*given, *(made if isinstance(made, tuple) else (made,))))

    half = layer.get_submodule(name)
    half.register_forward_hook(look)
    half.register_full_backward_hook(look)
    got = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    assert seen == [(2, 7, 16), (2, 7, 32), (2, 7, 16), (2, 7, 32)]
    assert max(relative(a, b) for a, b in zip(expected, got, strict=True)) < 1e-5


def test_what_stands_for_a_second_half_gets_batches() -> None:
    class Rows(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape == (2, 7, 16)
            y: Tensor = self.linear(x)
            return y

    layer, x = make(), tokens(2, 7, 48)
    expected = layer(x)[0]
    layer.f_proj[1], layer.g_proj[1] = Rows(layer.f_proj[1]), Rows(layer.g_proj[1])  # type: ignore[index,operator]
    assert relative(expected, layer(x)[0]) < 1e-6

"""kda.nn with the KDA layers of published checkpoints: names, shapes and numbers, in both directions, and their
meaning.

Facts are from checkpoints' headers and from transformers 5.24 (kimi_linear, glm5_next, bailing_hybrid).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kda.nn import KimiDeltaAttention, from_published, to_published
from layer_model import model, relative, tokens

BOUNDED: dict[str, Any] = {"lower_bound": -5.0, "safe_gate": True}
FULL_GATE, FULL_DECAY = {"use_full_rank_gate": True}, {"use_full_rank_decay": True}
# model_type: keywords of the layer, hidden_size, heads
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "kimi_linear": ({"gate_bias": False}, 2304, 32),
    "kimi_k3": ({**FULL_GATE, **BOUNDED}, 7168, 96),
    "glm5_next": ({"gate_bias": False, **BOUNDED}, 4096, 64),
    "bailing_hybrid": ({**FULL_GATE, **FULL_DECAY, **BOUNDED, "norm_eps": 1e-6}, 2560, 32),
}
IN_TRANSFORMERS = [name for name in MODELS if name != "kimi_k3"]
models = pytest.mark.parametrize("name", MODELS)


def published_shapes(name: str, hidden: int, H: int, D: int) -> dict[str, tuple[int, ...]]:
    P = H * D
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (P, hidden) for x in "qkv"}
    shapes |= {f"{x}_conv1d.weight": (P, 1, 4) for x in "qkv"}
    A_log = {"kimi_linear": (1, 1, H, 1), "kimi_k3": (128,)}.get(name, (H,))
    shapes |= {"A_log": A_log, "dt_bias": (P,), "b_proj.weight": (H, hidden)}
    shapes |= {"o_norm.weight": (D,), "o_proj.weight": (hidden, P)}
    full = {"kimi_k3": "g", "bailing_hybrid": "fg"}.get(name, "")
    for x in "fg":
        low_rank = {f"{x}_a_proj.weight": (D, hidden), f"{x}_b_proj.weight": (P, D)}
        shapes |= {f"{x}_proj.weight": (P, hidden)} if x in full else low_rank
    return shapes


def packed(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in the modules of transformers."""
    rest = {name: x for name, x in published.items() if "conv1d" not in name}
    inside = ("f_proj.", "f_a_proj.", "f_b_proj.", "A_log", "dt_bias")
    renamed = {f"forget_gate.{name}" if name.startswith(inside) else name: x for name, x in rest.items()}
    return {**renamed, "conv1d.weight": torch.cat([published[f"{x}_conv1d.weight"] for x in "qkv"])}


def small(name: str, H: int = 3, D: int = 16, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random numbers: matrices and convolutions in ``dtype``, and what stays float32 in checkpoints in float32."""
    published = {}
    for i, (key, shape) in enumerate(published_shapes(name, 48, H, D).items()):
        x = 0.3 * tokens(*shape, seed=i)
        published[key] = x if key in ("A_log", "dt_bias") else (x + ("norm" in key)).to(dtype)
    if name == "kimi_k3":
        published["A_log"][H:] = 0
    return published


def small_layer(name: str, **more: Any) -> KimiDeltaAttention:
    return KimiDeltaAttention(hidden_size=48, num_heads=3, head_dim=16, **{**MODELS[name][0], **more})


def by_hand(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters for the float64 model, under FLA's names."""
    names = {"f_a_proj": "f_proj.0", "f_b_proj": "f_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"}
    own = {
        names.get(key.split(".")[0], key.split(".")[0]) + key[len(key.split(".")[0]) :]: x
        for key, x in published.items()
    }
    return {key: x.double() for key, x in (own | {"A_log": own["A_log"].reshape(-1)[:3]}).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@models
def test_shapes_of_the_models(name):
    config, hidden, H = MODELS[name]
    shapes = published_shapes(name, hidden, H, 128)
    published = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    with torch.device("meta"):
        layer = KimiDeltaAttention(hidden_size=hidden, num_heads=H, head_dim=128, **config)
    own = from_published(published)
    assert {k: x.shape for k, x in own.items()} == {k: x.shape for k, x in layer.state_dict().items()}
    assert {k: tuple(x.shape) for k, x in to_published(layer.state_dict(), name).items()} == shapes
    layer.load_state_dict(published, assign=True)


@models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_are_exact(name, dtype):
    published = small(name, dtype=dtype)
    own = from_published(published)
    assert equal(to_published(own, name), published)
    layer = small_layer(name, dtype=dtype)
    layer.load_state_dict(published)
    assert equal(layer.state_dict(), dict(own))
    assert equal(to_published(layer.state_dict(), name), published)
    assert equal(from_published(own), own)
    checkpoint = {**to_published(own, name, "model.layers.3."), "model.layers.30.q_proj.weight": own["dt_bias"]}
    assert equal(from_published(checkpoint, "model.layers.3."), own)
    if name in IN_TRANSFORMERS:
        theirs = packed(published)
        assert equal(from_published(theirs), own)
        assert equal(to_published(own, name, in_transformers=True), theirs)
        layer = small_layer(name, dtype=dtype)
        layer.load_state_dict(theirs)
        assert equal(layer.state_dict(), own)


@models
def test_a_published_layer_means_the_float64_model(name):
    published, x = small(name), tokens(1, 70, 48)
    layer = small_layer(name)
    block = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(48), "self_attn": layer})
    inside = {f"self_attn.{key}": w for key, w in published.items()}
    block.load_state_dict(inside | {f"norm.{key}": w for key, w in block["norm"].state_dict().items()})
    assert relative(model(by_hand(published), x[0].double(), layer), layer(x)[0][0]) < 3e-6


def test_a_layer_with_a_gate_bias_starts_it_from_zero():
    published, x = small("kimi_linear"), tokens(1, 20, 48)
    layer = small_layer("kimi_linear", gate_bias=None)
    layer.g_proj[1].bias.data.fill_(7)
    layer.load_state_dict(published)
    assert not layer.g_proj[1].bias.any()
    assert relative(model(by_hand(published), x[0].double(), layer), layer(x)[0][0]) < 3e-6
    assert equal(to_published(layer.state_dict(), "kimi_linear"), published)
    layer.g_proj[1].bias.data[3] = 1
    with pytest.raises(ValueError, match=r"g_proj\.1\.bias: expected zeros \(or gate_bias=False\) for kimi_linear"):
        to_published(layer.state_dict(), "kimi_linear")
    with torch.device("meta"):
        empty = small_layer("kimi_linear", gate_bias=None)
    empty.load_state_dict(published, assign=True)
    empty.pack_weights()
    assert torch.equal(empty(x)[0], small_loaded(published)(x)[0])
    biased = {**published, "g_b_proj.bias": tokens(48)}  # not published, but a plausible variant
    layer.load_state_dict(biased)
    assert torch.equal(layer.g_proj[1].bias, biased["g_b_proj.bias"])


def small_loaded(published: dict[str, Tensor]) -> KimiDeltaAttention:
    layer = small_layer("kimi_linear")
    layer.load_state_dict(published)
    return layer


def test_a_state_dict_of_fla_is_understood():
    layer = KimiDeltaAttention(hidden_size=48, num_heads=2, num_v_heads=4, head_dim=8, expand_v=2, conv_bias=True)
    assert equal(from_published(layer.state_dict()), dict(layer.state_dict()))
    layer = KimiDeltaAttention(hidden_size=48, num_heads=2, head_dim=8, use_short_conv=False)
    assert equal(from_published(layer.state_dict()), dict(layer.state_dict()))


def without(published: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {key: x for key, x in published.items() if key not in names}


def test_names_that_are_not_understood():
    published = small("kimi_linear")
    with pytest.raises(
        ValueError, match=r"got missing: A_log, g_proj\.1\.weight \(g_b_proj\.weight\); unknown: c\.d, e$"
    ):
        from_published({**without(published, "g_b_proj.weight", "A_log"), "c.d": published["dt_bias"], "e": tokens(1)})
    with pytest.raises(ValueError, match=r"that begin with 'layers\.1\.', got missing: A_log, dt_bias, o_norm\.weight"):
        from_published(published, "layers.1.")
    with pytest.raises(ValueError, match=r"got missing: k_conv1d\.weight$"):
        from_published(without(published, "k_conv1d.weight"))
    with pytest.raises(ValueError, match=r"unknown: f_proj\.0\.weight, f_proj\.1\.weight$"):
        from_published({**published, "f_proj.weight": tokens(48, 48)})
    with pytest.raises(ValueError, match=r"unknown: f_proj\.1\.bias$"):
        from_published({**published, "f_b_proj.bias": tokens(48)})
    with pytest.raises(ValueError, match=r"one tensor for f_proj\.0\.weight, got f_proj\.0\.weight and another name"):
        from_published({**published, "f_proj.0.weight": tokens(16, 48)})
    with pytest.raises(ValueError, match=r"missing: q_proj\.weight; unknown: conv1d\.weight"):
        from_published(without(packed(published), "q_proj.weight"))
    with pytest.raises(ValueError, match=r"conv1d\.weight: expected 144 channels of q, k and v, got 143"):
        from_published({**packed(published), "conv1d.weight": tokens(143, 1, 4)})
    with pytest.raises(RuntimeError, match=r"Missing key.*f_proj\.0\.weight"):
        small_layer("kimi_linear").load_state_dict(without(published, "f_a_proj.weight"))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*g_proj\.0\.weight"):
        small_layer("kimi_k3").load_state_dict(published)


def test_numbers_behind_the_heads_are_refused():
    published = small("kimi_k3")
    published["A_log"][100] = 1
    for load in (from_published, small_layer("kimi_k3").load_state_dict):
        with pytest.raises(
            ValueError, match=r"A_log: expected 3 numbers, as b_proj\.weight has rows, and zeros, got 128"
        ):
            load(published)


def test_layers_that_a_checkpoint_has_no_place_for():
    own = from_published(small("kimi_linear"))
    with pytest.raises(ValueError, match=r"model_type: expected one of kimi_linear, kimi_k3, .*, got 'kimi'"):
        to_published(own, "kimi")
    with pytest.raises(ValueError, match="g_proj: expected that of a layer with use_full_rank_gate=True for kimi_k3"):
        to_published(own, "kimi_k3")
    with pytest.raises(ValueError, match="in_transformers: expected False for kimi_k3"):
        to_published(from_published(small("kimi_k3")), "kimi_k3", in_transformers=True)
    with pytest.raises(ValueError, match="convolutions without biases"):
        to_published(small_layer("kimi_linear", conv_bias=True).state_dict(), "kimi_linear")
    with pytest.raises(ValueError, match="missing: A_log"):
        to_published(without(own, "A_log"), "kimi_linear")


def theirs(name: str) -> torch.nn.Module:
    """The layer of transformers, at a small size."""
    if name == "kimi_linear":
        from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig as Config
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention as Layer
    elif name == "glm5_next":
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig as Config
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention as Layer
    else:
        from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig as Config
        from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention as Layer
    config = Config(hidden_size=48, num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    config.linear_num_heads, config.linear_head_dim = 3, 16
    config.rms_norm_eps = MODELS[name][0].get("norm_eps", 1e-5)
    return Layer(config, 0).eval()


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_layers_of_transformers(name):
    pytest.importorskip("transformers.models.bailing_hybrid")
    other, layer, x = theirs(name), small_layer(name).eval(), tokens(2, 70, 48)
    other.load_state_dict(packed(small(name)))
    layer.load_state_dict(other.state_dict())
    assert equal(to_published(layer.state_dict(), name, in_transformers=True), dict(other.state_dict()))
    with torch.no_grad():
        assert relative(other(x), layer(x)[0]) < 3e-6

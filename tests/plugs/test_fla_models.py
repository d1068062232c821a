"""FLA's KDA layer and model, and the KDA models of transformers, which call FLA: with our backend they compute what
they compute without it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fla_calls import both, compare, fla
from torch import Tensor, nn

import kda.fla
from tiny_models import EXPERTS, ONLY_LINEAR, made

CONV = ("causal_conv1d_fwd", "causal_conv1d_bwd")
NORM = ("layer_norm_gated_fwd", "layer_norm_gated_bwd")
DECODE = "fused_recurrent_kda_fwd"
SIZES = {"hidden_size": 32, "head_dim": 16, "num_heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "bounded": {"safe_gate": False, "lower_bound": -5.0},
    "groups_2sigmoid": {"num_v_heads": 4, "allow_neg_eigval": True},
    "wide_values": {"expand_v": 2},
    "no_convolution": {"use_short_conv": False},
}


def gradients(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    found = {name: x.grad for name, x in module.named_parameters()}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return {f"d {name}": x for name, x in found.items() if x is not None}


@pytest.mark.parametrize("name", OPTIONS)
def test_layer_trains(name: str) -> None:
    torch.manual_seed(0)
    layer = fla("layers.KimiDeltaAttention")(**SIZES, **OPTIONS[name], layer_idx=0)
    x = torch.randn(2, 40, 32)

    def step() -> dict[str, Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        o = layer(leaf)[0]
        o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))
        return {"o": o.detach(), **copy.deepcopy(gradients(layer, leaf))}

    takes = ("chunk_kda", *NORM, *(CONV if layer.use_short_conv else ()))
    ours, theirs = both(step, *takes)
    assert len(ours) > 10
    compare(ours, theirs, 5e-5)


def test_layer_with_padding() -> None:
    """FLA packs the sequences and calls with cu_seqlens."""
    torch.manual_seed(0)
    layer, mask = fla("layers.KimiDeltaAttention")(**SIZES, layer_idx=0), torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    x = torch.randn(2, 40, 32)
    ours, theirs = both(lambda: {"o": layer(x, attention_mask=mask)[0].detach()}, "chunk_kda", CONV[0], NORM[0])
    compare(ours, theirs, 5e-5)


def kda_model() -> Any:
    config = importlib.import_module("fla.models").KDAConfig(
        **SIZES, num_hidden_layers=2, vocab_size=100, intermediate_size=48, fuse_norm=False, fuse_swiglu=False,
        fuse_cross_entropy=False, fuse_linear_cross_entropy=False, use_cache=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = importlib.import_module("fla.models").KDAForCausalLM(config).eval()
    with torch.no_grad():  # its initial values make outputs that hardly depend on the tokens
        for name, x in model.named_parameters():
            if name.endswith("weight") and "norm" not in name:
                x.mul_(5)
    return model


IDS = torch.randint(3, 100, (2, 70), generator=torch.Generator().manual_seed(0))


def test_model_of_fla_generates() -> None:
    """A prompt in chunks, then tokens from the states and the inputs of the convolutions that it left."""
    model = kda_model()

    def generate() -> dict[str, Tensor]:
        more: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        found = model.generate(IDS, max_new_tokens=5, attention_mask=torch.ones_like(IDS), **more)
        return {"ids": found.sequences, "logits": torch.stack(found.logits)}

    ours, theirs = both(generate, "chunk_kda", "causal_conv1d_fwd", "causal_conv1d_update", DECODE)
    assert torch.equal(ours["ids"], theirs["ids"])
    compare(ours, theirs, 5e-5)


# ---- transformers ----

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", EXPERTS),
    "glm5_next": ("Glm5NextTextModel", "Glm5NextTextConfig", ONLY_LINEAR),
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridConfig", ONLY_LINEAR),
}  # fmt: skip


def model_of_transformers(kind: str) -> tuple[Any, Any]:
    """The module of the model's code, and a small model with random weights."""
    Model, Config, more = MODELS[kind]
    code = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    configuration = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    return code, made(getattr(code, Model), getattr(configuration, Config), **more)


def in_torch(code: Any, call: Callable[[], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """``call`` with transformers' own formulation in torch, which it has where FLA is not installed."""
    names = [n for n in vars(code) if n.endswith("delta_attention") and hasattr(getattr(code, n), "__wrapped__")]
    assert len(names) == 2, names
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(code, name, getattr(code, name).__wrapped__)
        kda.fla.report(reset=True)
        result = call()
        assert not kda.fla.report(reset=True).taken
        return result


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_trains(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits (or hidden states) and all gradients."""
    code, model = model_of_transformers(kind)

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        o = model(IDS, use_cache=False)[0]
        o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))
        return {"o": o.detach(), **copy.deepcopy(gradients(model))}

    kda.fla.report(reset=True)
    ours = step()
    layers = model.config.layer_types.count("linear_attention")
    assert kda.fla.report(reset=True).taken["chunk_kda"] == {"cpu float32": layers}
    assert len(ours) > 20
    compare(ours, in_torch(code, step, monkeypatch), 5e-5)


def test_transformers_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these small models only this one has full attention, too, without which transformers does not generate."""
    code, model = model_of_transformers("kimi_linear")

    def generate() -> dict[str, Tensor]:
        more: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        found = model.generate(IDS[:, :30], max_new_tokens=8, attention_mask=torch.ones_like(IDS[:, :30]), **more)
        return {"ids": found.sequences, "logits": torch.stack(found.logits)}

    kda.fla.report(reset=True)
    ours = generate()
    assert {"chunk_kda", DECODE} <= kda.fla.report(reset=True).taken.keys()
    theirs = in_torch(code, generate, monkeypatch)
    assert torch.equal(ours["ids"], theirs["ids"])
    compare(ours, theirs, 5e-5)

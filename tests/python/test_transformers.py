"""The layer inside models of transformers, where kda.transformers has put it: what they compute is what they
computed before. Skipped where transformers is not installed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda.nn import KimiDeltaAttention
from kda.transformers import replace_layers
from layer_model import relative
from tiny_models import EXPERTS, ONLY_LINEAR, made

pytest.importorskip("transformers.models.bailing_hybrid")

IDS = torch.randint(3, 300, (2, 90), generator=torch.Generator().manual_seed(0))


def kimi_linear() -> Any:
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

    return made(KimiLinearForCausalLM, KimiLinearConfig, **EXPERTS)


def glm5_next() -> Any:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    return made(Glm5NextTextModel, Glm5NextTextConfig, **ONLY_LINEAR)


def bailing_hybrid() -> Any:
    from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForCausalLM

    return made(BailingHybridForCausalLM, BailingHybridConfig, **ONLY_LINEAR)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The model as it is, and with our layers."""
    theirs = kimi_linear()
    ours = copy.deepcopy(theirs)
    assert replace_layers(ours) == 2
    return theirs, ours


def test_which_layers_are_replaced(models: tuple[Any, Any]) -> None:
    kinds = [isinstance(block.self_attn, KimiDeltaAttention) for block in models[1].model.layers]
    assert kinds == [True, False, True]


def test_logits(models: tuple[Any, Any]) -> None:
    with torch.no_grad():
        theirs, ours = (model(IDS).logits for model in models)
    assert theirs.std(1).min() > 0.1  # they depend on the tokens
    assert relative(theirs, ours) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_batch(models: tuple[Any, Any], side: str) -> None:
    mask = torch.ones_like(IDS)
    mask[1, slice(0, 37) if side == "left" else slice(60, None)] = 0
    with torch.no_grad():
        theirs, ours = (model(IDS, attention_mask=mask).logits[mask.bool()] for model in models)
    assert relative(theirs, ours) < 1e-5


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
@pytest.mark.parametrize("padded", [False, True])
def test_generation(models: tuple[Any, Any], options: dict[str, int], padded: bool) -> None:
    mask = torch.ones_like(IDS[:, :40])
    mask[1, : 11 * padded] = 0
    more = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "output_logits": True}
    more |= {"return_dict_in_generate": True, **options}
    theirs, ours = (model.generate(IDS[:, :40], **more) for model in models)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert theirs.sequences[:, 40:].unique().numel() > 5
    assert relative(torch.stack(theirs.logits), torch.stack(ours.logits)) < 1e-5


def step(model: nn.Module) -> dict[str, Tensor]:
    """The loss, the parameters after a step of training, and their gradients."""
    model = copy.deepcopy(model).train()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results = {"loss": loss.detach()} | {n: x.clone() for n, x in model.state_dict().items()}
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.zeros_like(x) if x.grad is None else x.grad)
    return results | {f"d {n}": x for n, x in model.state_dict().items()}


def test_a_training_step(models: tuple[Any, Any]) -> None:
    theirs, ours = (step(model) for model in models)
    assert theirs.keys() == ours.keys()
    assert all(theirs[n].any() for n in theirs if "self_attn" in n)
    errors = {n: relative(x, ours[n]) for n, x in theirs.items()}
    assert {n: e for n, e in errors.items() if not e < 1e-5} == {}


@pytest.mark.parametrize("make", [kimi_linear, glm5_next, bailing_hybrid])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_model(make: Callable[[], Any], dtype: torch.dtype) -> None:
    """Outputs, the state dict bit for bit, and whether weights are trained."""
    theirs = make().to(dtype)
    for name, x in theirs.named_parameters():
        x.requires_grad_("k_proj" in name)
    before, trained = copy.deepcopy(theirs.state_dict()), sum(x.requires_grad for x in theirs.parameters())
    with torch.no_grad():
        expected = theirs(IDS, use_cache=False)[0]
        ours = theirs
        assert replace_layers(ours) == sum(kind == "linear_attention" for kind in ours.config.layer_types)
        assert relative(expected, ours(IDS, use_cache=False)[0]) < (1e-5 if dtype == torch.float32 else 3e-2)
    after = ours.state_dict()
    assert before.keys() == after.keys()
    assert all(before[n].dtype == x.dtype and torch.equal(before[n], x) for n, x in after.items())
    assert sum(x.requires_grad for x in ours.parameters()) == trained > 0


def test_files(models: tuple[Any, Any], tmp_path: Path) -> None:
    """What the model with our layers saves is what transformers would have saved, and it is read again."""
    from safetensors.torch import load_file

    for name, model in zip(("theirs", "ours"), models, strict=True):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(x, files[1][n]) for n, x in files[0].items())
    again = type(models[0]).from_pretrained(tmp_path / "ours").eval()
    torch.save(models[1], tmp_path / "model.pt")
    pickled = torch.load(tmp_path / "model.pt", weights_only=False)
    assert pickled.state_dict().keys() == models[0].state_dict().keys()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, models[0](IDS).logits)
        assert torch.equal(pickled(IDS).logits, models[1](IDS).logits)


def test_own_names() -> None:
    """As FSDP2's state dicts need them."""
    model = kimi_linear()
    replace_layers(model, keep_names=False)
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}


def test_loading_after_replacing(models: tuple[Any, Any]) -> None:
    theirs, other = models[0].state_dict(), kimi_linear()
    replace_layers(other)
    with torch.no_grad():
        for x in other.parameters():
            x.zero_()
    other.load_state_dict(theirs)
    assert all(torch.equal(x, theirs[n]) for n, x in other.state_dict().items())


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^model: expected one with layers of KimiLinearDeltaAttention, .*got Linear"):
        replace_layers(nn.Linear(2, 2))
    model = kimi_linear()
    model.model.layers[2].self_attn.activation = "gelu"
    with pytest.raises(ValueError, match=r"^model: expected silu as activation of its KDA layers, got gelu"):
        replace_layers(model)
    assert not isinstance(model.model.layers[0].self_attn, KimiDeltaAttention)
    model.model.layers[2].self_attn.activation = "silu"
    model.model.layers[2].self_attn._hf_hook = None
    with pytest.raises(ValueError, match=r"^model: expected one without hooks of accelerate \(device_map\), got some"):
        replace_layers(model)

"""What others put into a model whose layers kda.transformers has replaced: adapters, parametrizations, pruning,
quantised weights, wrappers. Its state dict renames what is the layer's own, passes the rest on, and loads again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, prune

from kda.transformers import LayerInTransformers, replace_layers
from layer_model import relative
from test_transformers import IDS, kimi_linear


def ours(**more: Any) -> Any:
    model = kimi_linear()
    replace_layers(model, **more)
    return model


def layers(model: nn.Module) -> list[LayerInTransformers]:
    return [m for m in model.modules() if isinstance(m, LayerInTransformers)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep_names", [True, False])
@pytest.mark.parametrize("in_full", [None, ["b_proj", "f_proj.1"]])
def test_adapters_of_peft(keep_names: bool, in_full: list[str] | None, tmp_path: Path) -> None:
    """They train, are saved and loaded, and merged. ``in_full``: modules trained beside them."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = ours(keep_names=keep_names)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "f_proj.0", "o_proj"], init_lora_weights=False, modules_to_save=in_full
    )
    model = get_peft_model(copy.deepcopy(base), config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0 if p.grad is None else 0.01 * p.grad
    expected = logits(model)
    assert relative(logits(base), expected) > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)
    state = model.state_dict()
    other = get_peft_model(copy.deepcopy(base), config)
    other.load_state_dict(state)
    assert torch.equal(logits(other), expected)
    merged = model.merge_and_unload()
    assert relative(expected, logits(merged)) < 1e-5
    if keep_names:
        merged.save_pretrained(tmp_path / "merged")
        assert relative(expected, logits(type(base).from_pretrained(tmp_path / "merged"))) < 1e-5


class EightBits(nn.Module):
    """A quantised map: its weight is a buffer, and it has a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight.to(x.dtype) * self.scales).t()


def weight_norm(layer: Any) -> None:
    for module in (layer.q_proj, layer.f_proj[0], layer.k_conv1d, layer.b_proj):
        parametrizations.weight_norm(module)


def pruned(layer: Any) -> None:
    for module in (layer.v_proj, layer.g_proj[1], layer.q_conv1d, layer.v_conv1d):
        prune.l1_unstructured(module, "weight", 0.5)


def quantised(layer: Any) -> None:
    layer.q_proj, layer.f_proj[1] = EightBits(layer.q_proj), EightBits(layer.f_proj[1])


def wrapped(layer: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layer.q_proj, layer.f_proj[0] = map(checkpoint_wrapper, (layer.q_proj, layer.f_proj[0]))


def compiled(layer: Any) -> None:
    layer.q_proj = torch.compile(layer.q_proj, backend="eager")


def buffered(layer: Any) -> None:
    layer.register_buffer("seen", torch.ones(3))
    layer.o_norm.register_buffer("A_log", torch.ones(5))


ADDED: dict[Callable[[Any], None], set[str]] = {
    weight_norm: {"q_conv1d.weight", *(f"{x}.parametrizations.weight.original1" for x in ("q_proj", "f_proj.0"))},
    pruned: {"v_proj.weight_orig", "g_proj.1.weight_mask", "k_conv1d.weight", "forget_gate.f_b_proj.weight"},
    quantised: {"q_proj.qweight", "f_proj.1.scales", "conv1d.weight", "forget_gate.f_a_proj.weight"},
    wrapped: {"q_proj.weight", "forget_gate.f_a_proj.weight", "conv1d.weight"},
    compiled: {"q_proj._orig_mod.weight", "conv1d.weight"},
    buffered: {"seen", "o_norm.A_log", "conv1d.weight", "forget_gate.A_log"},
}  # fmt: skip


@pytest.mark.parametrize("change", ADDED, ids=lambda f: f.__name__)
def test_what_others_add(change: Callable[[Any], None]) -> None:
    model, other = ours(), ours()
    for one in (model, other):
        for layer in layers(one):
            change(layer)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    state = model.state_dict()
    names = {name.removeprefix("model.layers.0.self_attn.") for name in state}
    assert names >= {"forget_gate.dt_bias", *ADDED[change]}
    assert state["model.layers.0.self_attn.forget_gate.A_log"].shape == (1, 1, 2, 1)
    other.load_state_dict(state)
    assert all(torch.equal(x, state[n]) for n, x in other.state_dict().items())
    if change is not quantised:
        assert torch.equal(logits(other), logits(model))


def test_wrappers_around_layers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, names = ours(), set(kimi_linear().state_dict())
    for block in model.model.layers:
        block.self_attn = checkpoint_wrapper(block.self_attn)
    assert set(model.state_dict()) == names
    model.load_state_dict(kimi_linear().state_dict())


def test_fsdp1_has_the_names_of_parameters(tmp_path: Path) -> None:
    """It looks for its parameters in the state dict. Either names load."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = ours()
        names = {n for n, _ in model.named_parameters()}
        sharded = FSDP(
            model, auto_wrap_policy=ModuleWrapPolicy({LayerInTransformers}), device_id=torch.device("cpu"),
            use_orig_params=True,
        )  # fmt: skip
        state = {n: x.clone() for n, x in sharded.state_dict().items()}
    finally:
        dist.destroy_process_group()
    assert names <= set(state)
    theirs = kimi_linear().state_dict()
    again = ours()
    again.load_state_dict(state)
    assert all(torch.equal(x, theirs[n]) for n, x in again.state_dict().items())

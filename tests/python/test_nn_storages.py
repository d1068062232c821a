"""Every parameter of the layer, and every gradient, has a storage of its own, so whatever tells tensors apart by their
storages keeps all of them: files of trainers and hubs, copies, other processes."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda.nn import KimiDeltaAttention, from_published
from layer_model import make, tokens
from test_nn_packed import is_packed
from test_nn_published import packed, small

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"conv_bias": True, "num_v_heads": 4, "expand_v": 2},
    "full_rank": {"use_full_rank_gate": True, "use_full_rank_decay": True},
    "recurrent": {"mode": "fused_recurrent", "conv_bias": True},
    "odd": {"num_heads": 3, "head_dim": 20, "expand_v": 0.6},
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def assert_own(tensors: Iterable[Tensor | None]) -> None:
    """No storage holds another tensor, or more than its own."""
    found = [x for x in tensors if x is not None]
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)


def saved(what: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


@configs
def test_parameters(config: dict[str, Any]) -> None:
    layer = make(**config)
    empty = KimiDeltaAttention(hidden_size=48, **{"num_heads": 2, "head_dim": 16, **config}, device="meta")
    for one in (
        layer, copy.deepcopy(layer), torch.load(saved(layer), weights_only=False), make(**config).to(torch.float64),
        empty.to_empty(device="cpu"), make(**config, fuse_projections=False),
    ):  # fmt: skip
        assert_own(one.parameters())
        assert is_packed(one) == one.fuse_projections
        one.load_state_dict(layer.state_dict())
        assert is_packed(one) == one.fuse_projections
    one.fuse_projections = True
    one.pack_weights()
    assert_own(one.parameters())
    assert is_packed(one)
    assert all(torch.equal(x, one.state_dict()[n]) for n, x in layer.state_dict().items())
    one.fuse_projections = False
    one.pack_weights()
    assert not is_packed(one)
    assert not hasattr(one.q_proj.weight.untyped_storage(), "kda_whole")
    assert_own(one.parameters())


@configs
@pytest.mark.parametrize("how", ["one function", "cache", "hooked"])
def test_gradients(config: dict[str, Any], how: str) -> None:
    layer = make(**config)
    if how == "hooked":
        layer.q_proj.register_forward_hook(lambda *_: None)
    layer(tokens(1, 20, 48), cache=layer.new_cache(1) if how == "cache" else None)[0].square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert_own(p.grad for p in layer.parameters())


def test_gradients_of_a_compiled_layer() -> None:
    """Those of convolutions lie where the compiler puts them."""
    layer = make(conv_bias=True)
    torch.compile(layer, backend="aot_eager")(tokens(1, 20, 48))[0].square().sum().backward()
    torch.compiler.reset()  # compiled code is kept for the class, and only so much of it
    assert_own(p.grad for name, p in layer.named_parameters() if "conv1d" not in name)


def test_a_gradient_that_is_kept_keeps_no_others() -> None:
    layer = make()
    layer(tokens(1, 20, 48))[0].sum().backward()
    others = [weakref.ref(p.grad.untyped_storage()) for p in layer.parameters() if p.grad is not None]
    kept = layer.b_proj.weight.grad
    layer.zero_grad()
    gc.collect()
    assert kept is not None and sum(other() is not None for other in others) == 1


def test_parts_saved_alone_are_small() -> None:
    layer = make(hidden_size=256)
    assert len(saved(layer.b_proj.weight).getvalue()) < layer.b_proj.weight.nbytes + 2000
    assert len(saved(layer.k_proj).getvalue()) < layer.k_proj.weight.nbytes + 4000
    assert torch.equal(torch.load(saved(layer.b_proj.weight)), layer.b_proj.weight)


def test_shared_memory_stays_shared() -> None:
    """Packing would take the weights out of it. What they have left is freed."""
    layer = make()
    left = weakref.ref(layer.q_proj.weight.untyped_storage().kda_whole)  # type: ignore[attr-defined]
    layer.share_memory()
    gc.collect()
    assert all(p.is_shared() for p in layer.parameters())
    assert left() is None


def test_published_layers_are_split_into_own_storages() -> None:
    own = from_published(packed(small("kimi_linear")))
    assert_own(own.values())
    assert_own(from_published(small("kimi_k3")).values())
    layer = make(num_heads=3, gate_bias=False)
    layer.load_state_dict(packed(small("kimi_linear")), assign=True)
    assert_own(layer.parameters())


# ---- the tools' own functions ----


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), make(conv_bias=True), make(fuse_projections=False))


def with_accelerate(net: nn.Module, folder: Path) -> dict[str, Tensor]:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    Accelerator(cpu=True).save_model(net, folder)
    return load_file(folder / "model.safetensors")


def with_the_hub(net: nn.Module, folder: Path) -> dict[str, Tensor]:
    from huggingface_hub import save_torch_model
    from safetensors.torch import load_file

    save_torch_model(net, str(folder))
    return load_file(folder / "model.safetensors")


def with_safetensors(net: nn.Module, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file, save_model

    save_model(net, str(folder / "net"))
    return load_file(folder / "net")


@pytest.mark.parametrize("tool", [with_accelerate, with_the_hub, with_safetensors])
def test_files_hold_every_weight(tool: Callable[[nn.Module, Path], dict[str, Tensor]], tmp_path: Path) -> None:
    net = model()
    held = tool(net, tmp_path)
    assert held.keys() == net.state_dict().keys()
    assert all(torch.equal(x, held[n]) for n, x in net.state_dict().items())


def test_states_of_accelerate_come_back(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), model()
    _, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.1))
    want = {n: x.clone() for n, x in net.state_dict().items()}
    accelerator.save_state(tmp_path)
    accelerator.backward(net[1](net[0](tokens(1, 9, 48)))[0].sum())
    optimizer.step()
    assert not torch.equal(net[1].k_proj.weight, want["1.k_proj.weight"])
    accelerator.load_state(tmp_path)
    assert all(torch.equal(x, want[n]) for n, x in net.state_dict().items())
    assert is_packed(net[1])


def test_mixin_of_the_hub(tmp_path: Path) -> None:
    from huggingface_hub import PyTorchModelHubMixin

    class Net(nn.Module, PyTorchModelHubMixin):
        def __init__(self) -> None:
            super().__init__()
            self.attn = make()

    net = Net()
    with torch.no_grad():
        net.attn.v_proj.weight.add_(1)
    net.save_pretrained(tmp_path)
    again = Net.from_pretrained(tmp_path)
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in net.state_dict().items())

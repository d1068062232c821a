"""One product for all projections of the layer: it has the numbers of the single ones, and no weight goes stale."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda.layer import parts as _parts
from kda.layer import products as _projections
from kda.nn import KimiDeltaAttention
from layer_model import float64_parameters, make, model, relative, tokens

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "b_proj")


def is_packed(layer: KimiDeltaAttention) -> bool:
    maps = _parts.input_maps(layer._modules)
    return maps is not None and _projections.whole_of([m.weight for m in maps]) is not None


def products(layer: KimiDeltaAttention, x: Tensor) -> list[str]:
    """The shapes of the matrix products with x."""
    found: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op in (torch.ops.kda.joint_linear.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                found.append(str(op))
            return op(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        layer(x)
    return found


def assert_as_its_parameters_say(layer: KimiDeltaAttention) -> None:
    x = tokens(1, 20, 48).to(layer.q_proj.weight.dtype)
    expected = model(float64_parameters(layer), x[0].double(), layer)
    with torch.no_grad():
        assert relative(expected, layer(x)[0][0]) < 3e-6
    assert relative(expected, layer(x)[0][0]) < 3e-6


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_v_heads": 4, "expand_v": 2},
        {"use_full_rank_gate": True, "use_full_rank_decay": True},
        {"gate_bias": False},
    ],
    ids=str,
)
def test_projections_lie_side_by_side(config: dict[str, Any]) -> None:
    layer, single = make(**config), make(**config, fuse_projections=False)
    assert is_packed(layer) and not is_packed(single)
    assert "kda.joint_linear.default" in products(layer, tokens(1, 20, 48))
    assert "kda.joint_linear.default" not in products(single, tokens(1, 20, 48))
    single.load_state_dict(layer.state_dict())
    x = tokens(2, 30, 48)
    for one in (layer, single):
        one(x)[0].square().sum().backward()
    for (name, p), q in zip(layer.named_parameters(), single.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.shape == q.shape and relative(q.grad.double(), p.grad) < 1e-5, name


def in_place(layer: KimiDeltaAttention) -> None:
    with torch.no_grad():
        for name in PROJECTIONS:
            getattr(layer, name).weight.mul_(-1.5)


def through_data(layer: KimiDeltaAttention) -> None:
    for name in PROJECTIONS:
        weight = getattr(layer, name).weight
        weight.data.copy_(weight.detach() * -1.5)


def other_memory(layer: KimiDeltaAttention) -> None:
    for name in PROJECTIONS:
        weight = getattr(layer, name).weight
        weight.data = weight.detach() * -1.5


def other_parameter(layer: KimiDeltaAttention) -> None:
    layer.k_proj.weight = nn.Parameter(layer.k_proj.weight.detach() * -1.5)


def loaded(layer: KimiDeltaAttention) -> None:
    layer.load_state_dict({n: x * 1.5 for n, x in layer.state_dict().items()})


def assigned(layer: KimiDeltaAttention) -> None:
    layer.load_state_dict({n: x * 1.5 for n, x in layer.state_dict().items()}, assign=True)


def optimised(layer: KimiDeltaAttention) -> None:
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(tokens(1, 20, 48))[0].square().sum().backward()
    optimiser.step()


class Scaled(nn.Module):
    """A map that is not nn.Linear, as quantised ones are not."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(inner.weight.detach() * -1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def replaced(layer: KimiDeltaAttention) -> None:
    layer.v_proj = Scaled(layer.v_proj)  # type: ignore[assignment]


CHANGES = [in_place, through_data, other_memory, other_parameter, loaded, assigned, optimised, replaced]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_weight_goes_stale(change: Callable[[KimiDeltaAttention], None], compiled: bool) -> None:
    layer = make()
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    x = tokens(1, 20, 48)
    with torch.no_grad():
        before = run(x)[0]
    change(layer)
    expected = model(float64_parameters(layer), x[0].double(), layer)
    assert relative(expected, before[0]) > 1e-3, "the change has no effect, so the test shows nothing"
    with torch.no_grad():
        assert relative(expected, run(x)[0][0]) < 3e-6
    assert relative(expected, run(x)[0][0]) < 3e-6


def test_hooks_of_a_projection_run() -> None:
    layer, seen = make(), []

    def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen.append(1)
        return output * 2

    handle = layer.k_proj.register_forward_hook(double)
    x = tokens(1, 20, 48)
    with torch.no_grad():
        hooked = layer(x)[0]
        handle.remove()
        layer.k_proj.weight.mul_(2)
        assert seen == [1]
        assert relative(layer(x)[0], hooked) < 1e-6


def test_a_forward_of_its_own_runs() -> None:
    layer, seen = make(), []
    single = layer.k_proj.forward

    def forward(x: Tensor) -> Tensor:
        seen.append(1)
        return single(x)

    layer.k_proj.forward = forward  # type: ignore[method-assign]
    assert_as_its_parameters_say(layer)
    assert seen == [1, 1]


def test_hooks_of_a_convolution_run() -> None:
    layer, seen = make(), []
    layer.q_conv1d.register_forward_hook(lambda *_: seen.append(1))
    assert_as_its_parameters_say(layer)
    assert seen == [1, 1]


def test_copies_and_moves_stay_packed_and_apart() -> None:
    layer = make()
    for other in (copy.deepcopy(layer), pickled(layer), make().to(torch.float64).to(torch.float32)):
        assert is_packed(other)
        before = layer.q_proj.weight.clone()
        with torch.no_grad():
            other.q_proj.weight.zero_()
        assert torch.equal(layer.q_proj.weight, before)
    with torch.device("meta"):
        empty = make()
    assert not is_packed(empty)
    empty.to_empty(device="cpu")
    assert is_packed(empty)
    empty.load_state_dict(layer.state_dict())
    assert is_packed(empty)
    assert_as_its_parameters_say(empty)
    assert torch.equal(empty(tokens(1, 9, 48))[0], layer(tokens(1, 9, 48))[0])


def pickled(layer: KimiDeltaAttention) -> KimiDeltaAttention:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    other: KimiDeltaAttention = torch.load(buffer, weights_only=False)
    return other


def test_state_dicts_can_be_saved() -> None:
    from safetensors.torch import load, save

    layer, buffer = make(), io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    for saved in (torch.load(buffer), load(save(layer.state_dict()))):
        assert saved.keys() == layer.state_dict().keys()
        assert all(torch.equal(x, saved[n]) for n, x in layer.state_dict().items())


def test_frozen_projections_get_no_gradient() -> None:
    layer = make()
    layer.k_proj.weight.requires_grad_(False)
    layer(tokens(1, 20, 48))[0].sum().backward()
    assert layer.k_proj.weight.grad is None
    assert layer.q_proj.weight.grad is not None and layer.b_proj.weight.grad is not None


def kept_bytes(layer: KimiDeltaAttention, x: Tensor) -> dict[int, int]:
    """What backward keeps: bytes by address, so that nothing counts twice. Parameters do not count."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()} | {x.untyped_storage().data_ptr()}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer.o_norm = nn.Identity()  # type: ignore[assignment]  # what the norm keeps is another matter
        layer.o_norm.forward = lambda o, gate, mesh=None: o + 0 * gate  # type: ignore[method-assign]
        layer.o_proj = nn.Identity()  # type: ignore[assignment]
        layer(x)
    return kept


def test_what_training_keeps() -> None:
    """The joint product, and a state every 512 tokens. One by one, the parts keep q, k, v and the decay as well."""
    x = tokens(1, 512, 48).requires_grad_()
    layer = make()
    columns = _projections.filled_up(sum(m.weight.shape[0] for m in _parts.input_maps(layer._modules) or []))
    kept = kept_bytes(layer, x)
    state = layer.num_v_heads * layer.head_k_dim * layer.head_v_dim * 4
    small = 4 * (layer.num_v_heads * (1 + layer.head_k_dim) + 5 * (2 * layer.key_dim + layer.value_dim))
    assert sum(kept.values()) <= 512 * columns * 4 + state + small
    single = kept_bytes(make(fuse_projections=False), x)
    assert sum(single.values()) > 512 * 4 * (columns - 64 + 2 * layer.key_dim + layer.value_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_training_as_one_function(dtype: torch.dtype) -> None:
    """Packed sequences, more value heads than heads, a bias of the convolution; x needs no gradient in one case."""
    config = {"num_v_heads": 4, "expand_v": 2, "conv_bias": True}
    layer, single = make(**config).to(dtype), make(**config, fuse_projections=False).to(dtype)
    single.load_state_dict(layer.state_dict())
    cu = torch.tensor([0, 1, 70, 70, 90])
    for needed in (True, False):
        grads = []
        for one in (layer, single):
            x = tokens(1, 90, 48).to(dtype).requires_grad_(needed)
            one.zero_grad()
            o = one(x, cu_seqlens=cu)[0]
            assert ("LayerFunction" in graph(o)) == (one is layer)
            o.square().sum().backward()
            grads.append([*(p.grad for p in one.parameters()), x.grad])
        limit = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or relative(b.double(), a) < limit


def graph(o: Tensor) -> str:
    """The names of the functions behind o."""
    names, left, seen = [], [o.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            left += [n for n, _ in node.next_functions]
    return " ".join(names)


def test_autocast_takes_the_single_maps() -> None:
    layer = make()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer(tokens(1, 20, 48))[0].dtype == torch.bfloat16
        assert "kda.joint_linear.default" not in products(layer, tokens(1, 20, 48))


def test_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for fused in (True, False):
        layer = make(fuse_projections=fused)
        with FlopCounterMode(display=False) as counter:
            layer(tokens(1, 20, 48).requires_grad_())[0].sum().backward()
        counts.append(counter.get_total_flops())
    again = 2 * 20 * 96 * 4 + 2 * 20 * 16 * 32  # one function computes the convolution and the decay twice
    assert counts[0] - again == counts[1] > 0

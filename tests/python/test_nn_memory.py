"""The layer moves the memory of its parameters only where something has just moved it, or where it is asked to. It
leaves memory that others rely on: flat buffers of optimizers, shared and pinned memory, mapped files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kda.nn import KimiDeltaAttention
from layer_model import float64_parameters, make, model, relative, tokens
from test_nn_packed import is_packed, pickled


def addresses(layer: nn.Module) -> list[int]:
    return [p.data_ptr() for p in layer.parameters()]


# ---- where parameters lie; each returns what shows that they are still there ----

Shown = Callable[[], list[Tensor]]


def in_a_flat_buffer(layer: KimiDeltaAttention, _: Path) -> Shown:
    """As ZeRO keeps them."""
    flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
    for p, part in zip(layer.parameters(), flat.split([p.numel() for p in layer.parameters()]), strict=True):
        p.data = part.view_as(p)
    return lambda: [part for part in flat.split([p.numel() for p in layer.parameters()])]


def by_vector_to_parameters(layer: KimiDeltaAttention, _: Path) -> Shown:
    vector = nn.utils.parameters_to_vector(layer.parameters()).detach()
    nn.utils.vector_to_parameters(vector, layer.parameters())
    return lambda: [part for part in vector.split([p.numel() for p in layer.parameters()])]


def in_shared_memory(layer: KimiDeltaAttention, _: Path) -> Shown:
    layer.share_memory()
    assert all(p.is_shared() for p in layer.parameters())
    held = [p.detach() for p in layer.parameters()]
    return lambda: held


def in_a_file(layer: KimiDeltaAttention, folder: Path) -> Shown:
    torch.save(layer.state_dict(), folder / "weights")
    layer.load_state_dict(torch.load(folder / "weights", mmap=True), assign=True)
    held = [p.detach() for p in layer.parameters()]
    return lambda: held


def in_a_file_that_is_written(layer: KimiDeltaAttention, folder: Path) -> Shown:
    for i, p in enumerate(layer.parameters()):
        mapped = torch.from_file(str(folder / str(i)), shared=True, size=p.numel())
        p.data = mapped.copy_(p.detach().flatten()).view_as(p)
    return lambda: [torch.from_file(str(folder / str(i)), False, p.numel()) for i, p in enumerate(layer.parameters())]


def in_a_file_of_numpy(layer: KimiDeltaAttention, folder: Path) -> Shown:
    arrays = []
    for i, p in enumerate(layer.parameters()):
        arrays.append(np.memmap(folder / str(i), np.float32, "w+", shape=tuple(p.shape)))
        arrays[-1][:] = p.detach().numpy()
        p.data = torch.from_numpy(arrays[-1])
    return lambda: [torch.from_numpy(np.array(a)) for a in arrays]


def in_a_file_of_safetensors(layer: KimiDeltaAttention, folder: Path) -> Shown:
    from safetensors.torch import load_file, save_file

    save_file(layer.state_dict(), folder / "weights")
    layer.load_state_dict(load_file(folder / "weights"), assign=True)
    held = [p.detach() for p in layer.parameters()]
    return lambda: held


def in_pinned_memory(layer: KimiDeltaAttention, _: Path) -> Shown:
    """Pinned memory needs a GPU. So this says of ordinary memory that it is pinned."""
    own = {p: p.detach().clone() for p in layer.parameters()}
    for p, x in own.items():
        p.data = x
    pinned = {x.data_ptr() for x in own.values()}
    patch.setattr(Tensor, "is_pinned", lambda x: x.data_ptr() in pinned)
    return lambda: list(own.values())


patch = pytest.MonkeyPatch()


@pytest.fixture(autouse=True)
def _undone() -> Any:
    yield
    patch.undo()


def in_own_memory(layer: KimiDeltaAttention, _: Path) -> Shown:
    """Nobody can tell that others rely on it. So it moves, but only if someone asks for that."""
    for p in layer.parameters():
        p.data = p.detach().clone()
    held = [p.detach() for p in layer.parameters()]
    return lambda: held


FOREIGN = [
    in_a_flat_buffer, by_vector_to_parameters, in_shared_memory, in_a_file, in_a_file_that_is_written,
    in_a_file_of_numpy, in_a_file_of_safetensors, in_pinned_memory,
]  # fmt: skip


# ---- what moves nothing ----


def copied_with_its_parameters(layer: KimiDeltaAttention) -> None:
    other = copy.deepcopy(layer, {id(p): p for p in layer.parameters()})
    assert other.q_proj.weight is layer.q_proj.weight


NOTHING: dict[str, Callable[[KimiDeltaAttention], Any]] = {
    "float": lambda layer: layer.float(),
    "to its dtype": lambda layer: layer.to(torch.float32),
    "to its device": lambda layer: layer.to("cpu"),
    "to both": lambda layer: layer.to("cpu", torch.float32),
    "to a tensor's": lambda layer: layer.to(torch.zeros(1)),
    "cpu": lambda layer: layer.cpu(),
    "type": lambda layer: layer.type(torch.float32),
    "inside a model": lambda layer: nn.Sequential(layer).float(),
    "by another function": lambda layer: layer._apply(lambda x: x),
    "one map": lambda layer: layer.q_proj.float(),
    "copy.copy": copy.copy,
    "deepcopy of the layer alone": copied_with_its_parameters,
    "deepcopy": copy.deepcopy,
    "pickled": pickled,
    "state dict": lambda layer: layer.load_state_dict(layer.state_dict()),
    "frozen": lambda layer: layer.requires_grad_(False),
}


@pytest.mark.parametrize("place", [*FOREIGN, in_own_memory], ids=lambda f: f.__name__)
def test_what_moves_nothing_leaves_memory_where_it_is(
    place: Callable[[KimiDeltaAttention, Path], Shown], tmp_path: Path
) -> None:
    layer, x = make(conv_bias=True), tokens(1, 20, 48)
    shown = place(layer, tmp_path)
    assert not is_packed(layer)
    before = addresses(layer)
    for name, do in NOTHING.items():
        do(layer)
        assert addresses(layer) == before, name
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.25)
        expected = model(float64_parameters(layer), x[0].double(), layer)
        assert relative(expected, layer(x)[0][0]) < 3e-6
    for p, there in zip(layer.parameters(), shown(), strict=True):
        assert torch.equal(p.flatten(), there.flatten()), "what others see"


@pytest.mark.parametrize("place", FOREIGN, ids=lambda f: f.__name__)
def test_others_memory_stays_even_if_asked(place: Callable[[KimiDeltaAttention, Path], Shown], tmp_path: Path) -> None:
    layer = make(conv_bias=True)
    place(layer, tmp_path)
    before = addresses(layer)
    layer.pack_weights()
    layer.fuse_projections = False
    layer.pack_weights()
    assert addresses(layer) == before


@pytest.mark.parametrize("place", [*FOREIGN, in_own_memory], ids=lambda f: f.__name__)
def test_a_real_move_packs(place: Callable[[KimiDeltaAttention, Path], Shown], tmp_path: Path) -> None:
    layer, x = make(conv_bias=True), tokens(1, 20, 48).double()
    shown = place(layer, tmp_path)
    kept = [there.clone() for there in shown()]
    layer.double()
    assert is_packed(layer)
    expected = model(float64_parameters(layer), x[0], layer)
    assert relative(expected, layer(x)[0][0]) < 1e-12
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, shown(), strict=True))


def test_packed_weights_stay_packed() -> None:
    layer = make()
    before = addresses(layer)
    for name, do in NOTHING.items():
        do(layer)
        assert addresses(layer) == before and is_packed(layer), name


def test_a_layer_that_is_split_stays_split_or_packed_as_it_was() -> None:
    layer = make()
    layer.fuse_projections = False
    before = addresses(layer)
    layer.float()  # nothing moves, so it stays packed
    assert addresses(layer) == before
    layer.pack_weights()
    assert not is_packed(layer)
    before = addresses(layer)
    layer.fuse_projections = True
    layer.float()
    assert addresses(layer) == before and not is_packed(layer)


def test_what_is_moved_to_such_memory_stays_there() -> None:
    layer = make()
    flat, at = torch.zeros(20_000, dtype=torch.float64), [0]

    def into_the_buffer(x: Tensor) -> Tensor:
        part = flat[at[0] : at[0] + x.numel()].view_as(x)
        at[0] += x.numel()
        return part.copy_(x)

    layer._apply(into_the_buffer)
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    assert all(begin <= address < end for address in addresses(layer))
    pinned: set[int] = set()

    def pin(x: Tensor) -> Tensor:
        y = x.detach().clone()
        pinned.add(y.data_ptr())
        return y

    patch.setattr(Tensor, "is_pinned", lambda x: x.data_ptr() in pinned)
    layer._apply(pin)
    assert set(addresses(layer)) == pinned


def test_what_moves_in_part_stays_where_it_is() -> None:
    """Nobody knows what else is done with the maps that have not moved."""
    layer = make()
    layer.k_proj = nn.Linear(48, 32, bias=False, dtype=torch.float64)
    others = {n: p.data_ptr() for n, p in layer.named_parameters() if n != "k_proj.weight"}
    layer.float()
    assert {n: p.data_ptr() for n, p in layer.named_parameters() if n != "k_proj.weight"} == others
    assert not is_packed(layer)
    layer.pack_weights()
    assert is_packed(layer)


def test_tied_weights_stay_tied() -> None:
    layer = make()
    layer.k_proj.weight = layer.q_proj.weight
    before = addresses(layer)
    layer.pack_weights()
    assert addresses(layer) == before
    layer = make()
    layer.k_proj.weight.data = layer.q_proj.weight.data  # two parameters in one memory
    layer.pack_weights()
    assert layer.k_proj.weight.data_ptr() == layer.q_proj.weight.data_ptr()
    with torch.no_grad():
        layer.q_proj.weight.mul_(2)
    assert torch.equal(layer.q_proj.weight, layer.k_proj.weight)


def test_a_layer_from_a_file(tmp_path: Path) -> None:
    layer, x = make(), tokens(1, 20, 48)
    torch.save(layer, tmp_path / "layer")
    loaded = torch.load(tmp_path / "layer", weights_only=False)
    assert is_packed(loaded)
    mapped = torch.load(tmp_path / "layer", weights_only=False, mmap=True)
    assert not is_packed(mapped), "it lies in the file"
    for other in (loaded, mapped):
        assert relative(layer(x)[0], other(x)[0]) < 1e-6


def test_weights_that_were_loaded_can_be_packed(tmp_path: Path) -> None:
    """Storages of loaded tensors look like those of mapped files, but for the memory itself."""
    layer = make()
    torch.save(layer.state_dict(), tmp_path / "weights")
    layer.load_state_dict(torch.load(tmp_path / "weights"), assign=True)
    assert not is_packed(layer)
    layer.pack_weights()
    assert is_packed(layer)


@pytest.mark.parametrize("name", ["set_swap_module_params_on_conversion", "set_overwrite_module_params_on_conversion"])
def test_other_ways_of_converting(name: str) -> None:
    layer = make()
    before = addresses(layer)
    getattr(torch.__future__, name)(True)
    try:
        layer.float()
        assert addresses(layer) == before and is_packed(layer)
        layer.double()
        assert addresses(layer) != before and is_packed(layer)
    finally:
        getattr(torch.__future__, name)(False)

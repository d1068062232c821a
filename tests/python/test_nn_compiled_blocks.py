"""Models whose blocks are compiled one by one: how many graphs they need, with each kind of cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda.call import tracing
from layer_model import make, relative, tokens
from test_nn_foreign_caches import LikeFLA, LikeTransformers

LAYERS = 5


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph


class Block(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.attention = make(seed=layer_idx, layer_idx=layer_idx)

    def forward(self, x: Tensor, held: Any) -> Tensor:
        o: Tensor = self.attention(x, past_key_values=held, use_cache=True)[0]
        return x + o


class Model(nn.Module):
    """The number of the first layer is 1, because a cache of transformers has something else at 0 here."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i + 1) for i in range(layers))

    def forward(self, x: Tensor, held: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, held)
        return x


def new(kind: str, layers: int) -> Any:
    return {"dict": dict, "fla": LikeFLA, "transformers": lambda: LikeTransformers(layers + 1)}[kind]()


def stepped(model: Model, kind: str, x: Tensor, graphs: Graphs | None = None) -> tuple[list[Tensor], list[list[int]]]:
    """Outputs of three calls, and for each how many graphs there are after every block."""
    held, outputs, counts = new(kind, len(model.blocks)), [], []
    for piece in x.split([5, 1, 1], 1):
        counts.append([])
        for block in model.blocks:
            piece = block(piece, held)
            counts[-1].append(graphs.count if graphs else 0)
        outputs.append(piece)
    return outputs, counts


@pytest.mark.parametrize("kind", ["dict", "fla", "transformers"])
def test_the_fourth_block_and_later_ones_need_no_graphs(kind: str) -> None:
    """The second one shows that there are several, and the third one that the layer in them is called with several."""
    model, x, graphs = Model().eval(), tokens(2, 7, 48), Graphs()
    with torch.no_grad():
        expected, _ = stepped(model, kind, x)
        for block in model.blocks:
            block.compile(backend=graphs)
        got, counts = stepped(model, kind, x, graphs)
    assert max(relative(a, b) for a, b in zip(expected, got, strict=True)) < 3e-6
    for of_call in counts:
        assert of_call[3:] == of_call[2:3] * (LAYERS - 3), f"graphs after every block: {counts}"
    assert counts[0][0] == 1, "the first block alone has a graph without a break"


def test_gradients() -> None:
    model, x, graphs = Model(3), tokens(1, 5, 48), Graphs()

    def gradients() -> list[Tensor]:
        held: dict[int, Any] = {}
        loss = model(x, held).square().sum() + model(x, held).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()
    for block in model.blocks:
        block.compile(backend=graphs)
    assert max(relative(a, b) for a, b in zip(expected, gradients(), strict=True)) < 1e-5
    assert graphs.count > 1


def test_a_whole_model_is_one_graph() -> None:
    model, x, graphs = Model(3).eval(), tokens(2, 6, 48), Graphs()
    compiled = torch.compile(model, backend=graphs)
    held = {i + 1: block.attention.new_cache(2) for i, block in enumerate(model.blocks)}
    other = {i + 1: block.attention.new_cache(2) for i, block in enumerate(model.blocks)}
    with torch.no_grad():
        for count, piece in enumerate(x.split([5, 1], 1), 1):
            assert relative(model(piece, other), compiled(piece, held)) < 3e-6
            assert graphs.count == count


def test_fullgraph_is_obeyed() -> None:
    model, x, graphs = Model(2).eval(), tokens(2, 5, 48), Graphs()
    held = {i + 1: block.attention.new_cache(2) for i, block in enumerate(model.blocks)}
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    with torch.no_grad():
        model(x, held)
    assert graphs.count == 2


def test_a_cache_of_their_own_is_one_graph() -> None:
    model, x, graphs = Model().eval(), tokens(2, 5, 48), Graphs()
    caches = [block.attention.new_cache(2) for block in model.blocks]
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    with torch.no_grad():
        for block, cache in zip(model.blocks, caches, strict=True):
            block(x, cache)
    assert graphs.count == 1


def test_without_torchs_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tracing.compiled_for_others(0), "nothing is being compiled"
    monkeypatch.setattr(tracing, "_of_torch", lambda name, instead: instead)
    assert not tracing.compiled_for_others(0)

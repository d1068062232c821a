"""kda.nn with the cache objects of FLA and transformers: stand-ins with the methods that their layers call, and
transformers' own if it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.nn import KimiDeltaAttention, to_published
from layer_model import make, relative, tokens


class LikeFLA:
    """The methods of the cache that FLA 0.6's layer and models call."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any] | None] = []
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        return self.states[layer_idx]

    def update(
        self,
        recurrent_state: Any = None,
        attn_state: Any = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        layer_idx: int = 0,
        offset: int = 1,
        cache_kwargs: Any = None,
    ) -> dict[str, Any]:
        while len(self.states) <= layer_idx:
            self.states.append(None)
            self.seen.append(0)
        entry = {"recurrent_state": recurrent_state, "attn_state": attn_state, "conv_state": conv_state}
        self.states[layer_idx], self.seen[layer_idx] = entry, self.seen[layer_idx] + offset
        return entry


class Slot:
    """A layer in a cache of transformers 5: its buffers stay, and are written by copies."""

    def __init__(self) -> None:
        self.conv: Tensor | None = None
        self.state: Tensor | None = None
        self.record_past = False

    def update_conv_state(self, new: Tensor, conv_kernel_size: int) -> None:
        both = new if self.conv is None else torch.cat([self.conv, new], -1)
        self.conv = both[..., -conv_kernel_size:].clone()

    def update_recurrent_state(self, new: Tensor) -> None:
        self.state = torch.zeros_like(new) if self.state is None else self.state
        self.state.copy_(new)

    def reorder_cache(self, rows: Tensor) -> None:
        assert self.conv is not None
        assert self.state is not None
        self.conv, self.state = self.conv.index_select(0, rows), self.state.index_select(0, rows)


class LikeTransformers:
    def __init__(self, layers: int) -> None:
        self.layers: list[Any] = [SimpleNamespace(keys=None), *(Slot() for _ in range(layers - 1))]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layers[layer_idx].conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layers[layer_idx].state

    def update_conv_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> None:
        self.layers[layer_idx].update_conv_state(new, **kwargs)

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> None:
        self.layers[layer_idx].update_recurrent_state(new)


def like(kind: str) -> Any:
    return LikeFLA() if kind == "fla" else LikeTransformers(3)


def run(layer: KimiDeltaAttention, x: Tensor, sizes: list[int], held: Any, **kwargs: Any) -> Tensor:
    pieces = []
    for piece in x.split(sizes, 1):
        o, _, back = layer(piece, past_key_values=held, use_cache=True, **kwargs)
        assert back is held
        pieces.append(o.detach())
    return torch.cat(pieces, 1)


kinds = pytest.mark.parametrize("kind", ["fla", "transformers"])


@kinds
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("config", [{}, {"num_v_heads": 4, "expand_v": 2}, {"conv_size": 1}, {"conv_size": 3}])
def test_pieces_equal_one_forward(kind, gradients, config):
    layer, x, held = make(layer_idx=1, **config), tokens(3, 80, 48), like(kind)
    with torch.set_grad_enabled(gradients):
        o = run(layer, x, [60, 1, 1, 2, 15, 1], held)
    assert relative(layer(x)[0], o) < 3e-6
    own = layer.new_cache(3)
    with torch.no_grad():
        layer(x, cache=own)
    if kind == "fla":
        entry = held[1]
        conv, state = torch.cat(entry["conv_state"], 1), entry["recurrent_state"]
        assert held.seen == [0, 80]
        assert held[0] is None
    else:
        conv, state = held.get_conv_state(1), held.get_recurrent_state(1).transpose(-1, -2)
    assert conv.shape[2] == own.conv.shape[2] + 1
    assert relative(own.state, state) < 3e-6
    assert own.conv.numel() == 0 or relative(own.conv, conv[..., 1:]) < 3e-6
    assert not state.requires_grad


@kinds
def test_compiled_without_graph_breaks(kind):
    torch._dynamo.reset()
    layer, x, held = make(layer_idx=1), tokens(1, 20, 48), like(kind)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        o = torch.cat([compiled(piece, past_key_values=held)[0] for piece in x.split([12, 1, 7], 1)], 1)
    assert relative(layer(x)[0], o) < 3e-6
    torch._dynamo.reset()


@pytest.mark.parametrize("short", [True, False])
def test_states_that_others_hold_stay_as_they_are(short):
    """FLA's layers make new states, so a copy of the entries is a copy of the cache."""
    layer, x, held = make(layer_idx=0, use_short_conv=short), tokens(1, 9, 48), LikeFLA()
    with torch.no_grad():
        run(layer, x[:, :5], [5], held)
        entry = held[0]
        before = entry["recurrent_state"].clone()
        o = run(layer, x[:, 5:], [4], held)
        assert torch.equal(entry["recurrent_state"], before)
        held.states[0] = entry
        assert torch.equal(run(layer, x[:, 5:], [4], held), o)
    assert relative(layer(x)[0][:, 5:], o) < 3e-6


@kinds
def test_padding_and_beams(kind):
    layer, held, x = make(layer_idx=1), like(kind), tokens(2, 12, 48)
    mask = torch.ones(2, 12)
    mask[1, :4] = 0
    rows = torch.tensor([1, 1])
    with torch.no_grad():
        run(layer, x[:, :10], [10], held, attention_mask=mask[:, :10])
        if kind == "fla":
            entry = held[1]
            entry["recurrent_state"] = entry["recurrent_state"][rows]
            entry["conv_state"] = [part[rows] for part in entry["conv_state"]]
        else:
            held.layers[1].reorder_cache(rows)
        o = run(layer, x[:, 10:], [1, 1], held)
    for i in range(2):
        whole = torch.cat([x[1:, 4:10], x[i : i + 1, 10:]], 1)
        assert relative(layer(whole)[0][0, -2:], o[i]) < 3e-6


@kinds
def test_refusals(kind):
    layer, x, held = make(layer_idx=1), tokens(2, 3, 48), like(kind)
    with pytest.raises(ValueError, match="layer_idx: expected a number"):
        make()(x, past_key_values=held)
    layer(x, past_key_values=held)
    with pytest.raises(
        ValueError, match=r"past_key_values: expected conv_state of shape \[1, 96, 3\] in it, got \[2, "
    ):
        layer(x[:1], past_key_values=held)
    again = torch.utils.checkpoint.checkpoint(
        lambda x: layer(x, past_key_values=like(kind))[0], x.requires_grad_(), use_reentrant=False
    )
    with pytest.raises(ValueError, match="past_key_values: expected None in a function that backward runs again"):
        again.sum().backward()


def test_refusals_of_transformers_caches():
    x, held = tokens(2, 3, 48), LikeTransformers(2)
    with pytest.raises(ValueError, match=r"whose layer 0 is of linear attention, .* got SimpleNamespace"):
        make(layer_idx=0)(x, past_key_values=held)
    with pytest.raises(ValueError, match=r"whose layer 2 is of linear attention, .* got none"):
        make(layer_idx=2)(x, past_key_values=held)
    with pytest.raises(ValueError, match="expected a KDACache for a layer without short convolutions"):
        make(layer_idx=1, use_short_conv=False)(x, past_key_values=held)
    held.layers[1].record_past = True
    with pytest.raises(NotImplementedError, match="does not record the past"):
        make(layer_idx=1)(x, past_key_values=held)
    for other in (set(), object(), [1]):
        with pytest.raises(NotImplementedError, match=r"past_key_values: expected a KDACache or a dict .* got "):
            make(layer_idx=0)(x, past_key_values=other)


def test_transformers_own_cache_in_turns_with_its_own_layer():
    """kda's layer and transformers' take turns to compute the next tokens with one cache."""
    pytest.importorskip("transformers.models.kimi_linear")
    from transformers import DynamicCache
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "linear_head_dim": 16, "linear_num_heads": 2}
    config = KimiLinearConfig(
        hidden_size=48, num_hidden_layers=2, layer_types=["full_attention", "linear_attention"], **sizes
    )
    layer, x = make(layer_idx=1, gate_bias=False), tokens(2, 40, 48)
    theirs = KimiLinearDeltaAttention(config, 1)
    theirs.load_state_dict(to_published(layer.state_dict(), "kimi_linear", in_transformers=True))
    held = DynamicCache(config=config)
    with torch.no_grad():
        o = []
        for turn, piece in enumerate(x.split([20, 7, 1, 1, 1, 1, 9], 1)):
            ours = turn in (0, 2, 3, 6)
            o.append(layer(piece, past_key_values=held)[0] if ours else theirs(piece, cache=held))
            if turn == 3:
                held.reorder_cache(torch.tensor([0, 1]))  # changes the order of the state in memory
        assert relative(theirs(x), torch.cat(o, 1)) < 5e-6


def test_the_cache_of_fla() -> None:
    """Where FLA is installed: it needs Triton, so the tests do not bring it."""
    Cache = pytest.importorskip("fla.models.utils").Cache
    layer, x, held = make(layer_idx=1), tokens(3, 80, 48), Cache()
    rows = torch.tensor([2, 2, 0])
    with torch.no_grad():
        o = run(layer, x[:, :64], [60, 1, 3], held)
        assert relative(layer(x)[0][:, :64], o) < 3e-6
        assert held.get_seq_length(1) == 64
        held.reorder_cache(rows)
        o = run(layer, x[:, 64:], [1, 15], held)
        expected, _, _ = layer(torch.cat([x[rows, :64], x[:, 64:]], 1))
        assert relative(expected[:, 64:], o) < 3e-6

"""The layer with packed and padded sequences: each is computed as if it were alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from kda.nn import KimiDeltaAttention
from layer_model import in_pieces, make, relative, tokens

LENGTHS = [5, 0, 64, 1, 67, 2]


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_equal_separate_ones(conv, dtype):
    layer, x = make(use_short_conv=conv), tokens(1, sum(LENGTHS) + 4, 48)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)
    separate = [s for s in x[:, : sum(LENGTHS)].split(LENGTHS, 1)]
    expected = torch.cat([layer(s)[0] for s in separate], 1)
    o, _, _ = layer(x, cu_seqlens=cu)
    assert relative(expected, o[:, : sum(LENGTHS)]) < 2e-6
    assert not o[:, sum(LENGTHS) :].any()

    packed = layer.new_cache(len(LENGTHS))
    for _ in range(2):  # from zeros, then from the states of the first round
        with torch.no_grad():
            layer(x, cache=packed, cu_seqlens=cu)
    for n, s in enumerate(separate):
        cache = layer.new_cache(1)
        in_pieces(layer, torch.cat([s, s], 1), [2 * LENGTHS[n]], cache)
        assert relative(cache.state, packed.state[n : n + 1]) < 2e-6
        assert not conv or relative(cache.conv, packed.conv[n : n + 1]) < 1e-5


def test_no_gradient_leaks_between_packed_sequences():
    layer, x = make(), tokens(1, 40, 48).requires_grad_()
    o, _, _ = layer(x, cu_seqlens=torch.tensor([0, 13, 40]))
    o[:, 13:].sum().backward()
    assert not x.grad[:, :13].any()
    assert x.grad[:, 13:].abs().min() > 0


def in_one_graph(layer: KimiDeltaAttention):
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


how = pytest.mark.parametrize("how", [lambda layer: layer, in_one_graph], ids=["eager", "one_graph"])


@how
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_skipped(side, how):
    layer, lengths, T = make(), [9, 70, 1, 0], 70
    run = how(layer)
    x, mask = tokens(4, T, 48), torch.zeros(4, T, dtype=torch.int64)
    for n, length in enumerate(lengths):
        mask[n, T - length :] = side == "left"
        mask[n, :length] |= side == "right"
    x[mask == 0] = math.nan  # padding may hold anything
    leaf = x.clone().requires_grad_()
    o, _, _ = run(leaf, attention_mask=mask)
    o.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    cache = layer.new_cache(4)
    with torch.no_grad():
        run(x, attention_mask=mask, cache=cache)
        step, _, _ = run(tokens(4, 1, 48), attention_mask=F.pad(mask, (0, 1), value=1), cache=cache)
    assert not o[mask == 0].any()
    assert not leaf.grad[mask == 0].any()
    for n, length in enumerate(lengths):
        sequence = torch.cat([x[n : n + 1, mask[n].bool()], tokens(4, 1, 48)[n : n + 1]], 1)
        expected, _, _ = layer(sequence)
        assert relative(expected[:, -1:], step[n : n + 1]) < 2e-6
        if length:
            assert relative(expected[0, :-1], o[n, mask[n].bool()]) < 2e-6


@how
def test_a_masked_row_of_a_decode_step_keeps_its_state(how):
    layer = make()
    cache = layer.new_cache(2)
    in_pieces(layer, tokens(2, 10, 48), [10], cache)
    conv, state = cache.conv.clone(), cache.state.clone()
    with torch.no_grad():
        o, _, _ = how(layer)(tokens(2, 1, 48), attention_mask=torch.tensor([[1], [0]]), cache=cache)
    assert not o[1].any()
    assert torch.equal(cache.conv[1], conv[1])
    assert torch.equal(cache.state[1], state[1])
    assert not torch.equal(cache.state[0], state[0])

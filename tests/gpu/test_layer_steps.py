"""Decode steps of the layer with CUDA tensors: bits of the general way, capture between eager steps, and streams.
tests/python/test_nn_steps.py has more."""

from __future__ import annotations

import copy

import pytest
import torch

from kda.layer import step
from kda.nn import KDACache, KimiDeltaAttention
from places import DEVICE, only_cuda
from support import Tensor, same_bits


def layer_of(dtype: torch.dtype) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(hidden_size=256, num_heads=4, head_dim=128, device=DEVICE, dtype=dtype)


def rows(layer: KimiDeltaAttention, *shape: int) -> Tensor:
    return torch.randn(*shape, 256, device=DEVICE).to(layer.o_proj.weight.dtype)


def steps(layer: KimiDeltaAttention, x: Tensor, cache: KDACache) -> Tensor:
    with torch.no_grad():
        return torch.cat([layer(token, cache=cache)[0] for token in x.split(1, 1)], 1)


def without_quick_steps(layer: KimiDeltaAttention, x: Tensor, cache: KDACache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kda.nn.quick_step", lambda *_: None)
        return steps(layer, x, cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("B", [1, 3, 64])
def test_bits_of_the_general_way(dtype: torch.dtype, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, run, quick = layer_of(dtype), step._step, list[int]()
    monkeypatch.setattr(step, "_step", lambda *a: (quick.append(1), run(*a))[1])
    x, one, other = rows(layer, B, 6), layer.new_cache(B), layer.new_cache(B)
    assert same_bits(steps(layer, x, one), without_quick_steps(layer, x, other))
    assert len(quick) == 6
    assert one.conv is not None and other.conv is not None
    assert same_bits(one.state, other.state) and same_bits(one.conv, other.conv)


@only_cuda
def test_capture_between_eager_steps() -> None:
    layer = layer_of(torch.bfloat16)
    x, cache = rows(layer, 2, 9), layer.new_cache(2)
    expected = without_quick_steps(layer, x, layer.new_cache(2))
    got = [steps(layer, x[:, :3], cache)]
    graph, token, kept = torch.cuda.CUDAGraph(), x[:, 3:4].clone(), copy.deepcopy(cache)
    with torch.no_grad(), torch.cuda.graph(graph):
        o = layer(token, cache=cache)[0]
    assert same_bits(cache.state, kept.state), "capture runs nothing"
    for t in range(3, 9):
        if t % 2:  # in turns with eager steps
            token.copy_(x[:, t : t + 1])
            graph.replay()
            got.append(o.clone())
        else:
            got.append(steps(layer, x[:, t : t + 1], cache))
    assert same_bits(torch.cat(got, 1), expected)


@only_cuda
def test_caches_on_streams_of_their_own() -> None:
    layer, streams = layer_of(torch.bfloat16), [torch.cuda.Stream() for _ in range(4)]
    x, caches = [rows(layer, 64, 50) for _ in streams], [layer.new_cache(64) for _ in streams]
    expected = [without_quick_steps(layer, tokens, layer.new_cache(64)) for tokens in x]
    got: list[list[Tensor]] = [[] for _ in streams]
    torch.cuda.synchronize()
    with torch.no_grad():
        for t in range(50):
            for stream, tokens, cache, found in zip(streams, x, caches, got, strict=True):
                with torch.cuda.stream(stream):
                    found.append(layer(tokens[:, t : t + 1], cache=cache)[0])
    torch.cuda.synchronize()
    for found, wanted in zip(got, expected, strict=True):
        assert same_bits(torch.cat(found, 1), wanted)

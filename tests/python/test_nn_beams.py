"""KDACache for beams, and in files."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kda.nn import DraftCache, KDACache, KimiDeltaAttention
from layer_model import float64_parameters, make, model, relative, tokens

configs = pytest.mark.parametrize("config", [{}, {"use_short_conv": False}], ids=["convolution", "none"])


def prefilled(layer: KimiDeltaAttention, prompts: Tensor) -> KDACache:
    cache = layer.new_cache(prompts.shape[0])
    with torch.no_grad():
        layer(prompts, cache=cache)
    return cache


def same(a: KDACache, b: KDACache) -> bool:
    return torch.equal(a.state, b.state) and (a.conv is b.conv is None or torch.equal(a.conv, b.conv))


@configs
def test_a_beam_search_equals_the_float64_model(config):
    """Two prompts, three beams each. In every step beams continue from others, and each must match its own whole
    history."""
    layer, prompts = make(**config), tokens(2, 9, 48)
    cache = prefilled(layer, prompts).repeat(3)
    histories = [prompts[i // 3] for i in range(6)]
    addresses = [x.data_ptr() for x in (cache.state, cache.conv) if x is not None]
    p = float64_parameters(layer)
    for step, rows in enumerate(([2, 2, 0, 4, 5, 3], [0, 0, 0, 3, 3, 3], [1, 0, 2, 5, 3, 4])):
        token = tokens(6, 1, 48, seed=10 + step)
        cache.reorder(torch.tensor(rows))
        with torch.no_grad():
            o, _, _ = layer(token, cache=cache)
        histories = [torch.cat([histories[row], token[i]]) for i, row in enumerate(rows)]
        for i, history in enumerate(histories):
            assert relative(model(p, history.double(), layer)[-1:], o[i]) < 5e-6
    assert [x.data_ptr() for x in (cache.state, cache.conv) if x is not None] == addresses


@configs
def test_select_and_repeat_make_caches_of_their_own(config):
    layer, prompts = make(**config), tokens(4, 9, 48)
    cache = prefilled(layer, prompts)
    chosen, before = cache.select(torch.tensor([3, 1], dtype=torch.int32)), copy.deepcopy(cache)
    assert torch.equal(chosen.state, cache.state[[3, 1]])
    with torch.no_grad():
        layer(tokens(2, 1, 48), cache=chosen)
    assert same(cache, before)
    assert not same(chosen, cache.select(torch.tensor([3, 1])))
    assert torch.equal(cache.repeat(2).state, cache.state.repeat_interleave(2, 0))
    assert cache.repeat(0).state.shape[0] == 0


@configs
def test_names_of_transformers(config):
    layer = make(**config)
    cache = prefilled(layer, tokens(3, 9, 48))
    want, rows = copy.deepcopy(cache), torch.tensor([2, 0, 2])
    cache.batch_repeat_interleave(2)
    assert same(cache, want.repeat(2))
    cache.batch_select_indices(torch.tensor([0, 2, 4]))
    assert same(cache, want)
    cache.reorder_cache(rows)
    assert same(cache, want.select(rows))


def test_refusals():
    layer = make()
    cache = prefilled(layer, tokens(3, 9, 48))
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"rows: expected shape \[3\], got \[2\]"):
        cache.reorder(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"rows: expected int32 or int64 of one dimension, got torch\.bool of 1"):
        cache.reorder(torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match=r"rows: expected int32 or int64 of one dimension, got torch\.int64 of 2"):
        cache.select(torch.tensor([[0]]))
    with pytest.raises(ValueError, match="times: expected 0 or more, got -1"):
        cache.repeat(-1)
    for rows in ([0, 3, 0], [0, -1, 0]):
        with pytest.raises((IndexError, RuntimeError)):
            cache.reorder(torch.tensor(rows))
    assert same(cache, before)


def test_in_a_function_that_backward_runs_again():
    cache, x = prefilled(make(), tokens(1, 9, 48)), tokens(1, 3, 48).requires_grad_()

    def run(x: Tensor) -> Tensor:
        cache.reorder(torch.tensor([0]))
        return x.sin()

    with pytest.raises(ValueError, match=r"past_key_values: expected None in a function that backward runs again"):
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("fused", [True, False])
def test_drafts_are_flushed_first(fused):
    layer, x, rows = make(), tokens(2, 12, 48), torch.tensor([1, 1])
    cache = prefilled(layer, x[:, :9])
    drafts, plain = DraftCache(layer, cache, 3, fused=fused), copy.deepcopy(cache)
    more = tokens(2, 3, 48, seed=5)
    with torch.no_grad():
        layer(x[:, 9:], cache=drafts)
        drafts.accept(torch.tensor([1, 2], dtype=torch.int32))
        drafts.flush()
        cache.reorder(rows)
        got, _, _ = layer(more, cache=drafts)
        plain = plain.select(rows)
        layer(x[rows, 9:11], cache=plain)  # two tokens of sequence 1, twice
        want, _, _ = layer(more, cache=plain)
    assert relative(want, got) < 3e-6


@configs
def test_files_are_read_with_weights_only(config, tmp_path):
    layer = make(**config)
    cache, path = prefilled(layer, tokens(2, 9, 48)), tmp_path / "cache.pt"
    torch.save({3: cache}, path)
    loaded = torch.load(path, weights_only=True)[3]
    assert type(loaded) is KDACache
    assert same(loaded, cache)
    token = tokens(2, 1, 48, seed=4)
    with torch.no_grad():
        assert torch.equal(layer(token, cache=loaded)[0], layer(token, cache=cache)[0])


def test_a_new_process_reads_the_file_after_importing_kda_nn(tmp_path: Path):
    cache, path = prefilled(make(), tokens(2, 9, 48)), tmp_path / "cache.pt"
    torch.save(cache, path)
    program = f"import torch, kda.nn; print(tuple(torch.load({str(path)!r}).state.shape))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tuple(cache.state.shape))


def test_a_cache_made_in_a_backward_pass_is_usable_from_a_file(tmp_path: Path):
    """The number of a backward pass means nothing in another process."""
    layer, made = make(), []
    x = tokens(1, 2, 48).requires_grad_()
    x.register_hook(lambda g: made.append(prefilled(layer, tokens(1, 9, 48))))
    x.sum().backward()
    assert made[0].made_in != -1
    torch.save(made[0], tmp_path / "cache.pt")
    assert torch.load(tmp_path / "cache.pt").made_in == -1

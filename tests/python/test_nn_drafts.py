"""The layer in speculative decoding: kda.nn.DraftCache."""

from __future__ import annotations

import random

import pytest
import torch

from kda.nn import DraftCache, KimiDeltaAttention


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"use_short_conv": False}, {"num_v_heads": 4, "expand_v": 0.5, "conv_bias": True}]
)
def test_drafts_equal_decode(fused, options):
    """Any number of accepted drafts, different for each sequence; wrong drafts leave no trace."""
    torch.manual_seed(0)
    N, prompt = 3, 7
    layer, x = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32, **options), torch.randn(N, 60, 64)
    cache, plain = layer.new_cache(N), layer.new_cache(N)
    choose = random.Random(1)
    with torch.no_grad():
        for c in (cache, plain):
            layer(x[:, :prompt], cache=c)
        expected = torch.cat([layer(token, cache=plain)[0] for token in x[:, prompt:].split(1, 1)], 1)
        drafts, at = DraftCache(layer, cache, 5, fused=fused), [0] * N
        for _ in range(10):
            T = choose.randint(1, 5)
            accepted = [choose.randint(0, T) for _ in range(N)]
            rows = torch.stack([x[n, prompt + at[n] : prompt + at[n] + T] for n in range(N)])
            for n, m in enumerate(accepted):
                rows[n, m:] += 1
            o, _, _ = layer(rows, cache=drafts)
            for n, m in enumerate(accepted):
                torch.testing.assert_close(o[n, :m], expected[n, at[n] : at[n] + m], atol=1e-5, rtol=1e-4)
                at[n] += m
            drafts.accept(torch.tensor(accepted, dtype=torch.int32))
        layer(x[:, :3], cache=drafts)  # these are never accepted
        drafts.flush()
        for n in range(N):
            own, whole = layer.new_cache(1), x[n : n + 1, : prompt + at[n]]
            layer(whole, cache=own)
            torch.testing.assert_close(cache.state[n], own.state[0], atol=1e-5, rtol=1e-4)
            if cache.conv is not None:
                assert torch.equal(cache.conv[n], own.conv[0]) or torch.allclose(cache.conv[n], own.conv[0], atol=1e-5)


def test_drafts_refuse():
    layer = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32)
    x, drafts = torch.randn(1, 3, 64), DraftCache(layer, layer.new_cache(1), 2)
    with pytest.raises(ValueError, match=r"max_tokens: expected 1\.\.16, got 17"):
        DraftCache(layer, layer.new_cache(1), 17)
    with pytest.raises(ValueError, match=r"cache: expected .*no_grad"):
        layer(x[:, :2], cache=drafts)
    with torch.no_grad(), pytest.raises(ValueError, match="max_tokens = 2 drafts, got 3"):
        layer(x, cache=drafts)
    with torch.no_grad():
        layer(x[:, :1], cache=drafts)
    for wrong, sentence in (
        (torch.tensor([1.0]), r"expected int32 or int64 of shape \[1\], got torch.float32"),
        (torch.tensor([True]), r"expected int32 or int64 of shape \[1\], got torch.bool"),
        (torch.tensor([1, 1]), r"expected shape \[1\], got \[2\]"),
        (torch.tensor([2]), r"expected 0\.\.1, the drafts of the last call, got 2"),
        (torch.tensor([-1]), r"expected 0\.\.1, the drafts of the last call, got -1"),
        (2, r"expected 0\.\.1, the drafts of the last call, got 2"),
        (3, r"expected integers of 0\.\.2, got 3"),
        ([True], r"expected integers of 0\.\.2, got True"),
        (None, r"expected int32 or int64 of shape \[1\], got NoneType"),
    ):
        with pytest.raises(ValueError, match=rf"^accept_len: {sentence}$"):
            drafts.accept(wrong)


@pytest.mark.parametrize("fused", [True, False])
def test_each_draft_is_accepted_once(fused):
    """A round of fewer drafts leaves older ones in the records. They must not come back, nor those of a flush."""
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32), torch.randn(2, 6, 64)
    cache, plain = layer.new_cache(2), layer.new_cache(2)
    drafts = DraftCache(layer, cache, 4, fused=fused)
    with torch.no_grad():
        layer(x[:, :4], cache=drafts)
        drafts.accept(3)  # of all sequences
        layer(x[:, 3:4], cache=drafts)
        drafts.accept([1, 1])
        drafts.flush()
        with pytest.raises(ValueError, match=r"^accept_len: expected 0\.\.0, the drafts of the last call, got 1$"):
            drafts.accept(1)
        drafts.flush()
        layer(x[:, :4], cache=plain)
    torch.testing.assert_close(cache.state, plain.state, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache.conv, plain.conv)

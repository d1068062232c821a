"""One DraftBuffer for all layers of a model, which keeps accepted lengths and raw rows by slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kda
from support import Tensor, same_bits

H, HV, K, V, W, T, LAYERS, SLOTS = 1, 2, 9, 6, 4, 3, 3, 6
D = 2 * H * K + HV * V


def drafts(rows: int, layer: int, time: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(100 * layer + time)
    return torch.randn(rows, T, D), -torch.rand(rows, T, HV, K), torch.rand(rows, T, HV)


def ring(buffer: kda.DraftBuffer, layer: int) -> list[Tensor]:
    return [x[layer] for x in (buffer.records.ring_first, buffer.records.ring_count)]


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_one_buffer_has_the_bits_of_one_for_each_layer(width: torch.dtype) -> None:
    """Requests change places, one sits out a round, one row is padding, one slot begins anew."""
    torch.manual_seed(0)
    states, tails, weight = (
        torch.randn(LAYERS, SLOTS, HV, V, K),
        torch.randn(LAYERS, SLOTS, D, W - 1),
        torch.randn(D, W),
    )
    plain_states, plain_tails = states.clone(), tails.clone()
    one = kda.DraftBuffer(SLOTS, T, H, HV, K, V, entries=8, layers=LAYERS, channels=D)
    each = [kda.DraftBuffer(SLOTS, T, H, HV, K, V, entries=8) for _ in range(LAYERS)]
    accepted, kept = torch.zeros(SLOTS, dtype=torch.int32), torch.zeros(LAYERS, SLOTS, T, D)
    batches = [[4, 1, -1, 5], [1, 4, 5, -1], [-1, 5, 1, 0], [4, 1, -1, 5]]
    for time, batch in enumerate(batches):
        slots, at = torch.tensor(batch, dtype=width), torch.tensor(batch).clamp(0)
        for layer in range(LAYERS):
            x, g, beta = drafts(4, layer, time)
            conv = kda.Conv(x, weight, None, tails[layer], slots)
            o = one.step(None, None, None, g, beta, states[layer], slots, layer=layer, conv=conv)
            conv = conv._replace(state=plain_tails[layer])
            plain = each[layer].step(
                None,
                None,
                None,
                g,
                beta,
                plain_states[layer],
                slots,
                accepted[at],
                conv=conv,
                last_conv_x=kept[layer, at],
            )
            assert same_bits(o, plain), f"{time}, layer {layer}"
            for row, slot in enumerate(batch):
                if slot >= 0:
                    kept[layer, slot] = x[row]
        m = torch.tensor([2, 3, 1, 0], dtype=width)
        one.accept(slots, m)
        for row, slot in enumerate(batch):
            if slot >= 0:
                accepted[slot] = m[row]
        if time == 1:
            one.reset(torch.tensor([-1, 5]))
            for buffer in each:
                buffer.reset(torch.tensor([5]))
            accepted[5] = 0
    slots, at = torch.tensor([5, -1, 4, 1], dtype=width), torch.tensor([5, 0, 4, 1])
    one.flush(states, slots, conv_state=tails)
    for layer in range(LAYERS):
        conv = {"conv_x": kept[layer, at], "conv_state": plain_tails[layer], "conv_indices": slots}
        each[layer].flush(plain_states[layer], slots, accepted[at], **conv)
    assert same_bits(states, plain_states) and same_bits(tails, plain_tails)
    assert one.records.ring_count[:, [5, 4, 1]].eq(0).all()
    before = states.clone()
    one.flush(states, slots, conv_state=tails)
    assert same_bits(states, before), "a second flush has nothing to apply"


def test_drafts_may_be_fewer_than_the_most() -> None:
    torch.manual_seed(0)
    state, tail, weight, slot = torch.zeros(1, HV, V, K), torch.zeros(1, D, W - 1), torch.randn(D, W), torch.tensor([0])
    alone, alone_tail = state.clone(), tail.clone()
    buffer = kda.DraftBuffer(1, T, H, HV, K, V, channels=D)
    for time, (count, m) in enumerate(((1, 1), (3, 2), (2, 2), (3, 0))):
        x, g, beta = (t[:, :count] for t in drafts(1, 0, time))
        conv = kda.Conv(x, weight, None, tail, slot)
        o = buffer.step(None, None, None, g, beta, state, slot, conv=conv)
        buffer.accept(slot, torch.tensor([m]))
        if m == 0:
            break
        conv = kda.Conv(x[:, :m], weight, None, alone_tail, slot)
        expected = kda.decode_mtp(None, None, None, g[:, :m], beta[:, :m], alone, conv=conv)
        torch.testing.assert_close(o[:, :m], expected)
    buffer.flush(state, slot, conv_state=tail)
    torch.testing.assert_close(state, alone)
    assert same_bits(tail, alone_tail)


def test_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda.call.arrays.torch", None)
    buffer = kda.DraftBuffer(3, T, 1, 1, 4, 4, layers=2)
    monkeypatch.undo()
    x, beta = np.ones((1, T, 1, 4), np.float32) / 2, np.ones((1, T, 1), np.float32)
    pools, slot = np.zeros((2, 3, 1, 4, 4), np.float32), np.array([2])
    for _ in range(2):
        for layer in range(2):
            buffer.step(x, x, x, 0 * x, beta, pools[layer], slot, layer=layer)
        buffer.accept(slot, np.array([1]))
    buffer.flush(pools, slot)
    alone = np.zeros((1, 1, 4, 4), np.float32)
    kda.decode(x[:, :2], x[:, :2], x[:, :2], 0 * x[:, :2], beta[:, :2], alone)
    np.testing.assert_allclose(pools[0, 2], alone[0], rtol=1e-6)
    assert not pools[:, :2].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers: expected a number of at least 1, got 0"),
        ({"channels": 0}, "channels: expected a number of at least 1, got 0"),
        ({"dtype": torch.float16}, "dtype: expected None without channels, got torch.float16"),
    ],
)
def test_refused_buffers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        kda.DraftBuffer(SLOTS, T, H, HV, K, V, **changes)


def test_refused_calls() -> None:
    x, g, beta = drafts(1, 0, 0)
    state, slot = torch.zeros(1, HV, V, K), torch.tensor([0])
    conv = kda.Conv(x, torch.randn(D, W), None, torch.zeros(1, D, W - 1), slot)
    rest = (None, None, None, g, beta, state, slot)
    layered, single = (kda.DraftBuffer(1, T, H, HV, K, V, channels=D, **more) for more in ({"layers": 2}, {}))
    for layer in (None, 2, -1, True, "x"):
        with pytest.raises(ValueError, match=r"^layer: expected 0\.\.1, got"):
            layered.step(*rest, layer=layer, conv=conv)
    with pytest.raises(ValueError, match=r"^layer: expected None, the buffer has one layer, got 0"):
        single.step(*rest, layer=0, conv=conv)
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected None where the buffer keeps raw rows"):
        single.step(*rest, conv=conv, cu_seqlens=torch.tensor([0, T]))
    for wrong in (torch.tensor([1, 2]), torch.tensor(1), 3):
        with pytest.raises(ValueError, match=r"^accept_len: expected"):
            single.accept(slot, wrong)

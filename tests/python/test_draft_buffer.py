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
    for wrong in (
        torch.tensor([1, 2]),
        torch.tensor(1),
        4,
        1.0,
        None,
        "1",
        True,
        -1,
        [1, 2],
        [1.0],
        torch.tensor([1.0]),
    ):
        with pytest.raises(ValueError, match=r"^accept_len: expected"):
            single.accept(slot, wrong)
    for wrong, sentence in (
        (torch.tensor([1]), "expected numbers below 1, got 1"),
        (torch.tensor([0.0]), "expected int32 or int64 numbers of slots, got float32"),
        (torch.tensor([True]), "expected int32 or int64 numbers of slots, got bool"),
    ):
        with pytest.raises(ValueError, match=f"^slots: {sentence}$"):
            single.accept(wrong, 0)


# ---- a buffer knows its rounds ----

ZERO, ONE = torch.tensor([0]), torch.tensor([1])


class Alone:
    """A buffer of one layer and two slots, and plain decode of what slot 0 should hold."""

    def __init__(self, **more: Any) -> None:
        self.buffer = kda.DraftBuffer(2, 4, 1, 1, K, V, entries=16, **more)
        self.pool, self.plain = (torch.zeros(n, 1, V, K, dtype=torch.float32) for n in (2, 1))
        self.random = torch.Generator().manual_seed(1)

    def step(self, T: int, accept_len: Any = None) -> list[Tensor]:
        shapes = ((1, T, 1, K), (1, T, 1, K), (1, T, 1, V))
        q, k, v = (torch.randn(shape, generator=self.random) for shape in shapes)
        g, beta = -torch.rand(1, T, 1, K, generator=self.random), torch.rand(1, T, 1, generator=self.random)
        self.buffer.step(q, k, v, g, beta, self.pool, ZERO, accept_len, use_qk_l2norm_in_kernel=True)
        return [q, k, v, g, beta]

    def keep(self, tokens: list[Tensor], m: int) -> None:
        kda.decode(*(x[:, :m] for x in tokens), self.plain, use_qk_l2norm_in_kernel=True)

    def agree(self) -> None:
        torch.testing.assert_close(self.pool[:1], self.plain, atol=1e-5, rtol=1e-5)
        assert not self.pool[1].any()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where numbers are not read: they are cut."""
    monkeypatch.setattr("kda.draft_buffer._are_on_the_host", lambda x: False)


@pytest.mark.parametrize("how", ["accept", "step"])
def test_more_than_the_round_had_is_refused(how: str) -> None:
    """The ring still has the entries of the longer round before."""
    one = Alone()
    one.step(4)
    one.buffer.accept(ZERO, 0)
    tokens = one.step(1)
    for wrong in (torch.tensor([2]), torch.tensor([4]), torch.tensor([-1]), [2], 2):
        with pytest.raises(
            ValueError, match=r"^accept_len: expected 0\.\.1, the tokens of the last round of slot 0, got"
        ):
            one.buffer.accept(ZERO, wrong) if how == "accept" else one.step(1, wrong)
    one.buffer.accept(ZERO, 1)
    one.buffer.flush(one.pool, ZERO)
    one.keep(tokens, 1)
    one.agree()


@pytest.mark.parametrize("how", ["accept", "step", "flush"])
def test_more_than_the_round_had_is_cut_where_numbers_are_not_read(unread: None, how: str) -> None:
    one = Alone()
    one.step(4, torch.tensor([3]))  # there was no round before
    tokens = one.step(1, ZERO)
    one.keep(tokens, 1)
    if how == "step":
        one.step(2, torch.tensor([4]))
        one.buffer.flush(one.pool, ZERO)
    elif how == "flush":
        one.buffer.flush(one.pool, ZERO, torch.tensor([4]))
    else:
        one.buffer.accept(ZERO, torch.tensor([4]))
        one.buffer.flush(one.pool, ZERO)
    one.agree()
    one.buffer.accept(ZERO, ONE)  # of a round that is flushed
    one.buffer.flush(one.pool, ZERO, ONE)
    one.agree()


@pytest.mark.parametrize("read", [True, False])
def test_nothing_is_accepted_unless_somebody_says_so(read: bool, request: pytest.FixtureRequest) -> None:
    if not read:
        request.getfixturevalue("unread")
    one = Alone()
    one.keep(one.step(3), 2)
    one.buffer.accept(ZERO, 2)
    one.step(3)  # dropped: no accept
    one.keep(one.step(2), 1)
    one.buffer.accept(ZERO, [1])
    one.buffer.flush(one.pool, ZERO)
    one.agree()


def test_tokens_of_packed_requests_are_counted_by_slot() -> None:
    buffer, pool, slots = kda.DraftBuffer(3, 3, 1, 1, 4, 4), torch.zeros(3, 1, 4, 4), torch.tensor([2, -1, 0])
    x, beta = torch.ones(1, 6, 1, 4) / 2, torch.ones(1, 6, 1)
    buffer.step(x, x, x, 0 * x, beta, pool, slots, cu_seqlens=torch.tensor([0, 1, 4, 6]))
    for wrong, slot, most in (([2, 0, 0], 2, 1), ([0, 9, 3], 0, 2)):
        with pytest.raises(ValueError, match=f"expected 0..{most}, the tokens of the last round of slot {slot}, got"):
            buffer.accept(slots, torch.tensor(wrong))
    buffer.accept(slots, torch.tensor([1, 9, 2]))  # the number of padding does not matter
    buffer.flush(pool, slots)
    assert pool[2].sum() == 4 and pool[0].any() and not pool[1].any()


def test_slots_of_accept_are_those_of_step() -> None:
    buffer = Alone().buffer
    for slots, sentence in (
        (torch.tensor([0, 0]), "expected every live slot once, got slot 0 twice"),
        (np.array([1, 2]), "expected numbers below 2, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^slots: {sentence}$"):
            buffer.accept(slots, 0)
    buffer.accept(torch.tensor([-1, 0, -1]), 0)


@pytest.mark.parametrize("read", [True, False])
def test_a_layer_that_missed_a_round(read: bool, request: pytest.FixtureRequest) -> None:
    """Refused, or where numbers are not read, left as it is, while other slots are flushed."""
    if not read:
        request.getfixturevalue("unread")
    buffer = kda.DraftBuffer(3, 2, 1, 1, 4, 4, layers=2, entries=8)
    pools, both = torch.zeros(2, 3, 1, 4, 4), torch.tensor([0, 2])
    x, beta = torch.ones(2, 2, 1, 4) / 2, torch.ones(2, 2, 1)
    for layer in (0, 1):
        buffer.step(x, x, x, 0 * x, beta, pools[layer], both, layer=layer)
    buffer.accept(both, 1)
    for layer, slots in ((0, both), (1, both[1:])):  # slot 0 misses a round of layer 1
        n = len(slots)
        buffer.step(x[:n], x[:n], x[:n], 0 * x[:n], beta[:n], pools[layer], slots, layer=layer)
    sentence = r"^layer: expected every layer to step in every round of slot 0, got one without$"
    if read:
        for call in (lambda: buffer.accept(both, 1), lambda: buffer.flush(pools, both)):
            with pytest.raises(ValueError, match=sentence):
                call()
        assert not pools.any()
        buffer.flush(pools, both[1:])
    else:
        buffer.flush(pools, both)
    assert not pools[:, :2].any() and torch.equal(pools[0, 2], pools[1, 2]) and pools[0, 2].sum() == 4
    buffer.reset(both[:1])
    for layer in (0, 1):
        buffer.step(x[:1], x[:1], x[:1], 0 * x[:1], beta[:1], pools[layer], both[:1], layer=layer)
    buffer.accept(both[:1], 1)
    buffer.flush(pools, both[:1])
    assert torch.equal(pools[:, 0], pools[:, 2])


def test_counts_as_integers_and_lists() -> None:
    """Where accept_len is an argument."""
    x, beta, results = torch.ones(2, 3, 1, 4) / 2, torch.ones(2, 3, 1), []
    for m in (torch.tensor([2, 2]), np.int64(2), 2, [2, 2], (2, 2)):
        pool, a, b = torch.zeros(2, 1, 4, 4), *(kda.new_records(2, 3, 1, 1, 4, 4) for _ in range(2))
        kda.verify_kvbuffer(x, x, x, 0 * x, beta, pool, a)
        kda.flush_verify_kvbuffer(x, x, x, 0 * x, beta, pool, b, m, last=a)
        kda.flush_kvbuffer(pool, b, m)
        kda.flush_kvbuffer_all_layers(pool[None], kda.Records(*(y[None] for y in b[:3])), m)
        kda.flush_kvbuffer(pool, b, m, state_indices=torch.tensor([1, 0]))
        results.append(pool)
    assert results[0].any() and all(torch.equal(x, results[0]) for x in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    """Records are float32, so no call falls back to ``reference``, which alone takes float64."""
    results = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            one = Alone(channels=3)
            made = [*one.buffer.records[:3], one.buffer._rows, *kda.new_records(1, 2, 1, 1, 4, 4)[:3]]
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(x.dtype == torch.float32 for x in made)
        one.step(3)
        one.buffer.accept(ZERO, 2)
        one.buffer.flush(one.pool, ZERO)
        results.append(one.pool)
    assert same_bits(*results)

"""Verify, flush and flush_verify with CUDA tensors: bitwise promises, rings, large memory, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from drafting import NAN, alike, drafts, given, int32, random_trees, tokens
from places import DEVICE, HERE, LARGE, all_same, captured, far_pool, flood, only_cuda, without_synchronisation
from rounds import flush, flush_verify, records_of, rounds, two, verify
from support import Tensor, same_bits

pytestmark = pytest.mark.usefixtures("kernels")

# ---- bitwise promises ----


@pytest.mark.parametrize(
    ("T", "sizes"),
    [
        (7, {"K": 128, "V": 100}),
        (7, {"K": 20, "V": 36, "v_first": False, "dtype": torch.bfloat16}),
        (4, LARGE),
        (7, LARGE),
        (11, {"K": 64, "V": 128}),
        (3, {"K": 128, "V": 64, "dtype": torch.bfloat16}),
    ],
)
def test_company_changes_no_bit(T: int, sizes: dict[str, Any]) -> None:
    """A request alone, in a batch, elsewhere in it, among padding (where blocks are larger), in two runs."""
    N = 40
    p, following, h0 = two(T, N=N, **sizes)
    trees, accepted = random_trees(N, T), torch.arange(N).int() % (T + 1)

    def results(order: list[int]) -> list[Tensor]:
        """Outputs by rows, then what is kept by slots."""
        rows = [max(n, 0) for n in order]
        first, second = (tokens(x, rows) for x in (p, following))
        m, tree, at = accepted[rows], trees[rows], HERE(int32(*order))
        a, b, ring = (records_of(HERE, p, e, slots=N, ring=e > T)._replace(indices=at) for e in (T, T, 25))
        apart, fused, circling = (HERE(h0) for _ in range(3))
        o = [verify(HERE, first, apart, a, parents=tree, state_indices=at)]
        flush(HERE, first, apart, a, m, parents=tree, state_indices=at)
        o.append(flush_verify(HERE, second, fused, b, m, a, last_parents=tree, state_indices=at))
        for call, length in ((first, 0 * m), (second, m)):
            o.append(flush_verify(HERE, call, circling, ring, length, state_indices=at))
        flush(HERE, first, circling, ring, m, state_indices=at)
        return [*o, apart, fused, circling, *a[:3], *b[:3], *ring[:3], ring.ring_first, ring.ring_count]

    whole = results(list(range(N)))
    assert all_same(results(list(range(N))), whole)
    for order in ([0], [39], [3, 36], [-1, 5, -1, -1, 9], list(range(N))[::-1], [-1] * 300 + [7]):
        live = [n for n in order if n >= 0]
        for i, (x, y) in enumerate(zip(results(order), whole, strict=True)):
            rows = [n >= 0 for n in order] if i < 4 else live
            assert same_bits(x[rows], y[live]), (order, i)


def test_nan_stays_in_its_request() -> None:
    p, following, h0 = two(4, N=5, K=64, V=64)
    sick = h0.clone()
    sick[3, 1] = NAN
    well, got = (rounds(HERE, *x, alike(3, 5)) for x in ((p, following, h0), (flood(p, 1), following, sick)))
    for name, x in got.items():
        assert same_bits(x[[0, 2, 4]], well[name][[0, 2, 4]]), name
        assert name in ("k", "a") or x[1].isnan().any(), name
    assert same_bits(got["o"][3, :, 0], well["o"][3, :, 0]), "nor does it leave its head"


@pytest.mark.parametrize(("N", "T"), [(0, 3), (3, 0)])
def test_nothing_to_do(N: int, T: int) -> None:
    p, h0 = drafts(T, N=N)
    a, b, pool = records_of(HERE, p, 3, slots=N), records_of(HERE, p, 3, slots=N), HERE(h0)
    assert verify(HERE, p, pool, a).shape == (N, T, 2, 36)
    flush_verify(HERE, p, pool, b, alike(0, N), a)
    flush(HERE, p, pool, a, alike(0, N))
    assert same_bits(pool.cpu(), h0) and all(x.isnan().all() for x in (*a[:3], *b[:3]))


# ---- rings, large memory, refusals ----


@only_cuda
@pytest.mark.parametrize("told", ["before", "between"])
@pytest.mark.parametrize("sizes", [LARGE, {"K": 20, "V": 36}])
@pytest.mark.parametrize(("T", "N"), [(1, 3), (4, 3), (4, 70), (9, 3)])
def test_rounds_on_a_ring_without_a_pause(T: int, N: int, sizes: dict[str, Any], told: str) -> None:
    """Kernels start, and some read, while earlier ones still run: they must read what they would after a pause. The
    numbers of accepted drafts are written before all rounds, or between consecutive rounds."""
    p, h0 = drafts(T, N=N, dtype=torch.bfloat16, **sizes)
    accepted, m = torch.randint(T + 1, (16, N), device=DEVICE).int(), HERE(alike(0, N))
    call, start = HERE.call(p, state_indices=torch.randperm(N).int()), HERE(h0)
    ring = records_of(HERE, p, 4 * T + 1, slots=N, ring=True, fill=0.0)._replace(indices=call["state_indices"])
    pool, empty = start.clone(), [x.clone() for x in given(ring)]

    def serve(pause: bool) -> list[Tensor]:
        outputs = []
        for length in accepted:
            now = m.copy_(length) if told == "between" else length
            outputs.append(kda.flush_verify_kvbuffer(**call, state=pool, records=ring, accept_len=now))
            if pause:
                torch.cuda.synchronize()
        return outputs

    def begin_again() -> None:
        for x, y in zip([pool, *given(ring)], [start, *empty], strict=True):
            x.copy_(y)

    outputs = serve(pause=True)
    expected = [x.clone() for x in (*outputs, pool, *given(ring))]
    assert not same_bits(pool, start), "no state was written"
    results: list[Tensor] = []

    def run() -> None:
        results[:] = serve(pause=False)

    graph = captured(run)
    for turn in range(30):
        begin_again()
        graph.replay()
        assert all_same([*results, pool, *given(ring)], expected), turn


@only_cuda
def test_a_step_of_a_buffer_waits_for_nothing() -> None:
    p, h0 = drafts(4)
    call, pool, slots = HERE.call(p, accept_len=alike(4)), HERE(torch.cat([h0, h0])), HERE(int32(4, -1, 0))
    buffer = kda.DraftBuffer(6, 4, 1, 2, 20, 36, device=DEVICE)
    with without_synchronisation():
        for _ in range(3):
            buffer.step(**call, state=pool, slots=slots)
            buffer.flush(pool, slots, call["accept_len"])


@only_cuda
@pytest.mark.parametrize("far", ["float32", "bfloat16", "layers", "u", "k", "alpha"])
def test_slots_beyond_2_31_elements(far: str) -> None:
    """In the pool, in all layers' pools, in each array of the records."""
    p, following, h0 = two(2, N=1, K=64, V=64)
    h0, at = h0.to(torch.bfloat16 if far == "bfloat16" else torch.float32), {"state_indices": int32(2)}
    expected = rounds(HERE, p, following, h0, int32(2))
    records = records_of(HERE, p, 2)._replace(indices=HERE(int32(2)))
    if far in records._fields:
        records = records._replace(**{far: far_pool(getattr(records, far))})
    pool = HERE(h0.expand(3, -1, -1, -1)) if far in records._fields else far_pool(HERE(h0))
    for x in (pool, getattr(records, far, pool)):
        x[0].fill_(NAN)
    pool[2] = HERE(h0)[0]
    assert same_bits(verify(HERE, p, pool, records, **at), expected["o"])
    if far == "layers":
        kept = kda.Records(*(x[2].expand(3, 1, *x.shape[1:]).contiguous() for x in records[:3]))
        kda.flush_kvbuffer_all_layers(pool[:, None], kept, HERE(int32(2)))
    else:
        pool[1].fill_(NAN)
        more = records_of(HERE, p, 2, slots=1)
        flush_verify(HERE, following, pool, more, int32(2), records, **at)
        assert same_bits(pool[2], expected["fused"][0]) and pool[:2].isnan().all()
        pool[2] = HERE(h0)[0]
        flush(HERE, p, pool, records, int32(2), **at)
        assert pool[:2].isnan().all() and getattr(records, far, pool)[0].isnan().all()
    assert same_bits(pool[2], expected["state"][0])


def test_refusals_are_sentences() -> None:
    p, h0 = drafts(2)
    (long, _), (wide, _) = drafts(17), drafts(2, K=257)
    pool, a, b, m = HERE(h0), records_of(HERE, p, 17), records_of(HERE, p, 17), alike(1)
    with pytest.raises(ValueError, match=r"^q: expected K in 1\.\.256, got 257"):
        kda.decode(**HERE.call(wide))
    with pytest.raises(ValueError, match="16"):
        verify(HERE, long, pool, a)
    with pytest.raises(ValueError, match="16"):
        flush_verify(HERE, long, pool, a, m, b)

"""Verify, flush and flush_verify with CUDA tensors: bitwise promises, graphs, streams, large memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from drafting import NAN, alike, drafts, given, int32, random_trees, same_records, tokens
from places import DEVICE, HERE, LARGE, POOLS, all_same, captured, far_pool, flood, only_cuda, without_synchronisation
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


def test_inputs_are_never_written() -> None:
    p, following, h0 = two(4, dtype=torch.bfloat16, K=64, V=64)
    trees, m, slots = random_trees(3, 4), int32(-1, 4, 99), int32(2, -1, 0)
    pool, a, b = HERE(h0), records_of(HERE, p, 4), records_of(HERE, p, 4)
    first = HERE.call(p, parents=trees, state_indices=slots, has_initial_state=torch.tensor([True, True, False]))
    second = HERE.call(following, last_parents=trees, state_indices=slots, accept_len=m)
    before = HERE(first), HERE(second)
    kda.verify_kvbuffer(**first, state=pool, records=a)
    recorded = HERE(a)
    kda.flush_verify_kvbuffer(**second, state=pool, records=b, last=a)
    kda.flush_kvbuffer(pool, a, second["accept_len"], state_indices=first["state_indices"], parents=first["parents"])
    assert all_same(first, before[0]) and all_same(second, before[1]) and same_records(a, recorded)


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("tree", [False, True])
def test_all_layers_are_a_loop_over_layers(dtype: torch.dtype, tree: bool) -> None:
    layers, T = 5, 4
    p, h0 = drafts(T, K=64, V=100)
    pools = HERE(torch.randn(layers, 6, *h0.shape[1:]).to(dtype))
    records = records_of(HERE, p, T, fill=0.5, layers=layers)
    for x in records[:3]:
        x.uniform_(0, 0.5)
    records, start = records._replace(indices=HERE(int32(2, -1, 0))), pools.clone()
    shared = HERE({"state_indices": int32(5, 1, 3), **({"parents": random_trees(3, T, 1)} if tree else {})})
    kda.flush_kvbuffer_all_layers(pools, records, HERE(int32(3, 4, 2)), **shared)
    for layer in range(layers):
        one = records._replace(**{n: getattr(records, n)[layer] for n in ("u", "k", "alpha")})
        pool = start[layer].clone()
        kda.flush_kvbuffer(pool, one, HERE(int32(3, 4, 2)), **shared)
        assert same_bits(pool, pools[layer]) and not same_bits(pool, start[layer])
    assert same_bits(pools[:, [0, 1, 2, 4]], start[:, [0, 1, 2, 4]])


@pytest.mark.parametrize(("N", "T"), [(0, 3), (3, 0)])
def test_nothing_to_do(N: int, T: int) -> None:
    p, h0 = drafts(T, N=N)
    a, b, pool = records_of(HERE, p, 3, slots=N), records_of(HERE, p, 3, slots=N), HERE(h0)
    assert verify(HERE, p, pool, a).shape == (N, T, 2, 36)
    flush_verify(HERE, p, pool, b, alike(0, N), a)
    flush(HERE, p, pool, a, alike(0, N))
    assert same_bits(pool.cpu(), h0) and all(x.isnan().all() for x in (*a[:3], *b[:3]))


# ---- the device: graphs, streams, large memory, refusals ----


def shuffle(call: dict[str, Any], slots: int, T: int) -> None:
    """Writes new numbers into the memory of a call, with padding in some requests, without waiting for the device."""
    for name in ("q", "k", "v", "g", "beta"):
        call[name].normal_()
    N = len(call["state_indices"])
    call["state_indices"].copy_(torch.randperm(slots + 3, device=DEVICE)[:N] - 3)
    call["accept_len"].random_(-1, T + 2)
    call["parents"].random_(-2, T)


def one_of_each(memory: dict[str, Any]) -> list[Tensor]:
    """Runs verify, flush, flush_verify with two buffers, and a step of a ring, on one memory; returns what they
    wrote."""
    call, pool, ring_pool, a, b, ring = (memory[n] for n in ("call", "pool", "ring_pool", "a", "b", "ring"))
    inputs = {n: x for n, x in call.items() if n not in ("parents", "accept_len")}
    parents, m, at = call["parents"], call["accept_len"], call["state_indices"]
    a, b, ring = (r._replace(indices=at) for r in (a, b, ring))
    o = [kda.verify_kvbuffer(**inputs, state=pool, records=a, parents=parents)]
    kda.flush_kvbuffer(pool, a, m, state_indices=at, parents=parents)
    o.append(kda.flush_verify_kvbuffer(**inputs, state=pool, records=b, accept_len=m, last=a, last_parents=parents))
    o.append(kda.flush_verify_kvbuffer(**inputs, state=ring_pool, records=ring, accept_len=m))
    return [*o, pool, ring_pool, *a[:3], *b[:3], *given(ring)]


def memory_of(N: int, T: int, slots: int, seed: int = 0, **sizes: Any) -> dict[str, Any]:
    p, _ = drafts(T, N=N, seed=seed, **sizes)
    _, pool = drafts(1, N=slots, seed=seed, **sizes)
    more = {"state_indices": torch.arange(N).int(), "accept_len": alike(T, N), "parents": random_trees(N, T, seed)}
    kept = {n: records_of(HERE, p, T, slots=slots, fill=0.0) for n in "ab"}
    ring = records_of(HERE, p, 3 * T, slots=slots, ring=True, fill=0.0)
    return {"call": HERE.call(p, **more), "pool": HERE(pool), "ring_pool": HERE(pool), **kept, "ring": ring}


@only_cuda
def test_graphs() -> None:
    """Captured once, replayed with new content of the memory."""
    slots, T = 9, 4
    captive, eager = (memory_of(5, T, slots, K=64, V=64, dtype=torch.bfloat16) for _ in range(2))
    start, results = HERE(captive), []

    def call() -> None:
        results[:] = one_of_each(captive)

    graph = captured(call)
    for name in ("pool", "ring_pool", "a", "b", "ring"):
        for x, y in zip(given_tensors(captive[name]), given_tensors(start[name]), strict=True):
            x.copy_(y)
    torch.manual_seed(0)
    for turn in range(1000):
        shuffle(captive["call"], slots, T)
        for name, x in captive["call"].items():
            if isinstance(x, Tensor):
                eager["call"][name].copy_(x)
        graph.replay()
        assert all_same(one_of_each(eager), results), turn


def given_tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else given(x)


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
def test_nothing_waits() -> None:
    memory, buffer = memory_of(3, 4, 5), kda.DraftBuffer(5, 4, 1, 2, 20, 36, device=DEVICE)
    call = {n: x for n, x in memory["call"].items() if n not in ("parents", "state_indices", "impl")}
    slots = HERE(int32(4, -1, 0))
    with without_synchronisation():
        for _ in range(3):
            one_of_each(memory)
            buffer.step(**call, state=memory["pool"], slots=slots)
            buffer.flush(memory["pool"], slots, call["accept_len"])


@only_cuda
def test_two_streams_at_once() -> None:
    def work(seed: int) -> list[Tensor]:
        memory = memory_of(32, 8, 40, seed=seed, **LARGE)
        return [x.clone() for _ in range(5) for x in one_of_each(memory)]

    alone = [work(seed) for seed in range(2)]
    memories = [memory_of(32, 8, 40, seed=seed, **LARGE) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    together: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(5):
        for memory, stream, results in zip(memories, streams, together, strict=True):
            with torch.cuda.stream(stream):
                results += [x.clone() for x in one_of_each(memory)]
    torch.cuda.synchronize()
    assert all(all_same(a, b) for a, b in zip(alone, together, strict=True))


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


def refusals() -> dict[str, tuple[type[Exception], str, Callable[[], object]]]:
    p, h0 = drafts(2)
    (long, _), (wide, _) = drafts(17), drafts(2, K=257)
    pool, a, b, m = HERE(h0), records_of(HERE, p, 17), records_of(HERE, p, 17), alike(1)
    away = a._replace(alpha=a.alpha.cpu())
    return {
        "decode 257": (ValueError, r"^q: expected K in 1\.\.256, got 257", lambda: kda.decode(**HERE.call(wide))),
        "verify 17": (ValueError, "16", lambda: verify(HERE, long, pool, a)),
        "flush_verify 17": (ValueError, "16", lambda: flush_verify(HERE, long, pool, a, m, b)),
        "verify records": (ValueError, "^records.alpha: .*got cpu", lambda: verify(HERE, p, pool, away)),
        "flush length": (ValueError, "^accept_len: .*got cpu", lambda: kda.flush_kvbuffer(pool, a, m)),
        "flush records": (ValueError, "^records.alpha: .*got cpu", lambda: flush(HERE, p, pool, away, m)),
        "flush_verify last": (ValueError, "^last.alpha: .*got cpu", lambda: flush_verify(HERE, p, pool, b, m, away)),
        "flush_verify state": (ValueError, "^state: .*got cpu", lambda: flush_verify(HERE, p, h0, a, m, b)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["decode 257", "verify 17", "flush_verify 17", *(
    pytest.param(n, marks=only_cuda)
    for n in ("verify records", "flush length", "flush records", "flush_verify last", "flush_verify state")
)])  # fmt: skip
def test_refusals_are_sentences(name: str) -> None:
    kind, sentence, call = refusals()[name]
    with pytest.raises(kind, match=sentence):
        call()

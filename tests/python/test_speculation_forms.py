"""Speculative decoding in all its forms: with the convolution, for all layers at once, with memory of any shape,
NumPy, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda
import kda.call.graph
import kda.operators
import kda.speculation
from drafting import (
    NAN,
    REQUESTS,
    alike,
    convolved,
    decoded,
    drafts,
    given,
    int32,
    layout,
    near,
    random_trees,
    raw,
    records_for,
    rolled,
    same_records,
    separate,
    tokens,
)  # fmt: skip
from support import Problem, Tensor, assert_close, far_memory, same_bits, take_operators

# ---- with the convolution ----


SIZES: dict[str, dict[str, Any]] = {
    "any": {},
    "any_bf16": {"dtype": torch.bfloat16},
    "large": {"K": 128, "V": 128},
    "small_bf16": {"K": 64, "V": 64, "dtype": torch.bfloat16},
    "large_f16": {"K": 128, "V": 64, "dtype": torch.float16},
    "k_first": {"K": 30, "V": 70, "v_first": False},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("W", "bias"), [(4, True), (3, False), (2, True)])
@pytest.mark.parametrize("T", [1, 3, 7, 12])
def test_fused_convolution_is_the_one_in_front(name: str, W: int, bias: bool, T: int) -> None:
    like, h0 = drafts(T, H=2, **SIZES[name])
    (p, conv), (following, second) = (
        convolved(like, W, bias),
        convolved(drafts(T, H=2, seed=1, **SIZES[name])[0], W, bias),
    )
    plain, state = h0.clone(), h0.clone()
    mtp = conv._replace(state=conv.state.clone())
    o = kda.decode_mtp(**raw(p), state=state, conv=mtp)
    assert same_bits(o, kda.decode(**separate(p, conv, like).keywords, state=plain)) and same_bits(state, plain)
    assert same_bits(mtp.state, rolled(conv, T)), "decode rolls on by all tokens"

    before, a, b = conv.state.clone(), records_for(like, T), records_for(like, T)
    o = kda.verify_kvbuffer(**raw(p), state=h0, records=a, conv=conv)
    assert same_bits(o, kda.verify_kvbuffer(**separate(p, conv, like).keywords, state=h0, records=b))
    assert same_bits(conv.state, before) and same_records(a, b), "verify does not roll it on"
    for m in range(T + 1):
        state, pool, apart = h0.clone(), conv.state.clone(), conv._replace(x=second.x, state=conv.state.clone())
        fused_state, fused = h0.clone(), apart._replace(state=conv.state.clone())
        rows = {"conv_x": conv.x, "conv_state": apart.state, "conv_indices": conv.indices}
        kda.flush_kvbuffer(state, a, alike(m), **layout(p), **rows)
        assert same_bits(apart.state, rolled(conv, m)) and same_bits(pool, conv.state)
        ra, rb = records_for(like, T), records_for(like, T)
        o = kda.verify_kvbuffer(**raw(following), state=state, records=ra, conv=apart)
        last = {"last": a, "accept_len": alike(m), "last_conv_x": conv.x}
        got = kda.flush_verify_kvbuffer(**raw(following), state=fused_state, records=rb, conv=fused, **last)
        assert same_bits(got, o) and same_bits(fused_state, state) and same_bits(fused.state, apart.state)
        assert same_records(ra, rb)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["any", "large"])
def test_fused_convolution_along_trees(name: str) -> None:
    T, W = 9, 4
    like, h0 = drafts(T, **SIZES[name])
    p, conv = convolved(like, W, True)
    parents, records = random_trees(REQUESTS, T, 3), records_for(like, T)
    o = kda.verify_kvbuffer(**raw(p), state=h0, records=records, conv=conv, parents=parents)
    for n in range(REQUESTS):
        for t in range(T):
            path = [t]
            while (before := int(parents[n, path[0]])) >= 0:
                path.insert(0, before)
            chain = conv._replace(x=conv.x[n : n + 1, path], indices=conv.indices[n : n + 1])
            call = p.having(**{name: p.tensors[name][n : n + 1, path] for name in ("g", "beta")})
            plain, state, pool = h0[n : n + 1].clone(), h0.clone(), conv.state.clone()
            near(o[n, t], kda.decode(**separate(call, chain, like).keywords, state=plain)[0, -1])
            m = torch.where(torch.arange(REQUESTS) == n, t + 1, 0).int()
            rows = {"conv_x": conv.x, "conv_state": pool, "conv_indices": conv.indices}
            kda.flush_kvbuffer(state, records, m, parents=parents, **rows)
            assert_close({"final_state": plain}, {"final_state": state[n : n + 1]})
            assert same_bits(pool, rolled(chain, len(path)))


# ---- all layers ----


@pytest.mark.cuda
def test_all_layers_are_a_loop_over_layers() -> None:
    layers, T = 5, 4
    p, h0 = drafts(T)
    x = torch.randn(layers, REQUESTS, T, 2 * 20 + 2 * 36)
    for dtype in (torch.float32, torch.bfloat16):
        pools = torch.randn(layers, 6, *h0.shape[1:]).to(dtype)
        tails = torch.randn(layers, 4, x.shape[3], 3)
        records = records_for(p, T, fill=0.5, layers=layers)._replace(indices=int32(2, -1, 0))
        shared = {"state_indices": int32(5, 1, 3), "conv_indices": int32(0, 3, 2)}
        for more in (shared, {**shared, "parents": random_trees(REQUESTS, T, 1)}):
            at_once, rolled_at_once = pools.clone(), tails.clone()
            kda.flush_kvbuffer_all_layers(
                at_once, records, int32(3, 4, 2), conv_x=x, conv_state=rolled_at_once, **more
            )  # fmt: skip
            for layer in range(layers):
                one = records._replace(**{n: getattr(records, n)[layer] for n in ("u", "k", "alpha")})
                pool, tail = pools[layer].clone(), tails[layer].clone()
                kda.flush_kvbuffer(pool, one, int32(3, 4, 2), conv_x=x[layer], conv_state=tail, **more)
                assert same_bits(pool, at_once[layer]) and same_bits(tail, rolled_at_once[layer])
            assert same_bits(at_once[:, [0, 1, 2, 4]], pools[:, [0, 1, 2, 4]]) and not same_bits(at_once, pools)


# ---- memory ----


@pytest.mark.cuda
def test_slices_and_inputs() -> None:
    """Slices of wider rows: memory before, between and after them is not read or written. Inputs stay as they are."""
    p, h0 = drafts(3, dtype=torch.bfloat16, K=17, V=5)
    wide = {n: torch.full((*x.shape[:-1], x.shape[-1] + 3), NAN, dtype=x.dtype) for n, x in p.tensors.items()}
    cut = {n: wide[n][..., 1:-2].copy_(x) for n, x in p.tensors.items()}
    apart = p.having(**{n: cut[n] for n in ("q", "k", "v", "g", "beta")})
    out = torch.full((REQUESTS, 3, 2, 9), NAN, dtype=torch.bfloat16)
    a, b, pool = records_for(p, 3), records_for(p, 3), torch.full((REQUESTS, 1000), NAN)
    spaced = pool[:, 3 : 3 + h0[0].numel()].view(h0.shape).copy_(h0)
    before = {n: x.clone() for n, x in wide.items()}
    o = kda.verify_kvbuffer(**p.keywords, state=h0, records=a)
    kda.verify_kvbuffer(**apart.keywords, state=spaced, records=b, out=out[..., 2:7])
    assert same_bits(out[..., 2:7], o) and same_records(a, b) and out[..., [0, 1, 7, 8]].isnan().all()
    kept = kda.Records(*(x.clone() if isinstance(x, Tensor) else x for x in a))
    for state in (h0, spaced):
        kda.flush_kvbuffer(state, a, alike(2))
    assert same_bits(spaced, h0) and same_records(a, kept) and pool[:, [0, 1, 2]].isnan().all()
    assert all(same_bits(wide[n], before[n]) for n in wide)


def test_slots_beyond_2_31_elements() -> None:
    """Both of states and of records; only address space is used."""
    p, h0 = drafts(2, N=1)
    stride = 2**30 + 4096
    memory = far_memory(2 * stride + 2**16)
    pool = memory.as_strided((3, *h0.shape[1:]), (stride, *h0.stride()[1:]))
    pool[2] = h0[0]
    near_records, state = records_for(p, 2, 1), h0.clone()
    expected = kda.verify_kvbuffer(**p.keywords, state=h0, records=near_records)
    kda.flush_kvbuffer(state, near_records, int32(2))
    shared = {"state_indices": int32(2)}
    far = [
        far_memory(2 * stride + 2**16).as_strided((3, *x.shape[1:]), (stride, *x.stride()[1:]))
        for x in near_records[:3]
    ]
    records = kda.Records(*far, indices=int32(2))
    assert same_bits(kda.verify_kvbuffer(**p.keywords, state=pool, records=records, **shared), expected)
    assert all(same_bits(x[2], y[0]) for x, y in zip(far, near_records[:3], strict=True))
    kda.flush_kvbuffer(pool, records, int32(2), **shared)
    assert same_bits(pool[2], state[0]) and not pool[:2].any()


def arrays(x: Any) -> Any:
    """NumPy instead of torch."""
    if isinstance(x, tuple):
        return type(x)(*map(arrays, x))
    return x.numpy() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("change", [lambda x: x, arrays], ids=["records of torch", "all NumPy"])
def test_numpy(change: Callable[[Any], Any]) -> None:
    like, h0 = drafts(3)
    _, conv = convolved(like, 4, True)
    results = []
    for to in (lambda x: x, arrays):
        keywords = {n: to(x) for n, x in like.keywords.items()}
        state, kept = to(h0.clone()), to(torch.zeros(REQUESTS, 3, *h0.shape[1:]))
        records, more = (change(records_for(like, 3)) for _ in range(2))
        front, m = to(conv._replace(state=conv.state.clone())), to(int32(2, 0, 3))
        o = [kda.decode_mtp(**{**keywords, "q": None, "k": None, "v": None}, state=state, conv=front, snapshots=kept)]
        o.append(kda.verify_kvbuffer(**keywords, state=state, records=records))
        o.append(kda.flush_verify_kvbuffer(**keywords, state=state, records=more, accept_len=m, last=records))
        rows = {"conv_x": front.x, "conv_state": front.state, "conv_indices": front.indices}
        kda.flush_kvbuffer(state, more, m, **rows)
        buffer, slots = kda.DraftBuffer(4, 3, 1, 2, 20, 36), to(int32(3, -1, 0))
        buffer.records = change(buffer.records)
        pool = to(torch.cat([h0, h0[:1]]))
        o += [buffer.step(**keywords, state=pool, slots=slots, accept_len=n) for n in (0 * m, m)]
        buffer.flush(pool, slots, m)
        results.append([*o, state, kept, pool, front.state, *records[:3], *given(buffer.records)])
    for a, b in zip(*results, strict=True):
        assert isinstance(a, Tensor) or not isinstance(b, Tensor)
        assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize(("N", "T"), [(0, 3), (3, 0), (3, 3)])
def test_nothing_to_do(N: int, T: int) -> None:
    """No requests, requests without tokens, or nothing accepted."""
    p, h0 = drafts(T, N=N)
    if T and N:  # packed, all sequences empty
        p = tokens(p, slice(0, 1)).having(cu_seqlens=torch.zeros(N + 1, dtype=torch.int64))
    a, b, m = records_for(p, 3, N), records_for(p, 3, N), alike(0, N)
    pool, out = h0.clone(), torch.full_like(p.tensors["v"], NAN)
    for call in (
        lambda: kda.decode_mtp(**p.keywords, state=pool, out=out),
        lambda: kda.verify_kvbuffer(**p.keywords, state=pool, records=a, out=out),
        lambda: kda.flush_verify_kvbuffer(**p.keywords, state=pool, records=a, accept_len=m, last=b, out=out),
    ):
        out.fill_(NAN)
        assert call() is out and not out.any(), "rows beyond the last sequence are zeros"
    kda.flush_kvbuffer(pool, a, m)
    assert same_bits(pool, h0) and all(x.isnan().all() for x in (*a[:3], *b[:3]))


@pytest.mark.cuda
def test_new_values_in_the_same_metadata() -> None:
    """Only the current content of an array counts."""
    p, h0 = drafts(4)
    slots, m, parents = int32(0, 1, 2), alike(0), random_trees(REQUESTS, 4)
    records, pool = records_for(p, 4), h0.clone()
    for turn in range(5):
        slots.copy_(torch.randperm(REQUESTS))
        m.copy_(torch.randint(0, 5, (REQUESTS,)))
        parents.copy_(random_trees(REQUESTS, 4, turn))
        before = pool.clone()
        mine = records._replace(indices=slots)
        o = kda.verify_kvbuffer(**p.keywords, state=pool, records=mine, state_indices=slots, parents=parents)
        kda.flush_kvbuffer(pool, mine, m, state_indices=slots, parents=parents)
        expected, states = decoded(p, before[slots.long()], parents)
        near(o, expected)
        for n, accepted in enumerate(m.tolist()):
            assert_close({"final_state": states[accepted][n]}, {"final_state": pool[slots[n]]})


# ---- torch.compile ----

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def loop(p: Problem, following: Problem, conv: kda.Conv, state: Tensor, kept: Tensor, pool: Tensor) -> tuple[Any, ...]:
    """Every function, on memory of its own call."""
    records, more = records_for(p, 3, fill=0.0), records_for(p, 3, fill=0.0)
    buffer, m, slots = kda.DraftBuffer(4, 3, 1, 2, 20, 36), int32(2, 0, 3), int32(3, -1, 0)
    o = [kda.decode_mtp(**raw(following), state=state, conv=conv, snapshots=kept)]
    into = {
        "snapshots": pool,
        "snapshot_slots": int32(-1, -1, 3, *[-1] * 6).view(3, 3),
        "state_indices": int32(0, 1, 2),
    }
    o.append(kda.decode_mtp(**p.keywords, state=pool, update_state=False, **into))
    o.append(kda.verify_kvbuffer(**p.keywords, state=state, records=records, parents=int32(-1, -1, 0).expand(3, 3)))
    rows = {"conv_x": conv.x, "conv_state": conv.state, "conv_indices": conv.indices}
    kda.flush_kvbuffer(state, records, m, **rows)
    o.append(kda.flush_verify_kvbuffer(**p.keywords, state=state, records=more, accept_len=m, last=records))
    kda.flush_kvbuffer_all_layers(state[None], kda.Records(*(x[None] for x in more[:3])), m)
    o += [buffer.step(**p.keywords, state=pool, slots=slots, accept_len=n) for n in (0 * m, m)]
    counts = buffer.records.ring_count.clone()
    buffer.flush(pool, slots, m)
    return *(x + 1 for x in o), *records[:3], *given(buffer.records), counts


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend: str) -> None:
    p, h0 = drafts(3)
    following, conv = convolved(p, 4, True)
    torch._dynamo.reset()
    results = []
    for function in (loop, torch.compile(loop, fullgraph=True, backend=backend)):
        own = [h0.clone(), torch.zeros(REQUESTS, 3, *h0.shape[1:]), torch.cat([h0, h0[:1]])]
        front = conv._replace(state=conv.state.clone())
        results.append([*function(p, following, front, *own), *own, front.state])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_operators_are_proper(monkeypatch: pytest.MonkeyPatch) -> None:
    p, h0 = drafts(3)
    following, conv = convolved(p, 4, True)
    take_operators(monkeypatch)
    calls: list[tuple[str, dict[str, Any]]] = []
    graph = kda.call.graph
    monkeypatch.setattr(graph, "run_operator", lambda name, **a: calls.append((name, graph.apart(a))))
    loop(p, following, conv, h0, torch.zeros(REQUESTS, 3, *h0.shape[1:]), torch.cat([h0, h0[:1]]))
    assert {name for name, _ in calls} == {"decode_mtp", "verify", "flush", "flush_verify"}
    for name, arguments in calls:
        torch.library.opcheck(getattr(torch.ops.kda, name).default, (), arguments, test_utils=OPCHECKS)


def test_batches_of_any_size_compile_once() -> None:
    def step(buffer: kda.DraftBuffer, pool: Tensor, slots: Tensor, m: Tensor, **inputs: Any) -> Tensor:
        o: Tensor = buffer.step(**inputs, state=pool, slots=slots, accept_len=m)
        return o + 1

    torch._dynamo.reset()
    buffers, pools = (
        [kda.DraftBuffer(8, 4, 1, 2, 20, 36) for _ in range(2)],
        [torch.zeros(8, 2, 36, 20) for _ in range(2)],
    )
    functions = step, torch.compile(step, fullgraph=True, backend="aot_eager")
    last = torch.zeros(8, dtype=torch.int32)  # tokens of the slots' last rounds
    for turn, (N, T) in enumerate(((3, 4), (5, 2), (2, 3), (8, 4))):
        p, slots = drafts(T, N=N, seed=turn)[0], torch.randperm(8)[:N].int()
        m, last[slots] = torch.randint(0, 3, (N,)).int().minimum(last[slots]), T
        for x in (slots, m, *(p.tensors[n] for n in ("q", "k", "v", "g", "beta"))):
            for dimension in range(min(x.ndim, 2)):
                torch._dynamo.mark_dynamic(x, dimension)
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            o = [f(b, s, slots, m, **p.keywords) for f, b, s in zip(functions, buffers, pools, strict=True)]
        assert same_bits(*o) and same_bits(*pools) and same_records(*(b.records for b in buffers))

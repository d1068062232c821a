"""Calls of prefill, decode and speculation in context: a second device, threads, torch.compile, memory, and the first
call of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kda
from drafting import alike, drafts, int32
from places import DEVICE, HERE, LARGE, all_same, only_cuda
from rounds import records_of
from support import Problem, Tensor, same_bits


@only_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices() -> None:
    p, h0 = drafts(2)
    there, m, a = h0.to("cuda:1"), HERE(alike(1)), records_of(HERE, p, 2)
    calls = {
        "state": lambda: kda.decode(**HERE.call(p), state=there),
        "out": lambda: kda.verify_kvbuffer(**HERE.call(p), state=HERE(h0), out=p.tensors["v"].to("cuda:1")),
        "records.u": lambda: kda.flush_kvbuffer(HERE(h0), a._replace(u=a.u.to("cuda:1")), m),
        "accept_len": lambda: kda.flush_kvbuffer(HERE(h0), a, m.to("cuda:1")),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected device cuda:0 .*got cuda:1"):
            call()
    other = HERE.call(p, state=h0)
    o = kda.decode(**{n: x.to("cuda:1") if isinstance(x, Tensor) else x for n, x in other.items()})
    assert same_bits(o.cpu(), kda.decode(**other).cpu()), "whichever is current"


# ---- concurrent calls ----


def served(p: Problem, h0: Tensor, seed: int) -> list[Tensor]:
    """Some rounds on a ring, and plain decode."""
    T, (H, K), (N, HV, V) = p.tensors["q"].shape[1], p.tensors["q"].shape[2:], h0.shape[:3]
    buffer, pool = kda.DraftBuffer(N, T, H, HV, K, V, entries=3 * T, device=DEVICE), HERE(h0)
    slots, lengths = HERE(torch.arange(N).int()), torch.Generator().manual_seed(seed)
    o = []
    for turn in range(6):
        m = HERE(torch.randint(0, T + 1, (N,), generator=lengths).int() * bool(turn))
        o.append(buffer.step(**HERE.call(p), state=pool, slots=slots, accept_len=m))
    buffer.flush(pool, slots, m)
    return [*o, kda.decode(**HERE.call(p), state=pool), pool]


@pytest.mark.parametrize("sizes", [{}, LARGE])
def test_threads_with_streams_of_their_own(sizes: dict[str, int]) -> None:
    problems = [drafts(4, N=8, seed=seed, **sizes) for seed in range(8)]
    alone = [served(*x, seed) for seed, x in enumerate(problems)]

    def work(seed: int) -> list[Tensor]:
        if DEVICE.type != "cuda":
            return served(*problems[seed], seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            got = served(*problems[seed], seed)
            torch.cuda.current_stream().synchronize()
            return got

    with ThreadPoolExecutor(4) as threads:
        for seed, got in enumerate(threads.map(work, [*range(8)] * 3)):
            assert all_same(got, alone[seed % 8]), seed


# ---- torch.compile ----


def rounds(p: dict[str, Any], pool: Tensor, kept: Tensor, slots: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Every function, between operations of torch."""
    a, b = (kda.new_records(3, 4, 1, 2, 20, 36, device=DEVICE) for _ in range(2))
    buffer = kda.DraftBuffer(5, 4, 1, 2, 20, 36, device=DEVICE)
    at = {"state_indices": slots}
    o = [kda.decode(**p, state=pool, **at), kda.decode_mtp(**p, snapshots=kept, accepted=m)]
    o += [kda.prefill(**p, state=pool, **at), kda.chunk_kda(**p)[0]]
    o.append(kda.verify_kvbuffer(**p, state=pool, records=a, **at))
    kda.flush_kvbuffer(pool, a, m, **at)
    o.append(kda.flush_verify_kvbuffer(**p, state=pool, records=b, accept_len=m, last=a, **at))
    kda.flush_kvbuffer_all_layers(pool[None], kda.Records(*(x[None] for x in b[:3])), m, **at)
    o += [buffer.step(**p, state=pool, slots=slots, accept_len=n) for n in (0 * m, m)]
    buffer.flush(pool, slots, m)
    return *(x + 1 for x in o), *a[:3], *b[:3], buffer.records.u.clone(), buffer.records.ring_count.clone()


def test_compiled_equals_eager() -> None:
    p, h0 = drafts(4)
    call, m, slots = HERE.call(p), HERE(int32(2, 4, 1)), HERE(int32(3, -1, 0))
    results = []
    torch._dynamo.reset()
    for function in (rounds, torch.compile(rounds, fullgraph=True, backend="aot_eager")):
        own = HERE(torch.cat([h0, h0[:2]])), HERE(torch.randn(3, 4, *h0.shape[1:], generator=torch.Generator()))
        results.append([*function(call, *own, slots, m), *own])
    assert all_same(*results)


# ---- memory, and the first call of a process ----


@only_cuda
def test_nothing_is_allocated() -> None:
    """Neither a call nor a new shape allocates memory: 60 shapes, with outputs given. Other processes may use the
    GPU's memory in the meantime, but not every time."""
    free: list[int] = []
    while len(free) < 2 or (free[-1] < free[-2] and len(free) < 8):
        for T in range(1, 16, 4):
            for V in range(4, 64, 4):
                p, h0 = drafts(T, K=20, V=V)
                call, pool, m = HERE.call(p, out=p.tensors["v"]), HERE(h0), HERE(alike(1))
                a, b = records_of(HERE, p, T), records_of(HERE, p, T)
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                kda.decode(**call, state=pool)
                kda.prefill(**call, state=pool)
                kda.verify_kvbuffer(**call, state=pool, records=a)
                kda.flush_kvbuffer(pool, a, m)
                kda.flush_verify_kvbuffer(**call, state=pool, records=b, accept_len=m, last=a)
                assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[-2]


@only_cuda
def test_nothing_is_compiled_at_run_time() -> None:
    """With the driver's compiler off, and nothing on PATH."""
    if torch.cuda.get_device_capability()[0] not in (8, 9, 10):
        pytest.skip("newer than all that the library has machine code for")
    code = """
import torch, kda
x = torch.ones(1, 4, 2, 64, device="cuda") / 8
drafts, pool, m = (x, x, x, -x, x[..., 0]), torch.zeros(1, 2, 64, 64, device="cuda"), torch.ones(1, device="cuda").int()
first, second = (kda.new_records(1, 4, 2, 2, 64, 64, device="cuda") for _ in range(2))
kda.decode(*drafts, pool)
kda.decode(*(y[:, :1] for y in drafts), pool, impl="cuda_decode_sweep")
kda.prefill(*drafts, pool)
kda.verify_kvbuffer(*drafts, pool, first)
kda.flush_kvbuffer(pool, first, m)
kda.flush_verify_kvbuffer(*drafts, pool, second, m, last=first)
torch.cuda.synchronize()
"""
    own = {**os.environ, "PATH": "", "CUDA_DISABLE_PTX_JIT": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=own)

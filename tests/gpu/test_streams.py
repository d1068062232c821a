"""Calls on streams of a GPU, and memory that is kept between calls on several streams.

A call on the wrong stream is seen like this: the right one sleeps, and only then writes an input. Memory that is given
back too early is taken by the next tensors of its stream, which are filled, and then found changed.
tests/python/test_streams.py has what can be shown without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kda
from drafting import drafts, int32
from kda.nn import DraftCache, KDACache, KimiDeltaAttention
from kept import tensors_of
from places import DEVICE, HERE, LARGE, only_cuda
from support import Tensor, make, same_bits

SLEEP = 100_000_000  # cycles, 50 ms or more: far longer than the host takes for all that follows


class Other:
    """A tensor as another library would have it."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape, self.dtype, self.ndim = x, x.shape, x.dtype, x.ndim

    def reshape(self, *shape: int) -> Other:
        return Other(self.x.reshape(*shape))

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def as_is(x: Tensor) -> Tensor:
    return x


KINDS: dict[str, Callable[[Tensor], Any]] = {"torch": as_is, "other": Other}
kinds = pytest.mark.parametrize("kind", KINDS)


def step(kind: str, late: torch.cuda.Stream, **options: Any) -> None:
    """A decode step whose queries are written late on a stream. It is called on the current stream, with the options,
    and its outputs are read on the late one."""
    p, h0 = drafts(1, N=64, **LARGE)
    call = HERE.call(p)
    expected = kda.decode(**call, state=HERE(h0))
    q, state, out = torch.zeros_like(call["q"]), HERE(h0), torch.zeros_like(call["v"])
    torch.cuda.synchronize()
    with torch.cuda.stream(late):
        torch.cuda._sleep(SLEEP)
        q.copy_(call["q"])
    given = {**call, "q": q, "state": state, "out": out}
    given = {name: KINDS[kind](x) if isinstance(x, Tensor) else x for name, x in given.items()}
    kda.decode(**given, **options)
    with torch.cuda.stream(late):
        read = out.clone()
    torch.cuda.synchronize()
    assert same_bits(out.cpu(), expected.cpu()), "in the end"
    assert same_bits(read.cpu(), expected.cpu()), "in the order of the stream"


@only_cuda
@kinds
def test_a_call_runs_on_torchs_current_stream(kind: str) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(kind, stream)


FORMS: dict[str, Callable[[torch.cuda.Stream], Any]] = {
    "stream of torch": lambda stream: stream,
    "handle": lambda stream: stream.cuda_stream,
    "stream of CuPy": lambda stream: SimpleNamespace(ptr=stream.cuda_stream),
    "CUDA's protocol": lambda stream: SimpleNamespace(__cuda_stream__=lambda: (0, stream.cuda_stream)),
}


@only_cuda
@kinds
@pytest.mark.parametrize("form", FORMS)
def test_a_call_runs_on_the_given_stream(kind: str, form: str) -> None:
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    step(kind, stream, stream=FORMS[form](stream))
    assert torch.cuda.current_stream() == before


@only_cuda
@kinds
@pytest.mark.parametrize("handle", [0, 1])
def test_the_default_stream_is_given(kind: str, handle: int) -> None:
    default = torch.cuda.default_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        step(kind, default, stream=handle)


@only_cuda
def test_indices_of_another_library_wait_on_their_stream() -> None:
    """What is beside tensors of torch is asked for the stream of the call, too."""
    p, h0 = drafts(1, N=64, **LARGE)
    call, slots = HERE.call(p), torch.arange(63, -1, -1, device=DEVICE, dtype=torch.int32)
    expected = kda.decode(**call, state=HERE(h0), state_indices=slots)
    late, theirs, state = torch.zeros_like(slots), torch.cuda.Stream(), HERE(h0)

    class Theirs(Other):
        def __dlpack__(self, **options: Any) -> Any:
            with torch.cuda.stream(theirs):  # their current one
                return super().__dlpack__(**options)

    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(SLEEP)
        late.copy_(slots)
    with torch.cuda.stream(torch.cuda.Stream()):
        o = kda.decode(**call, state=state, state_indices=Theirs(late))
    torch.cuda.synchronize()
    assert same_bits(o.cpu(), expected.cpu())


@only_cuda
def test_a_stream_of_another_device_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    p, h0 = drafts(1)
    with pytest.raises(ValueError, match=r"^stream: expected one of cuda:0 like the arrays, got one of cuda:1"):
        kda.decode(**HERE.call(p), state=HERE(h0), stream=torch.cuda.Stream("cuda:1"))


# ---- workspaces without an allocator of torch ----


def prompt() -> tuple[dict[str, Any], Tensor]:
    p = make(1, 2048, 4, 1, 128, 128, dtype=torch.bfloat16, gate="softplus", beta="sigmoid", v_first=True)
    call = HERE.call(p.having(initial_state=None))
    del call["impl"]
    return call, HERE(p.tensors["initial_state"])


@only_cuda
@pytest.mark.parametrize("given", [False, True], ids=["current stream", "given stream"])
def test_a_workspace_from_the_driver(given: bool) -> None:
    call, h0 = prompt()
    assert kda.workspace_size(**call, state=h0.clone()) > 0
    after = h0.clone()
    expected, stream = kda.prefill(**call, state=after), torch.cuda.Stream()
    others = {name: Other(x) if isinstance(x, Tensor) else x for name, x in call.items()}
    states, outputs = [h0.clone() for _ in range(3)], [torch.zeros_like(expected) for _ in range(3)]
    torch.cuda.synchronize()
    for state, out in zip(states, outputs, strict=True):  # one after another in the same memory
        if given:
            kda.prefill(**others, state=Other(state), out=Other(out), stream=stream.cuda_stream)
        else:
            with torch.cuda.stream(stream):
                kda.prefill(**others, state=Other(state), out=Other(out))
    torch.cuda.synchronize()
    for state, out in zip(states, outputs, strict=True):
        assert same_bits(out.cpu(), expected.cpu()) and same_bits(state.cpu(), after.cpu())


def test_without_torch() -> None:
    """Arrays in memory of the driver, in a process that cannot import torch."""
    script = Path(__file__).with_name("without_torch.py")
    done = subprocess.run(
        [sys.executable, str(script), DEVICE.type], env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["decode: right", "prefill: right"]


# ---- memory that is kept between calls ----


def dropped(make_owner: Callable[[], Any], use: Callable[[Any], Tensor]) -> tuple[Tensor, int]:
    """Uses an owner of memory on stream A, where it was made, then late on stream B, and drops it. Returns the output
    on B, and how many bytes were changed of tensors that A made meanwhile."""
    A, B = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(A):
        owner = make_owner()
        use(owner)
    B.wait_stream(A)
    with torch.cuda.stream(B):
        torch.cuda._sleep(SLEEP)
        o = use(owner)
    if isinstance(owner, KDACache):
        owner.record_stream(B)  # for what it shows
    sizes = sorted({x.untyped_storage().nbytes() for x in tensors_of(owner)})
    assert sizes
    del owner
    with torch.cuda.stream(A):
        theirs = [torch.full((n,), 7, dtype=torch.uint8, device=DEVICE) for n in sizes for _ in range(6)]
    torch.cuda.synchronize()
    return o, sum(int((x != 7).sum()) for x in theirs)


def layer_and_tokens(T: int) -> tuple[KimiDeltaAttention, Tensor]:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(hidden_size=2048, num_heads=16, head_dim=128, device=DEVICE, dtype=torch.bfloat16)
    return layer.eval(), torch.randn(64, T, 2048, device=DEVICE, dtype=torch.bfloat16)


@only_cuda
def test_a_cache_moves_to_another_stream_and_is_dropped() -> None:
    layer, x = layer_and_tokens(1)
    cache = layer.new_cache(64)

    def use(cache: KDACache) -> Tensor:
        o: Tensor = layer(x, cache=cache)[0]
        return o

    with torch.no_grad():
        use(cache)
        expected = use(cache)
        for _ in range(3):
            o, changed = dropped(lambda: layer.new_cache(64), use)
            assert not changed and same_bits(o.cpu(), expected.cpu())


@only_cuda
@pytest.mark.parametrize("fused", [True, False])
def test_drafts_move_to_another_stream_and_are_dropped(fused: bool) -> None:
    layer, x = layer_and_tokens(4)
    cache = layer.new_cache(64)

    def use(calls: DraftCache) -> Tensor:
        o: Tensor = layer(x, cache=calls)[0]
        calls.accept(3)
        return o

    with torch.no_grad():
        calls = DraftCache(layer, cache, 4, fused=fused)
        use(calls)
        expected = use(calls)
        for _ in range(3):
            kept = layer.new_cache(64)
            torch.cuda.synchronize()
            o, changed = dropped(lambda kept=kept: DraftCache(layer, kept, 4, fused=fused), use)
            assert not changed and same_bits(o.cpu(), expected.cpu())


@only_cuda
def test_a_buffer_of_drafts_moves_to_another_stream_and_is_dropped() -> None:
    p, h0 = drafts(4, N=3, **LARGE)
    call, slots, m = HERE.call(p), HERE(int32(0, 1, 2)), HERE(int32(3, 2, 1))

    def run(state: Tensor, buffer: kda.DraftBuffer) -> Tensor:
        o: Tensor = buffer.step(**call, state=state, slots=slots)
        buffer.accept(slots, m)
        return o

    def new() -> kda.DraftBuffer:
        return kda.DraftBuffer(3, 4, 1, 2, 128, 128, device=DEVICE)

    state, buffer = HERE(h0), new()
    run(state, buffer)
    expected = run(state, buffer)
    for _ in range(3):
        state = HERE(h0)
        o, changed = dropped(new, lambda buffer, state=state: run(state, buffer))
        assert not changed and same_bits(o.cpu(), expected.cpu())

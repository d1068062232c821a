"""Streams of a GPU, as far as they can be told without one: on which a call runs, what arrays of other libraries are
asked for, and for which streams kept memory is noted. tests/gpu/test_streams.py runs them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import tvm_ffi

import kda
from drafting import alike, drafts, int32
from kda.call import library as door
from kda.call import streams
from kda.layer import step
from kda.nn import DraftCache
from kept import tensors_of
from layer_model import make, tokens
from serving_calls import CALLS, tensors
from support import Tensor, same_bits

GPU = 3


class Elsewhere:
    """An array of another library that says it is on a GPU, and notes for which streams it was asked."""

    asked: ClassVar[list[Any]] = []

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape, self.dtype, self.ndim = x, x.shape, x.dtype, x.ndim

    def reshape(self, *shape: int) -> Elsewhere:
        return Elsewhere(self.x.reshape(*shape))

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        assert stream != 0, "which DLPack does not allow"
        if stream != -1:  # nobody waits
            self.asked.append(stream)
        return self.x.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, GPU


def elsewhere(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Elsewhere(x)
    return type(x)(*map(elsewhere, x)) if hasattr(x, "_fields") else x


@contextmanager
def told() -> Iterator[list[int]]:
    """Lists the streams that the binding has for calls on the GPU."""
    found: list[int] = []
    kda.info()  # loads it
    library = door._library

    class Noting:
        def __getattr__(self, name: str) -> Any:
            function = getattr(library, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if name in library.operators:
                    found.append(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", GPU)))
                return function(*args, **kwargs)

            return call

    Elsewhere.asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "_library", Noting())
        yield found


def decode(stream: Any = None) -> tuple[Tensor, Tensor]:
    p, h0 = drafts(1)
    out = torch.zeros_like(p.tensors["v"])
    given = {name: elsewhere(x) for name, x in p.keywords.items()}
    back = kda.decode(**given, state=Elsewhere(h0), out=Elsewhere(out), stream=stream)
    assert type(back) is Elsewhere and back.x is out
    return out, kda.decode(**p.keywords, state=drafts(1)[1])


HANDLES: list[tuple[Any, int]] = [
    (7, 7),
    (0, 0),
    (1, 1),
    (np.int64(9), 9),
    (SimpleNamespace(ptr=11), 11),
    (SimpleNamespace(cuda_stream=13, ptr=1), 13),
    (SimpleNamespace(__cuda_stream__=lambda: (0, 15), cuda_stream=1), 15),
]


@pytest.mark.parametrize(("stream", "handle"), HANDLES, ids=range(len(HANDLES)))
def test_a_stream_is_a_handle_or_has_one(stream: Any, handle: int) -> None:
    with told() as found:
        got, expected = decode(stream)
    assert found[0] == handle and set(Elsewhere.asked) == {handle or 1} and same_bits(got, expected)
    assert tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", GPU)) == 0, "after the call, it is as before"


def test_without_one_it_is_torchs_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with told() as found:
        decode()
    assert found[0] == 0 and set(Elsewhere.asked) == {1}, "torch has not used a GPU: CUDA's default stream"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(streams, "raw_stream", lambda index: 20 + index)
    with told() as found:
        got, expected = decode()
    assert found[0] == 20 + GPU and set(Elsewhere.asked) == {20 + GPU} and same_bits(got, expected)
    monkeypatch.setattr(streams, "torch", None)
    with told() as found:
        decode()
    assert found[0] == 0 and set(Elsewhere.asked) == {1}, "torch is not installed"


def test_a_given_stream_is_torchs_current_one_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces that torch allocates belong to it."""
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("external", handle, device))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: ("default", index))

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", current)
    for stream, wanted in ((7, ("external", 7, GPU)), (0, ("default", GPU)), (1, ("default", GPU))):
        with told() as found:
            decode(stream)
        assert entered.pop() == wanted and not entered and found[0] == stream


@pytest.mark.parametrize(
    "wrong", [-1, True, "7", 7.0, object(), SimpleNamespace(ptr=None), 1 << 63, torch.zeros(2), torch.cuda.Stream]
)
def test_what_is_no_stream_is_named(wrong: Any) -> None:
    for function in (kda.decode, kda.verify_kvbuffer):
        p, h0 = drafts(1)
        given = {name: elsewhere(x) for name, x in p.keywords.items()}
        with pytest.raises(
            ValueError, match=r"^stream: expected a handle, or an object with __cuda_stream__, cuda_stre"
        ):
            function(**given, state=Elsewhere(h0), stream=wrong)


@pytest.mark.parametrize("function", [kda.decode, kda.prefill, kda.decode_mtp], ids=lambda f: f.__name__)
def test_arrays_on_the_cpu_have_none(function: Callable[..., Any]) -> None:
    p, h0 = drafts(1)
    with pytest.raises(ValueError, match=r"^stream: expected None for arrays on the CPU, got int"):
        function(**p.keywords, state=h0, stream=7)
    buffer = kda.DraftBuffer(3, 1, 1, 2, 20, 36)
    for call in (lambda: buffer.step(**p.keywords, state=h0, slots=int32(0, 1, 2), stream=7),
                 lambda: buffer.flush(h0, int32(0, 1, 2), stream=7)):  # fmt: skip
        with pytest.raises(ValueError, match=r"^stream: expected None, as a buffer is used on torch's current stream"):
            call()


@pytest.mark.parametrize(
    "wrong", [torch.Tensor, np.ndarray, [1.0], object()], ids=["class", "NumPy's", "list", "object"]
)
def test_what_is_no_array_is_named_with_a_stream_as_well(wrong: Any) -> None:
    p, h0 = drafts(1)
    given = {name: elsewhere(x) for name, x in p.keywords.items()}
    for function in (kda.decode, kda.prefill, kda.decode_mtp):
        out = Elsewhere(torch.zeros_like(p.tensors["v"]))
        with pytest.raises(ValueError, match=r"^k: expected an array"):
            function(**{**given, "k": wrong}, state=Elsewhere(h0), out=out, stream=7)


# ---- every function that takes a stream ----

OUTPUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "norm_gate": lambda kw: {"out": torch.zeros_like(kw["x"])},
    "causal_conv1d_update": lambda kw: {"out": torch.zeros_like(kw["x"])},
    "prefill_f32": lambda kw: {
        name: torch.zeros_like(x) for name, x in zip("owu", kda.prefill_f32(**copied(kw)), strict=True)
    },
}
TAKE = [name for name in CALLS if "stream" in inspect.signature(CALLS[name]()[0]).parameters]


def copied(keywords: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(keywords)


def test_these_functions_take_one() -> None:
    """All that can do without allocating an array, which must be one of torch or NumPy."""
    names = {name.split(",")[0] for name in TAKE}
    assert names == {
        "prefill", "decode", "fused_decode", "decode_mtp", "verify_kvbuffer", "flush_kvbuffer", "flush_verify_kvbuffer",
        "causal_conv1d_update", "norm_gate", "prefill_f32",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*TAKE, "flush_kvbuffer_all_layers"])
def test_all_arrays_are_ready_on_the_stream(name: str) -> None:
    function, kw = CALLS[name]()
    kw = {n: x.detach() if isinstance(x, Tensor) else x for n, x in kw.items()}
    kw |= OUTPUTS.get(name, lambda _: {})(kw)
    expected, other = copied(kw), copied(kw)
    function(**expected)
    arrays = {n: x for n, x in tensors(other)}
    with told() as found:
        function(**{n: elsewhere(x) for n, x in other.items()}, stream=7)
    assert set(found) == {7}
    assert Elsewhere.asked.count(7) >= len(arrays) and set(Elsewhere.asked) == {7}
    assert any(not same_bits(x, y) for (_, x), (_, y) in zip(tensors(kw), tensors(other), strict=True)), "written"
    for (where, x), (_, y) in zip(tensors(expected), tensors(other), strict=True):
        assert same_bits(x, y), where


INDICES = {
    "prefill": ("state_indices", "checkpoint_slots"),
    "decode": ("state_indices",),
    "decode_mtp": ("state_indices",),
    "fused_decode": ("state_indices",),
    "flush_kvbuffer": ("accept_len",),
    "flush_verify_kvbuffer": ("accept_len",),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_of_another_library_beside_tensors_of_torch(name: str) -> None:
    function, kw = CALLS[name]()
    given = {n: elsewhere(x) if n in INDICES[name] else x for n, x in copied(kw).items()}
    with told() as found:
        function(**given)
    assert set(found) == {0} and set(Elsewhere.asked) == {1}, "asked for the stream of the call"
    assert len(Elsewhere.asked) >= len(INDICES[name])


def test_an_exporter_of_old() -> None:
    """Without max_version, which came with DLPack 1.0."""

    class Old(Elsewhere):
        def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
            self.asked.append(stream)
            return self.x.__dlpack__()

    p, h0 = drafts(1)
    with told() as found:
        out = torch.zeros_like(p.tensors["v"])
        kda.decode(**p.keywords, state=Old(h0), out=Old(out), stream=7)
    assert set(found) == {7} and 7 in Elsewhere.asked
    assert same_bits(out, kda.decode(**p.keywords, state=drafts(1)[1]))


# ---- memory that is kept between calls ----


class Noted:
    """Pretends that tensors are on a GPU, and lists what is recorded for which stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.recorded = 1, list[tuple[int, Tensor]]()
        for module in (streams, step):
            patch.setattr(module, "raw_stream", lambda index: self.current)
        patch.setattr(streams, "_on_gpu", lambda x: isinstance(x, Tensor))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=self.current))
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.recorded.append((stream.cuda_stream, x)))

    def take(self) -> dict[int, set[int]]:
        """Addresses of the memory that was recorded since, by stream."""
        found: dict[int, set[int]] = {}
        for stream, x in self.recorded:
            found.setdefault(stream, set()).add(x.untyped_storage().data_ptr())
        self.recorded.clear()
        return found


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


def held(x: Any, without: tuple[Any, ...] = ()) -> set[int]:
    """Addresses of the memory that an object holds."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(x, without)}


def test_every_buffer_of_a_step_is_noted_for_every_stream(noted: Noted) -> None:
    for config in ({}, {"use_full_rank_gate": True}, {"num_v_heads": 4}, {"gate_bias": True}):
        layer, x = make(**config), tokens(2, 1, 48)
        cache = layer.new_cache(2)
        with torch.no_grad():
            layer(x, cache=cache)
            memory = cache.step_memory
            assert memory is not None and memory.users is None and not noted.take(), "there are no streams on the CPU"
            memory.users = streams.Users()
            own = held(memory) - held([cache.state, cache.conv])
            assert len(own) >= 2
            for stream, wanted in ((1, {1: own}), (1, {}), (2, {2: own}), (1, {}), (2, {})):
                noted.current = stream
                layer(x, cache=cache)
                assert cache.step_memory is memory and noted.take() == wanted


def test_drafts_are_noted(noted: Noted) -> None:
    for fused in (True, False):
        layer, x = make(), tokens(2, 3, 48)
        cache = layer.new_cache(2)
        calls = DraftCache(layer, cache, 3, fused=fused)
        for stream, is_new in ((1, True), (2, True), (2, False), (1, False)):
            noted.current = stream
            rows = held(calls._rows)
            own = held(calls, (cache,)) - rows
            with torch.no_grad():
                layer(x, cache=calls)
            used = (own if is_new else set()) | (rows if fused else set())
            assert noted.take() == ({stream: used} if used else {})
            rows = held(calls._rows)
            assert rows and rows < held(calls, (cache,))
            calls.accept(1)
            assert noted.take() == ({} if fused else {stream: rows}), "the rows of the call are new memory"
            noted.current = stream + 10
            calls.flush()
            assert noted.take() == {stream + 10: rows | (own if is_new else set())}
            calls.flush()
            assert not noted.take()


def test_a_buffer_of_drafts_is_noted(noted: Noted) -> None:
    p, h0 = drafts(2)
    slots = int32(0, 1, 2)
    buffer = kda.DraftBuffer(3, 2, 1, 2, 20, 36, channels=112)
    own = held(buffer)
    assert len(own) >= 7
    operations: list[Callable[[], Any]] = [
        lambda: buffer.step(**p.keywords, state=h0, slots=slots),
        lambda: buffer.accept(slots, alike(1)),
        lambda: buffer.flush(h0, slots),
        lambda: buffer.reset(slots),
    ]
    for stream, operation in enumerate(operations, 5):
        noted.current = stream
        operation()
        assert noted.take() == {stream: own}
    operations[3]()
    assert not noted.take()


def test_owners_tell_the_allocator_of_a_stream(noted: Noted) -> None:
    """For replays of a graph, which nobody sees."""
    layer = make()
    cache = layer.new_cache(2)
    calls, buffer, stream = (
        DraftCache(layer, cache, 3),
        kda.DraftBuffer(3, 2, 1, 2, 20, 36),
        SimpleNamespace(cuda_stream=9),
    )
    cache.record_stream(stream)  # type: ignore[arg-type]
    assert noted.take() == {9: held(cache)}
    calls.record_stream(stream)  # type: ignore[arg-type]
    assert noted.take() == {9: held(calls, (layer,))}
    buffer.record_stream(stream)
    assert noted.take() == {9: held(buffer)}
    without = make(use_short_conv=False).new_cache(1)
    without.record_stream(stream)  # type: ignore[arg-type]
    assert noted.take() == {9: held(without)}


def test_numbers_of_a_context_are_noted(noted: Noted) -> None:
    from kda.cp import Context

    context: Any = object.__new__(Context)
    context._tensors = {}
    cpu = torch.device("cpu")
    for stream, recorded in ((1, 1), (1, 0), (2, 1), (1, 0)):
        noted.current = stream
        numbers = context.tensor([0, 3], cpu, torch.int64)
        assert numbers.tolist() == [0, 3] and len(noted.recorded) == recorded
        assert noted.take() == ({stream: held(numbers)} if recorded else {})


def test_copies_of_an_owner_know_no_stream(noted: Noted) -> None:
    users, x = streams.Users(), torch.zeros(1)
    users.note(x, lambda: [x])
    for other in (copy.deepcopy(users), copy.copy(users), pickle.loads(pickle.dumps(users))):
        assert users.told == {1} and other.told == set()


def test_nothing_is_noted_where_torch_compiles_or_watches(noted: Noted) -> None:
    from torch._subclasses import FakeTensorMode

    torch._dynamo.reset()
    users, x = streams.Users(), torch.zeros(1)

    def use(x: Tensor) -> Tensor:
        users.note(x, lambda: [x])
        return x + 1

    torch.compile(use, backend="eager", fullgraph=True)(x)
    with FakeTensorMode():
        use(torch.zeros(1))
    assert not noted.recorded
    use(x)
    assert len(noted.recorded) == 1
    torch._dynamo.reset()


def test_tables_of_sglang_belong_to_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from kda.plugs import sglang_kernel

    now = [1]
    monkeypatch.setattr(sglang_kernel, "raw_stream", lambda index: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    source, made = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0)), list[int]()
    kept = sglang_kernel._Kept()
    for stream, count in ((1, 1), (1, 1), (2, 2), (2, 2), (1, 3)):
        now[0] = stream
        assert kept.get(source, "key", lambda *_: made.append(now[0]) or now[0]) == stream
        assert len(made) == count
    kept.get(source, "other", lambda *_: made.append(0))
    assert len(made) == 4

"""Bad arguments of the functions for speculative decoding give a message that names the Python argument, with nothing
written, or the answer for plain copies of the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda
from support import Tensor, make, on_cpu
from test_bad_input import CHANGES, OPTIONS, REFUSALS, SIZES, STRANGE, OnlyDLPack, bits, sentence, unsettled

on_cuda = pytest.mark.cuda

N, T, R = 3, 4, 9
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
WRITTEN = ("state", "out", "snapshots", "conv_state", "records.u", "records.k", "records.alpha", "records.ring_first",
           "records.ring_count", "conv.state")  # fmt: skip


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def records(slots: int = 4, **more: Any) -> kda.Records:
    return kda.new_records(slots, R, 1, 2, 4, 6, **more)._replace(indices=int32(2, 0, 3))


def inputs() -> dict[str, Any]:
    p = make(B=N, T=T, H=1, G=2, K=4, V=6, gate="softplus", beta="sigmoid", v_first=True, scale=0.5, state=False)
    state = {"state": torch.ones(5, 2, 6, 4), "state_indices": int32(4, 0, 2)}
    return {**p.keywords, **state, "out": torch.full_like(p.tensors["v"], 7.0), "num_threads": 1}


def front(kw: dict[str, Any]) -> dict[str, Any]:
    """Replaces q, k, v by raw rows."""
    conv = kda.Conv(torch.ones(N, T, 20), torch.ones(20, 4), torch.ones(20), torch.ones(4, 20, 3), int32(3, 0, 1))
    return {**kw, "q": None, "k": None, "v": None, "conv": conv}


def flush(layers: tuple[int, ...] = ()) -> dict[str, Any]:
    given = {"state": torch.ones(*layers, 5, 2, 6, 4), "state_indices": int32(4, 0, 2), "accept_len": int32(2, 0, 4)}
    conv = {"conv_x": torch.ones(*layers, N, T, 20), "conv_state": torch.ones(*layers, 4, 20, 3)}
    more = {"parents": int32(-1, 0, 1, 1).expand(N, T).contiguous(), "conv_indices": int32(3, 0, 1), "num_threads": 1}
    return {**given, **conv, **more, "records": records(layers=layers[0] if layers else None)}


def tree(name: str = "parents") -> dict[str, Any]:
    return {name: int32(-1, 0, 0, 1).expand(N, T).contiguous()}


def last() -> dict[str, Any]:
    return {"last": records(), "accept_len": int32(2, 0, 4)}


GOOD: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "decode_mtp": (
        "decode_mtp",
        lambda: {**front(inputs()), "snapshots": torch.ones(9, 2, 6, 4), "has_initial_state": torch.tensor([True] * N),
                 "snapshot_slots": torch.arange(-3, 9).view(N, T).int(), "update_state": True},
    ),
    "decode_mtp accepted": (
        "decode_mtp", lambda: {**inputs(), "snapshots": torch.ones(N, T, 2, 6, 4), "accepted": int32(1, 2, 4)}
    ),
    "verify": (
        "verify_kvbuffer",
        lambda: {**inputs(), "records": records(), "has_initial_state": torch.tensor([True] * N), **tree()},
    ),
    "verify conv": ("verify_kvbuffer", lambda: {**front(inputs()), "records": records(ring=True), **tree()}),
    "flush": ("flush_kvbuffer", flush),
    "flush all layers": ("flush_kvbuffer_all_layers", lambda: flush((2,))),
    "flush_verify": (
        "flush_verify_kvbuffer",
        lambda: {**inputs(), "records": records(), **last(), **tree(), **tree("last_parents")},
    ),
    "flush_verify conv": (
        "flush_verify_kvbuffer",
        lambda: {**front(inputs()), "records": records(), **last(), "last_conv_x": torch.ones(N, T, 20)},
    ),
    "flush_verify ring": (
        "flush_verify_kvbuffer", lambda: {**inputs(), "records": records(ring=True), "accept_len": int32(0, 0, 0)}
    ),
}  # fmt: skip


def flat(kw: dict[str, Any]) -> dict[str, Any]:
    """Fields of tuples by their names in messages, with copies of all arrays."""
    all_fields: dict[str, Any] = {}
    for n, x in kw.items():
        all_fields |= {f"{n}.{f}": y for f, y in x._asdict().items()} if hasattr(x, "_asdict") else {n: x}
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in all_fields.items()}


def call(name: str, kw: dict[str, Any]) -> Any:
    nested = {n: x for n, x in kw.items() if "." not in n}
    for n, kind in (("records", kda.Records), ("last", kda.Records), ("conv", kda.Conv)):
        fields = {f.partition(".")[2]: x for f, x in kw.items() if f.startswith(f"{n}.")}
        nested |= {n: kind(**fields)} if fields else {}
    return getattr(kda, name)(**nested)


def plain(x: Any) -> Any:
    """A dense copy; if that is impossible, the object itself, to be refused."""
    if isinstance(x, OnlyDLPack):
        x = x.x
    if isinstance(x, np.ndarray) and x.dtype != object:
        x = torch.from_numpy(x.astype(x.dtype.newbyteorder("=")))
    if not isinstance(x, Tensor) or x.is_nested or x.is_quantized:
        return x
    return x.detach().resolve_conj().resolve_neg().to_dense().contiguous().clone()


def contents(kw: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of everything that a call may write."""
    arrays = {n: kw.get(n) for n in WRITTEN}
    return {n: bits(x.x if isinstance(x, OnlyDLPack) else x) for n, x in arrays.items()}


def attempt(case: str, changes: dict[str, Any], names: set[str] | None = None) -> None:
    """Makes one call; an error must be about one of ``names``, by default about what was changed."""
    name, good = GOOD[case]
    kw, copies = {**flat(good()), **changes}, {**flat(good()), **{n: plain(x) for n, x in changes.items()}}
    before = contents(kw)
    try:
        result = call(name, kw)
    except REFUSALS as e:
        assert contents(kw) == before, f"something was written before: {e}"
        sentence(e, names or set(changes))
        return
    expected = call(name, copies)
    result = result.x if isinstance(result, OnlyDLPack) else result
    assert bits(expected) == bits(result) and contents(copies) == contents(kw)


# ---- one bad array ----

ARRAYS = [(case, n) for case, (_, good) in GOOD.items() for n, x in flat(good()).items() if isinstance(x, Tensor)]


@on_cuda
@pytest.mark.filterwarnings("ignore")  # prototypes of torch
@pytest.mark.parametrize(("case", "argument"), ARRAYS)
def test_one_bad_array(case: str, argument: str) -> None:
    for change, to in {**CHANGES, **STRANGE}.items():
        good = flat(GOOD[case][1]())
        try:
            changed = to(good[argument])
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # torch cannot make one
        if unsettled(argument, change):
            continue
        # If two sizes or dtypes do not fit, the library cannot know which one is wrong.
        attempt(case, {argument: changed}, {*good} if change in SIZES or argument in ("q", "conv.x") else None)


# ---- bad options, and arguments that fit nothing else ----


SENTENCES: list[tuple[str, dict[str, Any], str]] = [
    ("verify", {"q": None}, "q: expected an array"),
    ("verify conv", {"q": torch.ones(N, T, 1, 4)}, "q: expected none"),
    ("verify conv", {"out": None, "state": "x"}, "state: expected an array, got 'x'"),
    ("verify conv", {"out": None, "state": torch.ones(3)}, "state: expected 4 dimensions"),
    ("decode_mtp", {"out": None, "state": None}, "out: expected an array with conv and without state"),
    ("verify", {"state": None, "state_indices": None, "has_initial_state": None},
     "state: expected the states to verify from, got none"),
    ("verify", {f"records.{n}": torch.ones(4, 3, *s) for n, s in (("u", (2, 6)), ("k", (1, 4)), ("alpha", (2, 4)))},
     "records.u: expected at least T = 4 entries a slot, got 3"),
    ("verify", {"parents": int32(-1, -1, -1).expand(N, 3)}, "parents: expected shape"),
    ("verify", {n: torch.ones(N, 17, *s) for n, s in (("q", (1, 4)), ("k", (1, 4)), ("v", (2, 6)), ("g", (2, 4)),
                ("beta", (2,)), ("out", (2, 6)))}, "q: expected at most 16 tokens a request, got T = 17"),
    ("verify", {"cu_seqlens": int32(0, 4, 8, 12)}, "cu_seqlens: expected"),
    ("flush", {"accept_len": int32(1, 2)}, "(accept_len|state_indices|records.indices): expected"),
    ("flush", {"accept_len": [1, 2.5, 3]}, "accept_len: expected integers of 0..2147483647, got 2.5"),
    ("flush", {"accept_len": [1, 2]}, "accept_len: expected 3 integers, one for each request, got 2"),
    ("flush", {"accept_len": -1}, "accept_len: expected integers of 0..2147483647, got -1"),
    ("flush", {"accept_len": True}, "accept_len: expected integers of 0..2147483647, got True"),
    ("flush", {"accept_len": 1.0}, "accept_len: expected an array, got 1.0"),
    ("flush", {"accept_len": None}, "accept_len: expected"),
    ("flush", {"conv_x": None}, "conv_state: expected together with conv_x, got conv_state alone"),
    ("flush", {"conv_state": None}, "conv_state: expected together with conv_x, got conv_x alone"),
    ("flush", {"conv_x": None, "conv_state": None}, "conv_indices: expected conv_x with it, got none"),
    ("flush", {"state": torch.ones(2, 5, 2, 6, 4)}, r"records.k: expected 5 dimensions, got 4"),
    ("flush all layers", {"state": torch.ones(5, 2, 6, 4)}, r"state: expected 5 dimensions, got shape \[5, 2, 6, 4\]"),
    ("flush", {"state_v_first": torch.ones(2)}, "state_v_first: expected True or False, got Tensor"),
    ("flush_verify", {"max_tokens": 4}, "max_tokens: expected 0 without a ring, got 4"),
    ("flush_verify ring", {"max_tokens": 3}, r"max_tokens: expected at least T = 4 \(or 0\), got 3"),
    ("flush_verify ring", {"max_tokens": -1}, "max_tokens: expected"),
    ("flush_verify ring", {"max_tokens": 2**40}, "max_tokens: expected"),
    ("flush_verify ring", {"max_tokens": "x"}, "max_tokens: expected"),
    ("flush_verify ring", {"max_tokens": 5}, "records.u: expected a ring of at least 2 x 5 entries, for two rounds"),
    ("flush_verify ring", {"records.ring_first": None}, "records.ring_count: expected together with ring_first"),
    ("flush_verify ring", tree(), "parents: expected none with a ring"),
    ("flush_verify ring", tree("last_parents"), "last_parents: expected none with a ring"),
    ("flush_verify conv", {"last_conv_x": None}, "last_conv_x: expected together with conv.x, got conv.x alone"),
    ("decode_mtp", {"snapshot_slots": None}, "snapshots: expected"),
    ("decode_mtp", {"update_state": torch.ones(2)}, "update_state: expected True or False, got Tensor"),
    ("decode_mtp accepted", {"snapshots": None}, "(accepted|snapshots|snapshot_slots): expected"),
]  # fmt: skip


VALUES: list[tuple[str, dict[str, Any], str]] = [  # not checked on a device
    ("verify", {"records.indices": int32(1, 1, 0)}, "records.indices: expected every live slot once"),
    ("verify", {"records.indices": int32(1, 4, 0)}, "records.indices: expected"),
    ("decode_mtp", {"snapshot_slots": torch.zeros(N, T).int()}, "snapshot_slots: expected every live slot once"),
    ("decode_mtp", {"snapshot_slots": torch.full((N, T), 9).int()}, "snapshot_slots: expected"),
]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [*(pytest.param(*x, marks=on_cuda) for x in SENTENCES), *VALUES],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sentences(case: str, changes: dict[str, Any], message: str) -> None:
    name, good = GOOD[case]
    there = torch.get_default_device()
    kw = {**flat(good()), **{n: x.to(there) if isinstance(x, Tensor) else x for n, x in changes.items()}}
    before = contents(kw)
    with pytest.raises(REFUSALS, match=f"^{message}") as e:
        call(name, kw)
    assert contents(kw) == before
    sentence(e.value, {message.partition(":")[0]})


@on_cuda
@pytest.mark.parametrize("case", GOOD)
def test_one_bad_option(case: str) -> None:
    known = inspect.signature(getattr(kda, GOOD[case][0])).parameters
    for option in ("scale", "lower_bound", "impl", "num_threads", "first_valid_slot", "state_v_first"):
        for value in OPTIONS[option] if option in known else ():
            attempt(case, {option: value})


@on_cuda
def test_tuples() -> None:
    """Something else in place of records or a convolution."""
    for case, argument in (
        ("verify", "records"),
        ("flush", "records"),
        ("flush_verify", "last"),
        ("verify conv", "conv"),
    ):
        name, good = GOOD[case]
        for wrong in ("abc", 3, object(), torch.ones(6), (None,) * 6, [torch.ones(3)] * 5):
            kw = good()
            state = bits(kw["state"])
            with pytest.raises(ValueError) as e:
                getattr(kda, name)(**{**kw, argument: wrong})
            sentence(e.value, {argument})
            assert bits(kw["state"]) == state
    for case in ("flush", "flush all layers", "flush_verify"):
        name, good = GOOD[case]
        with pytest.raises(ValueError, match=r"^records: expected kda\.Records, got NoneType"):
            getattr(kda, name)(**{**good(), "records": None})


# ---- memory that overlaps ----


def inside(x: Tensor, *shape: int) -> Tensor:
    """An array in the memory of x."""
    return x.view(-1).expand(max(x.numel(), 1)).as_strided(shape, torch.empty(shape).stride())


OVERLAPS: list[tuple[str, str, Callable[[dict[str, Any]], Tensor]]] = [
    ("verify", "out", lambda kw: kw["v"]),
    ("verify", "out", lambda kw: inside(kw["state"], N, T, 2, 6)),
    ("verify", "records.u", lambda kw: kw["records.u"][:1].expand(4, R, 2, 6)),
    ("verify", "records.k", lambda kw: inside(kw["records.u"], 4, R, 1, 4)),
    ("verify", "records.alpha", lambda kw: inside(kw["records.u"], 4, R, 2, 4)),
    ("flush", "state", lambda kw: inside(kw["records.u"], 5, 2, 6, 4)),
    ("flush", "state", lambda kw: kw["state"][:1].expand(5, 2, 6, 4)),
    ("flush", "conv_state", lambda kw: inside(kw["conv_x"], 4, 20, 3)),
    ("flush", "conv_state", lambda kw: kw["conv_state"][:1].expand(4, 20, 3)),
    ("flush all layers", "state", lambda kw: kw["state"][:1].expand(2, 5, 2, 6, 4)),
    ("flush_verify", "last.u", lambda kw: kw["records.u"]),
    ("flush_verify ring", "records.ring_count", lambda kw: kw["records.ring_first"]),
    ("flush_verify ring", "accept_len", lambda kw: kw["records.ring_count"][:N]),
    ("decode_mtp", "snapshots", lambda kw: kw["state"].view(-1)[24:].as_strided((4, 2, 6, 4), (48, 24, 4, 1))),
    ("decode_mtp", "conv.state", lambda kw: inside(kw["conv.x"], 4, 20, 3)),
]


@on_cuda
@pytest.mark.parametrize(("case", "argument", "overlapping"), OVERLAPS)
def test_overlapping_memory(case: str, argument: str, overlapping: Callable[[dict[str, Any]], Tensor]) -> None:
    name, good = GOOD[case]
    kw = flat(good())
    kw[argument] = overlapping(kw)
    before = {n: bits(x) for n, x in kw.items()}
    with pytest.raises(ValueError, match=r"^[\w.]+: .*(overlap|apart)"):
        call(name, kw)
    assert {n: bits(x) for n, x in kw.items()} == before


# ---- the buffer ----


@on_cuda
def test_buffer() -> None:
    """Errors call the argument slots; a refused call moves no cursor."""
    kw = {n: x for n, x in inputs().items() if n != "state_indices"}
    kw["accept_len"] = int32(0, 0, 0)
    buffer = kda.DraftBuffer(4, T, 1, 2, 4, 6)
    buffer.records.ring_count.fill_(1)
    state, counts = bits(kw["state"]), buffer.records.ring_count.tolist()
    right = int32(0, 1, 2)
    for slots in (
        *((int32(0, 0, 1), int32(0, 4, 1)) if on_cpu() else ()),
        int32(0, 1),
        right.to(torch.int16),
        right.float(),
        right.tolist(),
        3,
        None,
        "x",
    ):
        for bad in (
            lambda slots=slots: buffer.step(**kw, slots=slots),
            lambda slots=slots: buffer.flush(kw["state"], slots, int32(0, 0, 0)),
        ):
            with pytest.raises(ValueError) as e:
                bad()
            sentence(e.value, {"slots"})
    for slots in ([0, 1], 3, None, "x", torch.zeros(2, 2).int()):
        with pytest.raises(ValueError, match=r"^slots: expected"):
            buffer.reset(slots)
    for bad, name in (({"accept_len": int32(1)}, "accept_len"), ({"state": torch.ones(5, 2, 4, 6)}, "state"),
                      ({"max_tokens": 3}, "max_tokens"), ({"last": records()}, "last.u")):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=name):
            buffer.step(**{**kw, **bad}, slots=int32(0, 1, 2))
    assert bits(kw["state"]) == state and buffer.records.ring_count.tolist() == counts


@pytest.mark.parametrize("make_one", [kda.new_records, kda.DraftBuffer], ids=lambda f: f.__name__)
def test_sizes(make_one: Callable[..., Any]) -> None:
    second = "entries" if make_one is kda.new_records else "max_tokens"
    good = {"slots": 2, second: 3, "H": 1, "HV": 2, "K": 4, "V": 6}
    make_one(**good)
    for name in good:
        for wrong in (-1, "x", 1.5, None):
            with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
                make_one(**{**good, name: wrong})
    with pytest.raises(ValueError, match=r"^layers: expected .*, got -1"):
        kda.new_records(2, 3, 1, 2, 4, 6, layers=-1)
    for wrong in (5, "x", -3):
        with pytest.raises(ValueError, match=r"^entries: expected .*, got "):
            kda.DraftBuffer(2, 3, 1, 2, 4, 6, entries=wrong)
    with pytest.raises(ValueError, match=r"^max_tokens: expected 1\.\.16, got 17"):
        kda.DraftBuffer(2, 17, 1, 2, 4, 6)

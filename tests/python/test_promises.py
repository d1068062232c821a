"""The numerical promises of docs/numerics.md in Python: gradients, and training functions as a whole.
tests/cpp/test_promises.cc tests the operators one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kda
from kda.call.library import batch_invariant
from kda.cp._exchange import same_kernels
from support import Problem, Tensor, cotangents, make, run, same_bits

both = pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda], ids=lambda f: f.__name__)
GATES = ("log", "softplus", "lower_bound")
TOKENWISE = ("q", "k", "v", "g", "beta")


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(same_bits(a[n], b[n]) for n in a)


@pytest.mark.cuda
@both
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("keep", [False, True])
def test_run_to_run(function: Callable[..., Any], gate: str, keep: bool) -> None:
    p = make(2, 150, 2, 2, 32, 40, dtype=torch.bfloat16, gate=gate, beta="sigmoid")
    more = {"disable_recompute": keep} if function is kda.chunk_kda else {}
    first = run(function, p, **more)
    for i in range(10):
        make(1, 10, seed=i)  # so that the allocator returns other memory
        assert equal(first, run(function, p, **more))


@both
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("lengths", [None, [150, 0, 3, 64, 1]])
def test_threads(function: Callable[..., Any], gate: str, lengths: list[int] | None, restored_threads: None) -> None:
    """libkda uses torch's OpenMP, so torch.set_num_threads sets its default number of threads."""
    p = make(3, 150, 1, 3, 32, 100, gate=gate, beta="sigmoid", lengths=lengths)
    results, workspaces = [], []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(run(function, p))
        workspaces.append(kda.workspace_size(*(p.tensors[n] for n in TOKENWISE)))
    assert workspaces[0] < workspaces[1] < workspaces[2], "the library did not see the number of threads"
    assert equal(results[0], results[1]) and equal(results[0], results[2])


def row(p: Problem, results: dict[str, Tensor], b: int) -> tuple[Problem, dict[str, Tensor]]:
    """Row b as a separate problem, and its part of the results."""
    batched = (*TOKENWISE, "initial_state")
    own = {n: x[b : b + 1] for n, x in results.items() if n in ("o", "final_state") or n[1:] in batched}
    return p.having(**{n: p.tensors[n][b : b + 1] for n in batched}), own


def grads_of_row(p: Problem, b: int) -> tuple[Tensor, Tensor]:
    d_o, d_state = cotangents(p)
    return d_o[b : b + 1], d_state[b : b + 1]


@pytest.mark.cuda
@both
@pytest.mark.parametrize("gate", GATES)
def test_batch_invariance(function: Callable[..., Any], gate: str) -> None:
    """A row's outputs and gradients are those that it gets alone. (dA_log and d dt_bias sum over the batch.)"""
    p = make(4, 130, 1, 2, 32, 40, dtype=torch.bfloat16, gate=gate)
    together = run(function, p)
    for b in range(4):
        own, expected = row(p, together, b)
        alone = run(function, own, grads=grads_of_row(p, b))
        assert all(same_bits(expected[n], alone[n]) for n in expected)


@pytest.mark.cuda
@both
def test_packing_invariance(function: Callable[..., Any]) -> None:
    """B rows, or the same sequences packed into one, in any order, followed by a tail."""
    p = make(4, 130, 1, 2, 32, 40, gate="softplus")
    together, order = run(function, p), [2, 0, 3, 1]
    packed = p.having(
        **{
            n: torch.cat([x[order].flatten(0, 1), torch.ones_like(x[0, :7])])[None]
            for n in TOKENWISE
            for x in [p.tensors[n]]
        },
        initial_state=p.tensors["initial_state"][order],
        cu_seqlens=torch.arange(5) * 130,
    )
    d_o, d_state = cotangents(p)
    d_packed = torch.cat([d_o[order].flatten(0, 1), torch.ones_like(d_o[0, :7])])[None]
    got = run(function, packed, grads=(d_packed, d_state[order]))
    for n in {"o", *(f"d{m}" for m in TOKENWISE)} & got.keys():
        assert same_bits(got[n][0, :520].unflatten(0, (4, 130)), together[n][order]), n
        assert not got[n][0, 520:].any(), f"{n} beyond the last sequence"
    for n in {"final_state", "dinitial_state"} & got.keys():
        assert same_bits(got[n], together[n][order]), n


@pytest.mark.cuda
@both
@pytest.mark.parametrize("what", ["q", "k", "v", "g", "beta", "initial_state", "d_o", "d_state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_sequence(function: Callable[..., Any], what: str, value: float) -> None:
    p = make(K=16, V=24, H=1, G=2, gate="log", lengths=[70, 3, 65])
    grads = dict(zip(("d_o", "d_state"), cotangents(p), strict=True))
    clean = run(function, p, grads=(grads["d_o"], grads["d_state"]))
    poisoned = {n: x.clone() for n, x in {**p.tensors, **grads}.items()}
    x = poisoned[what]
    if what in ("initial_state", "d_state"):
        x[1, 1, 0] = value
    else:
        x[(0, 71, slice(None), 0) if x.ndim == 4 else (0, 71, 0)] = value
    got = run(function, p.having(**{n: poisoned[n] for n in p.tensors}), grads=(poisoned["d_o"], poisoned["d_state"]))
    spread = 0
    for n, reference in clean.items():
        states = n in ("final_state", "dinitial_state")
        inside, outside = ([1], [0, 2]) if states else (slice(70, 73), [*range(70), *range(73, 138)])
        a, b = (got[n], reference) if states else (got[n][0], reference[0])
        assert same_bits(a[outside], b[outside]), f"{n} of another sequence"
        spread += int((~a[inside].isfinite()).sum())
    assert spread, "the poison was not swallowed either"


@pytest.mark.cuda
@both
def test_nan_stays_in_its_head(function: Callable[..., Any]) -> None:
    p = make(2, 70, 3, 2, 16, 24, gate="softplus")
    clean = run(function, p)
    v = p.tensors["v"].clone()
    v[0, 40, 2] = float("nan")  # value head 2 belongs to query head 1
    got = run(function, p.having(v=v))
    assert got["o"][0, 40:, 2].isnan().all() and same_bits(got["o"][0, :40], clean["o"][0, :40]), "nor into the past"
    for n in clean.keys() - {"dA_log", "ddt_bias"}:
        dimension = 1 if n in ("final_state", "dinitial_state") else 2
        heads = [0, 2] if n in ("dq", "dk") else [0, 1, 3, 4, 5]
        pick = torch.tensor(heads)
        assert same_bits(got[n].index_select(dimension, pick), clean[n].index_select(dimension, pick)), n
        assert same_bits(got[n][1], clean[n][1]), f"{n} of the other row"


@pytest.mark.cuda
@both
@pytest.mark.parametrize("split", [64, 128, 192])
def test_chunk_split_invariance(function: Callable[..., Any], split: int) -> None:
    """One call equals two calls split at a multiple of 64 with the float32 state carried over, bit for bit."""
    p = make(1, 230, 1, 2, 32, 40, dtype=torch.bfloat16, gate="softplus", beta="sigmoid")
    o, final_state = function(**p.keywords, output_final_state=True)
    head, tail = ({n: p.tensors[n][:, s] for n in TOKENWISE} for s in (slice(split), slice(split, None)))
    o1, state = function(**p.having(**head).keywords, output_final_state=True)
    o2, state = function(**p.having(**tail, initial_state=state).keywords, output_final_state=True)
    assert same_bits(torch.cat([o1, o2], 1), o) and same_bits(state, final_state)


@pytest.mark.cuda
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_of_many_tokens_is_token_by_token(v_first: bool, dtype: torch.dtype) -> None:
    p = make(2, 40, 1, 2, 36, 40, dtype=dtype, gate="softplus", beta="sigmoid", v_first=v_first)
    together, state = (p.tensors["initial_state"].clone() for _ in range(2))
    p = p.having(initial_state=None)
    o = kda.decode(**p.keywords, state=together)
    for t in range(40):
        token = p.having(**{n: p.tensors[n][:, t : t + 1] for n in TOKENWISE})
        assert same_bits(kda.decode(**token.keywords, state=state), o[:, t : t + 1])
    assert same_bits(state, together)


@pytest.mark.cuda
@both
def test_the_future_changes_nothing(function: Callable[..., Any]) -> None:
    p = make(1, 150, 1, 2, 16, 24, gate="softplus")
    o, _ = function(**p.keywords)
    for t in (1, 17, 64, 100):
        later = {
            n: torch.where(torch.arange(150).view(1, -1, *(1,) * (x.ndim - 2)) < t, x, 9.0)
            for n, x in p.tensors.items()
            if n in TOKENWISE
        }
        assert same_bits(function(**p.having(**later).keywords)[0][:, :t], o[:, :t])


def test_batch_invariant_is_what_it_is_anyway() -> None:
    """The switch is per process and returns its old value; on the CPU it changes no bit and no workspace."""
    p = make(2, 150, 2, 2, 32, 40)
    before = run(kda.chunk_kda, p)
    assert not kda.use_batch_invariant()
    try:
        assert kda.use_batch_invariant(True)
        assert equal(before, run(kda.chunk_kda, p))
    finally:
        assert kda.use_batch_invariant(False)
    with pytest.raises(ValueError, match=r"^enabled: expected True or False, got 1$"):
        kda.use_batch_invariant(1)  # type: ignore[arg-type]


# ---- batch invariance of one thread ----


def _setting() -> bool:
    """What calls of this thread take, read by setting it twice."""
    found = kda.use_batch_invariant(False)
    kda.use_batch_invariant(found)
    return found


@pytest.mark.parametrize("already", [False, True])
def test_batch_invariance_of_threads(already: bool) -> None:
    """The first thread leaves while the second is inside, in which it still holds. Others keep their setting, and all
    is as before when both have left."""
    step = threading.Barrier(3, timeout=60)
    inside: dict[str, bool] = {}

    def first() -> None:
        with batch_invariant():
            step.wait()
            inside["first"] = _setting()
            step.wait()
            step.wait()
        step.wait()

    def second() -> None:
        with batch_invariant():
            for _ in range(4):
                step.wait()
            inside["second, alone"] = _setting()
            with batch_invariant():
                pass
            inside["second, after another inside"] = _setting()

    before = kda.use_batch_invariant(already)
    try:
        threads = [threading.Thread(target=f) for f in (first, second)]
        for thread in threads:
            thread.start()
        step.wait()  # both are inside
        step.wait()  # the first has looked
        outside = _setting()
        step.wait()
        step.wait()  # the first has left
        for thread in threads:
            thread.join(60)
        assert inside == dict.fromkeys(("first", "second, alone", "second, after another inside"), True)
        assert outside == already == _setting()
    finally:
        kda.use_batch_invariant(before)


def test_batch_invariance_ends_with_an_error() -> None:
    with pytest.raises(KeyError), batch_invariant():
        assert _setting()
        raise KeyError
    assert not _setting()


def test_only_calls_of_invariant_contexts_ask_for_it() -> None:
    for asks in (True, False):
        with same_kernels(SimpleNamespace(cp_invariant=asks)):  # type: ignore[arg-type]
            assert _setting() == asks
        assert not _setting()

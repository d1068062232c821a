"""Every tensor that a call writes has a higher version afterwards, so that autograd refuses to use what it saved
before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
import kda.convolution
import kda.float32
import kda.operators.stages
import kda.segments
import kda.speculation
import kda.stages
from drafting import alike, drafts, int32
from serving_calls import CALLS, ON_CUDA, tensors
from support import Tensor, make, oracle, take_operators

every_call = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.cuda if n in ON_CUDA else ()) for n in CALLS]
)


@pytest.fixture(params=["eager", "operators"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls go straight to the library, or to the operators that graphs hold."""
    if request.param == "operators":
        take_operators(monkeypatch)
    return str(request.param)


def bits(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


@every_call
def test_what_a_call_writes_has_a_higher_version(name: str, form: str) -> None:
    function, keywords = CALLS[name]()
    given = dict(tensors(keywords))
    before = {n: (bits(x), x._version) for n, x in given.items()}
    function(**keywords)
    changed = {n for n, x in given.items() if bits(x) != before[n][0]}
    raised = {n for n, x in given.items() if x._version > before[n][1]}
    assert changed <= raised, f"{sorted(changed - raised)} were written behind autograd's back"
    assert all("indices" not in n and "slots" not in n and "len" not in n for n in raised), "these are only read"
    if "state" in given or "out" in given:
        assert raised


@pytest.mark.cuda
def test_a_workspace_is_written() -> None:
    p = make(1, 70, state=False, v_first=True)
    size = kda.workspace_size(**p.keywords)
    memory = torch.zeros(size + 256, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 256 :][:size]
    kda.prefill(**p.keywords, workspace=workspace)
    assert workspace._version == 1


@pytest.mark.cuda
def test_draft_buffers() -> None:
    p, h0 = drafts(3)
    (H, K), (HV, V) = p.tensors["q"].shape[2:], p.tensors["v"].shape[2:]
    buffer = kda.DraftBuffer(3, 3, H, HV, K, V)
    slots = int32(0, 1, 2)
    written = [x for x in (*buffer.records, h0) if x is not None]
    for call in (
        lambda: buffer.step(**p.keywords, state=h0, slots=slots, accept_len=alike(0)),
        lambda: buffer.step(**p.keywords, state=h0, slots=slots, accept_len=alike(2)),
    ):
        before = [x._version for x in written]
        call()
        assert all(x._version > b for x, b in zip(written, before, strict=True))
    count, before = buffer.records.ring_count, buffer.records.ring_count._version
    buffer.flush(h0, slots, alike(1))
    assert count._version > before and slots._version == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["decode", "prefill", "causal_conv1d_update"])
def test_backward_refuses_what_was_overwritten(name: str) -> None:
    """The reported bug: a read-out of the state, then the next token in place."""
    function, keywords = CALLS[name]()
    weight = torch.ones(keywords["state"].shape[-1], requires_grad=True)
    loss = (keywords["state"] * weight).sum()
    with torch.no_grad():
        function(**keywords)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_share_their_version() -> None:
    """Layers of one pool."""
    p = make(2, 1, v_first=True)
    pool = torch.stack([p.tensors["initial_state"]] * 2)
    kda.decode(**p.having(initial_state=None).keywords, state=pool[1])
    assert pool._version == 1


def test_a_refused_call_has_written_nothing() -> None:
    p = make(2, 1, v_first=True)
    state, out = p.tensors["initial_state"], torch.zeros_like(p.tensors["v"])
    with pytest.raises(ValueError, match=r"^state_indices: "):
        kda.decode(**p.having(initial_state=None).keywords, state=state, out=out, state_indices=int32(0, 9))
    assert state._version == out._version == 0


@pytest.mark.parametrize("written_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_inference_mode(name: str, written_in: Callable[[], Any], form: str) -> None:
    """Such tensors have no version, and graphs do not save them."""
    with torch.inference_mode():
        function, keywords = CALLS[name]()
    with written_in():
        function(**keywords)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    p = make(2, 1, v_first=True)
    state, out = p.tensors["initial_state"], torch.zeros_like(p.tensors["v"])
    expected = oracle(p)[0]
    weight = torch.ones(16, requires_grad=True)
    loss = (state * weight).sum()
    step = torch.compile(lambda **kw: kda.decode(**kw), fullgraph=True, backend=backend)
    with torch.no_grad():
        step(**p.having(initial_state=None).keywords, state=state, out=out)
    assert torch.allclose(out, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

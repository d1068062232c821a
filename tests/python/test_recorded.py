"""Under torch.jit.trace: a recording holds the operators, so it computes with other numbers and other lengths."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

import kda
import kda.cp
from kda.nn import KDACache, KimiDeltaAttention
from layer_model import make as make_layer
from layer_model import relative, tokens
from serving_calls import CALLS
from support import Tensor, make
from training_calls import TRAINING, leaves_of, loss_of

Call = tuple[Callable[..., Any], dict[str, Any]]


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    """So that what nobody has written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def record(function: Any, *inputs: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about sizes that are compared
        return torch.jit.trace(function, inputs, check_trace=False)


def kinds(recorded: Any) -> set[str]:
    return {node.kind() for node in recorded.inlined_graph.nodes()}


def of_tensors(call: Call) -> tuple[Callable[..., Any], list[Tensor]]:
    """The call as a function of its tensors alone, which returns tensors, and those tensors."""
    function, keywords = call
    flat, form = tree_flatten(keywords)
    at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = [*flat]
        for i, x in zip(at, tensors, strict=True):
            given[i] = x
        results = tree_flatten(function(**tree_unflatten(given, form)))[0]
        found = tuple(x for x in results if isinstance(x, Tensor))
        return found or (tensors[0].clone(),)

    return run, [flat[i] for i in at]


def others(tensors: list[Tensor]) -> list[Tensor]:
    """Other numbers in the same form. A tensor that is given twice stays one; integers mean places and stay."""
    made: dict[int, Tensor] = {}
    for x in tensors:
        made.setdefault(id(x), x.detach() * 0.75 if x.is_floating_point() else x.clone())
    return [made[id(x)] for x in tensors]


@pytest.mark.parametrize("name", [*CALLS, *TRAINING])
def test_functions_without_gradients(name: str) -> None:
    torch.manual_seed(0)
    run, examples = of_tensors((CALLS | TRAINING)[name]())  # type: ignore[operator]
    with torch.no_grad():
        recorded = record(run, *others(examples))
        given, again = others(examples), others(examples)
        expected, got = run(*given), recorded(*again)
    got = got if isinstance(got, tuple) else (got,)
    assert any(kind.startswith("kda") for kind in kinds(recorded))
    assert not any(kind.startswith("prim::Python") for kind in kinds(recorded))
    for a, b in zip((*expected, *given), (*got, *again), strict=True):  # records of drafts begin as NaN
        assert torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))
    if name in TRAINING:
        assert not any(x.isnan().any() for x in got)


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_of_a_recording(name: str) -> None:
    torch.manual_seed(0)
    function, keywords = TRAINING[name]()
    run, examples = of_tensors((function, keywords))
    recorded = record(run, *examples)

    def gradients(f: Callable[..., Any]) -> list[Tensor]:
        given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in examples]
        leaves = leaves_of(dict(enumerate(given)))  # type: ignore[arg-type]
        return list(torch.autograd.grad(loss_of(f(*given)), leaves))

    for a, b in zip(gradients(run), gradients(recorded), strict=True):
        assert torch.equal(a, b)


LAYERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in parts": {"fuse_projections": False},
    "token by token": {"mode": "fused_recurrent"},
    "without convolutions": {"use_short_conv": False},
}


class Outputs(torch.nn.Module):
    def __init__(self, layer: KimiDeltaAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, conv: Tensor | None = None, state: Tensor | None = None) -> Any:
        return self.layer(x, cache=None if state is None else KDACache(conv, state))[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("config", LAYERS)
def test_the_layer_for_other_lengths(config: str, grad: bool) -> None:
    layer = make_layer(**LAYERS[config])
    with torch.set_grad_enabled(grad):
        recorded = record(Outputs(layer), tokens(1, 20, 48))
        for B, T in ((1, 20), (3, 75), (2, 1)):
            x = tokens(B, T, 48, seed=T)
            expected, got = layer(x)[0], recorded(x)
            assert relative(expected, got) < 1e-6
            if grad:
                named = dict(recorded.named_parameters())
                wanted = torch.autograd.grad(loss_of(expected), list(layer.parameters()))
                found = torch.autograd.grad(loss_of(got), [named[f"layer.{n}"] for n, _ in layer.named_parameters()])
                assert max(relative(a, b) for a, b in zip(wanted, found, strict=True)) < 1e-5


@pytest.mark.parametrize("with_gradients", [False, True])
def test_one_recording_with_gradients_and_without(with_gradients: bool) -> None:
    """torch's own check records a second time, without gradients, and compares. So the graph may not depend on them,
    and each kind of example serves both kinds of calls."""
    layer = make_layer()
    with torch.set_grad_enabled(with_gradients), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded: Any = torch.jit.trace(Outputs(layer), tokens(1, 20, 48))
    x = tokens(2, 75, 48).requires_grad_()
    with torch.no_grad():
        assert relative(layer(x)[0], recorded(x)) < 1e-6
    expected, got = (torch.autograd.grad(loss_of(y), x)[0] for y in (layer(x)[0], recorded(x)))
    assert relative(expected, got) < 1e-5


@pytest.mark.parametrize("padding", [0, 5])
def test_masks_are_read_when_a_recording_runs(padding: int) -> None:
    """Also if the example has no padding at all."""
    layer, mask = make_layer(), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :padding] = 0

    class Masked(Outputs):
        def forward(self, x: Tensor, mask: Tensor | None = None, state: Tensor | None = None) -> Any:
            return self.layer(x, attention_mask=mask)[0]

    outputs = Masked(layer)
    other = torch.ones(2, 20, dtype=torch.int64)
    other[0, :9] = 0
    x = tokens(2, 20, 48, seed=1)
    with torch.no_grad():
        recorded = record(outputs, tokens(2, 20, 48), mask)
        assert relative(outputs(x, other), recorded(x, other)) < 1e-6


@pytest.mark.parametrize("T", [1, 5, 20])
def test_a_cache_that_is_given(T: int) -> None:
    """Of one token, which eager calls make in a way of their own, of a few, and of many."""
    layer = make_layer()
    step = Outputs(layer)
    caches = [layer.new_cache(2) for _ in range(3)]
    with torch.no_grad():
        recorded = record(step, tokens(2, T, 48, seed=5), caches[0].conv, caches[0].state)
        for seed in (1, 2):
            x = tokens(2, T, 48, seed=seed)
            expected = step(x, caches[1].conv, caches[1].state)
            got = recorded(x, caches[2].conv, caches[2].state)
            assert relative(expected, got) < 1e-6
    assert relative(caches[1].state, caches[2].state) < 1e-6 and torch.equal(caches[1].conv, caches[2].conv)  # type: ignore[arg-type]


def test_a_saved_recording_runs_in_another_process(tmp_path: Path) -> None:
    layer, x = make_layer(), tokens(1, 70, 48)
    record(Outputs(layer), tokens(1, 20, 48)).save(str(tmp_path / "layer.pt"))
    with torch.no_grad():
        torch.save({"x": x, "want": layer(x)[0]}, tmp_path / "tensors.pt")
    code = f"""
import torch, kda.operators
recorded, tensors = torch.jit.load({str(tmp_path / "layer.pt")!r}), torch.load({str(tmp_path / "tensors.pt")!r})
with torch.no_grad():
    print(float((recorded(tensors["x"]) - tensors["want"]).abs().max()))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


def test_exchanges_are_refused(tmp_path: Path) -> None:
    """Collectives are no operators that a recording could hold."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        p = make(1, 12, state=False)
        context = kda.cp.Context([0, 12])
        names = ("q", "k", "v", "g", "beta")

        def chunk(*inputs: Tensor) -> Any:
            return kda.chunk_kda(*inputs, **p.options, cp_context=context)[0]

        def prefill(*inputs: Tensor) -> Any:
            return kda.prefill(*inputs, **p.options, cp_context=context)

        for function in (chunk, prefill):
            with (
                torch.no_grad(),
                pytest.raises(NotImplementedError, match=r"^torch\.jit\.trace: expected calls without"),
            ):
                record(function, *(p.tensors[n] for n in names))
    finally:
        dist.destroy_process_group()


def test_a_draft_buffer_reads_no_example() -> None:
    """``accept`` would check the lengths of the example, and keep its verdict."""
    buffer = kda.DraftBuffer(2, 4, 1, 1, 8, 8)
    p, state = make(2, 3, 1, 1, 8, 8, state=False, v_first=True), torch.zeros(2, 1, 8, 8)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    with torch.no_grad():
        buffer.step(**p.keywords, state=state, slots=slots)
        record(lambda lengths: (buffer.accept(slots, lengths), lengths + 0)[1], torch.tensor([1, 2], dtype=torch.int32))
        with pytest.raises(ValueError, match="accept_len"):
            buffer.accept(slots, torch.tensor([4, 4], dtype=torch.int32))

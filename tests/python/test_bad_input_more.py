"""Any input, as in test_bad_input.py, for the convolution, segment maps, stages and the float32 prefill."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

import kda
from calls import BASES, WRITTEN, convolution, function
from support import Tensor, rel_rmse
from test_bad_input import CHANGES, MAY_WORK, REFUSALS, SIZES, STRANGE, bits, sentence


def results(name: str, kw: dict[str, Any]) -> list[np.ndarray]:
    """Results in float64, with zeros for what is never written: states of chunks that no sequence has."""
    r = function(name)(**kw)
    r = r if isinstance(r, tuple) else (r,)
    return [torch.as_tensor(x).detach().double().nan_to_num().numpy() for x in r if x is not None]


def plain(x: Any) -> Any:
    """The same numbers in a plain dense array."""
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(np.ascontiguousarray(x))
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return x
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def attempt(name: str, kw: dict[str, Any], changed: dict[str, str]) -> None:
    written = [kw[n] for n in WRITTEN.get(name, ()) if isinstance(kw[n], Tensor)]
    before = [bits(x) for x in written]
    expected_kw = {n: plain(x) for n, x in kw.items()}
    try:
        got = results(name, kw)
    except REFUSALS as e:
        assert [bits(x) for x in written] == before, f"something was written before: {e}"
        anyone = set(changed.values()) & SIZES or {"q", "x", "M"} & set(changed)
        sentence(e, set(kw) if anyone else set(changed))
        return
    for expected, x in zip(results(name, expected_kw), got, strict=True):
        assert expected.shape == x.shape
        assert rel_rmse(torch.from_numpy(expected), torch.from_numpy(x)) < 1e-5


@pytest.mark.parametrize("name", BASES)
def test_good_calls_work(name: str) -> None:
    assert all(np.isfinite(x).all() for x in results(name, BASES[name]()))


ONE_BY_ONE = [(f, n, c) for f in BASES for n, x in BASES[f]().items() if isinstance(x, Tensor) for c in CHANGES]


@pytest.mark.parametrize(("name", "argument", "change"), ONE_BY_ONE)
def test_one_bad_tensor(name: str, argument: str, change: str) -> None:
    kw = BASES[name]()
    try:
        kw[argument] = CHANGES[change](kw[argument])
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch cannot make one")
    attempt(name, kw, {argument: change})


@pytest.mark.filterwarnings("ignore")  # prototypes of torch
@pytest.mark.parametrize("change", STRANGE)
@pytest.mark.parametrize("name", BASES)
def test_strange_arrays(name: str, change: str) -> None:
    for argument in [n for n, x in BASES[name]().items() if isinstance(x, Tensor)]:
        kw = BASES[name]()
        kw[argument] = STRANGE[change](kw[argument])
        try:
            function(name)(**kw)
        except REFUSALS as e:
            sentence(e, {argument})
        else:
            assert change in MAY_WORK, argument


@pytest.mark.parametrize("name", BASES)
def test_a_negated_view_among_numpy_arrays(name: str) -> None:
    arrays = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in BASES[name]().items()}
    for argument, x in arrays.items():
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            kw = {**arrays, argument: torch._neg_view(torch.from_numpy(x))}
            with pytest.raises(ValueError, match=rf"^{argument}: expected "):
                function(name)(**kw)


FLAGS = [torch.tensor([1.0, 2.0]), np.ones(2)]
OPTIONS: dict[str, list[Any]] = {
    "scale": [0, 0.0, math.nan, math.inf, 1e40, 1e-50, "x", [1.0], torch.tensor([1.0, 2.0])],
    "lower_bound": [0.0, math.nan, -math.inf, "x", [1.0]],
    "activation": ["relu", 1, torch.zeros(2), ...],
    "output_final_state": FLAGS,
    "state_v_first": FLAGS,
    "reverse": FLAGS,
    "use_qk_l2norm_in_kernel": FLAGS,
    "allow_neg_eigval": FLAGS,
    "want": ["x", None, 3, ["M"]],
    "chunk_size": [0, 16, 48, 128, -32, "x", None, 2**40, torch.tensor([32, 64])],
    "impl": ["nobody", 3, ..., "cpu_gate"],
    "num_threads": [-1, "x", 1.5, None, 2**63, -(2**70)],
    "first_valid_slot": [-1, "x", 1.5, None, 2**31],
    "cu_seqlens": [
        torch.tensor(x, dtype=torch.int32) for x in ([1, 4, 4, 9], [0, 4, 3, 9], [0, 4, 4, 71], [0, -1, 4, 9], [])
    ]
    + [torch.tensor([0, 4, 4, 2**40]), [0, 4, 4, 9], "x", torch.zeros(2, 2).int()],
    "state_indices": [torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 3], [2, 0, 2], [0, 1], [[2, 0, 1]])]
    + [[2, 0, 1], "x", torch.tensor([2.0, 0.0, 1.0])],
}
ONE_OPTION = [
    pytest.param(f, n, x, id=f"{f}-{n}-{str(x).replace('tensor', '')[:40]}")
    for f in BASES
    for n, values in OPTIONS.items()
    for x in values
    if n in inspect.signature(function(f)).parameters
]


@pytest.mark.parametrize(("name", "option", "value"), ONE_OPTION)
def test_one_bad_option(name: str, option: str, value: Any) -> None:
    kw = {**BASES[name](), option: value}
    before = [bits(kw[n]) for n in WRITTEN.get(name, ())]
    with pytest.raises(REFUSALS) as e:
        function(name)(**kw)
    assert [bits(kw[n]) for n in WRITTEN.get(name, ())] == before
    sentence(e.value, set(kw) if option == "cu_seqlens" else {option})  # it decides the rows of states


@pytest.mark.parametrize("name", BASES)
def test_unknown_and_missing_arguments(name: str) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        function(name)(**BASES[name](), no_such_argument=1)
    kw = BASES[name]()
    del kw[next(iter(kw))]
    with pytest.raises(TypeError, match="missing"):
        function(name)(**kw)


ALIASES = [
    ("causal_conv1d_update", "out", "x"),
    ("prefill_f32", "o", "v"),
    ("prefill_f32", "final_state", "v"),
    ("prefill_f32", "w", "g"),
    ("bwd_intra", "dq", "dk"),
    ("bwd_intra", "dG", "G"),
]


@pytest.mark.parametrize(("name", "written", "other"), ALIASES)
def test_shared_memory(name: str, written: str, other: str) -> None:
    kw = BASES[name]()
    flat, n = kw[other].flatten(), kw[written].numel()
    kw[written] = (flat if flat.numel() >= n else flat.new_zeros(n))[:n].view(kw[written].shape)
    if flat.numel() < n:
        kw[other] = kw[written].flatten()[: flat.numel()].view(kw[other].shape)
    before = {m: bits(x) for m, x in kw.items()}
    with pytest.raises(ValueError, match=r"memory") as e:
        function(name)(**kw)
    sentence(e.value, {written, other})
    assert {m: bits(x) for m, x in kw.items()} == before


def test_gradients_of_the_convolution() -> None:
    """Gradients from torch: with any strides, expanded, or absent."""
    kw = convolution(update=False)
    leaves = {n: kw[n].requires_grad_() for n in ("x", "weight", "bias", "initial_state")}
    for d_y in (torch.ones(()).expand(1, 10, 6), torch.ones(1, 10, 12)[..., ::2], torch.ones(6, 10, 1).transpose(0, 2)):
        y, _ = kda.causal_conv1d(**kw)
        got = torch.autograd.grad(y, list(leaves.values()), d_y)
        expected = torch.autograd.grad(kda.causal_conv1d(**kw)[0], list(leaves.values()), d_y.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    _, last = kda.causal_conv1d(**kw)
    dx, d_state = torch.autograd.grad(last.sum(), (leaves["x"], leaves["initial_state"]))
    assert dx.sum() + d_state.sum() == last.numel()

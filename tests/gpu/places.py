"""Where the tests of this folder run: on KDA_TEST_DEVICE ("cuda" if not set), and at the oracle, in float64 on the
CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kda
from support import Problem, Tensor, assert_close, same_bits

DEVICE = torch.device(os.environ.get("KDA_TEST_DEVICE", "cuda"))
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device (KDA_TEST_DEVICE=cpu: the same tests on the CPU)", allow_module_level=True)
only_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="about streams, graphs and memory of a CUDA device")

POOLS = [torch.float32, torch.bfloat16]
LARGE = {"K": 128, "V": 128}
FORMS: dict[str, dict[str, Any]] = {
    "decays": {"gate": "log", "beta": "activated"},
    "softplus_2sigmoid": {"beta": "2sigmoid"},
    "bounded": {"gate": "lower_bound"},
    "bf16": {"dtype": torch.bfloat16},
    "bf16_bounded_k_first": {"dtype": torch.bfloat16, "gate": "lower_bound", "v_first": False},
    "f16_decays": {"dtype": torch.float16, "gate": "log"},
    "one_group_of_8": {"G": 8},
    "heads_alone": {"H": 3, "G": 1, "dtype": torch.bfloat16},
    "no_norm_scaled": {"l2norm": False, "scale": 0.3},
}


@dataclass(frozen=True)
class Place:
    """``place(x)`` is a copy of x in that place: of a tensor, or of all tensors in a dict, Problem or Records."""

    device: torch.device
    dtype: torch.dtype | None = None  # of all floating point numbers; None keeps their own
    impl: str | None = None

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(self.device, self.dtype if x.is_floating_point() else None, copy=True)
        if isinstance(x, Problem):
            return Problem(self(x.tensors), self(x.options))
        if isinstance(x, dict):
            return {name: self(value) for name, value in x.items()}
        return kda.Records(*map(self, x)) if isinstance(x, kda.Records) else x

    def call(self, p: Problem, slices: bool = False, **more: Any) -> dict[str, Any]:
        """Keywords of a call; with ``slices`` the inputs are those of ``packed``, which a copy would make dense."""
        p = packed(self(p)) if slices else self(p)
        return {**p.keywords, **self(more), "impl": self.impl}


HERE = Place(DEVICE)
ORACLE = Place(torch.device("cpu"), torch.float64, "reference")


def matches(
    scenario: Callable[..., dict[str, Tensor]], *args: Any, what: Any = "", rounding: float = 1.0, **more: Any
) -> dict[str, Tensor]:
    """Asserts that scenario(place, *args, **more) gives the same here as at the oracle, and NaN in the same elements:
    float32 to 1e-5 times ``rounding``, bf16 to 0.003, f16 to 6e-4, or 0.003 where ``rounding`` is not 1. Names of
    outputs must begin with "o"."""
    expected, got = (scenario(place, *args, **more) for place in (ORACLE, HERE))
    for name, x in got.items():
        close(expected[name], x, f"{what} {name}", rounding)
    return got


def close(expected: Tensor, x: Tensor, what: str, rounding: float = 1.0) -> None:
    expected, x = expected.cpu(), x.cpu()
    assert torch.equal(expected.isfinite(), x.isfinite()), f"{what}: not finite where the oracle is, or the reverse"
    kind = "o" if what.split()[-1].startswith("o") else "final_state"
    slack = {torch.float32: rounding, torch.float16: 0.6 if rounding == 1 else 3.0}.get(x.dtype, 0.6)
    finite = {"nan": 0.0, "posinf": 0.0, "neginf": 0.0}
    assert_close({kind: expected.nan_to_num(**finite)}, {kind: x.nan_to_num(**finite)}, slack, what)


def all_same(a: Any, b: Any) -> bool:
    """Do all tensors of two lists or dicts have the same bits?"""
    pairs = zip(*(x.values() if isinstance(x, dict) else x for x in (a, b)), strict=True)
    return all(same_bits(x, y) for x, y in pairs if isinstance(x, Tensor))


def extreme(p: Problem) -> Problem:
    """Raw inputs of the gate that are infinite, or have the same effect."""
    g, random = p.tensors["g"].clone(), torch.rand(p.tensors["g"].shape, generator=torch.Generator().manual_seed(3))
    for bound, value in ((0.4, -torch.inf), (0.3, 3e4), (0.2, -3e4), (0.1, torch.inf)):
        g[random < bound] = value
    return p.having(g=g)


def packed(p: Problem) -> Problem:
    """Makes q, k, v slices of one row per token, as a fused projection leaves them, and g and beta slices of another;
    the rest of the rows is NaN."""

    def slices(names: str) -> dict[str, Tensor]:
        x = [p.tensors[n if n != "b" else "beta"] for n in names]
        flat = [t.flatten(2) for t in x]
        row = torch.full((*flat[0].shape[:2], sum(t.shape[2] for t in flat) + 7), torch.nan).to(flat[0])
        at, cut = 3, {}
        for name, whole, t in zip(names, x, flat, strict=True):
            cut[name if name != "b" else "beta"] = row[..., at : at + t.shape[2]].copy_(t).unflatten(2, whole.shape[2:])
            at += t.shape[2]
        return cut

    return p.having(**slices("qkv"), **(slices("gb") if p.tensors["g"].dtype == p.tensors["beta"].dtype else {}))


def flood(p: Problem, n: int) -> Problem:
    """The problem with NaN in v of request n."""
    return p.having(v=p.tensors["v"].index_fill(0, torch.tensor([n], device=p.tensors["v"].device), torch.nan))


def spaced(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view with the numbers of x, with NaN between its rows and before and after them, and all of that memory."""
    memory = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype, device=x.device)
    view = memory[..., 3:-2].copy_(x)
    return view, memory


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """Inside, torch's own waits raise an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a graph, captured after one run."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def far_pool(near: Tensor, slots: int = 3) -> Tensor:
    """A pool with the shape of ``near``, whose last slot begins beyond 2^31 elements. Only rows that a test writes
    are defined."""
    stride = (1 << 31) // (slots - 1) + 4096
    try:
        memory = torch.empty((slots - 1) * stride + near[0].numel(), dtype=near.dtype, device=near.device)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"needs a larger GPU: {error}")
    return memory.as_strided((slots, *near.shape[1:]), (stride, *near[0].contiguous().stride()))

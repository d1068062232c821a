"""More of bugs.md: drift over long contexts, memory, metadata, threads; and the table itself."""

from __future__ import annotations

import importlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from support import Tensor, assert_close, make, rel_rmse, run, same_bits

on_cuda = pytest.mark.cuda
SERVING = [pytest.param(op, marks=on_cuda) for op in (kda.prefill, kda.decode)]
serving = pytest.mark.parametrize("op", SERVING, ids=lambda f: f.__name__)
HERE = Path(__file__).parent


# ---- the table ----


def find_test(test: str) -> bool:
    """`test_x.py::test_name` is in this folder; `gpu/test_x.py::test_name` and `cpp/test_x.cc:Suite.Name` are in the
    one above."""
    file, _, name = test.replace("::", ":").partition(":")
    path = HERE.parent / file if "/" in file else HERE / file
    if not path.is_file():
        return False
    suite, _, case = name.partition(".")
    pattern = rf"^def {name}\(" if file.endswith(".py") else rf"^(TYPED_)?TEST(_[PF])?\({suite}, {case}\)"
    return re.search(pattern, path.read_text(), re.M) is not None


def marked(test: str) -> bool:
    """Does the test run with CUDA tensors?"""
    file, _, name = test.partition("::")
    module = importlib.import_module(file.removesuffix(".py"))
    marks = [getattr(x, "pytestmark", None) for x in (module, getattr(module, name))]
    return "name='cuda'" in repr(marks)


def test_the_table_is_complete_and_true() -> None:
    lines = [line.strip("|").split("|") for line in (HERE / "bugs.md").read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in cells] for cells in lines[2:]]
    assert [row[0] for row in rows] == [str(n) for n in range(1, 45)]
    named = set()
    for n, bug, covered, waits in rows:
        tests = re.findall(r"`([^`]+)`", covered)
        named |= {t.partition("::")[2] for t in tests}
        assert bug and (tests or waits), f"{n}: neither a test nor what it waits for"
        assert [t for t in tests if not find_test(t)] == [], f"{n}: no such test"
        on_both = set(re.findall(r"`([^`]+)`\+", covered))
        assert on_both == {t for t in tests if "/" not in t and marked(t)}, f"{n}: which run with CUDA tensors"
        assert on_both or "gpu/" in covered or "CUDA" in waits, f"{n}: nothing with CUDA tensors"
    for file in HERE.glob("test_bugs*.py"):
        own = set(re.findall(r"^def (test_bug_\w+)\(", file.read_text(), re.M))
        assert own <= named, f"not in the table: {own - named}"


# ---- long contexts ----


def drift(tokens: list[int], chunked: bool, beta: str = "sigmoid") -> tuple[list[float], float]:
    """Errors of float32 states after each number of tokens, for bfloat16 inputs with slow gates, and the largest
    change of |S|."""
    T = tokens[-1]
    p = make(1, T, 1, 1, 8, 8, dtype=torch.bfloat16, gate="lower_bound", beta=beta, v_first=True, state=False)
    p = p.having(dt_bias=torch.full((8,), -9.0), A_log=torch.zeros(1))  # g about -5 sigmoid(-9): 1600 tokens of memory
    state, exact = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.float64, device="cpu")
    errors, at = [], 0
    for end in tokens:
        part = p.having(**{n: p.tensors[n][:, at:end] for n in ("q", "k", "v", "g", "beta")})
        (kda.prefill if chunked else kda.decode)(**part.keywords, state=state)
        kda.decode(**part.map(lambda x: x.double().cpu()).keywords, state=exact, impl="reference")
        errors.append(rel_rmse(exact, state.cpu()))
        at = end
    return errors, float(exact.abs().max())


@on_cuda
@pytest.mark.parametrize("beta", ["sigmoid", "2sigmoid"])
@pytest.mark.parametrize("chunked", [False, True])
def test_bug_30_logits_in_bfloat16_do_not_drift(chunked: bool, beta: str) -> None:
    """beta stays in float32 between its sigmoid and the state: the error is float32's, and as small at the end as at
    the start."""
    errors, size = drift([1024, 8192, 32768], chunked, beta)
    assert size > 0.1 and max(errors) < 1e-5 and errors[-1] < 4 * errors[0] + 1e-7, errors


@on_cuda
@pytest.mark.parametrize("chunked", [False, True])
def test_bug_31_states_after_a_million_tokens(chunked: bool) -> None:
    errors, size = drift([5_000, 50_000, 500_000, 1_000_000], chunked)
    assert size > 0.1 and max(errors) < 1e-5, errors


# ---- memory ----


def test_bug_37_nothing_is_compiled_at_run_time(tmp_path: Path) -> None:
    """Without a compiler on PATH and without HOME for a cache, the first call works and writes no file."""
    code = """
import torch, kda
x = torch.randn(1, 70, 2, 8, requires_grad=True)
o, _ = kda.chunk_kda(x, x, x, -x.abs(), torch.ones(1, 70, 2), use_qk_l2norm_in_kernel=True)
o.sum().backward()
kda.decode(x.detach(), x.detach(), x.detach(), -x.detach().abs(), torch.ones(1, 70, 2))
"""
    own = {**os.environ, "PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-B", "-c", code], check=True, env=own, cwd=tmp_path)
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.py"))


def test_bug_38_workspace_is_bounded_and_nothing_is_kept() -> None:
    def size(T: int, N: int = 1, num_threads: int = 2) -> int:
        x, cu = torch.empty(1, 1, 2, 64).expand(1, T, 2, 64), torch.arange(N + 1, dtype=torch.int32)
        return kda.workspace_size(x, x, x, x, x[..., 0], cu_seqlens=cu, num_threads=num_threads)

    sizes = [size(T) for T in (64, 1000, 81_920, 10_000_000)]
    assert sizes == sorted(sizes) and sizes[-1] <= 2**22, "a stack of chunks would be gigabytes"
    assert size(64) <= size(64, 50) <= 2**22 and size(64, num_threads=1) <= size(64)

    problems = [make(1, 200 + i, 4, 1, 64, 64, dtype=torch.bfloat16, gate="softplus", seed=1) for i in range(60)]
    run(kda.chunk_kda, problems[-1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for p in problems:  # a cache with one workspace per shape would hold 60 of them
        run(kda.chunk_kda, p)
        kda.decode(**p.having(initial_state=None, state_v_first=True).keywords)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024, "KiB"


# ---- metadata ----


@serving
def test_bug_40_new_values_in_the_same_metadata(op: Callable[..., Tensor]) -> None:
    p = make(H=1, G=2, gate="softplus", lengths=[5, 70, 3], v_first=True)
    h0, p = p.tensors["initial_state"], p.having(initial_state=None)
    cu, indices, has = p.options["cu_seqlens"].clone(), torch.zeros(3).int(), torch.ones(3).bool()
    for lengths, slots, initial in (
        ([5, 70, 3], [0, 1, 2], [True] * 3),
        ([64, 0, 14], [2, -1, 0], [True, False, False]),
        ([1, 1, 1], [1, 2, 0], [False, True, True]),
    ):
        (
            cu.copy_(torch.tensor([0, *lengths]).cumsum(0)),
            indices.copy_(torch.tensor(slots)),
            has.copy_(torch.tensor(initial)),
        )
        fresh = {"cu_seqlens": cu.clone(), "state_indices": indices.clone(), "has_initial_state": has.clone()}
        a, b = h0.clone(), h0.clone()
        reused = {"cu_seqlens": cu, "state_indices": indices, "has_initial_state": has}
        assert same_bits(op(**{**p.keywords, **reused}, state=a), op(**{**p.keywords, **fresh}, state=b))
        assert same_bits(a, b)


@serving
def test_bug_42_inputs_are_unchanged(op: Callable[..., Tensor]) -> None:
    p = make(H=1, G=2, gate="softplus", beta="sigmoid", lengths=[5, 70, 3], v_first=True)
    h0, p = p.tensors["initial_state"], p.having(initial_state=None)
    given = {**p.keywords, "state_indices": torch.tensor([2, -1, 0]).int(), "has_initial_state": torch.ones(3).bool()}
    before = {n: x.clone() for n, x in given.items() if isinstance(x, Tensor)}
    op(**given, state=h0)
    for n, x in before.items():
        assert torch.equal(given[n], x), n


@on_cuda
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "prefill", "decode"])
def test_bug_44_scale_is_used(name: str) -> None:
    """Doubling it doubles o (exactly, as it is a power of two) and does not change states; the default is K^-0.5."""
    p = make(1, 70, 1, 2, 36, 24, v_first=True)
    results = {}
    for scale in (None, 36**-0.5, 0.25, 0.5, -0.5):
        q = p.having(scale=scale)
        if name in ("prefill", "decode"):
            state = q.tensors["initial_state"].clone()
            results[scale] = getattr(kda, name)(**q.having(initial_state=None).keywords, state=state), state
        else:
            results[scale] = getattr(kda, name)(**q.keywords, output_final_state=True)
    assert same_bits(results[None][0], results[36**-0.5][0])
    assert same_bits(2 * results[0.25][0], results[0.5][0]) and same_bits(-results[0.5][0], results[-0.5][0])
    assert all(same_bits(results[None][1], state) for _, state in results.values())


# ---- threads ----


def test_bug_43_calls_from_several_threads() -> None:
    """Each with its own workspace (or none), all at the same time, with errors in between: every result is that of a
    lone call."""
    problems = [make(1, 150 + i, 2, 1, 16, 16, gate="softplus", seed=i, v_first=True) for i in range(4)]
    expected = [run(kda.chunk_kda, p) for p in problems]

    def work(i: int) -> None:
        p, serving = problems[i], problems[i].having(initial_state=None)
        memory = torch.full((kda.workspace_size(**serving.keywords) // 4 + 64,), float("nan"))
        workspace = memory[-memory.data_ptr() % 256 // 4 :]
        for _ in range(10):
            got = run(kda.chunk_kda, p)
            assert all(same_bits(expected[i][n], got[n]) for n in got)
            state = p.tensors["initial_state"].clone()
            assert same_bits(kda.prefill(**serving.keywords, state=state, workspace=workspace), expected[i]["o"])
            with pytest.raises(ValueError, match=f"got nobody{i}"):
                kda.prefill(**serving.keywords, impl=f"nobody{i}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@on_cuda
def test_bug_24_no_state_after_a_call_with_one() -> None:
    p = make(1, 70, 1, 2, gate="softplus")
    first = run(kda.chunk_kda, p.having(initial_state=None))
    run(kda.chunk_kda, p.having(initial_state=100 * p.tensors["initial_state"]))
    again = run(kda.chunk_kda, p.having(initial_state=None))
    zeros = run(kda.chunk_kda, p.having(initial_state=torch.zeros_like(p.tensors["initial_state"])))
    assert all(same_bits(first[n], again[n]) and same_bits(first[n], zeros[n]) for n in first)
    assert_close({n: x.double() for n, x in first.items()}, again)


@on_cuda
def test_bug_32_quantised_states_are_refused() -> None:
    """An int8 state without error feedback ruins a model; there is none here, and none is mistaken for something
    else."""
    p = make(1, 5, v_first=True).having(initial_state=None)
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.int32):
        state: Any = torch.zeros(1, 2, 24, 16).to(dtype)
        with pytest.raises((ValueError, TypeError), match=r"h0|state|float8|dtype"):
            kda.decode(**p.keywords, state=state)

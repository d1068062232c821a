"""Context parallelism: 2, 3 and 4 processes give what one does, including gradients, wherever sequences cross
borders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kda
import kda.cp
from cp_ranks import (
    CASES,
    CONVOLUTIONS,
    REFUSED,
    SHORT,
    TOKENS,
    TOKENWISE,
    UNEQUAL,
    UNEQUAL_CASES,
    chunk,
    convolution_in_front,
    convolved,
    run_rank,
)
from gloo import run_ranks
from support import Tensor, make, rel_rmse, same_bits

RANKS = (2, 3, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """The results of this many processes, which are started once."""
    folder = tmp_path_factory.mktemp("cp")
    done: dict[int, list[dict[str, Any]]] = {}

    def of(ranks: int) -> list[dict[str, Any]]:
        if ranks not in done:
            run_ranks(run_rank, (ranks, str(folder)), ranks)
            done[ranks] = [torch.load(folder / f"{ranks}_{rank}.pt") for rank in range(ranks)]
        return done[ranks]

    return of


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Windows one after another; gradients of parameters summed."""
    return {
        n: torch.cat([p[n] for p in parts], 1) if n == "o" or n[1:] in (*TOKENWISE, "x") else sum(p[n] for p in parts)  # type: ignore[misc]
        for n in parts[0]
        if n != "cu_seqlens"
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(results: Callable[[int], list[dict[str, Any]]], ranks: int, name: str) -> None:
    p = CASES[name].problem
    expected = chunk(p, slice(None), CASES[name].keywords)
    got = together([r[name] for r in results(ranks)])
    rounded = p.tensors["q"].dtype == torch.bfloat16
    for n, x in expected.items():
        allowed = 6e-3 if rounded else 1e-5
        assert got[n].shape == x.shape and rel_rmse(x, got[n]) <= allowed, f"{n}: {rel_rmse(x, got[n]):.1e}"


@pytest.mark.parametrize("ranks", RANKS)
def test_windows(results: Callable[[int], list[dict[str, Any]]], ranks: int) -> None:
    P = TOKENS // ranks
    for name, case in CASES.items():
        ends = torch.tensor([0, *case.lengths]).cumsum(0).tolist()
        for rank, r in enumerate(results(ranks)):
            owners = [
                n for t in range(rank * P, (rank + 1) * P) for n in range(len(ends) - 1) if ends[n] <= t < ends[n + 1]
            ]
            lengths = [owners.count(n) for n in sorted(set(owners))]
            assert r[name]["cu_seqlens"].diff().tolist() == lengths, name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_every_time(results: Callable[[int], list[dict[str, Any]]], ranks: int, name: str) -> None:
    for r in results(ranks):
        assert all(same_bits(x, r[name][n]) for n, x in r[f"{name} again"].items())
        assert same_bits(r[f"{name} without gradients"], r[name]["o"])


@pytest.mark.parametrize("ranks", RANKS)
def test_sequences_within_a_window_are_those_of_one_process(
    results: Callable[[int], list[dict[str, Any]]], ranks: int
) -> None:
    """Other ranks do not affect them, to the bit."""
    p = CASES["borders"].problem
    expected, got = chunk(p, slice(None), {}), together([r["borders"] for r in results(ranks)])
    assert all(same_bits(expected[n], got[n]) for n in expected)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("i", range(len(CONVOLUTIONS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(results: Callable[[int], list[dict[str, Any]]], ranks: int, i: int, dtype: torch.dtype) -> None:
    tokens, lengths, width = CONVOLUTIONS[i]
    expected = convolved(tokens, lengths, width, dtype)
    parts = [r[f"convolution {i} {dtype}"] for r in results(ranks)]
    allowed = 1e-6 if dtype == torch.float32 else 1e-2
    for n in ("y", "dx"):
        got = torch.cat([part[n] for part in parts], 1)
        assert got.dtype == dtype and rel_rmse(expected[n], got) <= allowed, n
    assert rel_rmse(expected["dweight"], sum(part["dweight"] for part in parts)) <= allowed  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_convolution_in_front(results: Callable[[int], list[dict[str, Any]]], ranks: int) -> None:
    expected, got = convolution_in_front(), together([r["convolution in front"] for r in results(ranks)])
    for n, x in expected.items():
        assert got[n].shape == x.shape and rel_rmse(x, got[n]) <= 1e-5, f"{n}: {rel_rmse(x, got[n]):.1e}"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("group", ["group", "mesh"])
def test_group_of_its_own(results: Callable[[int], list[dict[str, Any]]], ranks: int, group: str) -> None:
    parts = [r[group] for r in results(ranks)]
    assert [rank for rank, _ in parts] == list(range(ranks))
    expected = together([r["one"] for r in results(ranks)])
    got = together([part for _, part in parts])
    assert all(same_bits(expected[n], got[n]) for n in expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_dimension_of_a_mesh(results: Callable[[int], list[dict[str, Any]]], ranks: int) -> None:
    """Windows follow the ranks of the group, not those of the world: four ranks are two groups of two here."""
    size = 3 if ranks == 3 else 2
    expected = together([r["one"] for r in results(size)])
    for first in range(0, ranks, size):
        parts = [r["dimension of a mesh"] for r in results(ranks)[first : first + size]]
        assert [rank for rank, _ in parts] == list(range(size))
        got = together([part for _, part in parts])
        assert all(same_bits(expected[n], got[n]) for n in expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_meshes_refused(results: Callable[[int], list[dict[str, Any]]], ranks: int) -> None:
    parts = results(ranks)
    other = "group: expected one that this rank is a member of, got another"
    assert [r["not a member"] for r in parts] == [0, *[other] * (ranks - 1)]
    falling = f"group: expected a mesh whose ranks go up, got {list(reversed(range(ranks)))}"
    assert [r["falling"] for r in parts] == [falling] * ranks


# ---- unequal windows ----

WINDOWS = [(ranks, sizes) for ranks in RANKS for sizes in UNEQUAL[ranks]]


@pytest.mark.parametrize(("ranks", "sizes"), WINDOWS)
@pytest.mark.parametrize("name", UNEQUAL_CASES)
def test_unequal_windows(
    results: Callable[[int], list[dict[str, Any]]], ranks: int, sizes: list[int], name: str
) -> None:
    p = CASES[name].problem
    expected = chunk(p, slice(None), CASES[name].keywords)
    parts = [r[f"{name} {sizes}"] for r in results(ranks)]
    assert [part["o"].shape[1] for part in parts] == sizes
    got = together(parts)
    allowed = 6e-3 if p.tensors["q"].dtype == torch.bfloat16 else 1e-5
    for n, x in expected.items():
        assert got[n].shape == x.shape and rel_rmse(x, got[n]) <= allowed, f"{n}: {rel_rmse(x, got[n]):.1e}"
    for r, part in zip(results(ranks), parts, strict=True):
        assert all(same_bits(x, part[n]) for n, x in r[f"{name} {sizes} again"].items())


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", UNEQUAL_CASES)
def test_ranks_without_tokens_change_no_bit(
    results: Callable[[int], list[dict[str, Any]]], ranks: int, name: str
) -> None:
    expected = [r[f"{name} [100, 140]"] for r in results(2)]
    got = [r[f"{name} {[100, *[0] * (ranks - 2), 140]}"] for r in results(ranks)]
    for part, like in zip((got[0], got[-1]), expected, strict=True):
        assert all(same_bits(x, part[n]) for n, x in like.items())
    for part in got[1:-1]:
        assert part["cu_seqlens"].tolist() == [0] and not any(x.abs().sum() for x in part.values())


@pytest.mark.parametrize(("ranks", "sizes"), WINDOWS)
def test_unequal_windows_behind_a_convolution(
    results: Callable[[int], list[dict[str, Any]]], ranks: int, sizes: list[int]
) -> None:
    expected, got = convolution_in_front(), together([r[f"in front {sizes}"] for r in results(ranks)])
    for n, x in expected.items():
        assert got[n].shape == x.shape and rel_rmse(x, got[n]) <= 1e-5, f"{n}: {rel_rmse(x, got[n]):.1e}"


@pytest.mark.parametrize(("ranks", "sizes"), WINDOWS)
def test_each_rank_gives_its_own_number(
    results: Callable[[int], list[dict[str, Any]]], ranks: int, sizes: list[int]
) -> None:
    for rank, r in enumerate(results(ranks)):
        assert r[f"context {sizes}"] == (sizes, sum(sizes[:rank]), sizes[rank])


@pytest.mark.parametrize(("ranks", "sizes"), [(ranks, sizes) for ranks in RANKS for sizes in SHORT[ranks]])
def test_windows_shorter_than_the_convolution(
    results: Callable[[int], list[dict[str, Any]]], ranks: int, sizes: list[int]
) -> None:
    for i, (tokens, lengths, width) in enumerate(CONVOLUTIONS):
        if tokens == sum(sizes):
            expected = convolved(tokens, lengths, width, torch.float32)
            parts = [r[f"convolution {i} {sizes}"] for r in results(ranks)]
            got = {n: torch.cat([part[n] for part in parts], 1) for n in ("y", "dx")}
            got["dweight"] = torch.stack([part["dweight"] for part in parts]).sum(0)
            assert all(rel_rmse(x, got[n]) <= 1e-6 for n, x in expected.items()), (lengths, width)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_refuse(results: Callable[[int], list[dict[str, Any]]], ranks: int) -> None:
    first, *others = [r["refusals"] for r in results(ranks)]
    assert all(sentences == first for sentences in others)
    for sentence, (_, _, expected) in zip(first, REFUSED, strict=True):
        assert sentence.startswith(expected), sentence


# ---- refusals ----


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"^group: expected torch\.distributed to be initialised"):
        kda.cp.Context([0, 10])


def test_one_rank_is_one_process(alone: None) -> None:
    p = CASES["across"].problem
    expected = chunk(p, slice(None), {})
    cu = p.options.pop("cu_seqlens")
    got = chunk(p, slice(None), {"cp_context": kda.cp.Context(cu)})
    assert all(same_bits(x, got[n]) for n, x in expected.items())


@pytest.mark.parametrize(
    ("cu", "keywords", "sentence"),
    [
        ([], {}, r"cu_seqlens: expected offsets from 0 on, got \[\]"),
        ([1, 2], {}, r"cu_seqlens: expected offsets from 0 on, got \[1\]"),
        ([0, 5, 3], {}, r"cu_seqlens\[2\]: expected at least 5 \(never decreasing\), got 3"),
        (torch.zeros(2), {}, r"cu_seqlens: expected \[N \+ 1\] int32 or int64, got \[2\] torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int32), {}, r"cu_seqlens: expected \[N \+ 1\] int32 or int64, got \[2, 2\]"),
        ([0, 8], {"tokens": 7}, r"tokens: expected at least cu_seqlens\[-1\] = 8, got 7"),
    ],
)
def test_context_refuses(alone: None, cu: Any, keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence):
        kda.cp.Context(cu, **keywords)


def test_a_mesh_has_one_dimension(alone: None) -> None:
    assert kda.cp.Context([0, 8], init_device_mesh("cpu", (1,))).ranks == 1
    for names, more in ((None, ""), (("dp", "cp"), ", dp, cp")):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
        with pytest.raises(ValueError) as refused:
            kda.cp.Context([0, 8], mesh)
        assert str(refused.value) == f'group: expected a mesh of 1 dimension, such as mesh["cp"], got one of 2{more}'
    assert kda.cp.Context([0, 8], mesh["cp"]).group is mesh.get_group("cp")


@pytest.mark.parametrize(
    ("windows", "sentence"),
    [
        (None, "tokens: expected a number divisible by the 3 ranks, or windows, got 10"),
        ([], "windows: expected one for each of the 3 ranks, got 0"),
        ([4, 6], "windows: expected one for each of the 3 ranks, got 2"),
        ([4, 6, 0, 0], "windows: expected one for each of the 3 ranks, got 4"),
        ([4, -1, 7], r"windows\[1\]: expected >= 0, got -1"),
        ([4, 2.5, 3], r"windows\[1\]: expected an integer, got 2\.5"),
        (torch.tensor([4.0, 6.0, 0.0]), r"windows\[0\]: expected an integer, got 4\.0"),
        ([4, 5, 0], r"windows: expected 10 tokens together \(cu_seqlens\[-1\], or tokens with padding\), got 9"),
        ([4, 5, 2], r"windows: expected 10 tokens together \(cu_seqlens\[-1\], or tokens with padding\), got 11"),
        (2.5, r"windows: expected an integer, got 2\.5"),
        (True, "windows: expected an integer, got True"),
    ],
)
def test_windows_refused(alone: None, monkeypatch: pytest.MonkeyPatch, windows: Any, sentence: str) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        kda.cp.Context([0, 10], windows=windows)


def test_windows_of_any_integers(alone: None) -> None:
    for windows in (8, [8], (8,), torch.tensor(8), torch.tensor([8]), torch.tensor([8]).numpy()):
        context = kda.cp.Context([0, 8], windows=windows)  # type: ignore[arg-type]
        assert (context.windows, context.start, context.tokens) == ([8], 0, 8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"initial_state": torch.zeros(2, 2, 16, 24)},
            r"initial_state: expected \[1, 2, 16, 24\], one for each sequence",
        ),
        ({"cu_seqlens": torch.tensor([0, 12])}, "cu_seqlens: expected None with cp_context"),
        ({"cp_context": 3}, "cp_context: expected a kda.cp.Context, got int"),
        ({"cp_context": None, "T": 13}, r"q: expected \[1, 12, H, K\], this rank's window of the tokens, got \[1, 13"),
        ({"cp_context": None, "B": 2}, r"q: expected \[1, 12, H, K\], this rank's window of the tokens, got \[2, 12"),
    ],
)
def test_chunk_kda_refuses(alone: None, changes: dict[str, Any], sentence: str) -> None:
    context = kda.cp.Context([0, 12])
    changes = dict(changes)
    p = make(changes.pop("B", 1), changes.pop("T", 12), state=False)
    keywords = {**p.keywords, "cp_context": context, **{n: x for n, x in changes.items() if x is not None}}
    with pytest.raises(ValueError, match="^" + sentence):
        kda.chunk_kda(**keywords)


def test_intermediate_states_are_refused(alone: None) -> None:
    p = make(1, 12, state=False)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"^return_intermediate_states: expected False with"):
        kda.chunk_kda(**p.keywords, cp_context=kda.cp.Context([0, 12]), return_intermediate_states=True)


@pytest.mark.parametrize(
    ("x", "width", "sentence"),
    [
        (torch.zeros(1, 11, 4), 4, r"x: expected \[1, 12, D\], this rank's window of the tokens, got \[1, 11, 4\]"),
        (torch.zeros(12, 4), 4, r"x: expected \[1, 12, D\], this rank's window of the tokens, got \[12, 4\]"),
        (None, 4, r"x: expected \[1, 12, D\], this rank's window of the tokens, got NoneType"),
        (torch.zeros(1, 12, 4), 0, "width: expected >= 1, got 0"),
    ],
)
def test_halo_refuses(alone: None, x: Any, width: int, sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence):
        kda.cp.conv_halo(x, kda.cp.Context([0, 12]), width)


def test_halo_refuses_other_contexts(alone: None) -> None:
    with pytest.raises(ValueError, match=r"^cp_context: expected a kda\.cp\.Context, got NoneType"):
        kda.cp.conv_halo(torch.zeros(1, 12, 4), None, 4)  # type: ignore[arg-type]


def test_under_torch_compile_it_runs_outside_of_the_graph(alone: None) -> None:
    p = make(1, 12, state=False)
    context = kda.cp.Context([0, 12])
    compiled = torch.compile(lambda **kw: kda.chunk_kda(**kw, cp_context=context)[0] * 2, backend="eager")
    assert same_bits(compiled(**p.keywords), kda.chunk_kda(**p.keywords)[0] * 2)

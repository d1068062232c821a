"""Context parallelism with pieces in any order, and with windows that give the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kda.cp
from cp_layout_ranks import CONVOLUTIONS, EIGHT, INVARIANT, NAMES, RANKS, TOKENS, run_eight, run_layer, run_rank
from cp_ranks import CASES, TOKENWISE, Case, chunk, convolution, convolution_inputs, offsets
from cp_state_ranks import in_one_process
from gloo import run_ranks
from support import Tensor, rel_rmse, same_bits

Parts = list[dict[str, Tensor]]
Results = Callable[[int], list[dict[str, Any]]]
BY_TOKEN = ("o", "y", "x", *(f"d{n}" for n in (*TOKENWISE, "x")))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("layouts")
    done: dict[int, list[dict[str, Any]]] = {}

    def of(ranks: int) -> list[dict[str, Any]]:
        if ranks not in done:
            run_ranks(run_rank, (ranks, str(folder)), ranks)
            done[ranks] = [torch.load(folder / f"{ranks}_{rank}.pt") for rank in range(ranks)]
        return done[ranks]

    return of


def together(parts: Parts) -> dict[str, Tensor]:
    """Every token at its place; gradients of parameters summed; states of whichever rank has them."""
    order = torch.cat([part["pieces"] for part in parts]).argsort()
    joined: dict[str, Tensor] = {}
    for n in {n for part in parts for n in part if n != "pieces"}:
        have = [part[n] for part in parts if n in part]
        joined[n] = torch.cat(have, 1)[:, order] if n in BY_TOKEN else torch.stack(have).sum(0)
        if n.startswith("state"):
            assert len(have) == 1
    return joined


def wrong(
    expected: dict[str, Tensor], got: dict[str, Tensor], exact: Callable[[], dict[str, Tensor]] | None = None
) -> dict[str, float]:
    """Errors above the limits. Of the gradients of the gate's parameters, sums of terms that cancel, one process has
    errors of up to 1e-4 itself. They may be three times as far from ``exact``, those of float64, as it is."""
    assert got.keys() == expected.keys()
    assert all(got[n].shape == x.shape for n, x in expected.items())
    rounded = torch.bfloat16 in {x.dtype for x in expected.values()}
    limits = {n: 6e-3 if rounded else 1e-12 if x.dtype == torch.float64 else 1e-5 for n, x in expected.items()}
    errors = {n: rel_rmse(x, got[n]) for n, x in expected.items() if x.numel()}
    found = {n: e for n, e in errors.items() if not e <= limits[n]}
    sums = {"dA_log", "ddt_bias"} & found.keys()
    truth = exact() if sums and exact is not None else {}
    for n in sums & truth.keys():
        x = truth[n]
        if rel_rmse(x, got[n]) <= limits[n] + 3 * rel_rmse(x, expected[n]):
            found.pop(n)
    return found


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["zigzag", "pieces"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_pieces_equal_one_process(results: Results, ranks: int, name: str, kind: str, given: bool) -> None:
    case, parts = CASES[name], [r[f"{name} {kind} {given}"] for r in results(ranks)]
    got = together(parts)
    places = [int(n.rsplit(" ", 1)[1]) for n in got if n.startswith("state")]
    if not given:
        got = {n: x for n, x in got.items() if not n.startswith("state")}
        assert not wrong(chunk(case.problem, slice(None), case.keywords), got)
        return
    exact = replace(case, options={**case.options, "dtype": torch.float64})
    assert not wrong(in_one_process(case, places), got, lambda: in_one_process(exact, places))


@pytest.mark.parametrize("kind", ["zigzag", "pieces"])
@pytest.mark.parametrize("i", range(len(CONVOLUTIONS)))
@pytest.mark.parametrize("ranks", RANKS)
def test_convolution(results: Results, ranks: int, i: int, kind: str) -> None:
    lengths, width = CONVOLUTIONS[i]
    x, weight, dy = convolution_inputs(TOKENS, width, torch.float32)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = convolution(x, weight, lengths, None)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    got = together([r[f"convolution {i} {kind}"] for r in results(ranks)])
    assert not wrong({"y": y.detach(), "dx": dx, "dweight": dweight}, got)


@pytest.mark.parametrize("kind", ["zigzag", "pieces"])
@pytest.mark.parametrize("ranks", RANKS)
def test_layer(results: Results, ranks: int, kind: str) -> None:
    assert not wrong(run_layer(None), together([r[f"layer {kind}"] for r in results(ranks)]))


# ---- the same bits on any number of ranks ----


def invariant(results: Results, ranks: int, name: str, layout: str, given: bool) -> dict[str, Tensor]:
    return together([r[f"invariant {name} {layout} {given}"] for r in results(ranks)])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize("ranks", RANKS)
def test_bits_do_not_depend_on_ranks(results: Results, ranks: int, name: str, layout: str, given: bool) -> None:
    expected = invariant(results, 1, name, "contiguous", given)
    got = invariant(results, ranks, name, layout, given)
    same = [n for n in expected if n in BY_TOKEN or n in ends_of(INVARIANT[name]) or n == "dinitial_state"]
    assert len(same) >= 7
    assert [n for n in same if not same_bits(expected[n], got[n])] == []
    for n in ("dA_log", "ddt_bias"):  # sums over ranks round
        assert rel_rmse(expected[n], got[n]) < 1e-5


@pytest.mark.parametrize("name", INVARIANT)
def test_invariant_windows_are_exact(results: Results, name: str) -> None:
    case, got = INVARIANT[name], invariant(results, 1, name, "contiguous", True)
    exact = replace(case, options={**case.options, "dtype": torch.float64})
    assert not wrong(in_one_process(case, []), got, lambda: in_one_process(exact, []))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cut_windows_are_exact(results: Results, ranks: int, name: str, layout: str, given: bool) -> None:
    case, got = INVARIANT[name], together([r[f"cut {name} {layout} {given}"] for r in results(ranks)])
    if not given:
        exact = replace(case, options={**case.options, "dtype": torch.float64})
        got = {n: x for n, x in got.items() if not n.startswith("state")}
        expected, truth = (chunk(c.problem, slice(None), c.keywords) for c in (case, exact))
        assert not wrong(expected, got, lambda: truth)
        return
    exact = replace(case, options={**case.options, "dtype": torch.float64})
    got = {n: x for n, x in got.items() if not (n.startswith("state") and n not in ends_of(case))}
    assert not wrong(in_one_process(case, []), got, lambda: in_one_process(exact, []))


def ends_of(case: Case) -> set[str]:
    return {f"state {n} at {end}" for n, end in enumerate(offsets(case.lengths)[1:])}


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("eight")
    run_ranks(run_eight, (str(folder),), 8)
    return [torch.load(folder / f"8_{rank}.pt") for rank in range(8)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks(results: Results, eight: list[dict[str, Any]], name: str, layout: str) -> None:
    case, got = INVARIANT[name], together([r[f"{name} {layout}"] for r in eight])
    exact = replace(case, options={**case.options, "dtype": torch.float64})
    places = [int(n.rsplit(" ", 1)[1]) for n in got if n.startswith("state")]
    assert not wrong(in_one_process(case, places), got, lambda: in_one_process(exact, places))
    expected = invariant(results, 1, name, "contiguous", True)
    got = together([r[f"invariant {name} {layout}"] for r in eight])
    same = [n for n in expected if n in BY_TOKEN or n in ends_of(case) or n == "dinitial_state"]
    assert [n for n in same if not same_bits(expected[n], got[n])] == []


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "cu", "expected"),
    [
        (2, [0, 1024], [512, 512]),
        (4, [0, 1000], [256, 256, 256, 232]),
        (2, [0, 500, 1000], [500, 500]),
        (2, [0, 100, 1000], [484, 516]),  # the cut at 100 + 6 * 64
        (4, [0, 30, 60, 64], [30, 0, 30, 4]),
    ],
)
def test_invariant_windows_are_as_equal_as_cuts_allow(
    alone: None, monkeypatch: pytest.MonkeyPatch, ranks: int, cu: list[int], expected: list[int]
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    assert kda.cp.Context(cu, cp_invariant=True, cp_window=64, check=False).windows == expected


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"layout": "spiral"}, "layout: expected 'contiguous', 'zigzag' or pieces for each rank, got 'spiral'"),
        ({"layout": 3}, "layout: expected 'contiguous', 'zigzag' or pieces for each rank, got 3"),
        ({"layout": [[(0, 256)]]}, "layout: expected pieces for each of the 2 ranks, got 1"),
        (
            {"layout": [[(0, 100)], [(101, 256)]]},
            "layout: expected pieces that cover each of 256 tokens once, got none",
        ),
        ({"layout": [[(0, 100)], [(90, 256)]]}, "layout: expected pieces that cover each of 256 tokens once, got none"),
        ({"layout": [[(0, 100)], [(100, 255)]]}, "layout: expected pieces that cover each of 256 tokens once, got 255"),
        (
            {"layout": [[(100, 256), (0, 50)], [(50, 100)]]},
            r"layout\[0\]: expected pieces in the order of their tokens",
        ),
        ({"layout": [[(0, 1.5)], [(2, 256)]]}, r"layout\[0\]\[0\]: expected an integer, got 1\.5"),
        ({"layout": [[(0, 1, 2)], [(2, 256)]]}, r"layout\[0\]\[0\]: expected \(first, one beyond the last\)"),
        ({"layout": "zigzag", "windows": [100, 156]}, "windows: expected None with the layout 'zigzag', got"),
        (
            {"layout": "zigzag", "cu_seqlens": [0, 254]},
            r"tokens: expected a number divisible by the 4 pieces of 2 ranks",
        ),
        ({"cp_invariant": True, "cp_window": 100}, "cp_window: expected a multiple of 64, got 100"),
        ({"cp_invariant": True, "cp_window": 0}, "cp_window: expected a multiple of 64, got 0"),
        (
            {"cp_invariant": True, "cp_window": 64, "windows": [100, 156]},
            "windows: expected borders at ends of sequences or multiples of cp_window = 64 of one with cp_invariant,"
            " got one at token 100, 100 of its sequence",
        ),
    ],
)
def test_layouts_refused(alone: None, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any], sentence: str) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        kda.cp.Context(**{"cu_seqlens": [0, 256], **keywords})


def test_zigzag_of_one_rank(alone: None) -> None:
    """Two pieces, so a sequence across their border counts twice."""
    context = kda.cp.Context([0, 3, 8], layout="zigzag")
    assert (context.pieces, context.cu_seqlens.tolist()) == ([(0, 4), (4, 8)], [0, 3, 4, 8])
    assert (context.before, context.after, context.sequences) == (0, 0, 3)
    x = torch.arange(8.0).view(1, 8, 1)
    assert torch.equal(context.take(x), x)

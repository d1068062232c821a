"""Context parallelism when ranks do not agree, or one of them stays away: a sentence on every rank, and no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_fault_ranks import ABSENCES, FAULTS, PATIENCE, run_rank

RANKS = 2
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("faults")
    torch.multiprocessing.spawn(run_rank, (RANKS, str(folder)), RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", [n for n, fault in FAULTS.items() if fault[2]])
def test_disagreements_are_named_on_every_rank(results: Results, name: str) -> None:
    first, *others = (r[name][:2] for r in results)
    assert first[0] == "ValueError" and first[1].startswith(FAULTS[name][2].format(last=RANKS - 1))
    assert all(other == first for other in others)


def test_what_one_rank_cannot_call_is_told_to_all(results: Results) -> None:
    own = f"q: expected [1, 128, H, K], this rank's window of the tokens, got {[1, 127, 2, 16]}"
    *others, last = (r["tokens"][:2] for r in results)
    assert last == ("ValueError", own)
    for other in others:
        assert other == ("ValueError", f"chunk_kda: expected a call that every rank can make, got on rank 1: {own}")


def test_other_calls_are_named(results: Results) -> None:
    for name, r in zip(("chunk_kda", "conv_halo"), results, strict=True):
        assert r["another call"][:2] == (
            "ValueError",
            f"{name}: expected all ranks to make the same call, got chunk_kda on rank 0 and conv_halo on rank 1",
        )


def test_a_refusal_breaks_nothing(results: Results) -> None:
    assert all(r["afterwards"][:2] == ("", "") for r in results)


@pytest.mark.parametrize("absence", ABSENCES, ids=lambda absence: absence.__name__)
def test_no_hang_where_a_rank_stays_away(results: Results, absence: Any) -> None:
    *others, last = (r[absence.__name__] for r in results)
    assert last[:2] == ("", "")
    for kind, sentence, seconds in others:
        assert kind == "RuntimeError" and seconds < 3 * PATIENCE
        if absence.__name__ in ("away_from_the_first_call", "away_from_the_context"):
            call = "chunk_kda" if "first" in absence.__name__ else "kda.cp.Context"
            wanted = "expected every rank of the group to make this call within 3 s, got nothing from rank 1"
            assert sentence == f"{call}: {wanted}"
        else:
            call = "chunk_kda" if "second" in absence.__name__ else "chunk_kda, backward"
            assert sentence.startswith(f"{call}: expected every rank of the group to make this call, forward and back")

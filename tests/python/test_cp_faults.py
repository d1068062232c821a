"""Context parallelism when ranks do not agree, or one of them stays away: a sentence on every rank, and no hang."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from cp_fault_ranks import ABSENCES, FAULTS, MIXES, PATIENCE, run_rank
from gloo import run_ranks
from kda.cp._message import Line, poison, tag_of, told

RANKS = 2
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("faults")
    run_ranks(run_rank, (RANKS, str(folder)), RANKS)
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


EXCHANGES = {  # on rank 0 and on rank 1
    "backward_of_one": ("chunk_kda, backward of call", "chunk_kda of call"),
    "backwards_in_another_order": ("chunk_kda, backward of call", "chunk_kda, backward of call"),
    "other_values_on_one": ("chunk_kda of call", "chunk_kda of call"),
    "halo_against_maps": ("chunk_kda of call", "conv_halo of call"),
}


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
def test_exchanges_have_names(results: Results, mix: Any) -> None:
    """Also after the first call of a kind: bytes of another exchange are not taken for what was expected. Then all
    ranks go on."""
    first, *others = (r[mix.__name__][:2] for r in results)
    assert first[0] == "ValueError" and all(other == first for other in others)
    sentence = "kda.cp: expected every rank to make the same exchange, got (.*) on rank 0 and (.*) on rank 1"
    assert (found := re.fullmatch(sentence, first[1]))
    wanted = EXCHANGES[mix.__name__]
    assert all(got.startswith(want) for got, want in zip(found.groups(), wanted, strict=True))
    assert all(r[f"after {mix.__name__}"][:2] == ("", "") for r in results)


def test_what_another_exchange_sent_becomes_nan_where_nobody_waits() -> None:
    """As on a GPU: then the sentence comes once the tags have reached the host."""
    tags = [tag_of("chunk_kda", (4, 7)), tag_of("chunk_kda, backward", (3, 7))]
    x = torch.zeros(2, 3, 5)
    poison(x, torch.tensor(tags), tags[0])
    assert not x[0].any() and x[1, :, 0].isnan().all() and not x[1, :, 1:].any()

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    line, event = Line(), Event()
    line.pending = torch.tensor(tags), event
    line.look()
    event.done = True
    with pytest.raises(ValueError, match=r"got chunk_kda of call 4 \(layout 00000007\) on rank 0 and chunk_kda, back"):
        line.look()
    line.look()
    assert line.number == 4 and told(tags[1]) == "chunk_kda, backward of call 3 (layout 00000007)"


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

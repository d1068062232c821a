"""Prefill of prompts over several ranks: outputs and states of one process, the states on the rank that decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_prefill_ranks import CASES, Case, run, run_rank
from cp_ranks import offsets
from gloo import run_ranks
from support import Tensor, rel_rmse

Results = tuple[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[1, 2, 3])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    ranks, folder = request.param, tmp_path_factory.mktemp("prefill")
    run_ranks(run_rank, (ranks, str(folder)), ranks)
    return ranks, [torch.load(folder / f"{ranks}_{rank}.pt") for rank in range(ranks)]


def expected_of(case: Case) -> dict[str, Tensor]:
    """Of one process. A padded sequence has outputs with a context: those that start from zeros."""
    expected = run(case, None)
    if case.slots is not None and any(slot < case.first_valid_slot for slot in case.slots):
        padded = [n for n, slot in enumerate(case.slots) if slot < case.first_valid_slot]
        from_zeros = run(Case(case.lengths, case.options, fresh=padded), None)
        cu = offsets(case.lengths)
        for n in padded:
            expected["o"][:, cu[n] : cu[n + 1]] = from_zeros["o"][:, cu[n] : cu[n + 1]]
    return expected


def together(parts: list[dict[str, Tensor]]) -> Tensor:
    order = torch.cat([part["order"] for part in parts]).argsort()
    return torch.cat([part["o"] for part in parts], 1)[:, order]


@pytest.mark.parametrize("where", ["owner", "first", "last"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(results: Results, name: str, where: str) -> None:
    ranks, everyone = results
    case = CASES[name]
    if case.pool is None and where != "owner":
        pytest.skip("there are no states")
    state_rank = {"owner": None, "first": 0, "last": ranks - 1}[where]
    parts, expected = [r[f"{name} {state_rank}"] for r in everyone], expected_of(case)
    limit = 6e-3 if case.pool == torch.bfloat16 else 1e-5
    assert rel_rmse(expected["o"], together(parts)) <= limit
    if case.pool is None:
        return
    before = run(Case(case.lengths, case.options, slots=case.slots, update=False, pool=case.pool), None)["state"]
    if state_rank is not None:
        assert rel_rmse(expected["state"], parts[state_rank]["state"]) <= limit
        untouched = [part["state"] for rank, part in enumerate(parts) if rank != state_rank]
        assert all(torch.equal(x, (before.float() + 1).to(x.dtype)) or case.pool == torch.bfloat16 for x in untouched)
        return
    merged, slots = before.clone(), case.slots or list(range(len(case.lengths)))
    for n, slot in enumerate(slots):
        if slot >= case.first_valid_slot:  # written by one rank at most: that with the last token
            changed = [part["state"][slot] for part in parts if not torch.equal(part["state"][slot], before[slot])]
            assert len(changed) == (case.update and case.lengths[n] > 0)
            merged[slot] = changed[0] if changed else before[slot]
    written = [slot for n, slot in enumerate(slots) if case.lengths[n] and slot >= case.first_valid_slot]
    rest = [slot for slot in range(len(before)) if slot not in written]
    assert rel_rmse(expected["state"][written], merged[written]) <= limit
    assert all(torch.equal(part["state"][rest], before[rest]) for part in parts)


def test_refusals(results: Results) -> None:
    ranks, everyone = results
    context = "with cp_context, got"
    begins = [
        "state: expected 2 rows, one for each sequence of all ranks (or state_indices), got 1",
        "state_indices: expected [2], one for each sequence of all ranks, got [3]",
        f"state_rank: expected one of the {ranks} ranks, got 9",
        "state: expected a tensor with state_rank or state_indices, got None",
        "cu_seqlens: expected None with cp_context, which has its own, got a tensor",
        "has_initial_state: expected [2], one for each sequence of all ranks, got [3]",
        f"workspace: expected None {context} Tensor",
        f"checkpoints: expected None {context} Tensor",
        f"out_state_indices: expected None {context} Tensor",
        "state_rank: expected None without cp_context, got a rank",
        "state: expected torch.no_grad() or a tensor without requires_grad",
    ]
    for r in everyone:
        assert [sentence[: len(begin)] for sentence, begin in zip(r["refusals"], begins, strict=True)] == begins

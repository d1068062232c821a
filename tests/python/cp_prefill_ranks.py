"""One rank's part of test_cp_prefill.py: prompts over several ranks, with a pool of states on each. Results go to
files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kda
import kda.cp
from cp_ranks import FUSED, TOKENS, TOKENWISE, offsets
from gloo import answer, join
from support import Tensor, make

SLOTS = 9


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)  # of support.make
    layout: Any = "contiguous"
    slots: list[int] | None = None  # of all sequences; None: a state for each
    fresh: list[int] | None = None  # sequences without an initial state
    first_valid_slot: int = 0
    update: bool = True
    pool: torch.dtype | None = torch.float32  # None: no states
    norm: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)  # of the context


CASES = {
    "one": Case([240], {**FUSED, "v_first": True}),
    "packed": Case([50, 0, 130, 1, 59], {**FUSED, "G": 2}, slots=[3, 8, 1, 0, 5], fresh=[2, 3]),
    "zigzag": Case([100, 100], {"v_first": True}, "zigzag", slots=[7, 2]),
    "padded": Case([60, 120, 60], FUSED, slots=[4, 0, 2], first_valid_slot=1),
    "negative": Case([60, 120, 60], {**FUSED, "v_first": True}, slots=[4, -1, 2]),
    "bf16": Case([10, 220, 10], {**FUSED, "dtype": torch.bfloat16, "v_first": True}, pool=torch.bfloat16),
    "not_updated": Case([10, 220, 10], FUSED, update=False),
    "no_state": Case([10, 220, 10], {**FUSED, "v_first": True}, "zigzag", pool=None),
    "norm": Case([30, 210], {**FUSED, "v_first": True}, norm=True),
    "invariant": Case([200, 40], FUSED, keywords={"cp_invariant": True, "cp_window": 64}),
}


def run(case: Case, cp: kda.cp.Context | None, state_rank: int | None = None) -> dict[str, Tensor]:
    p = make(lengths=case.lengths, tail=TOKENS - sum(case.lengths), state=False, **case.options)
    tensors, options = dict(p.tensors), dict(p.options)
    random = torch.Generator().manual_seed(5)
    q, v = tensors["q"], tensors["v"]
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    v_first = bool(options.pop("state_v_first", False))
    rows = len(case.lengths) if case.slots is None else SLOTS
    # Other ranks than that with the states have other numbers in their pools.
    state = torch.randn(rows, HV, *((V, K) if v_first else (K, V)), generator=random)
    gate, weight = torch.randn(v.shape, generator=random), torch.rand(V, generator=random)
    if cp is not None and state_rank not in (None, cp.rank):
        state += 1
    pool = None if case.pool is None else state.to(case.pool)
    keywords: dict[str, Any] = {"state_v_first": v_first, "first_valid_slot": case.first_valid_slot}
    if case.slots is not None:
        keywords["state_indices"] = torch.tensor(case.slots, dtype=torch.int32)
    if case.fresh is not None:
        keywords["has_initial_state"] = torch.tensor([n not in case.fresh for n in range(len(case.lengths))])
    if cp is not None:
        tensors = {n: cp.take(x) if n in TOKENWISE else x for n, x in tensors.items()}
        gate = cp.take(gate)
        options.pop("cu_seqlens")
        keywords |= {"cp_context": cp, "state_rank": state_rank}
    if case.norm:
        keywords["norm"] = kda.Norm(gate, weight)
    o = kda.prefill(**tensors, **options, state=pool, update_state=case.update, **keywords)
    results = {"o": o} | ({} if pool is None else {"state": pool})
    order = torch.arange(TOKENS) if cp is None else cp.take(torch.arange(TOKENS)[None])[0]
    return {**results, "order": order}


def refusals(cp: kda.cp.Context) -> list[str]:
    q = torch.zeros(1, cp.tokens, 1, 8)
    call: dict[str, Any] = {"q": q, "k": q, "v": q, "g": q, "beta": q[..., 0]}
    state = torch.zeros(2, 1, 8, 8)
    index = torch.zeros(3, dtype=torch.int32)
    wrong: tuple[dict[str, Any], ...] = (
        {"state": state[:1]}, {"state": state, "state_indices": index}, {"state": state, "state_rank": 9},
        {"state_rank": 0}, {"cu_seqlens": index}, {"has_initial_state": index > 0}, {"workspace": index},
        {"checkpoints": state}, {"out_state_indices": index}, {"cp_context": None, "state_rank": 0},
        {"state": state.clone().requires_grad_()},
    )  # fmt: skip
    return [answer(partial(kda.prefill, **{**call, "cp_context": cp, **changes})) for changes in wrong]


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store_{ranks}")
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        cp = kda.cp.Context(offsets(case.lengths), tokens=TOKENS, layout=case.layout, **case.keywords)
        for state_rank in (None, 0, ranks - 1) if case.pool is not None else (None,):
            results[f"{name} {state_rank}"] = run(case, cp, state_rank)
    results["refusals"] = refusals(kda.cp.Context([0, 100, 240], check=False))
    torch.save(results, Path(folder) / f"{ranks}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

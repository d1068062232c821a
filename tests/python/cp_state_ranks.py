"""One rank's part of the calls with states in test_cp_states.py, and the same in one process. Results go to files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kda
import kda.cp
from cp_ranks import FUSED, TOKENS, TOKENWISE, Case, offsets, window
from gloo import join
from support import Tensor

CASES = {
    "one": Case([240], FUSED),
    "across": Case([50, 0, 130, 1, 59], {**FUSED, "G": 2}),
    "across_v_first": Case([50, 0, 130, 1, 59], {**FUSED, "v_first": True, "V": 40}),
    "spans": Case([10, 220, 10], {"gate": "lower_bound", "beta": "2sigmoid"}),
    "borders": Case([20] * 12),
    "tail": Case([100, 100], FUSED),
    "kept": Case([10, 220, 10], FUSED, {"disable_recompute": True}),
    "f64": Case([10, 220, 10], {**FUSED, "dtype": torch.float64, "H": 1, "K": 4, "V": 6}),
}
WINDOWS: dict[int, list[list[int] | None]] = {2: [None, [239, 1], [5, 235]], 3: [None, [100, 0, 140], [3, 200, 37]]}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaves_of(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """All inputs, and the gradient of the outputs. States are those of all sequences."""
    p = case.problem
    q, v = p.tensors["q"], p.tensors["v"]
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    state = random(len(case.lengths), HV, *((V, K) if p.options.get("state_v_first") else (K, V)), seed=3)
    tensors = {**p.tensors, "initial_state": state.to(torch.promote_types(q.dtype, torch.float32))}
    return {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}, random(*v.shape, seed=7).to(v.dtype)


def weight_of(n: int, place: int, state: Tensor) -> Tensor:
    """The gradient of the state of sequence n at this place."""
    return random(*state.shape, seed=1000 * n + place).to(state.dtype)


def in_one_process(case: Case, starts: list[int]) -> dict[str, Tensor]:
    """Outputs, the states of sequences at their ends and at the borders of windows, and all gradients."""
    leaves, d_o = leaves_of(case)
    options = {**case.problem.options, **case.keywords}
    o, last = kda.chunk_kda(**leaves, **options, output_final_state=True)
    loss, results, cu = (o * d_o).sum(), {"o": o}, offsets(case.lengths)
    options.pop("cu_seqlens", None)
    for n, (begin, end) in enumerate(pairwise(cu)):
        for place in [x for x in sorted(set(starts)) if begin < x < end] + [end] * (end > begin):
            state = last[n]
            if place < end:  # the same state as the last one of the tokens before
                part = {m: x[:, begin:place] if m in TOKENWISE else x for m, x in leaves.items()}
                part["initial_state"] = part["initial_state"][n : n + 1]
                state = kda.chunk_kda(**part, **options, output_final_state=True)[1][0]
            results[f"state {n} at {place}"] = state
            loss = loss + (state * weight_of(n, place, state)).sum()
    loss.backward()
    return {n: x.detach() for n, x in results.items()} | {f"d{n}": x.grad for n, x in leaves.items()}  # type: ignore[misc]


def on_this_rank(case: Case, cp: kda.cp.Context) -> dict[str, Tensor]:
    leaves, d_o = leaves_of(case)
    own, cu, end = window(cp), offsets(case.lengths), cp.start + cp.tokens
    here = [n for n in range(len(cu) - 1) if max(cu[n], cp.start) < min(cu[n + 1], end)]
    assert len(here) == cp.sequences
    rows = leaves["initial_state"][here]
    if cp.before:  # it comes from another rank
        rows = torch.cat([torch.full_like(rows[:1], torch.nan), rows[1:]])
    part = {n: x[:, own] if n in TOKENWISE else x for n, x in leaves.items()} | {"initial_state": rows}
    options = {**case.problem.options, **case.keywords, "cp_context": cp}
    options.pop("cu_seqlens", None)
    o, last = kda.chunk_kda(**part, **options, output_final_state=True)
    loss, results = (o * d_o[:, own]).sum() + 0 * last.sum(), {"o": o}
    for n, state in zip(here, last, strict=True):
        place = min(cu[n + 1], end)
        results[f"state {n} at {place}"] = state
        loss = loss + (state * weight_of(n, place, state)).sum()
    loss.backward()
    grads = {f"d{n}": x.grad[:, own] if n in TOKENWISE else x.grad for n, x in leaves.items()}  # type: ignore[index]
    return {n: x.detach() for n, x in results.items()} | grads  # type: ignore[return-value]


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store_{ranks}")
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        for sizes in WINDOWS[ranks]:
            cp = kda.cp.Context(offsets(case.lengths), tokens=TOKENS, windows=sizes)
            results[f"{name} {sizes}"] = on_this_rank(case, cp) | {"start": cp.start}
    torch.save(results, Path(folder) / f"{ranks}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

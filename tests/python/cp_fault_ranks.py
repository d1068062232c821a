"""One rank's part of test_cp_faults.py: calls that do not fit together, and a rank that stays away."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kda
import kda.cp
from gloo import join

PATIENCE = 3  # seconds, the timeout of the groups where a rank stays away
CU = [0, 70, 256]


def call(cp: Any, H: int = 2, V: int = 16, T: int = 128, dtype: torch.dtype = torch.float32, **keywords: Any) -> Any:
    random = torch.Generator().manual_seed(1)
    q, k, v, g = (torch.randn(1, T, H, n, generator=random).to(dtype) for n in (16, 16, V, 16))
    beta = torch.rand(1, T, H, generator=random)
    q.requires_grad_()
    return kda.chunk_kda(q, k, v, -g.abs().float(), beta, cp_context=cp, use_qk_l2norm_in_kernel=True, **keywords)


def halo(cp: Any, D: int = 5, width: int = 4) -> None:
    kda.cp.conv_halo(torch.zeros(1, 128, D), cp, width)


# What the last rank does, what the others do, and how the sentence begins that every rank says.
FAULTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "offsets": (
        lambda: call(kda.cp.Context([0, 71, 256])),
        lambda: call(kda.cp.Context(CU)),
        "cu_seqlens: expected the same on every rank, got [0, 70, 256] on rank 0 and [0, 71, 256] on rank {last}",
    ),
    "windows": (
        lambda: call(kda.cp.Context(CU, windows=[100, 156]), T=156),
        lambda: call(kda.cp.Context(CU)),
        "layout: expected the same on every rank, got [[[0, 128]], [[128, 256]]] on rank 0 and [[[0, 100]], [[100,",
    ),
    "zigzag": (
        lambda: call(kda.cp.Context(CU, layout="zigzag")),
        lambda: call(kda.cp.Context(CU)),
        "layout: expected the same on every rank, got [[[0, 128]], [[128, 256]]] on rank 0 and [[[0, 64], [192,",
    ),
    "invariant": (
        lambda: call(kda.cp.Context([0, 256], cp_invariant=True, cp_window=64)),
        lambda: call(kda.cp.Context([0, 256], cp_invariant=True, cp_window=128)),
        "cp_window: expected the same on every rank, got 128 on rank 0 and 64 on rank {last}",
    ),
    "heads": (
        lambda: call(kda.cp.Context(CU), H=4),
        lambda: call(kda.cp.Context(CU)),
        "q: heads and channels: expected the same on every rank, got [2, 16] on rank 0 and [4, 16] on rank {last}",
    ),
    "channels": (
        lambda: call(kda.cp.Context(CU), V=24),
        lambda: call(kda.cp.Context(CU)),
        "v: heads and channels: expected the same on every rank, got [2, 16] on rank 0 and [2, 24] on rank {last}",
    ),
    "dtype": (
        lambda: call(kda.cp.Context(CU), dtype=torch.bfloat16),
        lambda: call(kda.cp.Context(CU)),
        "q.dtype: expected the same on every rank, got torch.float32 on rank 0 and torch.bfloat16 on rank {last}",
    ),
    "scale": (
        lambda: call(kda.cp.Context(CU), scale=0.5),
        lambda: call(kda.cp.Context(CU)),
        "options: expected the same on every rank, got",
    ),
    "tokens": (
        lambda: call(kda.cp.Context(CU), T=127),
        lambda: call(kda.cp.Context(CU)),
        "",  # the last rank says what is wrong, the others that it does
    ),
    "convolution": (
        lambda: halo(kda.cp.Context(CU), 6),
        lambda: halo(kda.cp.Context(CU)),
        "x: channels: expected the same on every rank, got 5 on rank 0 and 6 on rank {last}",
    ),
    "taps": (
        lambda: halo(kda.cp.Context(CU), width=3),
        lambda: halo(kda.cp.Context(CU)),
        "width: expected the same on every rank, got 4 on rank 0 and 3 on rank {last}",
    ),
    "another call": (
        lambda: halo(kda.cp.Context(CU)),
        lambda: call(kda.cp.Context(CU)),
        "",
    ),
}


# ---- after the first calls: what a rank does in place of another call ----


def backward_of_one(last: bool) -> None:
    cp = kda.cp.Context(CU)
    o = call(cp)[0]
    call(cp) if last else o.sum().backward()


def backwards_in_another_order(last: bool) -> None:
    cp = kda.cp.Context(CU)
    both = [call(cp)[0].sum() for _ in range(2)]
    for loss in reversed(both) if last else both:
        loss.backward()


def other_values_on_one(last: bool) -> None:
    cp = kda.cp.Context(CU)
    call(cp)
    call(cp, V=24 if last else 16)


def halo_against_maps(last: bool) -> None:
    """Of another length."""
    cp = kda.cp.Context(CU)
    call(cp), halo(cp)
    halo(cp) if last else call(cp)


MIXES = (backward_of_one, backwards_in_another_order, other_values_on_one, halo_against_maps)


def other_values_on_all() -> None:
    """Layers of other sizes may share a context."""
    cp = kda.cp.Context(CU)
    for V in (16, 24, 16, 24):
        call(cp, V=V)[0].sum().backward()


def away_from_the_first_call(group: Any, stays_away: bool) -> None:
    cp = kda.cp.Context(CU, group)
    if not stays_away:
        call(cp)


def away_from_the_second_call(group: Any, stays_away: bool) -> None:
    cp = kda.cp.Context(CU, group)
    call(cp)
    if not stays_away:
        call(cp)


def away_from_backward(group: Any, stays_away: bool) -> None:
    o, _ = call(kda.cp.Context(CU, group))
    if not stays_away:
        o.sum().backward()


def away_from_the_context(group: Any, stays_away: bool) -> None:
    if not stays_away:
        kda.cp.Context(CU, group, windows=128)


ABSENCES = (away_from_the_first_call, away_from_the_second_call, away_from_backward, away_from_the_context)


def said(run: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind of error, its sentence, and how long it took."""
    begin = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store", 60)
    last = rank == ranks - 1
    results: dict[str, Any] = {n: said(fault[0] if last else fault[1]) for n, fault in FAULTS.items()}
    results["afterwards"] = said(lambda: call(kda.cp.Context(CU)))  # nothing is broken by a refusal
    for mix in MIXES:
        results[mix.__name__] = said(lambda mix=mix: mix(last))  # type: ignore[misc]
        results[f"after {mix.__name__}"] = said(other_values_on_all)
    groups = [dist.new_group(timeout=timedelta(seconds=PATIENCE)) for _ in ABSENCES]
    for group, absence in zip(groups, ABSENCES, strict=True):
        dist.barrier()
        results[absence.__name__] = said(lambda group=group, absence=absence: absence(group, last))  # type: ignore[misc]
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

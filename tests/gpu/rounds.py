"""Rounds of speculation in a place: on the device under test, or at the oracle."""

from __future__ import annotations

from typing import Any

import torch

import kda
from drafting import drafts, layout, records_for, same_records
from places import Place
from support import Problem, Tensor, same_bits


def records_of(place: Place, p: Problem, entries: int, **more: Any) -> kda.Records:
    """Records full of NaN."""
    moved: kda.Records = place(records_for(p, entries, **more))
    return moved


def verify(place: Place, p: Problem, pool: Tensor, records: kda.Records | None, **more: Any) -> Tensor:
    """Verifies from and to memory of the place."""
    o: Tensor = kda.verify_kvbuffer(**place.call(p, **more), state=pool, records=records)
    return o


def flush(place: Place, p: Problem, pool: Tensor, records: kda.Records, m: Tensor, **more: Any) -> None:
    kda.flush_kvbuffer(pool, records, place(m), **layout(p), **place(more), impl=place.impl)


def flush_verify(
    place: Place,
    p: Problem,
    pool: Tensor,
    records: kda.Records,
    m: Tensor,
    last: kda.Records | None = None,
    **more: Any,
) -> Tensor:
    call = place.call(p, accept_len=m, **more)
    o: Tensor = kda.flush_verify_kvbuffer(**call, state=pool, records=records, last=last)
    return o


def rounds(
    place: Place, p: Problem, following: Problem, h0: Tensor, m: Tensor, parents: Tensor | None = None,
    slices: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Verify, flush, and in one call a flush with the verify of the following drafts."""
    N, T = p.tensors["g"].shape[:2]
    trees = {} if parents is None else {"parents": parents}
    pool, fused, a, b, c = place(h0), place(h0), *(records_of(place, p, T, slots=N) for _ in range(3))
    o = verify(place, p, pool, a, slices=slices, **trees)
    flush(place, p, pool, a, m, **trees)
    last = {f"last_{n}": x for n, x in trees.items()}
    o_next = flush_verify(place, following, fused, b, m, a, slices=slices, **last)
    assert same_bits(verify(place, following, pool, c), o_next) and same_records(b, c), "one call, or two"
    results = {"o": o, "state": pool, "fused": fused} | dict(zip("uka", a[:3], strict=True))
    # A written state is rounded, sometimes to the other neighbour, and then a round that begins there differs.
    return results if h0.dtype == torch.bfloat16 else {**results, "o_next": o_next, "u_next": b.u}


def two(T: int, **sizes: Any) -> tuple[Problem, Problem, Tensor]:
    """Two rounds of drafts, and states."""
    (p, h0), (following, _) = drafts(T, **sizes), drafts(T, seed=1, **sizes)
    return p, following, h0

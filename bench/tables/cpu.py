"""Tables of figures on CPUs, from the records of python -m bench cpu. Columns are a Xeon and an EPYC."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from bench.tables.record import ROOT, table

RECORDS = ("cpu-intel-xeon", "cpu-amd-epyc")
NAMES = ("Xeon", "EPYC (Zen 4)")
LINKS = tuple(
    f"{name} ([record](../results/{file}.json))" for name, file in zip(("Xeon", "EPYC"), RECORDS, strict=True)
)
Found = dict[str, Any]


@cache
def records() -> tuple[Found, ...]:
    return tuple(json.loads((ROOT / "docs/results" / f"{name}.json").read_text()) for name in RECORDS)


def both(figure: Callable[[Found], float], digits: int) -> list[str]:
    return [f"{figure(r):.{digits}f}" for r in records()]


def prefill(name: str) -> Callable[[Found], float]:
    return lambda r: float(r["prefill_and_training"][name])


def other(name: str) -> Callable[[Found], float]:
    return lambda r: float(r["other_operators"]["ms"][name])


def over_prefill(name: str) -> Callable[[Found], float]:
    return lambda r: other(name)(r) / other("prefill")(r)


def drafts(name: str) -> Callable[[Found], float]:
    return lambda r: float(r["speculation"]["ms"][name])


def in_place(r: Found) -> float:
    """Decode's time over that of a multiplication of the pool in place."""
    return float(r["decode"]["V-first"]["ms"] / r["decode"]["multiplied in place"]["ms"])


def chunk() -> list[str]:
    kept = "training_with_kept_memory"
    rows = [
        ["prefill of 4,096 tokens, GFLOP/s", *both(prefill("prefill_gflops"), 0)],
        ["its share of the multiply-add peak of the same run", *both(prefill("share_of_fma_peak"), 2)],
        ["two threads over one", *both(prefill("speedup_of_threads"), 2)],
        ["the same for one head of 65,536 tokens", *both(lambda r: float(r["one_long_head"]["speedup"]), 2)],
        ["forward and backward through autograd, in forwards", *both(prefill("training_over_forward"), 2)],
        ["with `disable_recompute`", *both(prefill("training_over_forward, disable_recompute"), 2)],
        [
            "where malloc keeps its memory between steps",
            *both(lambda r: float(r[kept]["training_over_forward"]), 2),
        ],
    ]
    return table(["", *NAMES], rows)


def recurrent() -> list[str]:
    def rate(name: str) -> list[str]:
        return both(lambda r: float(r["decode"][name]["gb_per_s"]), 1)

    rows = [["V-first", *rate("V-first")], ["K-first", *rate("K-first")]]
    return table(["GB/s, read and written", *NAMES], [*rows, ["multiply in place", *rate("multiplied in place")]])


def speculation() -> list[str]:
    rows = {
        "verify, T = 1": "verify, T = 1",
        "verify, T = 4": "verify, T = 4",
        "verify, T = 6": "verify, T = 6",
        "verify and flush, T = 4, two calls": "verify + flush",
        "verify and flush, T = 4, one pass": "flush_verify",
        "the same with a state kept after each draft, and a copy": "snapshots + copy",
    }
    return table(["", *NAMES], [[name, *both(drafts(key), 1)] for name, key in rows.items()])


def segment() -> list[str]:
    rows = {"`segment_map`": "segment_map", "prefill, in the same run": "prefill"}
    return table(["ms", *NAMES], [[name, *both(other(key), 1)] for name, key in rows.items()])


def segments() -> list[str]:
    return table(LINKS, [both(over_prefill("segment_map"), 1)])


def stages() -> list[str]:
    return table(LINKS, [both(over_prefill("stages of the forward"), 1)])


def prefill_f32() -> list[str]:
    return table(LINKS, [both(over_prefill("prefill_f32"), 2)])


def readme() -> list[str]:
    def row(what: str, figure: Callable[[Found], float], digits: int, unit: str, beside: str = "") -> list[str]:
        return [what, f"{', '.join(both(figure, digits))} {unit}", beside]

    faster, longer = "times as fast", "times as long"
    kept = "training_with_kept_memory"
    rows = [
        row("prefill, 8 heads x 4096", lambda r: 100 * prefill("share_of_fma_peak")(r), 0,
            "% of the multiply-add peak"),
        row("the same", prefill("speedup_over_naive"), 0, faster, "FLA's `naive_chunk_kda` in PyTorch"),
        row("the same", prefill("speedup_of_threads"), 1, faster, "one thread"),
        row("prefill, 1 head x 65,536", lambda r: r["one_long_head"]["speedup"], 2, faster, "one thread"),
        row("forward and backward by autograd, 8 heads x 4096", prefill("training_over_forward"), 1, longer,
            "forward alone"),
        row("the same if malloc keeps memory between steps", lambda r: r[kept]["training_over_forward"], 1, longer,
            "forward alone"),
        row("decode, 1024 requests of 8 heads", in_place, 2, longer, "multiplying the pool in place"),
        row("verify and flush of 4 drafts, 8 heads", lambda r: r["speculation"]["verify_and_flush_over_snapshots"], 1,
            faster, "a state per draft, one copied back"),
    ]  # fmt: skip
    return table(["on a Xeon, an EPYC", "kda", "beside it"], rows)


TABLES = {
    "readme cpu": readme, "cpu chunk": chunk, "cpu recurrent": recurrent, "cpu speculation": speculation,
    "cpu segment": segment, "segments over prefill": segments, "stages over prefill": stages,
    "prefill_f32 over prefill": prefill_f32,
}  # fmt: skip

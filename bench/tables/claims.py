"""Sentences about the records: what has passed and what has not (README), how large the build is (HACKING)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from bench.tables.record import ROOT

H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
PTX, TWO = "cpp from ptx", "python on two GPUs"
EARLIER = ", at an earlier version"
Parts = Mapping[str, Mapping[str, Any]]


def load(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs/results" / f"{name}.json").read_text()))


def paragraph(*sentences: str) -> list[str]:
    return textwrap.wrap(" ".join(filter(None, sentences)), 120, break_on_hyphens=False, break_long_words=False)


def words(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def counts(parts: Iterable[Mapping[str, Any]], tests: str = "tests") -> str:
    """12 tests passed and 1 failed"""
    parts = list(parts)
    ran, failed = (sum(part[kind] for part in parts) for kind in ("ran", "failed"))
    return f"{ran - failed:,} {tests} passed and {f'{failed:,}' if failed else 'none'} failed"


def link(name: str) -> str:
    return f"[record](docs/results/{name}.json)"


def newest(found: Mapping[str, Any], kind: str) -> tuple[Parts, bool]:
    """The tests or sanitizers of the newest source that has any, and whether that is the record's own."""
    sources = [found, *found.get("earlier", ())]
    source = next(s for s in sources if s.get(kind))
    return source[kind], source is found


def sanitizers(found: Parts, own: bool) -> str:
    """Which found nothing, and which did. racecheck is not run on all: docs/kernels/cuda_backward.md."""

    def named(names: Iterable[str]) -> str:
        left_out = "racecheck ([Hopper's backward](docs/kernels/cuda_backward.md#limits) left out)"
        return words(left_out if name == "racecheck" else name for name in names)

    clean, others = ([n for n, part in found.items() if (part["exit"] == 0) == good] for good in (True, False))
    at = "" if own else EARLIER
    said = f"{named(clean)} found nothing in a short list of the tests{at}." if clean else ""
    return f"{said} {named(others)} did not end well{at}." if others else said


def tests() -> list[str]:
    h200, h100 = load(H200), load(H100)
    from_ptx = h200["tests"].get(PTX)
    kinds = "tests" if "python" in h200["tests"] else "tests in C++"
    two = next((r["tests"][TWO] for r in (h200, *h200["earlier"]) if TWO in r.get("tests", {})), None)
    older = "" if h100["source_hash"] == h200["source_hash"] else " at another version"
    return paragraph(
        f"On an H200 {counts(h200['tests'].values(), kinds)} ({link(H200)}, {h200['date']}, source "
        f"{h200['source_hash'][:8]}).",
        f"Of these, {from_ptx['ran']:,} ran from the PTX for sm_80 instead of the code for Hopper." if from_ptx else "",
        sanitizers(*newest(h200, "sanitizer")),
        f"Of the tests of DDP, FSDP2, tensor and context parallelism over NCCL on two H200s, {counts([two])}"
        f"{'' if TWO in h200['tests'] else EARLIER}."
        if two
        else "",
        f"On an H100 {counts(h100['tests'].values())}{older} ({link(H100)}, {h100['date']}).",
    )


def build() -> list[str]:
    found = load("build")
    files = found["files"].values()
    most = max(file["kernels"] for file in files)
    return paragraph(
        f"At the last record that is {found['kernels']} kernels in {len(files)} files, at most {most} of them in one, "
        f"a libkda.so of {found['mib']['libkda.so']} MiB and a wheel of {found['mib']['wheel']} MiB."
    )


TABLES = {"tests that passed": tests, "size of the build": build}

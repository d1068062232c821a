"""Which rows of a record does this tree still stand behind?

    python tools/standing.py build/release                         for all records in docs/results

A record keeps the hash of each kernel that its GPU runs (tools/machine_code.py). Its rows stand as long as the build
has these kernels, whatever has been renamed or moved since. If only the host's code has changed, the quick list of
tests (`python -m bench record --only quick`) is enough. Where a kernel has changed, its rows are measured again.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from source_hash import ROOT, source_hash

RESULTS = ROOT / "docs/results"
KERNELS = "kernels.json"  # of a build: hashes by file, architecture and name
Hashes = Mapping[str, Mapping[str, str]]

# The rows of a record by the end of their names, and the folders of src/cuda with the kernels that they run. Old names
# of folders stay, since old records have them.
ENGINE = ("engine", "hopper_prefill", "blackwell_prefill", "prefill")
BACKWARD = (*ENGINE, "hopper_backward", "backward")
STAGES = ("stages", "hopper_stages", "blackwell_stages")
FAMILIES = {
    "layer, training|plug of FLA": (*BACKWARD, "gate", "conv", "norm"),
    "layer, prefill": (*ENGINE, "gate", "conv", "norm"),
    "layer, decode|decode step.*|ring decode": ("decode", "drafts", "conv", "norm"),
    "prefill_f32|bwd_wy_dqkg": STAGES,
    "prefill": ENGINE,
    "training": BACKWARD,
    "decode|snapshots": ("decode",),
    ".*(verify|flush)": ("drafts", "conv"),
    "plug of .*": ("decode", "drafts", *ENGINE),
    "conv.*": ("conv",),
    "gate.*": ("gate",),
    "norm_gate.*": ("norm",),
}


def folders_of(what: str) -> tuple[str, ...]:
    """The folders of the kernels that a row runs; none if it is another library's."""
    name = re.sub(r" \(.*?\)|,? (h, v_new|nothing) saved|,? chunks of \d+|, one token|_backward$", "", what)
    if not name.startswith(("kda", "plug", "host", "conv", "gate", "norm")):
        return ()
    name = re.sub(r"^(kda|host time of a),? ?", "", name)
    return next((folders for names, folders in FAMILIES.items() if re.fullmatch(f"({names}).*", name)), ())


def flat(kernels: Hashes, folders: tuple[str, ...] | None = None) -> set[tuple[str, str]]:
    """Architecture and hash of each kernel, in these folders."""
    chosen = (of for file, of in kernels.items() if folders is None or Path(file).parent.name in folders)
    return {(name.split()[0], digest) for of in chosen for name, digest in of.items()}


def for_architectures(kernels: Hashes, wanted: set[str]) -> dict[str, dict[str, str]]:
    """What a GPU runs of a build's kernels."""
    found = {file: {n: d for n, d in of.items() if n.split()[0] in wanted} for file, of in kernels.items()}
    return {file: of for file, of in found.items() if of}


def of_part(part: Mapping[str, Any], tree: set[tuple[str, str]]) -> Iterator[str]:
    """What there is to say of the rows of one source."""
    rows = Counter(row["what"] for row in part.get("benchmarks", ()) if folders_of(row["what"]))
    name = f"{part['date']}, source {part['source_hash'][:8]}"
    if "kernels" not in part:
        if rows:
            yield f"  {name}: {sum(rows.values())} rows, from before records had hashes of kernels"
        return
    changed = {what: len(flat(part["kernels"], folders_of(what)) - tree) for what in rows}
    stands = sum(count for what, count in rows.items() if not changed[what])
    recorded = flat(part["kernels"])
    gone = len(recorded - tree)
    yield f"  {name}: {gone} of {len(recorded)} kernels changed; {stands} of {sum(rows.values())} rows stand"
    for what, count in changed.items():
        if count:
            yield f"    to be measured again: {what} ({rows[what]} rows, {count} kernels changed)"
    if not gone and part["source_hash"] != source_hash():
        yield "    the host's code or a comment changed: the quick list of tests is enough"


def report(build: Path) -> Iterator[str]:
    tree = flat(json.loads((build / KERNELS).read_text()))
    for path in sorted(RESULTS.glob("*nvidia*.json")):
        record = json.loads(path.read_text())
        lines = [line for part in (record, *record.get("earlier", ())) for line in of_part(part, tree)]
        if lines:
            yield f"{path.stem}:"
            yield from lines


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]))))

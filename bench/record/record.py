"""The record: one JSON file a GPU. What other sources have measured stays in it under `earlier`."""

from __future__ import annotations

import datetime
import json
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.record.processes import run

YARDSTICK = "y = 2 x"  # the first row of every run: others are given as fractions of it


def device() -> dict[str, Any]:
    import torch

    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,memory.total"
    smi = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]).stdout.strip().split(", ")
    return {
        **dict(zip(query.split(","), smi, strict=True)),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def text_of(record: dict[str, Any]) -> str:
    """JSON with one line per table row."""
    return re.sub(r"\{[^{}]*\}", lambda row: re.sub(r"\n\s*", " ", row[0]), json.dumps(record, indent=2)) + "\n"


def identity(row: dict[str, Any]) -> str:
    """Identifies a row of the benchmarks: everything in it that is not measured."""
    return json.dumps({k: v for k, v in row.items() if v is not None and not isinstance(v, float)}, sort_keys=True)


def replaced(rows: list[dict[str, Any]], by: list[dict[str, Any]]) -> list[dict[str, Any]]:
    new = {identity(row) for row in by}
    return [row for row in rows if identity(row) not in new] + by


def left_over(before: Iterable[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]]:
    """From records of other sources, newest first: what neither this record nor a newer one has."""
    known = {part: dict(record.get(part, {})) for part in ("tests", "sanitizer")}
    rows, found = {identity(row) for row in record.get("benchmarks", ())}, []
    for old in before:
        left: dict[str, Any] = {
            part: {k: v for k, v in old.get(part, {}).items() if k not in known[part]} for part in known
        }
        left["benchmarks"] = [row for row in old.get("benchmarks", ()) if identity(row) not in rows]
        if left["benchmarks"]:
            yardstick = [row for row in old["benchmarks"] if row["what"] == YARDSTICK]
            left["benchmarks"] = replaced(yardstick, left["benchmarks"])
        if not any(left.values()):
            continue
        for part in known:
            known[part] |= left[part]
        rows |= {identity(row) for row in left["benchmarks"]}
        now, then = record["folders"], old.get("folders", {})
        changed = sorted(folder for folder in now.keys() | then.keys() if now.get(folder) != then.get(folder))
        kept = {
            name: old[name] for name in ("why", "date", "source_hash", "folders", "kernels", "device") if name in old
        }
        since = {"changed_since": changed} if then else {}
        found.append(kept | since | {part: parts for part, parts in left.items() if parts})
    return found


def passed(record: dict[str, Any]) -> bool:
    quick = record.get("quick", {}).get("tests", {})
    parts = [*record.get("tests", {}).values(), *record.get("sanitizer", {}).values(), *quick.values()]
    return all(t["exit"] == 0 for t in parts) and all(t.get("ran", 1) > 0 for t in parts)


def command_of(words: Sequence[str]) -> str:
    """The command for the record, without names of the machine's folders."""
    folder = r"(--(?:build|out|peers)[ =])('[^']*'|\S+)"
    return re.sub(folder, r"\1FOLDER", shlex.join(["python", "-m", "bench", *words]))


class Record:
    """The record of this source, in a file of the GPU's name. ``goes_on``: parts that the file has stay, if they are of
    the same source."""

    def __init__(self, folder: Path, this: dict[str, Any], command: str, *, goes_on: bool) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", this["device"]["name"].lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if goes_on and self.path.exists() else {}
        self.before: list[dict[str, Any]] = self.found.pop("earlier", [])
        if self.found and self.found["source_hash"] != this["source_hash"]:
            self.before, self.found = [self.found, *self.before], {}
        commands = [*([self.found["command"]] if self.found else []), command]
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        self.found |= {"date": today, "command": "; ".join(commands), **this}

    def save(self) -> None:
        self.found["passed"] = passed(self.found)
        earlier = left_over(self.before, self.found)
        self.path.write_text(text_of(self.found | ({"earlier": earlier} if earlier else {})))

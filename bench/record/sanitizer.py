"""compute-sanitizer on a short list of the C++ tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.record.processes import shards

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def left_out(outputs: Iterable[str], capability: int) -> list[str]:
    """Implementations on the short list that no process has run. Those of one architecture run there alone."""
    only = {"hopper": 9, "blackwell": 10}
    found: dict[str, bool] = {}
    for name, ran in re.findall(r"^short list: (.*): (has|has not) run$", "\n".join(outputs), re.M):
        found[name] = found.get(name, False) or ran == "has"
    return [
        name
        for name, ran in found.items()
        if not ran and all(capability == of for word, of in only.items() if word in name)
    ]


def sanitizer(binary: Path, tools: Sequence[str], capability: int = 9) -> dict[str, Any]:
    """By tool: the worst exit status, a summary, and implementations that have not run, which is a failure. Which tests
    are on the list: tests/gpu/short_list.cc. ``capability``: the GPU's major one."""

    def check(tool: str) -> dict[str, Any]:
        command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
        if tool in ("racecheck", "synccheck"):  # by itself it does not find all mbarriers of a kernel
            command.append("--num-cuda-barriers=64")
        # No canaries around tensors: they would hide out-of-bounds reads from the sanitizer.
        environment = {"KDA_TEST_SHORT_LIST": tool, "KDA_TEST_EXACT_MEMORY": "1"}
        results = shards([*command, str(binary)], 4, **environment)
        summaries = [re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", r.stdout + r.stderr) for r in results]
        worst = max((s[-1] if s else "no summary" for s in summaries), key=lambda s: not re.search(r"SUMMARY: 0 ", s))
        # The summary cannot see what did not run. racecheck leaves kernels out on purpose.
        missing = [] if tool == "racecheck" else left_out((r.stdout for r in results), capability)
        status = max(abs(r.returncode) for r in results) or int(bool(missing))
        return {"exit": status, "summary": worst} | ({"not run": missing} if missing else {})

    with ThreadPoolExecutor() as at_once:
        return dict(zip(tools, at_once.map(check, tools), strict=True))

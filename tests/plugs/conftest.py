"""Puts an engine's real files, which tools/fetch_engines.py has unpacked under build/engines, on the path of the tests
in this folder.

There is no GPU, so FLA's own kernels run in Triton's interpreter: their Python code, one program after the other. What
FLA computes without our plug is therefore what its source says, and the tests compare with that.

    tools/fetch_engines.py
    KDA_LIBRARY_DIR=build/release/lib PYTHONPATH=python .venv/bin/pytest tests/plugs
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before torch and libkda start their threads
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
import torch

ENGINE = "fla-0.6"
ENGINES = Path(os.environ.get("KDA_ENGINES", Path(__file__).resolve().parents[2] / "build" / "engines"))
FOLDERS = [ENGINES / name for name in (ENGINE, "triton")]
if missing := [folder.name for folder in FOLDERS if not (folder / "complete").exists()]:
    raise pytest.UsageError(f"the tests of plugs need {', '.join(missing)}: tools/fetch_engines.py brings them")
sys.path[:0] = [str(folder) for folder in FOLDERS]
# For processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, FOLDERS), os.environ.get("PYTHONPATH")]))


def pytest_report_header() -> str:
    return f"plugs: {ENGINE}"


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> None:
    """Lets FLA's kernels run in Triton's interpreter: the last variant of each, which has the fewest programs, instead
    of the fastest, which only a GPU can tell; and numbers of a loop that have the methods of Triton's."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner

    prune = autotuner.prune_configs
    autotuner.prune_configs = lambda kernel, given: prune(kernel, given)[-1:]
    autotuner.do_bench = property(lambda self: lambda call, quantiles=None: [0.0] * 3, lambda self, value: None)
    language: Any = importlib.import_module("triton.language")

    def numbers(*bounds: Any) -> Iterator[Any]:
        for i in builtins.range(*map(int, bounds)):
            yield language.full((), i, language.int32)

    importlib.import_module("fla.ops.common.chunk_delta_h").range = numbers


@pytest.fixture(autouse=True)
def _nothing_forced_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KDA_IMPL", "FLA_KDA_LIB"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)

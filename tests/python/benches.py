"""Helpers for tests of the command. Benches that need a GPU run on the CPU, with stand-ins for peers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import kda
from bench import ROOT, measure, peers
from bench import run as bench
from kda.cli import arrays

TINY = ["--T", "70", "--H", "1", "--K", "16", "--V", "16", "--repeats", "3", "--device", "cpu"]


def believe_in_gpu(monkeypatch: pytest.MonkeyPatch, milliseconds: Callable[..., float]) -> None:
    """Makes the command believe in a GPU on which ``milliseconds`` times calls, without a folder of peers."""
    for name in ("graph_milliseconds", "stream_milliseconds", "host_microseconds", "own_bytes"):
        monkeypatch.setattr(measure, name, milliseconds)
    monkeypatch.setattr(measure, "stream_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(measure, "ceilings", lambda device: {"GFLOP/s": 800e3, "GB/s": 3000.0})
    about = {"cpu": "a CPU", "threads": 1, "device": "a GPU", "library": kda.info()}
    monkeypatch.setattr(measure, "machine", lambda device: about)
    monkeypatch.setattr(arrays, "cuda_device", lambda: True)
    monkeypatch.setattr(bench, "_best_device", lambda operators: "cuda")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(peers, "_folder", None)
    monkeypatch.delenv("KDA_PEERS", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Makes a module of these functions importable, in packages that are otherwise empty."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        setattr(sys.modules[module], name, function)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Calls ``python -m bench`` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "bench", *words], cwd=ROOT, capture_output=True, text=True)


def rows(table: str) -> list[list[str]]:
    """The cells of a plain table."""
    lines = table.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch(r"-+(  +-+)+", line))
    columns = [m.span() for m in re.finditer("-+", lines[rule])]
    body = lines[rule + 1 :]
    body = body[: body.index("")] if "" in body else body
    return [
        [line[a : b if i + 1 < len(columns) else None].strip() for i, (a, b) in enumerate(columns)] for line in body
    ]

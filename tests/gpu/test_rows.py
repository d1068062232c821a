"""operators.py has a row for every operator of the library."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from kda.call import library, tracing
from operators import OPERATORS
from places import HERE


def test_every_operator_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's profiler would list them."""
    called: set[str] = set()

    def record(name: str) -> Any:
        called.add(name.removeprefix("libkda::"))
        return nullcontext()

    monkeypatch.setattr(library, "_profiling", lambda: True)
    monkeypatch.setattr(tracing, "profiled", record)
    for row in OPERATORS.values():
        row.run(HERE(row.make(0)))
    assert called == set(library.OPERATORS), "a new operator needs a row in tests/gpu/operators.py"

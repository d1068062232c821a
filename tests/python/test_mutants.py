"""When tests/mutants/mutants.py believes that a mutant was caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "mutants"


@pytest.mark.parametrize(
    ("status", "output", "result"),
    [
        (1, "tests/cpp/test_gate.cc:41: Failure\nExpected equality", "caught"),
        (1, 'unknown file: Failure\nC++ exception with description "a race" thrown in the test body.', "caught"),
        (1, "\nglobal memory: Failure\naccess at byte 4096 of 4096\n", "caught"),
        (-11, "tests/cpp/test_gate.cc:41: Failure\nand then it crashed", "caught"),
        (0, "[  PASSED  ] 3 tests.", "SURVIVED"),
        (1, "no test matches the filter: Gate.*", "ENDED"),
        (-11, "", "ENDED"),
        (-9, "", "ENDED"),
        (127, "symbol lookup error: undefined symbol: kda_gate", "ENDED"),
    ],
)
def test_only_a_failed_expectation_catches_a_mutant(
    status: int, output: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import mutants

    begun = "[ RUN      ] Gate.IsTheOracle\n[       OK ] Gate.IsTheOracle (1 ms)\n[ RUN      ] Gate.OfAnyWidth\n"
    run = subprocess.CompletedProcess(["test"], status, begun + output, "")
    found, details = mutants.verdict(run)
    assert found == result
    crashed = status in (-6, -11)
    assert mutants.verdict(run, ends=True)[0] == ("caught" if crashed else result), "where a crash was looked at"
    assert details == "Gate.OfAnyWidth" if result == "caught" else bool(details) == (result == "ENDED")
    nothing_ran = subprocess.CompletedProcess(["test"], status, output.partition("[ RUN")[0], "")
    assert mutants.verdict(nothing_ran, ends=True)[0] == ("ENDED" if status else "SURVIVED")
    for name in ("mutants", "table"):
        sys.modules.pop(name)

"""What a mutant is, and the tests that must notice it: a program, behind variables of its environment,
and a filter."""

from __future__ import annotations

from dataclasses import dataclass

CASES = ("tokens_65", "packed", "gva_2", "softplus_bias", "lower_bound", "beta_2sigmoid", "K5_V200", "state_K_first")


def numerics(*suites: str) -> tuple[str, str]:
    return "test_numerics", ":".join(f"All/{s}.*_{c}" for s in suites for c in CASES)


# CUDA kernels, on the emulator.
EMULATOR = "test_emulator"


def emulated(*tests: str) -> tuple[str, str]:
    return EMULATOR, ":".join(f"All/{t}" for t in tests)


@dataclass
class Mutant:
    name: str
    file: str
    tests: tuple[str, str]
    old: str  # exactly once in the file
    new: str
    ends: bool = False  # see ENDS


# Wrong accesses of these end the process, on the CPU in malloc, before a test can say what is wrong. Each was seen so.
ENDS = frozenset(
    {
        "cuda snapshots: rows that are not wanted",
        "flush_verify: state written back unchanged",
        "forward: padded sequences computed",
        "speculation: accept_len not clamped from below",
        "team: last chunk as long as the others",
    }
)


def mutants(file: str, tests: tuple[str, str], *substitutions: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(name, file, tests, old, new, name in ENDS) for name, old, new in substitutions]

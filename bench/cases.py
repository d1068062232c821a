"""What is computed: a problem with a kind of gate, its name in tables and records, and how names choose cases."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kda.cli.problems import Problem, combinations


@dataclass(frozen=True)
class Case:
    problem: Problem
    gate: str  # "strong": every channel decays by about 2.5 nats a token; "slow": all but one channel a head do;
    # "softplus": without a lower bound; "log": steps as a stage takes them

    @property
    def name(self) -> str:
        p = self.problem
        heads = f"H{p.H}" if p.HV == p.H else f"H{p.H} HV{p.HV}"
        if p.lengths:
            same = len(set(p.lengths)) == 1
            return f"{heads} {p.N} x {p.lengths[0]}" if same else f"{heads} {p.N} lengths, {p.T}"
        return f"{heads} {f'B{p.B} ' if p.B > 1 else ''}T{p.T}"


def full_name(case: Case, usual: str = "V-first") -> str:
    """With what differs from 128 channels in bfloat16. ``usual``: the layout that goes without saying."""
    p = case.problem
    sizes = f" K{p.K} V{p.V}" if (p.K, p.V) != (128, 128) else ""
    layout = "" if p.layout == usual else f" {p.layout}"
    return case.name + sizes + layout + (f" {p.dtype}" if p.dtype != "bfloat16" else "")


def given_cases(p: Problem, given: dict[str, list[Any]], operator: str) -> list[Case]:
    """All combinations of the sizes, with strong and slow gates."""
    gates = given.get("gate", ["lower_bound"])
    if "log" in gates:
        raise ValueError(f"--gate: expected lower_bound or softplus for {operator} on cuda, got log")
    return [
        Case(p, gate)
        for p in combinations(p, given | {"gate": gates})
        for gate in (["softplus"] if p.gate == "softplus" else ["strong", "slow"])
    ]


SomeCase = TypeVar("SomeCase", bound=Case)


def named(
    cases: Sequence[SomeCase], names: Sequence[str], name_of: Callable[[SomeCase], str] = lambda case: case.name
) -> list[SomeCase]:
    """The cases that one of ``names`` matches, such as H64T8192, H12* or H96*slow, or all if there are none."""

    def called(case: SomeCase, name: str) -> bool:
        words = [x.replace(" ", "").lower() for x in (name, name_of(case), name_of(case) + case.gate)]
        return any(fnmatch.fnmatchcase(word, words[0]) for word in words[1:])

    for name in names:
        if not any(called(case, name) for case in cases):
            known = ", ".join(dict.fromkeys(name_of(case).replace(" ", "") for case in cases))
            raise ValueError(f"--rows: expected some of {known}, or patterns of them, got {name}")
    return [case for case in cases if not names or any(called(case, name) for name in names)]

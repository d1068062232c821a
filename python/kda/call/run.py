"""The one door to the operators of the library: calls by name. Nobody else knows the order of their operands.

The binding's functions take all operands by position, in the order of the tables in ``src/contract``. On the first call
of an operator, :func:`by_name` makes a function with parameters from its table. It is source text, because then a call
costs little more than one by position. A decode of one token (H = 1, K = V = 16) takes 2.7 us by position, 3.3 by this
function and 5.2 by one that goes through the table in a loop (one core of a Xeon):

* An operand has the name of its member in ``kda.h``: ``q``, ``h0``, ``first_valid_slot``. Operands that may be absent
  are None by default, numbers are 0: what a zeroed struct of ``kda.h`` means.
* Members of a struct within the args are one parameter, a tuple in the order of the struct: ``conv``, ``records``,
  ``last`` and ``norm``, by default None; and ``options``, the numbers of ``kda_inputs``.
* The tensors that come first, at most eight, may also be given by position. Steps of decode do: for a call with more
  than fifteen keywords (a position counts as half of one) CPython makes a dict, which takes a tenth of the step.
* Operands that nobody gave are left off at the end: reading them would take time, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

MOST_BY_POSITION = 8


class Operand(NamedTuple):
    """What an operator takes as one positional argument: a row of its table in ``src/contract``."""

    name: str  # in sentences
    member: str  # of the args struct: "in.q"
    type: str  # "tensor", "int", "bool" or "float"
    role: str  # "in", "out" or "inout"
    optional: bool  # may be absent
    trailing: bool  # comes after impl, num_threads and workspace, and may be left off at the end
    dtypes: tuple[str, ...]  # () for scalars
    shape: str  # "[B,T,H,K]"; "" for scalars
    with_: str  # the operand that it comes with; "" if it stands alone. Absent without that one
    may_be: tuple[str, ...]  # the operands of which it may be the very same view
    together: bool  # is there if and only if `with_` is

    @classmethod
    def parse(cls, line: str) -> Operand:
        name, member, kind, role, absent, trailing, dtypes, shape, other, may_be = line.split("\t")
        return cls(
            name,
            member,
            kind,
            role,
            optional=absent in ("optional", "together"),
            trailing=trailing == "trailing",
            dtypes=tuple(dtypes.split()),
            shape=shape,
            with_=other,
            may_be=tuple(may_be.split()),
            together=absent in ("needed", "together"),
        )

    @property
    def struct(self) -> str:
        """The parameter that it is a part of; "" if it is one itself."""
        struct = self.member.rpartition(".")[0]
        if struct == "in":
            return "" if self.type == "tensor" else "options"
        return "" if struct in ("states", "at") else struct

    @property
    def variable(self) -> str:
        member = self.member.rpartition(".")[2]
        return member if self.struct in ("", "options") else f"{self.struct}_{member}"

    @property
    def zero(self) -> str:
        return {"tensor": "None", "bool": "False", "float": "0.0"}.get(self.type, "0")


def by_name(name: str, function: Any, operands: Sequence[Operand], sizes: Sequence[str] = ()) -> Callable[..., Any]:
    """``function`` of the binding, with parameters in place of positions. ``sizes`` are numbers before the operands."""
    scope = {"function": function}
    exec(compile(source_of(name, operands, sizes), f"<kda: {name}>", "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


def source_of(name: str, operands: Sequence[Operand], sizes: Sequence[str] = ()) -> str:
    before, behind = ([o for o in operands if o.trailing is trailing] for trailing in (False, True))
    by_position = _by_position(before)
    parameters = [*map(_parameter, by_position), "*", *sizes]
    parameters += dict.fromkeys(map(_parameter, before[len(by_position) :]))  # each struct once
    parameters += ["impl=None", "num_threads=0", "workspace=None"]
    parameters += dict.fromkeys(map(_parameter, behind))
    lines = [f"def {name}({', '.join(parameters)}):"]
    if behind:  # nearly all calls have none, or the first alone: the slots to write
        first = [o for o in behind if (o.struct or o.variable) == (behind[0].struct or behind[0].variable)]
        lines += [f"    if {_absent(behind[len(first) :])}:", f"        if {_absent(first)}:"]
        lines += [*_call(before, [], " " * 12, sizes), *_call(before, first, " " * 8, sizes)]
    return "\n".join([*lines, *_call(before, behind, " " * 4, sizes)])


def _by_position(operands: Sequence[Operand]) -> list[Operand]:
    """The tensors that come first, until one must be given after one that may be absent."""
    found: list[Operand] = []
    for o in operands[:MOST_BY_POSITION]:
        if o.struct or o.type != "tensor" or (found and found[-1].optional and not o.optional):
            break
        found.append(o)
    return found


def _parameter(o: Operand) -> str:
    if o.struct:
        return "options" if o.struct == "options" else f"{o.struct}=None"
    return o.variable if o.type == "tensor" and not o.optional else f"{o.variable}={o.zero}"


def _absent(operands: Sequence[Operand]) -> str:
    """The condition that nobody gave any of them."""
    conditions = (
        f"{o.struct or o.variable} is None" if o.struct or o.type == "tensor" else f"not {o.variable}" for o in operands
    )
    return " and ".join(dict.fromkeys(conditions)) or "True"


def _call(before: Sequence[Operand], behind: Sequence[Operand], margin: str, sizes: Sequence[str]) -> list[str]:
    """The statements of the call. Spreading a struct in it takes longer than making variables of its members, unless
    they are so many arguments that CPython makes a list of them anyway."""
    spread = len(before) + len(behind) > 27  # and at least three more
    lines, arguments = [], [*sizes]
    for part, given in ((before, arguments), (behind, rest := list[str]())):
        for struct, members in groupby(part, lambda o: o.struct):
            variables, zeros = zip(*((o.variable, o.zero) for o in members), strict=True)
            fields = struct if struct == "options" else f"(({', '.join(zeros)},) if {struct} is None else {struct})"
            if struct and spread:
                given.append(f"*{fields}")
                continue
            if struct:
                lines.append(f"{margin}{', '.join(variables)} = {fields}")
            given += variables
    return [*lines, f"{margin}return function({', '.join([*arguments, 'impl', 'num_threads', 'workspace', *rest])})"]

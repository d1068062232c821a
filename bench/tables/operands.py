"""Tables of operands, from the library: one for each operator, and for each struct that several args structs have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

from bench.tables.record import table
from kda.call.library import OPERATORS, Operand, library

GROUPS = {
    "in": "kda_inputs", "states": "kda_states", "conv": "kda_conv_inputs", "norm": "kda_norm_inputs",
    "records": "kda_records", "last": "kda_records", "at": "kda_stage",
}  # fmt: skip
ROLES = {"in": "in", "out": "out", "inout": "in and out"}
SCALARS = {"int": "integer", "bool": "flag", "float": "number"}
ANY_FLOAT = {"float32", "bfloat16", "float16"}


def dtypes(o: Operand) -> str:
    if o.type != "tensor":
        return SCALARS[o.type]
    names = [name for name in o.dtypes if name != "float64"]
    return "any float" if set(names) == ANY_FLOAT else ", ".join(names)


def quoted(o: Operand, other: str) -> str:
    """The operand as others of its struct name it, behind words that may be in front: a pool `hT`."""
    group = o.member.rpartition(".")[0]
    *words, name = other.removeprefix(f"{group}.").split()
    return " ".join([*words, f"`{name}`"])


def given(o: Operand) -> str:
    """When it is there, and whose memory it may be."""
    alone = "optional" if o.optional else ""
    needs = f"optional, needs {quoted(o, o.with_)}" if o.with_ else alone
    there = f"with {quoted(o, o.with_)}" if o.together else needs
    may_be = "may be " + " or ".join(quoted(o, x) for x in o.may_be) if o.may_be else ""
    return "; ".join(filter(None, (there, may_be)))


def kind(o: Operand) -> list[str]:
    return [dtypes(o), f"`{o.shape}`" if o.shape else ""]


def merged(rows: Iterable[list[str]]) -> list[list[str]]:
    """Neighbours that differ in their names alone share a row."""
    return [[", ".join(row[0] for row in alike), *what] for what, alike in groupby(rows, lambda row: row[1:])]


def operator(op: str) -> list[str]:
    rows: dict[str, list[str]] = {}
    for o in library().operands(op):
        group = o.member.rpartition(".")[0]
        if not group:
            rows[o.member] = [f"`{o.member}`", *kind(o), ROLES[o.role], given(o)]
        elif group not in rows:
            link = f"[{GROUPS[group]}](#{GROUPS[group]})"
            rows[group] = [f"`{group}`", link, "", "; ".join(roles(op, group)), ""]
    return table(["", "dtype", "shape", "role", "given"], merged(rows.values()))


def roles(op: str, group: str) -> Iterator[str]:
    """What the operator does with the members of the struct."""
    members = [o for o in library().operands(op) if o.member.startswith(f"{group}.")]
    for role, text in ROLES.items():
        names = [f"`{o.member.removeprefix(f'{group}.')}`" for o in members if o.role == role]
        if names:
            yield text if role == "in" else f"{text}: {', '.join(names)}"


def group(struct: str) -> list[str]:
    rows: dict[str, list[str]] = {}
    for o in (o for op in OPERATORS for o in library().operands(op)):
        within, _, member = o.member.rpartition(".")
        if GROUPS.get(within) == struct:
            row = [f"`{member}`", *kind(o), given(o)]
            assert rows.setdefault(member, row) == row, f"{struct}.{member}: operators differ"
    return table(["", "dtype", "shape", "given"], merged(rows.values()))


def stages() -> list[str]:
    """What each stage reads and writes."""

    def names(op: str, *roles: str) -> str:
        found = (o for o in library().operands(op) if o.type == "tensor" and "." not in o.member and o.role in roles)
        return " ".join(o.name + "?" * o.optional for o in found)

    each = [op for op in OPERATORS if op.startswith("stage_")]
    rows = [
        [f"`{op.removeprefix('stage_')}`", f"`{names(op, 'in', 'inout')}`", f"`{names(op, 'out', 'inout')}`"]
        for op in each
    ]
    return table(["C, Python", "reads", "writes"], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    **{struct: partial(group, struct) for struct in dict.fromkeys(GROUPS.values())},
    **{f"kda_{op}": partial(operator, op) for op in OPERATORS},
    "stages": stages,
}

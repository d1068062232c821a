"""kda.h read as text, and where it differs from the library's tables of operands.

The header is written by hand, in a regular form:

    kda_tensor q, k; /* [B,T,H,K] in, optional: bf16, f16 or f32; .. */

A tensor's comment begins with its shape, or with a shape for each of the names. "or [..]" may follow, for another form
of the call. Instead it may begin with "as given to kda_x" or "as kda_x wrote them". Outputs say "out" or "in and out".
Who may be absent says "optional" or "absent", and who comes with x says "with x" or "needs x". Dtypes, if named, are
all but float64. Structs within the args, such as kda_inputs, have the same form. What operators write there differs, so
it need not be said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kda.call.library import Operand

TYPES = {"kda_tensor": ("tensor",), "int32_t": ("int", "bool"), "float": ("float",), "double": ("float",)}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "i64": "int64", "bool": "bool"}
SHAPE = r"\[[^\]]*\]"
ELSEWHERE = re.compile(r"as (?:given to kda_(\w+)|kda_(\w+) wrote them)")
ABSENT = re.compile(r"(?:(\w+) is )?\b(?:optional|absent|with|needs)\b")

Operands = Callable[[str], Sequence[Operand]]


class Member(NamedTuple):
    name: str
    type: str
    comment: str
    place: int  # among the names of its declaration
    names: int  # of the declaration


class Header:
    def __init__(self, text: str) -> None:
        self.text = text
        found = re.finditer(r"typedef struct (\w+) \{(.*?)\n\} \1;", text, re.S)
        self.structs = {m[1]: list(_declared(m[2])) for m in found}

    def members(self, args: str) -> Iterator[tuple[str, Member]]:
        """Those of an args struct and of the structs within, by the names of operands, in the order of memory."""
        for m in self.structs[args][2:]:
            if m.type == "kda_tensor" or m.type not in self.structs:
                yield m.name, m
            else:
                yield from ((f"{m.name}.{x.name}", x) for x in self.structs[m.type])


def _declared(body: str) -> Iterator[Member]:
    for kind, names, comment in re.findall(r"^\s*(\w+) ([\w,\s]+);(?: */\*(.*?)\*/)?", body, re.S | re.M):
        each = [name.strip() for name in names.split(",")]
        yield from (Member(name, kind, " ".join(comment.split()), i, len(each)) for i, name in enumerate(each))


def differences(text: str, operators: Sequence[str], operands: Operands) -> Iterator[str]:
    """Sentences; none if the header says what the tables say."""
    header = Header(text)
    wanted = [f"kda_{op}_args" for op in operators]
    unknown = [name for name in header.structs if name.endswith("_args") and name not in wanted]
    yield from (f"{name}: no operator has it" for name in unknown)
    for op, args in zip(operators, wanted, strict=True):
        wrong = _of_operator(header, op, args, operands) if args in header.structs else ["no args"]
        yield from (f"kda_{op}: {sentence}" for sentence in wrong)


def _of_operator(header: Header, op: str, args: str, operands: Operands) -> Iterator[str]:
    for function in (f"kda_{op}", f"kda_{op}_workspace", f"kda_{op}_explain"):
        if f"\nKDA_API kda_status {function}(const {args}* args" not in header.text:
            yield f"{function} is not declared"
    if f"\n#define KDA_{op.upper()}_ARGS_INIT KDA_ARGS_INIT({args})\n" not in header.text:
        yield "no initialiser"
    first, second = header.structs[args][:2]
    if first[:3] != ("struct_size", "uint64_t", f"sizeof({args})") or second[:2] != ("exec", "kda_exec"):
        yield "does not begin with its size and exec"

    members = {name: m for name, m in header.members(args) if m.name != "reserved"}
    table = {o.member: o for o in operands(op)}
    yield from (f"{name} is not in the table" for name in members if name not in table)
    yield from (f"{name} is not in the struct" for name in table if name not in members)
    # What Python's calls may leave off at the end is in the order in which they got it.
    order = [name for name, o in table.items() if not o.trailing and name in members]
    if [name for name in members if name in order] != order:
        yield f"the order in the table is {', '.join(order)}"
    for name in (name for name in members if name in table):
        yield from (f"{name}: {sentence}" for sentence in _of_member(members[name], table[name], operands))


def _of_member(m: Member, o: Operand, operands: Operands) -> Iterator[str]:
    if o.type not in TYPES.get(m.type, ()):
        yield f"{m.type}, in the table {o.type}"
    elif o.type == "tensor" and (other := ELSEWHERE.match(m.comment)):
        yield from _of_other(m, o, other[1] or other[2], operands)
    elif o.type == "tensor":
        yield from _of_shape(m, o)
        yield from _of_words(m, o)


def _of_other(m: Member, o: Operand, op: str, operands: Operands) -> Iterator[str]:
    other = next((x for x in operands(op) if x.name == m.name), None)
    if other is None or (other.shape, other.dtypes, other.optional) != (o.shape, o.dtypes, o.optional):
        yield f"not as in kda_{op}"
    if o.role != "in":
        yield f"{o.role} in the table"


def _of_shape(m: Member, o: Operand) -> Iterator[str]:
    begin = re.match(rf"{SHAPE}(?:, {SHAPE})*", m.comment)
    shapes = re.findall(SHAPE, begin[0]) if begin else []
    if len(shapes) not in (1, m.names):
        yield f"{len(shapes)} shapes for {m.names} names: {m.comment!r}"
    elif (shape := shapes[m.place % len(shapes)]) != o.shape:
        yield f"shape {shape}, in the table {o.shape}"


def _of_words(m: Member, o: Operand) -> Iterator[str]:
    role = "inout" if "in and out" in m.comment else "out" if re.search(r"\bout\b", m.comment) else "in"
    if role != o.role and "." not in o.member:
        yield f"{role}, in the table {o.role}: {m.comment!r}"
    absent = ABSENT.search(m.comment)
    if (absent is not None and absent[1] in (None, m.name)) != (o.optional or o.with_ != ""):
        yield f"{'may' if absent else 'may not'} be absent, unlike in the table: {m.comment!r}"
    other = o.with_.split(" ")[-1].removeprefix(f"{o.member.rpartition('.')[0]}.")
    if other and not re.search(rf"\b(?:with|needs) {re.escape(other)}\b", m.comment):
        yield f"does not name {other}, with which it comes: {m.comment!r}"
    named = {DTYPES[x] for x in re.findall(rf"\b(?:{'|'.join(DTYPES)})\b", m.comment)}
    if named and named != set(o.dtypes) - {"float64"}:
        yield f"{', '.join(sorted(named))}, in the table {', '.join(o.dtypes)}"

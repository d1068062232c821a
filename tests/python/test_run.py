"""kda.call.run: calls of the library by name. Expected positions are those of the tables, read by the binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda
import kda.operators
from kda.call.graph import POOL, WRITES, LibraryCall
from kda.call.library import OPERATORS, library
from kda.call.options import Options
from kda.call.run import Operand, by_name, source_of

RUN = ("impl", "num_threads", "workspace")
STRUCTS = {"options": Options._fields, "conv": kda.Conv._fields, "records": kda.Records._fields}
STRUCTS |= {"last": kda.Records._fields, "norm": ("gate", "weight", "eps", "activation", "apply")}


def recorder(op: str) -> Callable[..., tuple[Any, ...]]:
    """The operator's function, which returns what the binding would get."""
    return by_name(op, lambda *arguments: arguments, library().operands(op))


def members(op: str, trailing: bool) -> list[str]:
    return [o.member for o in library().operands(op) if o.trailing == trailing]


def everything(op: str) -> dict[str, Any]:
    """Every operand as the name of its member, by the name of its parameter."""
    given: dict[str, Any] = {name: name for name in RUN}
    for o in library().operands(op):
        if o.struct:
            given[o.struct] = (*given.get(o.struct, ()), o.member)
        else:
            given[o.variable] = o.member
    return given


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operand_is_in_its_place(op: str) -> None:
    assert recorder(op)(**everything(op)) == (*members(op, trailing=False), *RUN, *members(op, trailing=True))


@pytest.mark.parametrize("op", OPERATORS)
def test_what_is_absent(op: str) -> None:
    """Names that are left out are None or 0. Trailing operands are left off, but for the first if it is given."""
    operands = library().operands(op)
    zeros = {"tensor": None, "int": 0, "float": 0.0, "bool": False}
    required = {o.variable: o.member for o in operands if o.zero == "None" and not o.optional and not o.struct}
    required = {name: x for name, x in required.items() if not any(o.variable == name and o.trailing for o in operands)}
    options = {"options": tuple(o.member for o in operands if o.struct == "options")}
    given = required | (options if options["options"] else {})
    leading = tuple(
        o.member if o.variable in given or o.struct == "options" else zeros[o.type] for o in operands if not o.trailing
    )
    got = recorder(op)(**given)
    assert got == (*leading, None, 0, None)
    assert all(type(x) is type(y) for x, y in zip(got, (*leading, None, 0, None), strict=True))
    if trailing := [o for o in operands if o.trailing]:
        first, last = trailing[0], trailing[-1]
        if not first.struct:
            assert recorder(op)(**given, **{first.variable: "x"}) == (*leading, None, 0, None, "x")
        more = {last.struct: [o.member for o in trailing if o.struct == last.struct]} if last.struct else {}
        got = recorder(op)(**given, **(more or {last.variable: last.member}))
        assert len(got) == len(operands) + 3 and got[-1] == last.member and got[: len(leading)] == leading


@pytest.mark.parametrize("op", OPERATORS)
def test_wrong_names(op: str) -> None:
    given = everything(op)
    with pytest.raises(TypeError, match="no_such_operand"):
        recorder(op)(**given, no_such_operand=1)
    for o in library().operands(op):
        if o.type == "tensor" and not o.optional and not o.struct:
            with pytest.raises(TypeError, match=f"'{o.variable}'"):
                recorder(op)(**{name: x for name, x in given.items() if name != o.variable})


def test_by_position_are_the_first_tensors() -> None:
    given = everything("decode")
    first = [given.pop(name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")]
    assert recorder("decode")(*first, **given)[:8] == tuple(f"in.{name}" for name in (
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"
    ))  # fmt: skip
    with pytest.raises(TypeError, match="positional"):
        recorder("decode")(*first, given.pop("h0"), **given)
    parameters = source_of("segment_merge", library().operands("segment_merge")).split(":")[0]
    assert parameters.startswith("def segment_merge(M, b, h0=None, *, states"), "a required one after an optional one"


@pytest.mark.parametrize("op", OPERATORS)
def test_structs_are_ours(op: str) -> None:
    """Callers hand over ``Options``, ``Conv``, ``Records`` and norms as they are."""
    found: dict[str, list[str]] = {}
    for o in library().operands(op):
        if o.struct:
            found.setdefault(o.struct, []).append(o.member.split(".")[1])
    assert found == {struct: list(STRUCTS[struct]) for struct in found}


def test_names_of_a_line() -> None:
    line = "records.u\trecords.u\ttensor\tinout\tneeded\t\tfloat32 float64\t[slots,R,HV,V]\trecords.k\ta b"
    o = Operand.parse(line)
    assert (o.struct, o.variable, o.optional, o.trailing, o.zero) == ("records", "records_u", False, False, "None")
    assert (o.dtypes, o.may_be, o.with_) == (("float32", "float64"), ("a", "b"), "records.k")


def test_other_functions_of_the_binding_stay_as_they_are() -> None:
    assert library().implementation("conv", 99) == ""
    assert library().decode is library().decode, "made once"


def test_a_workspace_and_an_explanation_take_the_same_names() -> None:
    x, options = np.ones((1, 70, 1, 4), np.float32), (0, 0, False, 0, 0.0, 1.0)
    call = {"q": x, "k": x, "v": x, "g": -x, "beta": x[..., 0], "options": options, "o": np.empty_like(x)}
    assert library().forward_workspace(**call, num_threads=1) > 0
    assert "* cpu_chunk" in library().forward_explain(**call)
    library().forward(**call)
    assert np.array_equal(call["o"], kda.prefill(x, x, x, -x, x[..., 0], scale=1.0))


def test_operators_that_get_the_arguments_of_their_schema() -> None:
    """A call by position is one by name there, which takes less time. ``graph`` calls all others by name."""
    calls = {"prefill": ("forward", POOL, WRITES), "decode_mtp": ("decode", POOL, WRITES), "flush": ("flush", {})}
    for op, call in calls.items():
        operator = getattr(torch.ops.kda, op).default
        run, schema = LibraryCall(*call).of(operator), operator._schema.arguments
        assert run.__code__.co_varnames[: run.__code__.co_argcount] == tuple(a.name for a in schema)
        assert (run.__defaults__ or ()) == tuple(a.default_value for a in schema if a.has_default_value())
    source = LibraryCall("decode", POOL, WRITES).source(torch.ops.kda.decode.default)
    assert "library().decode(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options=(gate_form, beta_form," in source
    assert "h0=state," in source and "o=out," in source and "update_state=" not in source
    assert source.endswith("hT=state if update_state else None)")

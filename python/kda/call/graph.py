"""Defines the registered operators of torch, for :mod:`kda.operators`, whose functions take the arguments by the names
of the schemas."""

from __future__ import annotations

import functools
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import torch

from .eager import LostGradients, mark_written
from .library import library
from .options import Options
from .tracing import after_autograd

Tensor = torch.Tensor

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
OPTIONS = "int gate_form, int beta_form, bool qk_l2norm, int state_layout, float lower_bound, float scale"
STATES = "Tensor(a!)? state, Tensor? state_indices, Tensor? has_initial_state, SymInt first_valid_slot, Tensor(b!) out"
WRITTEN = "Tensor? out_state_indices, bool update_state"  # the slots to write; is anything written?
RUN = "str? impl, SymInt num_threads"  # counts may be symbols of a graph, so that others need no new one
NORM = "Tensor? norm_gate=None, Tensor? norm_weight=None, float norm_eps=0.0, int norm_activation=0, bool norm=False"

_RECORDS = ("u", "k", "alpha", "indices", "first", "count")
# Schemas have no tuples of different things, so they name the fields of what is one argument elsewhere (see ``run``).
_STRUCTS = {
    "options": Options._fields,
    "conv": tuple(f"conv_{field}" for field in ("x", "weight", "bias", "state", "indices")),
    "records": tuple(f"records_{field}" for field in _RECORDS),
    "last": tuple(f"last_{field}" for field in _RECORDS),
    "norm": ("norm_gate", "norm_weight", "norm_eps", "norm_activation", "norm"),
}

LIBRARY = torch.library.Library("kda", "DEF")


class LibraryCall(NamedTuple):
    """The ``run`` of an operator that does nothing but call a function of the library."""

    function: str
    names: dict[str, str]  # the library's for those of the schema that differ, or "" for those that it does not take
    more: str = ""  # further arguments, as source text

    def source(self, operator: Any) -> str:
        """The text of a function whose parameters are those of the schema: torch passes them by position, and a call
        that takes them so is 5 us shorter than one that finds their names first (:func:`by_schema`)."""
        arguments = operator._schema.arguments
        parameters = [f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name for a in arguments]
        first = [a.name for a in takewhile(lambda a: a.name in _BY_POSITION, arguments)]
        given, structs = [*first], {field: struct for struct, names in _STRUCTS.items() for field in names}
        for struct, group in groupby(arguments[len(first) :], lambda a: structs.get(a.name)):
            names = [a.name for a in group]
            if struct is None or len(names) < len(_STRUCTS[struct]):  # flush takes some of conv's by themselves
                given += [f"{n}={name}" for name in names if (n := self.names.get(name, name))]
            else:
                given.append(f"{struct}={'norm_of' if struct == 'norm' else ''}({', '.join(names)})")
        call = f"library().{self.function}({', '.join([*given, *filter(None, [self.more])])})"
        return f"def run({', '.join(parameters)}):\n    {call}"

    def of(self, operator: Any) -> Any:
        scope: dict[str, Any] = {"library": library, "norm_of": norm_of}
        exec(compile(self.source(operator), f"<kda: {operator}>", "exec"), scope)
        return scope["run"]


_BY_POSITION = {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "x", "weight", "bias"}
POOL = {"state": "h0", "out": "o", "update_state": ""}  # names of schemas with STATES
WRITES = "hT=state if update_state else None"


def define(name: str, signature: str, run: Any, fake: Any, instead: str | None = None) -> None:
    """``instead`` names the function that has gradients if this one has none."""
    define_in(LIBRARY, name, signature, run, fake, instead)


def define_in(there: Any, name: str, signature: str, run: Any, fake: Any, instead: str | None) -> None:
    there.define(f"{name}{signature}", tags=torch.Tag.pt2_compliant_tag)
    operator = getattr(getattr(torch.ops, there.ns), name).default
    if isinstance(run, LibraryCall):
        run = run.of(operator)
    for device in ("CPU", "CUDA"):
        there.impl(name, _marking(operator, run), device)
    torch.library.register_fake(f"{there.ns}::{name}", _of_one_kind(operator, fake), lib=there)
    if instead is not None:
        there.impl(name, _refusing(operator, instead), "Autograd", with_keyset=True)


def by_schema(operator: Any) -> Any:
    """A function that names the arguments of the operator's functions. torch passes them by position, and leaves out
    those at the end that have their defaults."""
    arguments = operator._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def named(*values: Any, **options: Any) -> dict[str, Any]:
        found = defaults.copy()
        found.update(zip(names, values, strict=False))
        found.update(options)
        return found

    return named


def in_order(operator: Any) -> Any:
    """A function from values by name to one for each argument of the operator, None where there is none: gradients, as
    torch takes them. It reads no schema, so torch can trace it in a backward (compiled autograd)."""
    names = tuple(a.name for a in operator._schema.arguments)
    return lambda found: tuple(found.get(name) for name in names)


def norm_of(gate: Any, weight: Any, eps: float, activation: int, norm: bool) -> tuple[Any, ...] | None:
    """The norm for the library, from the arguments of a schema. Without one, the library's call is shorter."""
    return (gate, weight, eps, activation, norm) if norm or gate is not None or weight is not None else None


def run_operator(name: str, **arguments: Any) -> Any:
    """Calls an operator of ``torch.ops.kda``. Structs are given as tuples, or None."""
    return getattr(torch.ops.kda, name)(**apart(arguments))


def apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the fields of structs in their place."""
    for struct, names in _STRUCTS.items():
        if struct in arguments:
            fields = arguments.pop(struct)
            if fields is not None:
                arguments.update(zip(names, fields, strict=True))
            elif struct != "norm":  # whose fields have defaults, for older graphs
                arguments.update(dict.fromkeys(names))
    return arguments


def _of_one_kind(operator: Any, fake: Any) -> Any:
    """Returns ``fake``, unless some tensors are meta and some are not: torch would treat all as meta and compute
    nothing."""
    named = by_schema(operator)

    @functools.wraps(fake)
    def check_and_fake(*values: Any, **options: Any) -> Any:
        arguments = named(*values, **options)
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        on_meta = [n for n, x in tensors.items() if x.is_meta]
        if on_meta and len(on_meta) < len(tensors):
            other = next(x.device for x in tensors.values() if not x.is_meta)
            raise ValueError(f"{on_meta[0]}: expected device {other} like the other tensors, got meta")
        return fake(**arguments)

    return check_and_fake


def _takes_names(operator: Any, run: Any) -> Any:
    """``run``, called by name. If its parameters and defaults are those of the schema, in the same order, a call by
    position is that, and takes 5 us less."""
    code, arguments = run.__code__, operator._schema.arguments
    defaults = tuple(a.default_value for a in arguments if a.has_default_value())
    if (
        code.co_varnames[: code.co_argcount] == tuple(a.name for a in arguments)
        and (run.__defaults__ or ()) == defaults
    ):
        return run
    named = by_schema(operator)
    return lambda *values, **options: run(**named(*values, **options))


def _marking(operator: Any, run: Any) -> Any:
    """``run``, after which everything that the schema marks as written has a higher version. torch does this only for
    its own operators."""
    run, arguments = _takes_names(operator, run), operator._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    if not any(written):
        return run
    names = [a.name for a, w in zip(arguments, written, strict=True) if w and a.kwarg_only]

    def run_and_mark(*values: Any, **options: Any) -> Any:
        result = run(*values, **options)
        mark_written(*(x for x, w in zip(values, written, strict=False) if w), *(options.get(n) for n in names))
        return result

    return run_and_mark


def _refusing(operator: Any, instead: str) -> Any:
    """Leaves autograd out, but refuses inputs that would lose their gradients. Runs in traces as well."""
    names = [a.name for a in operator._schema.arguments]

    def refuse_or_run(keys: Any, *values: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            for name, x in (*zip(names, values, strict=False), *options.items()):
                if isinstance(x, Tensor) and x.requires_grad:
                    raise ValueError(f"{name}: {LostGradients(instead)}")
        return operator.redispatch(keys & after_autograd, *values, **options)

    return refuse_or_run


def nothing(**_: Any) -> None:
    pass

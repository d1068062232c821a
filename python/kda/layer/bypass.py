"""Which parts of the layer may be computed from their parameters, without a call of them.

The layer computes its maps as one product, its convolutions in one launch, and a step with little else. That is right
only for parts whose call would compute just this. Whatever goes past a part asks :func:`may_bypass`. All other parts
are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..call.tracing import any_global_hook, compiling

Class = TypeVar("Class", bound=type)

_KINDS: dict[str, tuple[Any, frozenset[str]]] = {}  # of each role: the class, and the parameters that it reads
_FORWARDS: dict[Any, Any] = {}  # of these classes, as they were at import
_CALL = nn.Module.__call__


def stands_for(role: str, *parameters: str) -> Callable[[Class], Class]:
    """A decorator for the class of the parts of a role."""

    def register(kind: Class) -> Class:
        _KINDS[role], _FORWARDS[kind] = (kind, frozenset(parameters)), kind.forward  # type: ignore[attr-defined]
        return kind

    return register


stands_for("map", "weight", "bias")(nn.Linear)
stands_for("pair")(nn.Sequential)  # the two halves of a low-rank map


def may_bypass(role: str, *parts: Any) -> bool:
    """May the parts be computed as their role says, from their parameters? Not if anything else could happen in their
    calls: they are of another class, even one derived from it; they have hooks, a forward or a compiled call of their
    own; there are hooks of all modules; a parameter is computed by something (parametrized, pruned, an attribute)."""
    return not calls_differ() and are_own(role, *parts)


def calls_differ() -> bool:
    """Does something see, or change, the calls of all modules, or of all of a class?"""
    if any_global_hook() or nn.Module.__call__ is not _CALL:
        return True
    for kind, forward in _FORWARDS.items():  # noqa: SIM110  # every step asks: a generator takes twice as long
        if kind.forward is not forward:
            return True
    return False


def are_own(role: str, *parts: Any) -> bool:
    """What :func:`may_bypass` asks of the parts themselves. It reads what nn.Module keeps: attributes of modules take
    ten times as long, which shows in decode steps."""
    kind, parameters = _KINDS[role]
    for part in parts:
        if type(part) is not kind:
            return False
        kept = part.__dict__
        if kept["_forward_hooks"] or kept["_forward_pre_hooks"]:
            return False
        if kept["_backward_hooks"] or kept["_backward_pre_hooks"]:
            return False
        if "forward" in kept or kept.get("_compiled_call_impl") is not None:
            return False
        if not parameters <= kept["_parameters"].keys():
            return False
    # A compiled graph is guarded by what it compares in this way, and not by what is in a module's __dict__.
    return not compiling() or all(part.forward == kind.forward.__get__(part) for part in parts)


def are_plain_maps(*maps: Any, bias: bool = False) -> bool:
    """Are they the layer's own linear maps, with weights that are neither distributed, quantised nor sparse? ``bias``:
    they may have one. As :func:`are_own`, this leaves out what :func:`calls_differ` tells."""
    if not are_own("map", *maps):
        return False
    biases = _PLAIN_OR_NONE if bias else _NONE
    for m in maps:
        parameters = m._parameters
        weight = parameters["weight"]
        if type(weight) not in _PLAIN or weight.layout is not _STRIDED or type(parameters["bias"]) not in biases:
            return False
    return True


_PLAIN = {nn.Parameter, Tensor}  # FSDP and functional_call put tensors in the place of parameters
_NONE = {type(None)}
_PLAIN_OR_NONE = _PLAIN | _NONE
_STRIDED = torch.strided

"""Finds calls that torch has to see. Eager calls go straight to the binding. The registered operators (see
:mod:`kda.operators`) take calls that are traced or recorded, calls under a mode of torch's dispatcher
(``FakeTensorMode``, ``FlopCounterMode``, selective checkpointing), and calls with tensors that have no memory to read
here. ``retry`` looks for such tensors only after a call has failed, so other calls do not pay for the check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from . import tracing
from .arrays import is_torch, torch
from .tracing import compiling, is_wrapper, modes, recording


def dispatched() -> bool:
    if compiling() or recording():
        return True
    if modes():
        _tell_counters()
        return True
    return False


def _tell_counters() -> None:
    """A ``FlopCounterMode`` copies the formulas when it is made, which may be before ours are registered."""
    for mode in tracing.active_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(registry := getattr(counter, "flop_registry", None), dict):
            from . import flops

            for operator, formula in flops.formulas().items():
                registry.setdefault(operator, formula)


def tensors_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The torch tensors among the arguments, those in ``Conv`` and ``Records`` included."""
    found: dict[str, Any] = {}
    for name, x in arguments.items():
        fields: Iterable[tuple[str, Any]] = ((name, x),)
        if hasattr(x, "_fields"):
            fields = ((f"{name}.{field}", y) for field, y in zip(x._fields, x, strict=True))
        found |= {n: y for n, y in fields if is_torch(y)}
    return found


def needs_dispatch(arguments: dict[str, Any]) -> bool:
    """Does a failed call have tensors that the binding cannot read but the operators accept? A call with some meta
    tensors and some others would compute nothing, so it is left to ``refusal``."""
    if torch is None or modes():
        return False
    tensors = tensors_of(arguments).values()
    return any(map(is_wrapper, tensors)) or (bool(tensors) and all(x.is_meta for x in tensors))


@functools.cache
def mode_that_sees() -> Any:
    """The class :class:`kda.operators.SeenByTorch`."""

    class SeenByTorch(tracing.mode_class()):  # type: ignore[misc]
        """A mode of torch's dispatcher that changes nothing but the way of our calls: inside, they are operators of
        ``torch.ops.kda``, as they are under any mode. So what hooks into the dispatcher sees them, too: execution
        traces, observers of ``RecordFunction``, and implementations that a program registers itself."""

        __module__ = "kda.operators"

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operator(*args, **(kwargs or {}))

    return SeenByTorch


def through_operators(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with mode_that_sees()():
        return function(**arguments)

"""What the adapters of serving engines share. A call that they leave to the engine runs by its own function, and a
warning says once why."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ..call.library import library


class Declined(ValueError):
    """What an adapter itself leaves to the engine, before anything was touched."""


def built_with_cuda() -> bool:
    """Whether the library can run where engines run. Loads it."""
    return "\ncuda: not built" not in str(library().info())


def check_one_row(name: str, B: int) -> None:
    """Engines pass all tokens of a step in one row."""
    if B != 1:
        raise Declined(f"{name}: expected all tokens in one row, got {B} rows")


_told: set[str] = set()


def tell(engine: str, function: str, error: ValueError) -> None:
    """Warns, once for each sentence."""
    sentence = f"kda: {engine}'s own kernel runs for {function}, as ours declined: {error}"
    if sentence not in _told:
        _told.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def or_own(engine: str, ours: Any, own: Any) -> Callable[..., Any]:
    """A function with the parameters of ``ours``, which it calls. Where that declines with a ``ValueError``, it calls
    ``own`` with the same arguments. Our functions check a call before they touch anything, so what they refuse can
    still run elsewhere. A call with an argument that ours does not know is declined, too.

    It is source text, with the parameters spelled out: to pass them on as a dict takes 0.7 us.
    """
    parameters = inspect.signature(ours).parameters.values()
    in_front = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    known = inspect.signature(own).parameters

    def leave(error: ValueError, given: dict[str, Any], more: dict[str, Any]) -> Any:
        tell(engine, own.__name__, error)
        others = ((p, given[p.name]) for p in parameters if p.name not in in_front)
        by_name = {p.name: x for p, x in others if p.name in known or x is not p.default}
        return own(*(given[name] for name in in_front), **by_name, **more)

    scope: dict[str, Any] = {"ours": ours, "leave": leave, "refuse": _refuse}
    scope |= {f"default_{p.name}": p.default for p in parameters}
    exec(compile(_source_of(parameters), f"<kda: {own.__name__} of {engine}>", "exec"), scope)
    call: Callable[..., Any] = functools.wraps(own)(scope["call"])
    call.of_kda = True  # type: ignore[attr-defined]
    return call


def _source_of(parameters: Iterable[inspect.Parameter]) -> str:
    declared, passed, given = [], [], []
    for p in parameters:
        by_name = p.kind is p.KEYWORD_ONLY
        if by_name and "*" not in declared:
            declared.append("*")
        declared.append(p.name if p.default is p.empty else f"{p.name}=default_{p.name}")
        passed.append(f"{p.name}={p.name}" if by_name else p.name)
        given.append(f"{p.name!r}: {p.name}")
    return f"""
def call({", ".join(declared)}, **more):
    try:
        if more:
            refuse(more)
        return ours({", ".join(passed)})
    except ValueError as error:
        return leave(error, {{{", ".join(given)}}}, more)
"""


def _refuse(more: dict[str, Any]) -> None:
    raise Declined(f"{next(iter(more))}: expected no such argument")

"""What the adapters share. A call that they leave to the engine runs by its own function, and those of serving engines
say once why."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ..call.library import built_with_cuda, library
from ..call.options import make_options


class Declined(ValueError):
    """What an adapter itself leaves to the engine, before anything was touched."""


# What our functions raise before they touch anything: an argument that is wrong; a call that no kernel takes here, or
# not the one that KDA_IMPL forces.
REFUSALS = (ValueError, NotImplementedError)


@functools.lru_cache(maxsize=64)
def gpu_why_not(index: int) -> str | None:
    """Why kernels of ours cannot run on this GPU: it is too old, its driver is, the library has none. Or None. For
    processes that use the GPU already."""
    if not built_with_cuda():
        return "kda was built without CUDA"
    import torch

    x, o = torch.empty(2, 1, 1, 1, 64, dtype=torch.bfloat16, device=f"cuda:{index}")
    options = make_options(None, None, None, (False, False, False), neg_eigval=False, v_first=True)
    try:  # the kernel that takes any prefill
        library().forward_workspace(x, x, x, x, x[..., 0], options=options, o=o, impl="cuda_prefill_recurrent")
    except NotImplementedError as error:
        return f"kda {str(error).partition(' was forced but ')[2]}"
    return None


def check_one_row(name: str, B: int) -> None:
    """Engines pass all tokens of a step in one row."""
    if B != 1:
        raise Declined(f"{name}: expected all tokens in one row, got {B} rows")


_told: set[str] = set()
_MOST = 200  # sentences that are kept; a server that runs for months makes no more


def tell(engine: str, function: str, error: Exception) -> None:
    """Warns, once for each sentence."""
    sentence = f"kda: {engine}'s own kernel runs for {function}, as ours declined: {error}"
    if sentence not in _told and len(_told) < _MOST:
        _told.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def or_own(engine: str, ours: Any, own: Any) -> Callable[..., Any]:
    """A function with the parameters of ``ours``, which it calls. Where that declines, with one of ``REFUSALS``, it
    calls ``own`` with the same arguments. Our functions check a call before they touch anything, so what they refuse
    can still run elsewhere. A call with an argument that ours does not know is declined, too.

    It is source text, with the parameters spelled out: to pass them on as a dict takes 0.7 us.
    """
    parameters = inspect.signature(ours).parameters.values()
    in_front = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    taken = inspect.signature(own).parameters
    name = getattr(own, "__name__", type(own).__name__)  # a decorator may have made it an object without one

    def leave(error: Exception, given: dict[str, Any], more: dict[str, Any]) -> Any:
        tell(engine, name, error)
        others = ((p, given[p.name]) for p in parameters if p.name not in in_front)
        by_name = {p.name: x for p, x in others if p.name in taken or x is not p.default}
        return own(*(given[p] for p in in_front), **by_name, **more)

    scope: dict[str, Any] = {"ours": ours, "leave": leave, "refuse": _refuse, "refusals": REFUSALS}
    scope |= {f"default_{p.name}": p.default for p in parameters}
    exec(compile(_source_of(parameters), f"<kda: {name} of {engine}>", "exec"), scope)
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
    except refusals as error:
        return leave(error, {{{", ".join(given)}}}, more)
"""


def _refuse(more: dict[str, Any]) -> None:
    raise Declined(f"{next(iter(more))}: expected no such argument")

"""``import kda.fla`` lets FLA (flash-linear-attention) run its KDA on our kernels, in training and inference.

It registers a backend in FLA, with FLA's own means: calls of ``fla.ops.kda.chunk_kda``, of FLA's layers and models,
and of whatever else calls FLA (the KDA models of transformers do) then come here first. A call that we do not take
goes on to FLA's own code; :func:`report` tells which and why. docs/plugs.md has the list.

``FLA_KDA_LIB=0`` in the environment switches the backend off, at any time. FLA's ``FLA_DISABLE_BACKEND_DISPATCH=1``
must be set before FLA is imported, and switches all backends off. If FLA is not installed, or is another than the plug
was written for, the import warns and changes nothing.

>>> import kda.fla                                                               # doctest: +SKIP
>>> from fla.ops.kda import chunk_kda                                            # doctest: +SKIP
>>> o, _ = chunk_kda(q, k, v, g, beta)                                           # doctest: +SKIP
>>> print(kda.fla.report())                                                      # doctest: +SKIP
FLA 0.6.0: plugged
  chunk_kda: 1 taken (cuda bfloat16)
"""

from __future__ import annotations

import inspect
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from .call.library import library
from .plugs import engines
from .plugs.fla_places import MACHINERY, PLACES, Place

__all__ = ["Report", "plug", "report"]

ENGINE, SWITCH, VERSIONS = "FLA", "FLA_KDA_LIB", ("0.6",)
MOST_REASONS = 200  # a program cannot fill the memory with them

_taken: dict[tuple[str, bool, Any], int] = {}  # (function, on a GPU, dtype)
_left: dict[tuple[str, str], int] = {}  # (function, reason)
_handed_on: dict[tuple[int, str], str] = {}  # (thread, function): why its next call of the function is FLA's


@dataclass(frozen=True)
class Report:
    """What became of the plug, and of the calls since it was plugged or since ``report(reset=True)``. Printed, it is
    a text of one line for each function and reason.

    Attributes:
        plug: as :func:`plug` returned it.
        taken: by function, how many calls ran on our kernels, by device and dtype of the first tensor.
        left: by function, how many calls were left to FLA, by reason.
    """

    plug: engines.Plug
    taken: dict[str, dict[str, int]] = field(default_factory=dict)
    left: dict[str, dict[str, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [str(self.plug)]
        for name in sorted(self.taken.keys() | self.left.keys()):
            for where, count in self.taken.get(name, {}).items():
                lines.append(f"  {name}: {count} taken ({where})")
            for reason, count in self.left.get(name, {}).items():
                lines.append(f"  {name}: {count} left to FLA ({reason})")
        return "\n".join(lines)


def report(*, reset: bool = False) -> Report:
    """What was dispatched where, and why not.

    Args:
        reset: start to count anew.
    """
    taken: dict[str, dict[str, int]] = {}
    left: dict[str, dict[str, int]] = {}
    for (name, on_gpu, dtype), count in list(_taken.items()):
        where = f"{'cuda' if on_gpu else 'cpu'} {str(dtype).removeprefix('torch.')}"
        taken.setdefault(name, {})[where] = count
    for (name, reason), count in list(_left.items()):
        left.setdefault(name, {})[reason] = count
    if reset:
        _taken.clear()
        _left.clear()
    return Report(engines.plugs()[ENGINE], taken, left)


def plug() -> engines.Plug:
    """Registers the backend in FLA, unless that is done. ``import kda.fla`` calls it.

    Returns:
        ``state`` is "plugged", "refused" (``reasons`` name what moved), "switched off" or "not installed".
    """
    return engines.once(ENGINE, _connect)


def _connect() -> engines.Plug:
    if reasons := engines.guard(ENGINE, VERSIONS, MACHINERY | {place.path: place.signature for place in PLACES}):
        state = "not installed" if engines.installed(ENGINE) is None else "refused"
        return engines.refuse(ENGINE, reasons, state=state)
    if engines.resolve("fla.backends._DISPATCH_DISABLED"):
        reasons = ["FLA_DISABLE_BACKEND_DISPATCH=1 was set when FLA was imported"]
        return engines.refuse(ENGINE, reasons, state="switched off", warn=False)
    try:
        library()
    except ImportError as error:
        return engines.refuse(ENGINE, [str(error)])
    _register()
    return engines.plugged(ENGINE, [place.path for place in PLACES])


# ---- the backend ----


def _register() -> None:
    """Registers one class under every registry that the functions are dispatched by. FLA replaces a backend of the
    same type, so a second time changes nothing."""
    backend: Any = _backend()
    try:
        _register_everywhere(backend)
    except Exception:  # a function is not what it was: none of them is ours then
        backend.is_enabled = staticmethod(lambda: False)
        raise


def _register_everywhere(backend: Any) -> None:
    register = engines.resolve("fla.backends.register")
    for entry in {place.registry or engines.resolve(place.path) for place in PLACES}:
        register(entry)(backend)


def _backend() -> type:
    from .plugs.fla_modules import MODULES, from_our_norm
    from .plugs.fla_takes import KDA

    names = {place.name: _names(place) for place in PLACES}
    takes = {name: (KDA | MODULES)[name] for name in names}
    environ = os.environ

    class KDALibBackend(engines.resolve("fla.backends.BaseBackend")):  # type: ignore[misc]
        """The functions of ``takes``. The switch is asked in ``verify``, so that calls left to FLA are counted."""

        backend_type = "kda_lib"
        package_name = "kda"
        env_var = SWITCH
        priority = 2  # lower is earlier; FlashKDA, which only infers, has 3

        @classmethod
        def is_available(cls) -> bool:
            return True

        @staticmethod
        def is_enabled() -> bool:
            return True

        def verify(self, function: str, *args: Any, **given: Any) -> tuple[bool, str | None]:
            take = takes.get(function)
            if take is None:
                return False, "kda has none"
            if _handed_on and (why := _handed_on.pop((threading.get_ident(), function), None)) is not None:
                _count_left(function, why)
                return False, why
            if args:
                given = _by_name(names[function], args, given)
            try:
                reason = take.why_not(given)
            except Exception as error:  # arguments that neither we nor FLA expect
                reason = f"{type(error).__name__}: {error}"
            if environ.get(SWITCH) == "0" and not from_our_norm(given):
                reason = f"switched off by {SWITCH}=0"
            if reason is None:
                return _ACCEPTED
            _count_left(function, reason)
            return False, reason

    for place in PLACES:
        call = _counted(place, names[place.name], takes[place.name].run)
        setattr(KDALibBackend, place.name, staticmethod(call))
    return KDALibBackend


def _names(place: Place) -> tuple[str, ...]:
    return tuple(inspect.signature(engines.resolve(place.path)).parameters)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **given}


def _counted(place: Place, names: tuple[str, ...], run: Any) -> Any:
    """``run``, with a count under its first argument, which is a tensor. What no kernel of ours takes, as one that
    ``KDA_IMPL`` forces may not, FLA is asked for once more, and we decline."""
    name, first = place.name, names[0]

    def call(*args: Any, **given: Any) -> Any:
        original = args, given
        if args:
            given = _by_name(names, args, given)
        x = given[first]
        try:
            result = run(given)
        except NotImplementedError as error:
            if name == "layer_norm_gated_bwd":  # FLA's cannot follow our forward
                raise
            return _hand_on(place, str(error), *original)
        key = (name, x.is_cuda, x.dtype)
        _taken[key] = _taken.get(key, 0) + 1
        return result

    return call


def _hand_on(place: Place, reason: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    key = (threading.get_ident(), place.name)
    _handed_on[key] = reason
    try:
        return engines.resolve(place.path)(*args, **given)
    finally:
        _handed_on.pop(key, None)


_ACCEPTED = (True, None)


def _count_left(name: str, reason: str) -> None:
    key = (name, reason)
    if key not in _left and len(_left) >= MOST_REASONS:
        key = (name, "other reasons")
    _left[key] = _left.get(key, 0) + 1


plug()

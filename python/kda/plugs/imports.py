"""Reads modules of somebody else's without importing them, and acts on them when they are imported, however late."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .engines import read, source_signature, told

Act = Callable[[ModuleType], None]


def moved(package: str, expected: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """What differs in the files of a package that is installed, which are read and not run.

    Args:
        expected: by module, by name (a function or ``Class.method``): the signature in the form of
            :func:`kda.plugs.engines.signature`. Or None for words that need only be in the file.

    Returns:
        One sentence for each thing that is missing or has another signature.
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return [f"{package}: expected a package, got none"]
    root, reasons = Path(next(iter(found.submodule_search_locations))), []
    for module, names in expected.items():
        _package, *parts = module.split(".")
        file = root.joinpath(*parts).with_suffix(".py")
        if not file.exists():
            reasons.append(f"{module}: expected a file, got none")
            continue
        try:
            reasons += _differences(module, read(file), names)
        except Exception as error:  # it is not what Python reads: half written, in another encoding, not ours to read
            reasons.append(f"{module}: expected a file of Python, got {told(error)}")
    return reasons


def _differences(module: str, source: str, names: Mapping[str, str | None]) -> Iterator[str]:
    for name, wanted in names.items():
        if wanted is None:
            if name not in source:
                yield f"{module}: expected {name}, got nothing of that name"
        elif (got := source_signature(source, name)) != wanted:
            yield f"{module}.{name}: expected {wanted}, got {'no such function' if got is None else got}"


def after_import(name: str, act: Act) -> None:
    """Calls ``act`` with the module ``name`` whenever it has run: now, if it is imported already; again, if somebody
    reloads it. The module's import does not fail if ``act`` does: a warning says why, and the module stays as it is. An
    import that fails by itself leaves ``act`` waiting for the next."""
    module = sys.modules.get(name)
    if module is not None:
        _do(act, module)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting[name] = act


def _do(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:
        sentence = f"kda: {module.__name__} is left as it is: {told(error)}"
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself. It asks the others, and puts a loader around theirs."""

    def __init__(self) -> None:
        self.waiting: dict[str, Act] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        act = self.waiting.get(name)  # which stays: this import may fail, or be none, as others ask for specs, too
        if act is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
            spec.loader = _Loader(spec.loader, act)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, act: Act) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # nothing of ours stays in the module
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _do(self._act, module)

    def __getattr__(self, name: str) -> Any:  # for those who ask for the source of what is not imported yet
        return getattr(self._loader, name)


_finder = _Finder()

"""Reads modules of somebody else's without importing them, and acts on them when they are imported, however late."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .engines import source_signature

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
        source = file.read_text(encoding="utf-8")
        for name, wanted in names.items():
            if wanted is None:
                reasons += [] if name in source else [f"{module}: expected {name}, got nothing of that name"]
            elif (got := source_signature(source, name)) != wanted:
                reasons.append(f"{module}.{name}: expected {wanted}, got {'no such function' if got is None else got}")
    return reasons


def after_import(name: str, act: Act) -> None:
    """Calls ``act`` with the module ``name`` once it has run: now, if it is imported already. The module's import does
    not fail if ``act`` does: a warning says why, and the module stays as it is."""
    module = sys.modules.get(name)
    if module is not None:
        _do(act, module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting[name] = act


def _do(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:
        sentence = f"kda: {module.__name__} is left as it is: {type(error).__name__}: {error}"
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself. It asks the others, and puts a loader around theirs."""

    def __init__(self) -> None:
        self.waiting: dict[str, Act] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        act = self.waiting.pop(name, None)
        if act is None:
            return None
        spec = importlib.util.find_spec(name)  # which comes here again, and gets None
        if spec is None or spec.loader is None:
            self.waiting[name] = act
            return None
        spec.loader = _Loader(spec.loader, act)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, act: Act) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _do(self._act, module)

    def __getattr__(self, name: str) -> Any:  # for those who ask a module's loader for its source
        return getattr(self._loader, name)


_finder = _Finder()

"""Runs single files of an engine that is not installed. What they import of the engine beside them is stood in for.

Of the modules under the engine's name, the files that are there are run as they are. Every other one is a stand-in:
its names are what the caller gives, or else an empty class, which fails where it is used for anything but a type. So
signatures, class attributes and the code that is called are the engine's. ``tools/fetch_engines.py`` brings files.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Names = dict[str, dict[str, Any]]  # by module: what a stand-in has


class StandIn(ModuleType):
    """A module that is not there. ``from it import name`` finds any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, engine: str, folder: Path, names: Names) -> None:
        self.engine, self.folder, self.names = engine, folder, names

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] != self.engine and name not in self.names:
            return None
        parent, _, leaf = name.rpartition(".")
        if leaf in self.names.get(parent, ()):  # no module, but a name in one
            return None
        place = self.folder / Path(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if name not in self.names and file.exists():
                folders = [str(place)] if file.name == "__init__.py" else None
                return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(place)] if place.is_dir() else []
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names.get(module.__name__, {}))


@contextmanager
def importable(engine: str, folder: Path, names: Names) -> Iterator[None]:
    """Inside, ``import`` finds the engine's files and the stand-ins. Afterwards neither is left among the modules."""
    finder, before = Finder(engine, folder, names), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] == engine or name in names:
                del sys.modules[name]

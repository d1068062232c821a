"""``torch.ops.kda`` and ``torch.ops.kda_prefill`` from ``import kda`` on, whether torch comes before or after it.

Registering the operators takes 20 ms and the import of torch, so it waits for the first look into a namespace: of a
program that names an operator, or of ``torch.export.load``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_NAMESPACES = ("kda", "kda_prefill")


def announce_when_imported() -> None:
    """Now, if torch is there already."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _Finder())
    elif hasattr(torch, "ops"):  # else it is being imported, or a stand-in for it
        _announce(torch)


def _announce(torch: Any) -> None:
    class Namespace(torch._ops._OpNamespace):  # type: ignore[misc]
        __module__ = torch._ops._OpNamespace.__module__  # exported programs name their operators by it

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                importlib.import_module("kda.compiled")  # which comes here itself: then it is there, if unfinished
            return super().__getattr__(name)

    for name in _NAMESPACES:
        setattr(torch.ops, name, Namespace(name))


class _Finder:
    """Finds torch as the others do, and has it announce the namespaces at the end of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._announce_after(spec.loader)
                return spec
        return None

    def _announce_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module  # its own again
            execute(module)
            sys.meta_path.remove(self)
            _announce(module)

        loader.exec_module = exec_module

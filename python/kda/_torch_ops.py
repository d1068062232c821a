"""Provides ``torch.ops.kda`` and ``torch.ops.kda_prefill`` after ``import kda``, whether torch is imported before or
after it.

Registering the operators takes 20 ms and the import of torch, so it waits for the first look-up in a namespace: by a
program that names an operator, or by ``torch.export.load``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_NAMESPACES = ("kda", "kda_prefill")


def announce_when_imported() -> None:
    """Announces them at once if torch is already imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _Finder())
    elif hasattr(torch, "ops"):  # otherwise it is being imported, or is a stand-in
        _announce(torch)


def _announce(torch: Any) -> None:
    kind: Any = type(torch.ops.aten)

    class Namespace(kind):  # type: ignore[misc]
        __module__ = kind.__module__  # exported programs name their operators by this module

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                importlib.import_module(
                    "kda.operators"
                )  # it comes back here: by then the package exists, if unfinished
            return super().__getattr__(name)

    for name in _NAMESPACES:
        setattr(torch.ops, name, Namespace(name))


class _Finder:
    """Finds torch as the other finders do, and announces the namespaces at the end of its import."""

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
            del loader.exec_module  # restores its own
            execute(module)
            sys.meta_path.remove(self)
            _announce(module)

        loader.exec_module = exec_module

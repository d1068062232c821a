"""What ``import kda`` does at once, before torch is imported: it looks for another project's kda, sets how OpenMP's
threads wait, and announces our operators to torch."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def check_folder(package: str) -> None:
    """Raises an error if another distribution shares ``package``, our folder. Another project in the Python package
    index is named ``kda`` and is imported by that name, too. If both are installed, their files lie in one folder, and
    some of either are overwritten. pip keeps its records beside the folder. (Asking ``importlib.metadata`` would take
    longer than all the rest of ``import kda``.)"""
    try:
        names = os.listdir(os.path.dirname(package))
    except OSError:  # frozen into a program: no such folder
        return
    records = [name for name in names if _is_record(name)]
    if records:
        raise ImportError(
            f"kda: two distributions share the folder {package}: libkda, which this is, and another one named kda "
            f"({records[0]}), which is another project or an early build of this one. Their files are mixed. To mend "
            "it: pip uninstall --yes kda libkda && pip install libkda"
        )


def _is_record(name: str) -> bool:
    """Names such as kda-1.0.dist-info, kda.egg-info or kda-1.0-py3.11.egg-info."""
    stem, _, kind = name.lower().rpartition(".")
    return kind in ("dist-info", "egg-info") and stem.split("-")[0] == "kda"


def wait_briefly() -> None:
    """Lets OpenMP's threads without work sleep soon, unless the user has chosen how they wait: docs/shared_cpu.md says
    why. The OpenMP runtime reads the setting once, when torch or libkda loads it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


# ---- torch.ops.kda ----
#
# ``torch.ops.kda`` and ``torch.ops.kda_prefill`` are there after ``import kda``, whether torch is imported before or
# after it. Registering the operators takes 20 ms and the import of torch, so it waits for the first look-up in a
# namespace: by a program that names an operator, or by ``torch.export.load``.

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
                importlib.import_module("kda.operators")  # which comes back here: by then it exists, if unfinished
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

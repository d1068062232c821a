"""Detects a conflict: another project in the Python package index is named ``kda`` and is imported by that name, too.
If both are installed, their files lie in one folder, and some of either are overwritten."""

from __future__ import annotations

import os


def check(package: str) -> None:
    """Raises an error if another distribution shares ``package``, our folder: pip keeps its records beside it.
    (Asking ``importlib.metadata`` would take longer than all the rest of ``import kda``.)"""
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

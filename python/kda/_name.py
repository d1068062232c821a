"""Another project is named ``kda`` in the index of Python packages, and is imported by that name, too. Where both are
installed their files lie in one folder, and some of either are overwritten."""

from __future__ import annotations

import os


def check(package: str) -> None:
    """``package`` is our folder: pip records what else it put there beside it. (Asking ``importlib.metadata`` would
    take longer than all the rest of ``import kda``.)"""
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
    """As kda-1.0.dist-info, kda.egg-info or kda-1.0-py3.11.egg-info."""
    stem, _, kind = name.lower().rpartition(".")
    return kind in ("dist-info", "egg-info") and stem.split("-")[0] == "kda"

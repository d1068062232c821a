"""Parts of kda that need torch import this module before it. It says what to install where there is no torch, or, for
``from ._needs_torch import new_torch``, where it is older than that of the extra ``libkda[torch]``."""

from __future__ import annotations

import re
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _WANTED = "expected torch for this part of kda (pip install 'libkda[torch]')"
    raise ModuleNotFoundError(f"torch: {_WANTED}, got none", name="torch") from None

_LEAST = (2, 10)  # as in pyproject.toml


def __getattr__(name: str) -> Any:
    if name != "new_torch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _LEAST:
        wanted = f"expected {'.'.join(map(str, _LEAST))} or newer for kda.nn, kda.tp and kda.transformers"
        raise ImportError(f"torch: {wanted} (pip install 'libkda[torch]'), got {torch.__version__}")
    return torch

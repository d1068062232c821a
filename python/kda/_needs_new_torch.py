"""The same for parts that need the torch of the extra ``libkda[torch]``: those with the layer."""

from __future__ import annotations

import re

from ._needs_torch import torch

_LEAST = (2, 10)  # as in pyproject.toml

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _LEAST:
    _WANTED = f"expected {'.'.join(map(str, _LEAST))} or newer for kda.nn, kda.tp and kda.transformers"
    raise ImportError(f"torch: {_WANTED} (pip install 'libkda[torch]'), got {torch.__version__}")

"""Parts of kda that need torch import this module before it. It says what to install where there is no torch."""

from __future__ import annotations

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _WANTED = "expected torch for this part of kda (pip install 'libkda[torch]')"
    raise ModuleNotFoundError(f"torch: {_WANTED}, got none", name="torch") from None

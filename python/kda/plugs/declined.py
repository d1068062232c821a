"""What the adapters of serving engines share. A call that they leave to the engine runs by its own function, and a
warning says once why. And the rows in which engines have q, k and v."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from ..call.library import library


class Declined(ValueError):
    """What an adapter itself leaves to the engine, before anything was touched."""


def built_with_cuda() -> bool:
    """Whether the library can run where engines run. Loads it."""
    return "\ncuda: not built" not in str(library().info())


_told: set[str] = set()


def tell(engine: str, function: str, error: ValueError) -> None:
    """Warns, once for each sentence."""
    sentence = f"kda: {engine}'s own kernel runs for {function}, as ours declined: {error}"
    if sentence not in _told:
        _told.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def or_own(engine: str, ours: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """``ours``, which has the parameters of ``own``; ``own`` where that declines with a ``ValueError``. Our functions
    check a call before they touch anything, so what they refuse can still run elsewhere."""

    @functools.wraps(own)
    def call(*args: Any, **given: Any) -> Any:
        try:
            return ours(*args, **given)
        except ValueError as error:
            tell(engine, own.__name__, error)
            return own(*args, **given)

    call.of_kda = True  # type: ignore[attr-defined]
    return call


def split_heads(rows: Any, HV: int, K: int, V: int) -> tuple[Any, Any, Any]:
    """q, k and v, ``[B, 1, heads, K or V]``, of rows ``[B, 2*H*K + HV*V]`` that have them one after another."""
    B, D = rows.shape
    H = (D - HV * V) // (2 * K)
    if K == V:
        q, k, v = rows.view(B, 1, 2 * H + HV, K).split_with_sizes((H, H, HV), 2)
        return q, k, v
    q, k, v = rows.split_with_sizes((H * K, H * K, HV * V), 1)
    return q.view(B, 1, H, K), k.view(B, 1, H, K), v.view(B, 1, HV, V)

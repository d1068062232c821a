"""Calls of FLA with our backend and without it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import kda.fla

Tensor = torch.Tensor


@contextmanager
def without_kda() -> Iterator[None]:
    os.environ["FLA_KDA_LIB"] = "0"
    try:
        yield
    finally:
        del os.environ["FLA_KDA_LIB"]


def both(call: Callable[[], Any], *takes: str) -> tuple[Any, Any]:
    """(ours, FLA's own). Asserts that we took all calls of those functions in the first, and none in the second."""
    kda.fla.report(reset=True)
    ours = call()
    told = kda.fla.report(reset=True)
    assert set(takes) <= told.taken.keys(), told
    assert not set(takes) & told.left.keys(), told
    with without_kda():
        theirs = call()
    told = kda.fla.report(reset=True)
    assert not told.taken, told
    assert set(takes) <= told.left.keys(), told
    return ours, theirs


def difference(expected: Tensor, got: Tensor) -> float:
    """RMS of the difference over the RMS of what was expected."""
    assert expected.shape == got.shape, (expected.shape, got.shape)
    assert expected.dtype == got.dtype, (expected.dtype, got.dtype)
    expected, got = expected.double(), got.double()
    return float((expected - got).square().mean().sqrt() / (expected.square().mean().sqrt() + 1e-30))


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], most: float) -> None:
    assert ours.keys() == theirs.keys()
    found = {name: difference(theirs[name], x) for name, x in ours.items()}
    assert {name: x for name, x in found.items() if not x < most} == {}


def fla(path: str) -> Any:
    """Something of FLA by its dotted path behind ``fla.``."""
    module, _, name = f"fla.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)

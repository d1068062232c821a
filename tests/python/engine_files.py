"""The files of engines that tools/fetch_engines.py brought, for tests. See ``bench.engine_files``."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kda.plugs.declined
import kda.plugs.engines
import kda.plugs.imports
from bench.engine_files import Names, importable

ENGINES = Path(os.environ.get("KDA_ENGINES", Path(__file__).resolve().parents[2] / "build" / "engines"))


def folder_of(engine: str, version: str) -> Path:
    folder = ENGINES / f"{engine}-{version}"
    if not (folder / "complete").exists():
        pytest.skip(f"no files of {engine} {version}: tools/fetch_engines.py brings them")
    return folder


@contextmanager
def loaded(engine: str, version: str, names: Names, says: str | None = None) -> Iterator[Path]:
    """Inside, ``import`` finds the engine's files, and ``importlib.metadata`` its version, or what it ``says``."""
    folder, real = folder_of(engine, version), importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch, importable(engine, folder, names):
        patch.setattr(importlib.metadata, "version", lambda name: says or version if name == engine else real(name))
        yield folder


def forget(engine: str) -> None:
    """As if nothing had asked for the engine's plug yet."""
    kda.plugs.engines._plugs.pop(engine, None)
    kda.plugs.declined._told.clear()
    kda.plugs.imports._finder.waiting.clear()
    if kda.plugs.imports._finder in sys.meta_path:
        sys.meta_path.remove(kda.plugs.imports._finder)

"""Variants of Triton's kernels are compiled at once, before Triton times them: with stand-ins for Triton."""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import pytest

from benches import install
from kda.cli.tuning import compiled_at_once


class Variant:
    def __init__(self, warps: int) -> None:
        self.warps = warps

    def all_kwargs(self) -> dict[str, int]:
        return {"num_warps": self.warps}


class Autotuner:
    """Two arguments by position, one by name."""

    def __init__(self, seen: list[Any]) -> None:
        self.nargs = {"q": 1, "k": 2}
        self.fn = SimpleNamespace(run=lambda *arguments, **given: seen.append((arguments, given)))

    def prune_configs(self, given: dict[str, Any]) -> list[Variant]:
        return [Variant(2), Variant(4)]


def test_all_variants_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class AsyncCompileMode:
        def __init__(self, threads: Executor, ignore_errors: bool) -> None:
            assert isinstance(threads, Executor) and ignore_errors

        def __enter__(self) -> None:
            seen.append("begin")

        def __exit__(self, *error: object) -> None:
            seen.append("end")

    install(monkeypatch, "triton.runtime.autotuner", Autotuner=Autotuner)
    monkeypatch.setattr(sys.modules["triton"], "AsyncCompileMode", AsyncCompileMode, raising=False)
    prune, given = Autotuner.prune_configs, {"grid": (3,), "warmup": False, "v": 5}
    with pytest.raises(RuntimeError, match="it broke"), compiled_at_once():
        assert [variant.warps for variant in Autotuner(seen).prune_configs(given)] == [2, 4]
        raise RuntimeError("it broke")
    compiled = [((1, 2), {"grid": (3,), "warmup": True, "v": 5, "num_warps": warps}) for warps in (2, 4)]
    assert seen == ["begin", *compiled, "end"] and not given["warmup"]
    assert Autotuner.prune_configs is prune


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with compiled_at_once():
        assert "triton" not in sys.modules

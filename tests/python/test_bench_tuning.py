"""Variants of Triton's kernels are compiled at once, before Triton times them: with stand-ins for Triton."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.tuning import compiled_at_once
from benches import install

WARPS = (1, 2, 4, 8, 16)
DRIVER = SimpleNamespace(get_current_device=lambda: 3, get_current_target=lambda: "sm_90")


class Variant:
    def __init__(self, warps: int) -> None:
        self.warps = warps

    def all_kwargs(self) -> dict[str, int]:
        return {"num_warps": self.warps}


class Autotuner:
    """Two arguments by position, two by name. What is compiled leaves a file with the number of its process."""

    def __init__(self, folder: Path) -> None:
        self.nargs, self.folder = {"q": 1, "k": 2}, folder
        self.fn = SimpleNamespace(run=self.run)

    def run(self, *arguments: int, num_warps: int, **given: Any) -> None:
        assert (arguments, given) == ((1, 2), {"grid": (3,), "warmup": True, "v": 5})
        assert (DRIVER.get_current_device(), DRIVER.get_current_stream(3)) == (3, 0)
        with (self.folder / str(num_warps)).open("x") as file:
            file.write(str(os.getpid()))
        if num_warps == 2:
            raise RuntimeError("too many registers")

    def prune_configs(self, given: dict[str, Any]) -> list[Variant]:
        return [Variant(warps) for warps in WARPS]


def test_all_variants_are_compiled_by_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each once, though one of them fails. Nothing changes in this process."""
    install(monkeypatch, "triton.runtime.autotuner", Autotuner=Autotuner)
    install(monkeypatch, "triton.runtime.driver", driver=SimpleNamespace(active=DRIVER))
    prune, given = Autotuner.prune_configs, {"grid": (3,), "warmup": False, "v": 5}
    with pytest.raises(RuntimeError, match="it broke"), compiled_at_once():
        assert [variant.warps for variant in Autotuner(tmp_path).prune_configs(given)] == [*WARPS]
        raise RuntimeError("it broke")
    compiled = {int(path.name): int(path.read_text()) for path in tmp_path.iterdir()}
    assert compiled.keys() == set(WARPS) and os.getpid() not in compiled.values()
    assert Autotuner.prune_configs is prune and not given["warmup"] and not hasattr(DRIVER, "get_current_stream")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with compiled_at_once():
        assert "triton" not in sys.modules

"""The adapters for serving engines in processes: nothing is imported early, and workers are plugged whichever way they
start."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import kda.sglang
import kda.vllm
from sglang_server import sglang
from vllm_layers import vllm

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_adapters_imports_no_engine() -> None:
    program = """
import sys
import kda, kda.sglang, kda.vllm
found = {name.split(".")[0] for name in sys.modules} & {"sglang", "vllm", "fla", "triton", "torch", "transformers"}
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_an_engine_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_VLLM", "1")
    for adapter, name in ((kda.sglang, "SGLang"), (kda.vllm, "vLLM")):
        kda.plugs.engines._plugs.pop(name, None)
        with pytest.warns(RuntimeWarning, match=rf"{name}: expected an installed package {name.lower()}, got none"):
            assert adapter.plug().state == "refused"
        kda.plugs.engines._plugs.pop(name, None)


def test_entry_points_name_the_adapters() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, adapter in (("sglang.srt.plugins", kda.sglang), ("vllm.general_plugins", kda.vllm)):
        for name, value in groups[group].items():
            assert EntryPoint(name, value, group).load() is adapter.plug


def _plug_sglang(results: Any) -> None:
    from sglang_server import dispatcher

    results.put((kda.sglang.plug().state, type(dispatcher().decode_kernel).__name__))


def _plug_vllm(results: Any) -> None:
    module = __import__("vllm.models.kimi_k3.nvidia.ops.third_party.kda", fromlist=["fused_recurrent_kda"])
    results.put((kda.vllm.plug().state, hasattr(module.fused_recurrent_kda, "of_kda")))


def _spawned(engine: str, results: Any) -> None:
    with sglang() if engine == "sglang" else vllm():
        kda.vllm.plug() if engine == "vllm" else kda.sglang.plug()
        (_plug_sglang if engine == "sglang" else _plug_vllm)(results)


def answer(context: Any, target: Any, *arguments: Any) -> Any:
    results = context.Queue()
    worker = context.Process(target=target, args=(*arguments, results))
    worker.start()
    try:
        return results.get(timeout=120)
    finally:
        worker.join(60)


def test_forked_workers() -> None:
    """They have what their parent has, and plug again without effect."""
    fork = multiprocessing.get_context("fork")
    with sglang():
        kda.sglang.plug()
        assert answer(fork, _plug_sglang) == ("plugged", "KDAKernel")
    with vllm():
        kda.vllm.plug()  # the module is imported in the worker
        assert answer(fork, _plug_vllm) == ("plugged", True)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_spawned_workers(engine: str) -> None:
    with sglang() if engine == "sglang" else vllm():  # skips without the engine's files
        pass
    wanted = ("plugged", "KDAKernel" if engine == "sglang" else True)
    assert answer(multiprocessing.get_context("spawn"), _spawned, engine) == wanted

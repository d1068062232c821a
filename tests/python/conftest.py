"""Settings of the Python suite, and the fixtures that force an implementation and call the command.

PYTHONPATH=python KDA_LIBRARY_DIR=build/lib python -m pytest tests/python

With KDA_TEST_DEVICE=cuda, it runs the tests marked ``cuda``, with all tensors on the device.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before torch and libkda start their threads
os.environ.setdefault("KDA_FUZZ_DAY", str(int(time.time() // 86400)))  # one for all workers, also at midnight

import pytest
import torch
from hypothesis import HealthCheck, settings

import kda
from bench import command, measure
from kda.cli import bench, main

# A shell that runs the suite in the background makes it ignore Ctrl-C, and the programs that tests interrupt would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "kda",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("kda")

DEVICE = torch.device(os.environ.get("KDA_TEST_DEVICE", "cpu"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE.type != "cpu":
        config.hook.pytest_deselected(items=[x for x in items if x.get_closest_marker("cuda") is None])
        items[:] = [x for x in items if x.get_closest_marker("cuda")]


@pytest.fixture(autouse=True)
def _tensors_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests make all their tensors on the device."""
    if DEVICE.type == "cpu":
        yield
        return
    import torch._dynamo  # what torch.compile imports annotates with torch.Generator, and needs the class

    monkeypatch.setattr(torch, "Generator", partial(torch.Generator, DEVICE))
    with DEVICE:
        yield


@pytest.fixture(autouse=True)
def _nothing_forced_from_outside(environment: Callable[[str, str | None], None]) -> None:
    if "KDA_IMPL" in os.environ:
        environment("KDA_IMPL", None)
    torch.manual_seed(0)


@pytest.fixture
def force(environment: Callable[[str, str | None], None]) -> Callable[..., None]:
    """``force("cpu_chunk", "reference")``: operators that have one of these must use it, in backward as well."""

    def set_names(*names: str) -> None:
        known = {
            n for op in ("forward", "backward", "decode", "gate", "gate_backward") for n in kda.implementations(op)
        }
        assert set(names) <= known, f"{names} are not all among {sorted(known)}"
        environment("KDA_IMPL", ",".join(names))

    return set_names


def calling(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        try:
            got = main(words)
        except SystemExit as stop:  # argparse
            got = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert got == status, out + err
        assert "Traceback" not in out + err
        return out + err

    return call


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``cli("info")`` runs ``python -m kda info`` in this process, expects ``status`` and returns what it printed."""
    return calling(main, capsys)


@pytest.fixture
def bench_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The same for ``python -m bench``."""
    return calling(command.main, capsys)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the seconds that ceilings take."""
    for module in (measure, bench):
        monkeypatch.setattr(module, "ceilings", lambda device: {"GFLOP/s": 100.0, "GB/s": 10.0})

"""A test that is skipped proves nothing, so a skip that no rule below expects is a failure: a package or a file is
missing that the tests need. ``KDA_TEST_SKIPS=any`` lets all skips pass, as on a GPU machine without other projects'
files; python -m bench record counts them there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest

EXPECTED = (
    # The test's own parameters leave nothing to test.
    "torch cannot make one",
    "nobody knows what comes",
    "this mesh has one dimension",
    "there are no states",
    "the reference reads float16 as it reads bfloat16; its numbers are tested in float64",
    "softplus needs A_log",
    "vLLM's functions keep no states on the way.*",
    "an implementation of another device",
    # What the machine has or lacks.
    "there is a device",
    "no \\d+ GiB here: .*",
    "needs a larger GPU: .*",
    "needs (a|two) CUDA devices?.*",
    "needs \\d+ CUDA devices, there is \\d+",
    "needs compute capability .*",
    "about the default on Hopper",
    "about streams, graphs and memory of a CUDA device",
    # Packages that the tests do not bring: JAX alone takes 600 MB. tests/plugs has FLA.
    "could not import '(jax[.]numpy|ml_dtypes|fla[.]models[.]utils)'.*",
    # Other projects' kernels, which only a GPU runs.
    "FLA is not installed, nor in KDA_PEERS",
    "KDA_PEERS has no .*",
)


def expected() -> re.Pattern[str]:
    rules = list(EXPECTED)
    if os.environ.get("KDA_CUDA") != "ON":  # which make test sets
        rules.append("built without CUDA")
    if "KDA_LIBRARY_DIR" in os.environ:
        rules.append("the wheel is not installed")
    return re.compile("|".join(rules), re.S)


def fail_if_unexpected(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("KDA_TEST_SKIPS") == "any":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not expected().fullmatch(reason):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: a skip that is not expected (tests/conftest.py): {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    fail_if_unexpected((yield).get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    fail_if_unexpected((yield).get_result())


@pytest.fixture
def environment() -> Iterator[Callable[[str, str | None], None]]:
    """``environment("KDA_IMPL", "cpu_chunk")`` sets a variable, or removes it (None), and has the library read it,
    which does so once by itself."""
    from kda.call.library import library

    before: dict[str, str | None] = {}

    def change(name: str, value: str | None) -> None:
        before.setdefault(name, os.environ.get(name))
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
        library().read_environment()

    yield change
    for name, value in before.items():
        change(name, value)

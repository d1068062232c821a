"""``pytest.mark.usefixtures("kernels")`` runs a test with the kernels that the library chooses, and again with those
that accept any call."""

from __future__ import annotations

import os

import pytest

from support import DECODING, kernels_of

NAMES = [names for op in DECODING if (names := kernels_of(op, os.environ.get("KDA_TEST_DEVICE", "cuda")))]
GENERAL = ",".join(names[-1] for names in NAMES)


@pytest.fixture(params=["chosen", GENERAL])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "chosen":
        monkeypatch.setenv("KDA_IMPL", request.param)

"""The example engine on this device: every text is that of a float64 loop."""

from __future__ import annotations

from typing import Any

import pytest
from examples.engine import Model

from engine_requests import check
from places import DEVICE


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"H": 2, "HV": 4, "K": 64, "V": 64},
        pytest.param({"HV": 1, "K": 128, "V": 128, "layers": 3}, marks=pytest.mark.slow),
    ],
    ids=["small", "64", "128"],
)
def test_every_text_is_that_of_the_float64_loop(sizes: dict[str, Any]) -> None:
    check(Model(device=str(DEVICE), **sizes), str(DEVICE))

"""How the threads of OpenMP wait: docs/shared_cpu.md. Each test runs a new process, because the setting is read at
start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CALL = """
x = np.ones((1, 70, 4, 16), np.float32)
kda.prefill(x, x, x, -x, x[..., 0], num_threads=2)
print({name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")})
"""


def run(imports: str, **settings: str) -> tuple[str, str]:
    """What the process prints, and what the OpenMP runtime reports about itself when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", f"import os\n{imports}\nimport numpy as np\n{CALL}"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


def test_threads_wait_briefly_by_default() -> None:
    printed, says = run("import kda")
    assert printed == "{'GOMP_SPINCOUNT': '1000', 'OMP_WAIT_POLICY': None}"
    assert "GOMP_SPINCOUNT = '1000'" in says, "and it was heard"


def test_torch_gets_it_from_a_kda_imported_before() -> None:
    assert "GOMP_SPINCOUNT = '1000'" in run("import kda, torch")[1]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"GOMP_SPINCOUNT": "77"}, "{'GOMP_SPINCOUNT': '77', 'OMP_WAIT_POLICY': None}"),
        ({"OMP_WAIT_POLICY": "active"}, "{'GOMP_SPINCOUNT': None, 'OMP_WAIT_POLICY': 'active'}"),
        ({"OMP_WAIT_POLICY": "passive"}, "{'GOMP_SPINCOUNT': None, 'OMP_WAIT_POLICY': 'passive'}"),
    ],
)
def test_settings_of_the_user_are_kept(settings: dict[str, str], kept: str) -> None:
    assert run("import kda", **settings)[0] == kept

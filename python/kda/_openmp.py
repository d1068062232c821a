"""Sets how OpenMP's threads wait for work. docs/shared_cpu.md says why, and what it changes."""

from __future__ import annotations

import os


def wait_briefly() -> None:
    """Lets threads without work sleep soon, unless the user has chosen how they wait. The OpenMP runtime reads the
    setting once, when torch or libkda loads it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")

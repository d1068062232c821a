"""How the threads of OpenMP wait for work. Why, and what it changes: docs/shared_cpu.md."""

from __future__ import annotations

import os


def wait_briefly() -> None:
    """Threads without work sleep soon, unless the user has said how they wait. OpenMP's library reads that once, when
    torch or ours loads it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")

"""A demonstration of ``kda.nn``; run it with ``python -m examples.demo``."""

import os

# Set before torch loads OpenMP. Its threads spin for some milliseconds at every barrier. On cores shared with other
# programs that made a training step ten times as long. Sleeping early costs almost nothing on idle cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

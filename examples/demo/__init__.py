"""A demonstration of ``kda.nn``; run it with ``python -m examples.demo``."""

import os

# Before torch loads OpenMP. Its threads spin for each other some milliseconds at every barrier; on cores shared with
# other programs that made a training step ten times as long. Sleeping early costs next to nothing on idle ones.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

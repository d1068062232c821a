"""What measures. ``python -m bench`` is run from the root of the repository, and the wheel has none of it.

A case is what is computed, a contender is who computes it, and a row is one result. docs/cli.md tells the rest."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tools") not in sys.path:
    sys.path.append(str(ROOT / "tools"))  # source_hash, which names what was measured

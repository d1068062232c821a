"""Which engine the tests of this folder run with, and its files."""

from __future__ import annotations

import os
from pathlib import Path

ENGINES = Path(os.environ.get("KDA_ENGINES", Path(__file__).resolve().parents[2] / "build" / "engines"))
ENGINE = os.environ.get("KDA_ENGINE", "fla-0.6")
FOLDERS = [ENGINES / name for name in (ENGINE, "triton")]
MISSING = [folder.name for folder in FOLDERS if not (folder / "complete").exists()]

"""SHA-256 of what decides how kernels behave: every file under include/ and src/, for the CPU without those under
src/cuda. Ties a record of measurements to the source it was made from."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_hash(root: Path = ROOT, *, cuda: bool = True) -> str:
    digest = hashlib.sha256()
    files = [p for folder in ("include", "src") for p in (root / folder).rglob("*") if p.is_file()]
    for path in sorted(files):
        if not cuda and path.is_relative_to(root / "src/cuda"):
            continue
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    print(source_hash())

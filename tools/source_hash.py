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


def folder_hashes(root: Path = ROOT) -> dict[str, str]:
    """Of the files right in each folder under include/ and src/: to tell which have changed."""
    folders = sorted({p.parent for top in ("include", "src") for p in (root / top).rglob("*") if p.is_file()})
    hashes = {}
    for folder in folders:
        files = sorted(p for p in folder.iterdir() if p.is_file())
        content = b"".join(p.name.encode() + b"\0" + p.read_bytes() + b"\0" for p in files)
        hashes[str(folder.relative_to(root))] = hashlib.sha256(content).hexdigest()[:16]
    return hashes


if __name__ == "__main__":
    print(source_hash())

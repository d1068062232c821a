"""SHA-256 of what decides how kernels behave: every file under include/ and src/, for the CPU without those under
src/cuda. It ties a record of measurements to the source that was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def files_of(root: Path) -> list[Path]:
    return sorted(p for folder in ("include", "src") for p in (root / folder).rglob("*") if p.is_file())


def hash_of(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def source_hash(root: Path = ROOT, *, cuda: bool = True) -> str:
    return hash_of((p for p in files_of(root) if cuda or not p.is_relative_to(root / "src/cuda")), root)


def folder_hashes(root: Path = ROOT) -> dict[str, str]:
    """Hashes of the files directly in each folder under include/ and src/, to tell which folders have changed."""
    folders: dict[Path, list[Path]] = {}
    for path in files_of(root):
        folders.setdefault(path.parent, []).append(path)
    return {str(folder.relative_to(root)): hash_of(files, root)[:16] for folder, files in sorted(folders.items())}


if __name__ == "__main__":
    print(source_hash())

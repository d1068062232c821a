"""Names of implementations: those on CUDA follow from their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

import kda
from kda.call import library as _lib
from kda.cli import main
from kda.cli.operators import OPERATORS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., dict[str, tuple[bool, str, str]]]]:
    """The rows of ``python -m kda explain``: name, chosen, text and file."""

    def run(op: str, *words: str) -> dict[str, tuple[bool, str, str]]:
        main(["explain", op, "--device", "cpu", "--json", *words])
        rows = json.loads(capsys.readouterr().out)["implementations"]
        return {row["name"]: (row["chosen"], row["text"], row["file"]) for row in rows}

    yield run


@pytest.mark.parametrize("op", OPERATORS)
def test_names_follow_from_files(op: str, explained: Callable[..., dict[str, tuple[bool, str, str]]]) -> None:
    rows = explained(op)
    here = [name for name in rows if _lib.built_with_cuda() or not name.startswith("cuda_")]
    assert here == kda.implementations(op), "explain tells of those on CUDA without CUDA, too"
    pages = "".join(path.read_text() for path in (ROOT / "docs/kernels").glob("*.md"))
    for name, (_, _, file) in rows.items():
        assert (ROOT / file).is_file(), file
        src, room, *folders, stem = PurePosixPath(file).with_suffix("").parts
        assert src == "src" and room == name.split("_")[0]
        if room == "cuda":
            assert name in (f"cuda_{stem}", "_".join(["cuda", *folders, stem]))
            assert f"`{name}`" in pages, f"a page tells how {name} works"

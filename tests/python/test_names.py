"""Names of implementations: the file that the name of a CUDA implementation follows from, and former names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import kda
from kda.call import library as _lib
from kda.cli import main
from kda.cli.operators import OPERATORS

ROOT = Path(__file__).resolve().parents[2]

# Every former name, by operator: docs/architecture.md.
FORMER = {
    "forward": {
        "cuda_segments_sm90": "cuda_hopper_prefill_segments",
        "cuda_chunk_sm90": "cuda_hopper_prefill_pairs",
        "cuda_chunk": "cuda_prefill_chunk",
        "cuda_recurrent": "cuda_prefill_recurrent",
    },
    "backward": {
        "cuda_chunk_sm90": "cuda_hopper_backward_chunk",
        "cuda_chunk": "cuda_backward_chunk",
        "cuda_recurrent": "cuda_backward_recurrent",
    },
    "verify": {
        "cuda_verify_recurrent": "cuda_drafts_recurrent",
        "cuda_verify_mma": "cuda_drafts_mma",
        "cuda_verify": "cuda_drafts_general",
    },
    "flush": {"cuda_flush_registers": "cuda_drafts_flush_registers", "cuda_flush": "cuda_drafts_general"},
    "flush_verify": {
        "cuda_flush_verify_recurrent": "cuda_drafts_recurrent",
        "cuda_flush_verify_mma": "cuda_drafts_mma",
        "cuda_flush_verify": "cuda_drafts_general",
    },
    "conv_backward": {"cuda_conv": "cuda_conv_backward"},
    "prefill_f32": {"cuda_stages": "cuda_stages_prefill_f32"},
    "stage_cumsum": {"cuda_stage": "cuda_stages_cumsum"},
    "stage_chunk_intra": {"cuda_stage": "cuda_stages_chunk_intra"},
    "stage_recompute_w_u": {"cuda_stage": "cuda_stages_chunk_intra"},
    "stage_delta_h": {"cuda_stage": "cuda_stages_delta_h"},
    "stage_fwd_o": {"cuda_stage": "cuda_stages_fwd_o"},
    "stage_bwd_local": {"cuda_stage": "cuda_stages_backward"},
    "stage_bwd_delta_h": {"cuda_stage": "cuda_stages_backward"},
    "stage_bwd_wy_dqkg": {"cuda_stage": "cuda_stages_backward"},
    "stage_bwd_intra": {"cuda_stage": "cuda_stages_backward"},
    "stage_cumsum_backward": {"cuda_stage": "cuda_stages_backward"},
}
PAIRS = [(op, former, name) for op, names in FORMER.items() for former, name in names.items()]


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
            assert name == "_".join([room, *folders, *([] if [stem] == folders else [stem])])
            assert f"`{name}`" in pages, f"a page tells how {name} works"


@pytest.mark.parametrize(("op", "former", "name"), PAIRS)
def test_former_names_are_accepted(
    op: str,
    former: str,
    name: str,
    explained: Callable[..., dict[str, tuple[bool, str, str]]],
    environment: Callable[[str, str | None], None],
) -> None:
    """On the CPU: the forced one then declines, and the others tell that it is forced."""
    assert _lib.library().current_name(op, former) == _lib.library().current_name(op, name) == name
    environment("KDA_IMPL", former)
    by_environment = explained(op)
    environment("KDA_IMPL", None)
    for rows in (by_environment, explained(op, "--impl", former)):
        assert not any(chosen for chosen, _, _ in rows.values())
        assert {n for n, (_, text, _) in rows.items() if text == "another one is forced"}
        assert rows[name][1] != "another one is forced"


def test_a_former_name_as_an_argument() -> None:
    x = np.zeros((1, 3, 1, 4), np.float32)
    with pytest.raises(NotImplementedError, match=r"^cuda_prefill_chunk was forced but "):
        kda.prefill(x, x, x, x, x[..., 0], impl="cuda_chunk")
    with pytest.raises(ValueError, match=r"impl: expected one of cuda_blackwell_prefill_segments, .*got cuda_verify$"):
        kda.prefill(x, x, x, x, x[..., 0], impl="cuda_verify")


def test_a_new_name_wins_over_a_former_one() -> None:
    """``cuda_conv`` is an implementation of the convolution today, and was one of its backward."""
    library = _lib.library()
    assert library.current_name("conv", "cuda_conv") == "cuda_conv"
    assert library.current_name("conv_backward", "cuda_conv") == "cuda_conv_backward"
    assert library.current_name("conv", "cuda_conv_backward") == library.current_name("nothing", "cuda_conv") == ""


def test_the_table_has_them_all() -> None:
    page = (ROOT / "docs/architecture.md").read_text().split("### Names")[1]
    for _, former, name in PAIRS:
        assert f"`{former}`" in page and (f"`{name}`" in page or former == "cuda_stage")

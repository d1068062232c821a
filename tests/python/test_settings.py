"""Settings and arguments that used to be accepted silently although they meant nothing, or something else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import kda
import kda.cp

X, BETA = np.ones((1, 4, 1, 8), np.float32), np.ones((1, 4, 1), np.float32)
CALL = {"q": X, "k": X, "v": X, "g": -X, "beta": BETA}


def says(code: str, **environment: str | bytes) -> str:
    """What a new process prints about an exception."""
    code = f"import kda, numpy as np\ntry: {code}\nexcept Exception as e: print(type(e).__name__, ascii(str(e)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.strip()


# ---- settings ----


def test_a_library_folder_that_is_none(tmp_path: Path) -> None:
    """There may be a library next to the package: a test run would measure that one instead."""
    wanted = "ImportError 'KDA_LIBRARY_DIR: expected a folder with _binding.so, got "
    missing = says("kda.info()", KDA_LIBRARY_DIR=str(tmp_path / "missing"))
    assert missing.startswith(wanted.replace("'", '"')) and missing.endswith("missing', where there is no folder\"")
    empty = says("kda.info()", KDA_LIBRARY_DIR=str(tmp_path))
    assert empty.startswith(wanted.replace("'", '"')) and empty.endswith(', which holds none"')
    strange = says("kda.info()", KDA_LIBRARY_DIR=b"/caf\xe9")
    assert "KDA_LIBRARY_DIR: expected a folder with _binding.so" in strange and "caf" in strange


def test_text_that_is_not_utf8() -> None:
    with pytest.raises(ValueError, match=r"^impl: expected text that UTF-8 can hold, got 'caf\\udce9'$"):
        kda.prefill(**CALL, impl="caf\udce9")
    for op in ("caf\udce9", None, 3, "Forward", "", b"forward", ["forward"]):
        with pytest.raises(ValueError, match=r"^op: expected one of forward, backward, .*, got ") as refused:
            kda.implementations(op)  # type: ignore[arg-type]
        assert str(refused.value).endswith(f"got {op!a}")


# ---- numbers and flags ----


@pytest.mark.parametrize("value", [True, False, 2.0, np.float32(2), "2", None, 2**40, 2**70, torch.tensor(2.0)])
@pytest.mark.parametrize("name", ["num_threads", "first_valid_slot", "checkpoint_every"])
def test_integers(name: str, value: Any) -> None:
    pool, slots = np.zeros((1, 1, 8, 8), np.float32), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=rf"^{name}: expected an integer"):
        kda.prefill(**CALL, **{name: value}, state=pool, checkpoints=pool.copy(), checkpoint_slots=slots)


FLAGS = ["use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"]


@pytest.mark.parametrize("name", [*FLAGS, "state_v_first"])
def test_flags(name: str) -> None:
    """The text "False" is true in Python."""
    others = {"lower_bound": -1.0, "use_beta_sigmoid_in_kernel": name == "allow_neg_eigval"}
    for value in ("False", "no", None, 2, 1.5, [1]):
        with pytest.raises(ValueError, match=rf"^{name}: expected True or False, got"):
            kda.prefill(**CALL, **{**others, name: value})
    want = {flag: kda.prefill(**CALL, **{**others, name: flag}) for flag in (True, False)}
    for value in (np.True_, np.False_, 1, 0):
        assert np.array_equal(kda.prefill(**CALL, **{**others, name: value}), want[bool(value)])


def test_chunk_size_of_the_float32_prefill() -> None:
    x = np.ones((1, 1, 4, 8), np.float32)
    for value in (64.0, True, "64", None, 16):
        with pytest.raises(ValueError, match=r"^chunk_size: expected (32 or 64|a number), got"):
            kda.prefill_f32(x, x, x, -x, np.ones((1, 1, 4), np.float32), value)  # type: ignore[arg-type]


# ---- draft buffers ----


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"HV": 3}, "HV: expected a multiple of H = 2, got 3"),
        ({"H": 0}, "H: expected a number of at least 1, got 0"),
        ({"K": 0}, "K: expected 1..256, got 0"),
        ({"V": 257}, "V: expected 1..256, got 257"),
        ({"slots": True}, "slots: expected a number of at least 0, got True"),
        ({"slots": 2.0}, "slots: expected a number of at least 0, got 2.0"),
        ({"max_tokens": True}, "max_tokens: expected 1..16, got True"),
        ({"max_tokens": 17}, "max_tokens: expected 1..16, got 17"),
        ({"entries": 5}, "entries: expected at least 2 * max_tokens = 6, got 5"),
        ({"device": "nonsense"}, "device: expected one that torch has here, got 'nonsense'"),
        ({"device": 1.5}, "device: expected one that torch has here, got 1.5"),
    ],
)
def test_sizes_of_a_draft_buffer(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        kda.DraftBuffer(**{"slots": 4, "max_tokens": 3, "H": 2, "HV": 2, "K": 8, "V": 8, **wrong})
    assert str(refused.value).startswith(sentence)


def test_flags_of_records() -> None:
    for value in (2, "no", None):
        with pytest.raises(ValueError, match=r"^ring: expected True or False, got"):
            kda.new_records(2, 3, 1, 1, 8, 8, ring=value)  # type: ignore[arg-type]


def buffer(of: str) -> Any:
    made = kda.DraftBuffer(6, 2, 1, 1, 8, 8, entries=8)
    if of == "numpy":  # as without torch
        made.records = kda.Records(*(None if x is None else x.numpy() for x in made.records))
    made.records.ring_count[:] = 4
    return made


@pytest.mark.parametrize("of", ["torch", "numpy"])
def test_reset(of: str) -> None:
    frozen = np.array([2, 5], np.int64)
    frozen.flags.writeable = False
    for slots, left in (
        (np.array([2], np.int32), [4, 4, 0, 4, 4, 4]),
        (np.array([-1, 5, -7, 5], np.int64), [4, 4, 4, 4, 4, 0]),
        (frozen, [4, 4, 0, 4, 4, 0]),
        (np.array([], np.int32), [4] * 6),
        (np.arange(6) == 2, [4, 4, 0, 4, 4, 4]),
        (np.arange(6) != 2, [0, 0, 4, 0, 0, 0]),
        (np.zeros(6, bool), [4] * 6),
        (torch.tensor([2], dtype=torch.int32), [4, 4, 0, 4, 4, 4]),
        (torch.arange(6) == 2, [4, 4, 0, 4, 4, 4]),
    ):
        made = buffer(of)
        made.reset(slots)
        assert made.records.ring_count.tolist() == left, slots


@pytest.mark.parametrize("of", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        (np.array([2.0]), "slots: expected int32 or int64 numbers of slots, or a bool mask of all 6, got float64"),
        (
            np.array([2], np.uint8),
            "slots: expected int32 or int64 numbers of slots, or a bool mask of all 6, got uint8",
        ),
        (np.array([0, 6], np.int32), "slots: expected numbers below 6, got 6"),
        (torch.tensor([99]), "slots: expected numbers below 6, got 99"),
        (np.ones(5, bool), "slots: expected a mask of all 6 slots, or their numbers, got a mask of 5"),
        (np.ones((6, 1), bool), "slots: expected 1 dimensions, got shape [6, 1]"),
        (2, "slots: expected an array, got int"),
        ([2], "slots: expected an array, got list"),
    ],
)
def test_reset_refuses(of: str, slots: Any, sentence: str) -> None:
    made = buffer(of)
    with pytest.raises(ValueError) as refused:
        made.reset(slots)
    assert str(refused.value) == sentence
    assert made.records.ring_count.tolist() == [4] * 6


# ---- context parallelism ----


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([0, 2.5],), "cu_seqlens[1]: expected an integer, got 2.5"),
        ((np.array([0.0, 2.0]),), "cu_seqlens[0]: expected an integer, got "),
        (([0, True],), "cu_seqlens[1]: expected an integer, got True"),
        (([0, "3"],), "cu_seqlens[1]: expected an integer, got '3'"),
        (([0, None],), "cu_seqlens[1]: expected an integer, got None"),
        ((np.array([[0, 2]]),), "cu_seqlens[0]: expected an integer, got "),
        ((3,), "cu_seqlens: expected a tensor or a sequence of integers, got 3"),
        ((None,), "cu_seqlens: expected a tensor or a sequence of integers, got None"),
        (("03",), "cu_seqlens: expected a tensor or a sequence of integers, got '03'"),
        ((torch.tensor([0.0, 2.0]),), "cu_seqlens: expected [N + 1] int32 or int64, got"),
        (([0, 2], None, 2.0), "tokens: expected an integer, got 2.0"),
        (([0, 1], None, True), "tokens: expected an integer, got True"),
    ],
)
def test_offsets_of_a_context(group: None, arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        kda.cp.Context(*arguments)
    assert str(refused.value).startswith(sentence)


def test_a_context_of_integers(group: None) -> None:
    for offsets in (
        [0, 3, 8],
        np.array([0, 3, 8]),
        (np.int32(0), np.int64(3), 8),
        range(0, 9, 4),
        torch.tensor([0, 8]),
    ):
        context = kda.cp.Context(offsets)
        assert context.tokens == 8 and context.cu_seqlens.tolist() == [int(x) for x in offsets]
    with pytest.raises(ValueError, match=r"^width: expected an integer, got 2\.5"):
        kda.cp.conv_halo(torch.ones(1, 8, 4), context, 2.5)  # type: ignore[arg-type]

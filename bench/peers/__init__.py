"""Other implementations to measure next to ours, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kda
from kda.cli.arrays import Source
from kda.cli.problems import Problem, common

_folder: Path | None = None


def add_folder(folder: Path | None) -> None:
    """Makes a folder, and its ``sgl/``, a place to look for peers: the given one, or that of the variable KDA_PEERS."""
    global _folder
    if folder is None and os.environ.get("KDA_PEERS"):
        folder = Path(os.environ["KDA_PEERS"])
    if folder is None:
        return
    if not folder.is_dir():
        raise ValueError(f"--peers: expected a folder, got {folder}")
    _folder = folder.resolve()
    sys.path += [path for path in (str(_folder), str(_folder / "sgl")) if path not in sys.path]


def file_of_peers(name: str) -> Path:
    if _folder is None:
        raise FileNotFoundError(f"{name} is looked for in the folder of --peers or KDA_PEERS, and none is given")
    if not (_folder / name).exists():
        raise FileNotFoundError(f"{_folder} has no {name}")
    return _folder / name


def missing(modules: set[str]) -> list[str]:
    """One sentence for each of these modules that cannot be imported."""
    sentences = []
    for name in sorted(modules):
        if importlib.util.find_spec(name.split(".")[0]) is None:
            sentences.append(f"no rows of {name}: it is not installed")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # a foreign package may raise anything when it is imported
            sentences.append(f"no rows of {name}: importing it fails with {type(error).__name__}: {error}")
    return sentences


def activated(x: dict[str, Any]) -> dict[str, Any]:
    """The inputs of :func:`kda.cli.problems.common` for formulations without gate, norm and sigmoid. These are
    computed here, so the time of such a formulation does not include them."""
    import torch

    normalized = {n: torch.nn.functional.normalize(x[n].float(), dim=-1).to(x[n].dtype) for n in "qk"}
    g = kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x.get("lower_bound")) if "A_log" in x else x["g"]
    beta = x["beta"].float().sigmoid() if x["use_beta_sigmoid_in_kernel"] else x["beta"]
    return normalized | {"v": x["v"], "g": g, "beta": 2 * beta if x["allow_neg_eigval"] else beta}


def naive_chunk(p: Problem, new: Source, naive: ModuleType | None = None) -> Callable[[], object]:
    """FLA's chunked formulation in PyTorch."""
    naive = naive or importlib.import_module("fla.ops.kda.naive")
    x = activated(common(p, new))
    return lambda: naive.naive_chunk_kda(**x)


def naive_recurrent(p: Problem, new: Source) -> Callable[[], object]:
    """FLA's token recurrence in PyTorch."""
    import torch

    naive = importlib.import_module("fla.ops.kda.naive")
    state = torch.randn(p.B, p.HV, p.K, p.V, dtype=torch.float32, device="cpu")
    x = activated(common(p, new)) | {"initial_state": state}
    return lambda: naive.naive_recurrent_kda(**x, output_final_state=True)

"""Other implementations to measure beside ours, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kda

from .arrays import Source
from .problems import Problem, common


def missing(modules: set[str]) -> list[str]:
    """Sentences on those of these modules that cannot be imported."""
    sentences = []
    for name in sorted(modules):
        if importlib.util.find_spec(name.split(".")[0]) is None:
            sentences.append(f"no rows of {name}: it is not installed")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a foreign package does when it is imported
            sentences.append(f"no rows of {name}: importing it fails with {type(error).__name__}: {error}")
    return sentences


def activated(x: dict[str, Any]) -> dict[str, Any]:
    """The inputs of :func:`kda.cli.problems.common` as formulations take them that have no gate, norm or sigmoid: they
    are spared those."""
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
    x = activated(common(p, new)) | {"initial_state": torch.randn(p.B, p.HV, p.K, p.V)}
    return lambda: naive.naive_recurrent_kda(**x, output_final_state=True)

"""One small call of every function with gradients, for tests of what torch is told about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kda
from support import Tensor, make

Call = tuple[Callable[..., Any], dict[str, Any]]


def chunk(**options: Any) -> Call:
    p = make(2, 70, 2, 2, 8, 24, gate="softplus", beta="sigmoid")
    return kda.chunk_kda, p.keywords | {"output_final_state": True, **options}


def _packed() -> Call:
    p = make(1, 70, state=False)
    return kda.chunk_kda, p.keywords | {"cu_seqlens": torch.tensor([0, 3, 3, 70]), "output_final_state": True}


def _recurrent() -> Call:
    p = make(2, 5, state=False, v_first=True)
    bfloat = {n: p.tensors[n].bfloat16() for n in ("q", "k", "v")}
    return kda.fused_recurrent_kda, p.keywords | bfloat | {"output_final_state": True}


def _gate() -> Call:
    x = {"g": torch.randn(2, 3, 2, 4), "A_log": torch.randn(2), "dt_bias": torch.randn(8)}
    return kda.fused_kda_gate, x | {"output_dtype": torch.bfloat16}


def _conv() -> Call:
    x = {"x": torch.randn(2, 5, 6).half(), "weight": torch.randn(6, 4), "initial_state": torch.randn(2, 6, 3)}
    return kda.causal_conv1d, x | {"output_final_state": True}


def _conv_of_parts() -> Call:
    x = {"x": torch.randn(1, 7, 4), "x1": torch.randn(1, 7, 2), "x2": torch.randn(1, 7, 2), "weight": torch.randn(8, 4)}
    return kda.causal_conv1d, x | {"bias": torch.randn(8), "cu_seqlens": torch.tensor([0, 3, 7])}


def _norm() -> Call:
    return kda.norm_gate, {"x": torch.randn(2, 3, 2, 8), "gate": torch.randn(2, 3, 2, 8), "weight": torch.randn(8)}


TRAINING: dict[str, Callable[[], Call]] = {
    "chunk_kda": chunk,
    "chunk_kda, all kept": lambda: chunk(disable_recompute=True),
    "chunk_kda, packed": _packed,
    "fused_recurrent_kda": _recurrent,
    "fused_kda_gate": _gate,
    "causal_conv1d": _conv,
    "causal_conv1d, parts": _conv_of_parts,
    "norm_gate": _norm,
}


def leaves_of(keywords: dict[str, Any]) -> list[Tensor]:
    """The tensors that can have gradients."""
    return [x for x in keywords.values() if isinstance(x, Tensor) and x.is_floating_point()]


def loss_of(result: Any) -> Tensor:
    """A sum in which every element has its own factor."""
    outputs = result if isinstance(result, tuple) else (result,)
    terms = [(y.double() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum() for y in outputs if y is not None]
    return torch.stack(terms).sum()

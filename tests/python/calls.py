"""A valid call of the convolution, of the norm, of segment maps, of each stage and of the float32 prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kda
from kda import stages
from kda.call.shared import STAGES
from kda.cli import problems
from kda.cli.arrays import Source
from support import make


def convolution(update: bool) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    x, weight, bias, pool = (torch.randn(*s, generator=random) for s in ((1, 10, 6), (6, 4), (6,), (3, 6, 3)))
    kw = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": torch.tensor([0, 4, 4, 9], dtype=torch.int32)}
    if not update:
        return kw | {"initial_state": pool, "output_final_state": True}
    slots, has = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([True, True, False])
    return kw | {"state": pool, "state_indices": slots, "has_initial_state": has, "out": torch.full_like(x, 7.0)}


def norm_gate() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(*s, generator=random) for s in ((2, 3, 2, 6), (2, 3, 2, 6), (6,)))
    return {"x": x, "gate": gate, "weight": weight, "activation": "silu", "out": torch.full_like(x, 7.0)}


def segment_map() -> dict[str, Any]:
    p = make(H=1, G=2, K=4, V=6, gate="softplus", beta="sigmoid", lengths=[3, 0, 66], tail=1, scale=0.5, state=False)
    return p.keywords | {"d_o": p.tensors["v"] / 2, "want": "Mbd"}


def segment_merge() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    M, b, h0 = (torch.randn(*s, generator=random) for s in ((3, 2, 4, 4), (3, 2, 6, 4), (2, 6, 4)))
    return {"M": M, "b": b, "h0": h0}


def prefill_f32() -> dict[str, Any]:
    kw = problems.heads_first(problems.Problem(T=40, H=1, HV=2, K=4, V=6, layout="V-first"), Source())
    w, u = torch.full((1, 2, 2, 32, 4), 7.0), torch.full((1, 2, 2, 32, 6), 7.0)
    return kw | {"final_state": torch.full_like(kw["initial_state"], 7.0), "w": w, "u": u, "o": kw["v"] * 0 + 7}


def stage(name: str) -> dict[str, Any]:
    p = problems.Problem(T=70, H=1, HV=2, K=4, V=6, dtype="float32", layout="V-first")
    return problems.stage(name, p, Source()) | {"cu_seqlens": torch.tensor([0, 66])}


BASES: dict[str, Callable[[], dict[str, Any]]] = {
    "causal_conv1d": lambda: convolution(update=False),
    "causal_conv1d_update": lambda: convolution(update=True),
    "norm_gate": norm_gate,
    "segment_map": segment_map,
    "segment_merge": segment_merge,
    "prefill_f32": prefill_f32,
} | {name: lambda name=name: stage(name) for name in STAGES}  # type: ignore[misc]
WRITTEN = {
    "causal_conv1d_update": ("state", "out"),
    "norm_gate": ("out",),
    "prefill_f32": ("final_state", "w", "u", "o"),
    "bwd_intra": ("dq", "dk", "dbeta", "dG"),
}


def function(name: str) -> Callable[..., Any]:
    f: Callable[..., Any] = getattr(stages if name in STAGES else kda, name)
    return f

"""One rank's part of the layer in test_nn_keywords.py, with a context. Results go to files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kda.cp
from gloo import join
from kda.nn import KimiDeltaAttention
from layer_model import make, tokens

TOKENS = 96  # on all ranks together


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    config: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    checkpointed: bool = False
    windows: dict[int, list[int]] = field(default_factory=dict)  # by the number of ranks; equal ones otherwise

    def layer(self) -> KimiDeltaAttention:
        return make(**self.config)


CASES = {
    "one": Case([96]),
    "across": Case([20, 0, 50, 1, 25], {"num_v_heads": 4, "expand_v": 2}),
    "spans": Case([3, 90, 3], {"conv_size": 3, "conv_bias": True, "allow_neg_eigval": True}),
    "short": Case([31, 1, 1, 1, 14, 1, 1, 46], {"lower_bound": -5.0, "safe_gate": True}),
    "tail": Case([40, 40], {"conv_size": 1}),
    "no_convolution": Case([50, 46], {"use_short_conv": False}),
    "autocast": Case([10, 86], autocast=True),
    "checkpointed": Case([10, 86], checkpointed=True),
    "unequal": Case([20, 0, 50, 1, 25], {"num_v_heads": 4}, windows={2: [1, 95], 3: [71, 2, 23]}),
    "without_tokens": Case([10, 86], {"conv_bias": True}, windows={2: [0, 96], 3: [40, 0, 56]}),
    "unequal_checkpointed": Case([10, 86], checkpointed=True, windows={2: [96, 0], 3: [0, 12, 84]}),
}


def run_layer(case: Case, cp: Any = None) -> dict[str, Tensor]:
    """Outputs, and gradients of x and of every parameter, for this rank's window or for everything."""
    layer, x, d_o = case.layer(), tokens(1, TOKENS, 48), tokens(1, TOKENS, 48, seed=2)
    keywords: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *case.lengths]).cumsum(0)}
    if cp is not None:
        own = slice(cp.start, cp.start + cp.tokens)
        x, d_o, keywords = x[:, own], d_o[:, own], {"cp_context": cp}
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
        if case.checkpointed:
            o = checkpoint(lambda x: layer(x, **keywords)[0], x, use_reentrant=False)
        else:
            o = layer(x, **keywords)[0]
    (o * d_o).sum().backward()
    return {"o": o.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


def run_layer_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store_{ranks}")
    contexts = {
        n: kda.cp.Context([0, *torch.tensor(c.lengths).cumsum(0).tolist()], tokens=TOKENS, windows=c.windows.get(ranks))
        for n, c in CASES.items()
    }
    torch.save({n: run_layer(case, contexts[n]) for n, case in CASES.items()}, Path(folder) / f"{ranks}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

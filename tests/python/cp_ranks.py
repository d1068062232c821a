"""Run by every process of test_cp.py: the cases, and one rank's part of them. Results go to files."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import kda
import kda.cp
from gloo import answer, join
from support import Problem, Tensor, make

TOKENWISE = ("q", "k", "v", "g", "beta")
TOKENS = 240  # on all ranks together, divisible by 2, 3 and 4


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)  # of support.make
    keywords: dict[str, Any] = field(default_factory=dict)  # of chunk_kda
    wild: bool = False
    tokens: int = TOKENS

    @property
    def problem(self) -> Problem:
        p = make(lengths=self.lengths, tail=self.tokens - sum(self.lengths), state=False, **self.options)
        if not self.wild:
            return p
        g = p.tensors["g"].clone()
        g[:, ::7, :, ::3], g[:, 3::31] = -3000.0, -torch.inf
        return p.having(g=g)


FUSED = {"gate": "softplus", "beta": "sigmoid"}
CASES = {
    "one": Case([240]),
    "one_fused": Case([240], {**FUSED, "G": 2, "H": 1}),
    "one_slow": Case([240], {"decay": 100.0, "gate": "log"}),
    "one_wild": Case([240], wild=True),
    "across": Case([50, 0, 130, 1, 59], {**FUSED, "G": 2}),
    "across_v_first": Case([50, 0, 130, 1, 59], {**FUSED, "v_first": True, "V": 40}),
    "spans": Case([10, 220, 10], {"gate": "lower_bound", "beta": "2sigmoid"}),
    "borders": Case([20] * 12),  # no sequence crosses a border of 2, 3 or 4 windows
    "many": Case([7, 33, 41, 0, 0, 19, 50, 3, 47, 40], FUSED),
    "tail": Case([100, 100], FUSED),
    "ranks_of_padding": Case([30, 20], FUSED),
    "nothing": Case([]),
    "empty": Case([0, 0, 240, 0]),
    "kept": Case([10, 220, 10], FUSED, {"disable_recompute": True}),
    "bf16": Case([10, 220, 10], {**FUSED, "dtype": torch.bfloat16}),
    "f64": Case([10, 220, 10], {**FUSED, "dtype": torch.float64, "H": 1, "K": 4, "V": 6}),
    "wide": Case([10, 220, 10], {**FUSED, "H": 1, "K": 128, "V": 128}),
}


# Windows of ranks, without tokens or with few: of TOKENS, and of the 12 tokens of a convolution.
UNEQUAL = {
    2: [[240, 0], [0, 240], [100, 140], [1, 239], [235, 5]],
    3: [[100, 0, 140], [0, 240, 0], [99, 1, 140], [0, 3, 237], [50, 189, 1]],
    4: [[100, 0, 0, 140], [97, 1, 2, 140]],
}
UNEQUAL_CASES = ("one_fused", "across", "across_v_first", "spans", "many", "tail", "empty", "kept", "bf16", "f64")
SHORT = {
    2: [[12, 0], [1, 11], [10, 2]],
    3: [[0, 12, 0], [9, 1, 2], [5, 1, 6], [2, 0, 10]],
    4: [[8, 1, 1, 2], [0, 5, 0, 7]],
}


def window(cp: Any) -> slice:
    return slice(cp.start, cp.start + cp.tokens)


def chunk(p: Problem, shard: slice, keywords: dict[str, Any]) -> dict[str, Tensor]:
    """{"o", "dq", ..} for some of the tokens."""
    leaves = {n: (x[:, shard] if n in TOKENWISE else x).detach().clone().requires_grad_() for n, x in p.tensors.items()}
    o, state = kda.chunk_kda(**leaves, **{**p.options, **keywords})
    assert state is None
    d_o = torch.randn(p.tensors["v"].shape, generator=torch.Generator().manual_seed(7)).to(o.dtype)
    d = torch.autograd.grad(o, list(leaves.values()), d_o[:, shard])
    return {"o": o.detach(), **{f"d{n}": x for n, x in zip(leaves, d, strict=True)}}


# ---- the convolution ----

CONVOLUTIONS = [  # tokens on all ranks, lengths, width
    (240, [240], 4),
    (240, [50, 0, 130, 1, 59], 4),
    (240, [20] * 12, 4),
    (240, [59, 1, 1, 1, 178], 4),
    (240, [100, 100], 3),
    (12, [12], 4),  # windows as short as the halo, or shorter
    (12, [1, 10, 1], 6),
    (12, [2, 9], 13),
    (12, [12], 1),
]


def convolution(x: Tensor, weight: Tensor, lengths: list[int], halo: Tensor | None) -> Tensor:
    """Causal depthwise convolution of packed sequences, each with the rows before it: ``[N, D, W - 1]``, or zeros."""
    D, W = weight.shape
    outputs, start = [], 0
    for n, length in enumerate(lengths):
        before = x.new_zeros(1, D, W - 1) if halo is None else halo[n : n + 1]
        rows = torch.cat([before, x[:, start : start + length].transpose(1, 2)], 2)
        outputs.append(F.conv1d(rows, weight[:, None], groups=D).transpose(1, 2) if length else x[:, :0])
        start += length
    # Backward goes through the halo of a rank without tokens, too: the others wait for it.
    rest = 0 * x[:, start:] if halo is None else 0 * x[:, start:] + 0 * halo.sum()
    return torch.cat([*outputs, rest], 1)


def convolution_inputs(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens + width)
    x, weight, dy = (torch.randn(*s, generator=random) for s in ((1, tokens, 5), (5, width), (1, tokens, 5)))
    return x.to(dtype), weight.to(dtype), dy.to(dtype)


def convolved(tokens: int, lengths: list[int], width: int, dtype: torch.dtype, cp: Any = None) -> dict[str, Tensor]:
    x, weight, dy = convolution_inputs(tokens, width, dtype)
    if cp is not None:
        shard = window(cp)
        x, dy, lengths = x[:, shard], dy[:, shard], cp.cu_seqlens.diff().tolist()
    x, weight = x.clone().requires_grad_(), weight.requires_grad_()
    halo = None if cp is None else kda.cp.conv_halo(x, cp, width)
    y = convolution(x, weight, lengths, halo)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), "dx": dx, "dweight": dweight}


def convolution_in_front(cp: Any = None) -> dict[str, Tensor]:
    """The layer's q, k and v from kda.causal_conv1d."""
    random = torch.Generator().manual_seed(1)
    H, K, V, lengths = 2, 16, 20, CASES["many"].lengths
    D = 2 * H * K + H * V
    x, weight, d_o = (torch.randn(*s, generator=random) for s in ((1, TOKENS, D), (D, 4), (1, TOKENS, H, V)))
    g, beta = -torch.rand(1, TOKENS, H, K, generator=random), torch.rand(1, TOKENS, H, generator=random)
    packed: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    if cp is not None:
        shard = window(cp)
        x, g, beta, d_o = (t[:, shard] for t in (x, g, beta, d_o))
        packed = {"cp_context": cp}
    x, weight = x.clone().requires_grad_(), weight.requires_grad_()
    halo = None if cp is None else kda.cp.conv_halo(x, cp, 4)
    y, _ = kda.causal_conv1d(
        x, weight, initial_state=halo, cu_seqlens=packed["cu_seqlens"] if cp is None else cp.cu_seqlens
    )
    q, k, v = (t.unflatten(-1, (H, -1)) for t in y.split([H * K, H * K, H * V], -1))
    o, _ = kda.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **packed)
    dx, dweight = torch.autograd.grad(o, (x, weight), d_o)
    return {"o": o.detach(), "dx": dx, "dweight": dweight}


# ---- groups and meshes ----


def whole_sequence(group: Any) -> tuple[int, dict[str, Tensor]]:
    """This rank's number in the group, and its window of the case "one"."""
    cp = kda.cp.Context([0, TOKENS], group=group)
    p = CASES["one"].problem
    p.options.pop("cu_seqlens")
    return cp.rank, chunk(p, window(cp), {"cp_context": cp})


def groups(ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks), mesh_dim_names=("dp", "cp"))
    results: dict[str, Any] = {
        "group": whole_sequence(dist.new_group()),
        "mesh": whole_sequence(DeviceMesh("cpu", list(range(ranks)))),
        "dimension of a mesh": whole_sequence(mesh["cp"]),
    }
    for name, members in (("not a member", [0]), ("falling", list(reversed(range(ranks))))):
        mesh = DeviceMesh("cpu", members)
        try:
            results[name] = kda.cp.Context([0, 8 * len(members)], mesh).rank
        except ValueError as error:
            results[name] = str(error)
    return results


# ---- unequal windows ----


def offsets(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]


def unequal(rank: int, ranks: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for sizes in UNEQUAL[ranks]:
        for name in UNEQUAL_CASES:
            case, p = CASES[name], CASES[name].problem
            cp = kda.cp.Context(p.options.pop("cu_seqlens"), tokens=TOKENS, windows=sizes)
            keywords = {**case.keywords, "cp_context": cp}
            results[f"{name} {sizes}"] = {**chunk(p, window(cp), keywords), "cu_seqlens": cp.cu_seqlens}
            results[f"{name} {sizes} again"] = chunk(p, window(cp), keywords)
        # the same context from this rank's own number
        cp = kda.cp.Context(offsets(CASES["many"].lengths), windows=sizes[rank])
        results[f"in front {sizes}"] = convolution_in_front(cp)
        results[f"context {sizes}"] = (cp.windows, cp.start, cp.tokens)
    for sizes in SHORT[ranks]:
        for i, (tokens, lengths, width) in enumerate(CONVOLUTIONS):
            if tokens == sum(sizes):
                cp = kda.cp.Context(offsets(lengths), tokens=tokens, windows=sizes)
                results[f"convolution {i} {sizes}"] = convolved(tokens, lengths, width, torch.float32, cp)
    return results


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # arguments of the last rank, of the others; the sentence
    ({"cu_seqlens": [0, 3, 8]}, {"cu_seqlens": [0, 8]}, "cu_seqlens: expected the same on every rank, got others on"),
    ({"cu_seqlens": [0, 3, 8]}, {"cu_seqlens": [0, 4, 8]}, "cu_seqlens: expected the same on every rank, got others"),
    ({"tokens": 9}, {"tokens": 8}, "tokens: expected the same on every rank, got others on rank"),
    ({"windows": 7}, {"windows": 0}, "windows: expected 8 tokens together (cu_seqlens[-1], or tokens with padding)"),
    ({"windows": 9}, {"windows": 0}, "windows: expected 8 tokens together (cu_seqlens[-1], or tokens with padding)"),
    ({"windows": -1}, {"windows": 9}, "windows["),
    ({"tokens": 7, "windows": 7}, {"tokens": 7, "windows": 0}, "tokens: expected at least cu_seqlens[-1] = 8, got 7"),
]


def refusals(last: bool) -> list[str]:
    """What every rank says to arguments that only together are wrong."""
    usual = {"cu_seqlens": [0, 8], "windows": 8 if last else 0}
    return [
        answer(partial(kda.cp.Context, **{**usual, **(of_last if last else of_others)}))
        for of_last, of_others, _ in REFUSED
    ]


# ---- one process ----


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store_{ranks}")
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        p = case.problem
        cu = p.options.pop("cu_seqlens", torch.zeros(1, dtype=torch.int64))
        cp = kda.cp.Context(cu, tokens=TOKENS)
        shard = window(cp)
        if rank % 2:
            time.sleep(0.01)  # late ranks change nothing
        keywords = {**case.keywords, "cp_context": cp}
        results[name] = {**chunk(p, shard, keywords), "cu_seqlens": cp.cu_seqlens}
        results[f"{name} again"] = chunk(p, shard, keywords)
        with torch.no_grad():
            part = {n: x[:, shard] if n in TOKENWISE else x for n, x in p.tensors.items()}
            results[f"{name} without gradients"] = kda.chunk_kda(**part, **p.options, **keywords)[0]
    for i, (tokens, lengths, width) in enumerate(CONVOLUTIONS):
        cp = kda.cp.Context(offsets(lengths), tokens=tokens)
        for dtype in (torch.float32, torch.bfloat16):
            results[f"convolution {i} {dtype}"] = convolved(tokens, lengths, width, dtype, cp)
    results["convolution in front"] = convolution_in_front(kda.cp.Context(offsets(CASES["many"].lengths)))
    results |= groups(ranks)
    results |= unequal(rank, ranks)
    results["refusals"] = refusals(rank == ranks - 1)
    torch.save(results, Path(folder) / f"{ranks}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

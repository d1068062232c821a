"""One rank's part of test_fla_cp.py: calls as users of FLA's context parallelism make them. Results go to files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import kda
from gloo import answer, join
from kda.cp import Context, conv_halo
from layer_model import make, tokens

Tensor = torch.Tensor
T, H = 1024, 4


@dataclass
class ForeignContext:
    """The fields of FLA's context, and what its ``build_cp_context`` writes into them."""

    group: Any
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    layout: str = "contiguous"
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, ...] | None = None
    post_num_ranks_by_part: tuple[int, ...] | None = None
    pre_num_ranks_dev: Tensor | None = None
    post_num_ranks_dev: Tensor | None = None


def build(lengths: list[int], layout: str = "contiguous", **changes: Any) -> ForeignContext:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    owner = [n for n, length in enumerate(lengths) for _ in range(length)]
    count = ranks if layout == "contiguous" else 2 * ranks
    size = len(owner) // count
    slots = [rank] if layout == "contiguous" else [rank, count - 1 - rank]
    holders = [
        [slot for slot in range(count) if n in owner[slot * size : (slot + 1) * size]] for n in range(len(lengths))
    ]
    offsets, fronts, before, after = [0], 0, [], []
    for slot in slots:
        own = owner[slot * size : (slot + 1) * size]
        for n in sorted(set(own)):
            offsets.append(offsets[-1] + own.count(n))
        fronts = fronts or len(offsets) - 1
        before.append(sum(s < slot for s in holders[own[0]]))
        after.append(sum(s > slot for s in holders[own[-1]]))
    cu = torch.tensor(offsets, dtype=torch.int32)
    more: dict[str, Any] = {
        "pre_num_ranks": before[0], "post_num_ranks": after[0], "is_first_rank": not before[0],
        "is_last_rank": not after[0],
    }  # fmt: skip
    if layout == "zigzag":
        more = {
            "layout": layout, "front_num_seqs": fronts, "pre_num_ranks_by_part": tuple(before),
            "post_num_ranks_by_part": tuple(after),
        }  # fmt: skip
    return ForeignContext(dist.group.WORLD, cu, **{"cu_seqlens_cpu": cu, **more, **changes})


@dataclass(frozen=True)
class Case:
    """A scenario of test_cp_kda, a test of FLA, or a zigzag one."""

    ranks: int
    D: int
    lengths: list[int]
    disable_recompute: bool = False
    layout: str = "contiguous"


CASES = {
    "CP2_SequenceCut": Case(2, 64, [300, 400, 324]),
    "CP2_BoundaryAligned": Case(2, 128, [512, 512]),
    "CP4_Complex": Case(4, 128, [700, 324]),
    "CP4_SingleSequence": Case(4, 64, [1024]),
    "CP2_ManyShortSequences": Case(2, 64, [100, 150, 200, 250, 124, 100, 100]),
    "CP2_DisableRecompute": Case(2, 64, [300, 400, 324], True),
    "CP2_Zigzag": Case(2, 64, [300, 400, 324], layout="zigzag"),
    "CP4_Zigzag": Case(4, 64, [700, 24, 300], layout="zigzag"),
}


def inputs(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(42)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    q, k, v, d_o = (randn(1, T, H, case.D).half() for _ in range(4))
    g, beta = F.logsigmoid(randn(1, T, H, case.D)), randn(1, T, H).half().sigmoid()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}, d_o


def run(case: Case, cp: Any = None) -> dict[str, Tensor]:
    tensors, d_o = inputs(case)
    window = Context([0, *torch.tensor(case.lengths).cumsum(0).tolist()], layout=case.layout) if cp else None
    leaves = {n: (window.take(x) if window else x).clone().requires_grad_() for n, x in tensors.items()}
    cu = cp.cu_seqlens if cp else torch.tensor([0, *case.lengths]).cumsum(0)
    q, k = (F.normalize(leaves[n], p=2, dim=-1) for n in ("q", "k"))
    rest = {n: leaves[n] for n in ("v", "g", "beta")}
    more: dict[str, Any] = {"cu_seqlens": cu, "cp_context": cp, "disable_recompute": case.disable_recompute}
    o, _ = kda.chunk_kda(q=q, k=k, **rest, **more)
    o.backward(window.take(d_o) if window else d_o)
    order = window.take(torch.arange(T)[None])[0] if window else torch.arange(T)
    return {"o": o.detach(), **{f"d{n}": x.grad for n, x in leaves.items()}, "order": order}  # type: ignore[dict-item]


def run_layer(lengths: list[int], cp: Any = None) -> dict[str, Tensor]:
    layer, x, order = make(), tokens(1, T, 48), torch.arange(T)
    keywords: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    if cp is not None:
        window = Context([0, *torch.tensor(lengths).cumsum(0).tolist()], layout=cp.layout)
        x, order = window.take(x), window.take(order[None])[0]
        keywords = {"cu_seqlens": cp.cu_seqlens, "cp_context": cp}
    x = x.clone().requires_grad_()
    o = layer(x, **keywords)[0]
    o.square().sum().backward()
    return {"o": o.detach(), "dx": x.grad, "order": order}  # type: ignore[dict-item]


def refusals() -> list[str]:
    last = dist.get_rank() == dist.get_world_size() - 1
    wrong: tuple[dict[str, Any], ...] = (
        {"pre_num_ranks_dev": torch.zeros((), dtype=torch.int32)},
        {"pre_num_ranks": 7},
        {"cu_seqlens_cpu": torch.tensor([0, 300 if last else 512])},
    )

    def ask(changes: dict[str, Any]) -> None:
        conv_halo(torch.zeros(1, 512, 3), build([1024], **changes), 4)

    return [answer(partial(ask, changes)) for changes in wrong]


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store_{ranks}")
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.ranks == ranks:
            cp = build(case.lengths, case.layout)
            results[name] = run(case, cp)
            assert all(torch.equal(x, results[name][n]) for n, x in run(case, cp).items()), "read once, used again"
            results[f"layer {name}"] = run_layer(case.lengths, build(case.lengths, case.layout, cu_seqlens_cpu=None))
    if ranks == 2:
        results["refusals"] = refusals()
    torch.save(results, Path(folder) / f"{ranks}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

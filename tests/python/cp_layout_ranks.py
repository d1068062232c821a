"""One rank's part of test_cp_layouts.py: zigzag and other pieces, and windows that give the same bits on any number of
ranks. Results go to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kda
import kda.cp
from cp_layer_ranks import Case as LayerCase
from cp_ranks import CASES, FUSED, TOKENWISE, UNEQUAL_CASES, Case, convolution, convolution_inputs, offsets
from cp_state_ranks import leaves_of, weight_of
from gloo import join
from layer_model import tokens
from support import Tensor

TOKENS = 240
RANKS = (1, 2, 3, 4)

# Pieces of ranks, among the same TOKENS: many, short, none, beside each other.
PIECES: dict[int, dict[str, Any]] = {
    1: {"zigzag": "zigzag", "pieces": [[(0, 100), (100, 101), (101, 240)]]},
    2: {"zigzag": "zigzag", "pieces": [[(0, 70), (70, 71), (200, 240)], [(71, 200)]]},
    3: {"zigzag": "zigzag", "pieces": [[(0, 2), (90, 140), (238, 240)], [], [(2, 3), (3, 90), (140, 238)]]},
    4: {"zigzag": "zigzag", "pieces": [[(5, 80), (80, 80)], [(0, 5), (100, 101)], [(80, 100)], [(101, 240)]]},
}
NAMES = (*UNEQUAL_CASES, "one", "one_wild", "borders", "nothing")


def places(cp: kda.cp.Context) -> Tensor:
    """The tokens of the window, by number."""
    return torch.tensor([t for start, end in cp.pieces for t in range(start, end)], dtype=torch.int64)


def run(case: Case, layout: Any, given_states: bool, **keywords: Any) -> dict[str, Tensor]:
    """Outputs, states at the ends of sequences and at borders, and gradients of this rank's window. With a window of
    ``cp_invariant``, only states at ends have gradients: other numbers of ranks have other borders."""
    leaves, d_o = leaves_of(case)
    cu = offsets(case.lengths)
    cp = kda.cp.Context(cu, tokens=case.tokens, layout=layout, **keywords)
    part = {n: cp.take(x) if n in TOKENWISE else x for n, x in leaves.items()}
    here = [cp.segments[i] for i in cp.first_of_row]
    rows = leaves["initial_state"][[s.sequence for s in here]]
    if given_states:  # of a sequence that begins elsewhere, the row is not read
        elsewhere = torch.tensor([s.joined_before for s in here], dtype=torch.bool)
        part["initial_state"] = torch.where(elsewhere[:, None, None, None], torch.nan, rows)
    else:
        del part["initial_state"]
    options = {**case.problem.options, **case.keywords, "cp_context": cp}
    options.pop("cu_seqlens", None)
    o, last = kda.chunk_kda(**part, **options, output_final_state=True)
    loss, results = (o * cp.take(d_o)).sum() + 0 * last.sum(), {"o": o}
    for row, state in enumerate(last):
        segment = cp.segments[cp.last_of_row[row]]
        if given_states and not (keywords and segment.joined_after):
            loss = loss + (state * weight_of(segment.sequence, segment.end, state)).sum()
        results[f"state {segment.sequence} at {segment.end}"] = state
    loss.backward()
    grads = {f"d{n}": cp.take(x.grad) if n in TOKENWISE else x.grad for n, x in leaves.items() if x.grad is not None}  # type: ignore[arg-type]
    return {n: x.detach() for n, x in results.items()} | grads | {"pieces": places(cp)}


def convolved(cu: list[int], width: int, layout: Any) -> dict[str, Tensor]:
    x, weight, dy = convolution_inputs(TOKENS, width, torch.float32)
    cp = kda.cp.Context(cu, tokens=TOKENS, layout=layout)
    x, weight = cp.take(x).clone().requires_grad_(), weight.requires_grad_()
    y = convolution(x, weight, cp.cu_seqlens.diff().tolist(), kda.cp.conv_halo(x, cp, width))
    dx, dweight = torch.autograd.grad(y, (x, weight), cp.take(dy), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), "dx": dx, "dweight": dweight, "pieces": places(cp)}


CONVOLUTIONS = [([240], 4), ([50, 0, 130, 1, 59], 4), ([2, 1, 1, 98, 130], 13)]
LAYER = LayerCase([50, 0, 130, 1, 59], {"num_v_heads": 4, "conv_bias": True})


def run_layer(cp: kda.cp.Context | None) -> dict[str, Tensor]:
    layer, x, d_o = LAYER.layer(), tokens(1, TOKENS, 48), tokens(1, TOKENS, 48, seed=2)
    keywords: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *LAYER.lengths]).cumsum(0)}
    if cp is not None:
        x, d_o, keywords = cp.take(x), cp.take(d_o), {"cp_context": cp}
    x = x.clone().requires_grad_()
    o = layer(x, **keywords)[0]
    (o * d_o).sum().backward()
    return {"o": o.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


# ---- the same bits on any number of ranks ----

WINDOW = 64
LONG = 1024
INVARIANT = {
    "one": Case([1024], FUSED, tokens=LONG),
    "packed": Case([150, 0, 610, 1, 200, 63], {**FUSED, "G": 2}, tokens=LONG),
    "v_first_bf16": Case([700, 300], {**FUSED, "v_first": True, "V": 40, "dtype": torch.bfloat16}, tokens=LONG),
    "kept": Case([64, 960], FUSED, {"disable_recompute": True}, tokens=LONG),
}


EIGHT = ("one", "packed")  # of INVARIANT, on 8 ranks


def run_eight(rank: int, folder: str) -> None:
    join(rank, 8, f"{folder}/store_8")
    results = {}
    for name in EIGHT:
        for layout in ("contiguous", "zigzag"):
            results[f"{name} {layout}"] = run(INVARIANT[name], layout, True)
            results[f"invariant {name} {layout}"] = run(
                INVARIANT[name], layout, True, cp_invariant=True, cp_window=WINDOW
            )
    torch.save(results, Path(folder) / f"8_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/store_{ranks}")
    results: dict[str, Any] = {}
    for kind, layout in PIECES[ranks].items():
        for name in NAMES:
            for given in (False, True):
                results[f"{name} {kind} {given}"] = run(CASES[name], layout, given)
        for i, (lengths, width) in enumerate(CONVOLUTIONS):
            results[f"convolution {i} {kind}"] = convolved(offsets(lengths), width, layout)
        cp = kda.cp.Context(offsets(LAYER.lengths), layout=layout)
        results[f"layer {kind}"] = run_layer(cp) | {"pieces": places(cp)}
    for name, case in INVARIANT.items():
        for layout in ("contiguous", "zigzag"):
            for given in (False, True):
                if LONG % (2 * ranks) == 0:
                    results[f"cut {name} {layout} {given}"] = run(case, layout, given, cp_window=192)
                results[f"invariant {name} {layout} {given}"] = run(
                    case, layout, given, cp_invariant=True, cp_window=WINDOW
                )
    torch.save(results, Path(folder) / f"{ranks}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

"""The stages of the forward and prefill_f32 on a GPU, next to the bytes that they must move, FLA's stages (Triton) if
FLA can be imported, and FLA's naive chunked formulation in PyTorch for prefill_f32. Times are medians of CUDA graphs
that find nothing in the L2 cache, all in one run and on the same inputs.

    KDA_LIBRARY_DIR=build/release/lib python -m bench forward_stages [--out record.json]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kda
from bench.measure import graph_milliseconds, machine, stream_bandwidth
from kda import stages

Call = Callable[[], object]
SIZES = ((1, 8192, 96, 96), (1, 8192, 32, 32), (1, 8192, 16, 32), (8, 1024, 64, 64), (1, 8192, 12, 12))  # B, T, H, HV
SIZES_F32 = ((1, 4096, 16, 64), (1, 4096, 16, 128), (4, 2048, 32, 128))  # B, T, H, K = V
K = V = 128


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def unit(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, dtype=torch.float32), dim=-1).to(dtype)


def bytes_of(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def ours(x: dict[str, torch.Tensor], scale: float) -> dict[str, tuple[Call, int]]:
    """Returns for each stage a call and its bytes."""
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    G = stages.cumsum(g)
    w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(q, k, v, G, beta, scale)
    h, v_new, last = stages.delta_h(kg, w, u, G, output_final_state=True)
    o = stages.fwd_o(q, v_new, G, Aqk, h, scale)
    given = (k, v, G, beta)
    return {
        "cumsum": (lambda: stages.cumsum(g), bytes_of(g, G)),
        "chunk_intra": (
            lambda: stages.chunk_intra(q, *given, scale),
            bytes_of(q, *given, w, u, qG, kg, Aqk, Akk_inv),
        ),
        "recompute_w_u": (
            lambda: stages.recompute_w_u(k, v, beta, Akk_inv, G, q),
            bytes_of(q, *given, Akk_inv, w, u, qG, kg),
        ),
        "delta_h": (
            lambda: stages.delta_h(kg, w, u, G, output_final_state=True),
            bytes_of(kg, w, u, h, v_new, last) + bytes_of(G) // 64,
        ),
        "fwd_o": (lambda: stages.fwd_o(q, v_new, G, Aqk, h, scale), bytes_of(q, v_new, G, Aqk, h, o)),
    }


def of_fla(x: dict[str, torch.Tensor], scale: float) -> dict[str, Call]:
    try:
        cumsum = importlib.import_module("fla.ops.utils").chunk_local_cumsum
        intra = importlib.import_module("fla.ops.kda.chunk_intra").chunk_kda_fwd_intra
        scan = importlib.import_module("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_fwd_h
        output = importlib.import_module("fla.ops.gla.chunk").chunk_gla_fwd_o_gk
        log2e = importlib.import_module("fla.ops.utils.constant").RCP_LN2
    except Exception as error:  # a foreign package may raise anything when it is imported
        print(f"no rows of FLA: {type(error).__name__}: {error}")
        return {}
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    G = cumsum(g=g, scale=log2e, chunk_size=64)
    how = {"chunk_size": 64, "safe_gate": False, "disable_recompute": True}
    w, u, _, kg, Aqk, _ = intra(q=q, k=k, v=v, gk=G, beta=beta, scale=scale, **how)
    h, v_new, _ = scan(k=kg, w=w, u=u, gk=G, output_final_state=True, chunk_size=64)
    return {
        "cumsum": lambda: cumsum(g=g, scale=log2e, chunk_size=64),
        "chunk_intra": lambda: intra(q=q, k=k, v=v, gk=G, beta=beta, scale=scale, **how),
        "delta_h": lambda: scan(k=kg, w=w, u=u, gk=G, output_final_state=True, chunk_size=64),
        "fwd_o": lambda: output(q=q, v=v_new, g=G, A=Aqk, h=h, scale=scale, chunk_size=64),
    }


def stage_rows(bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    for B, T, H, HV in SIZES:
        x = {"q": unit(B, T, H, K), "k": unit(B, T, H, K), "v": normal(B, T, HV, V)}
        x |= {"g": -5 * torch.rand(B, T, HV, K, device="cuda").bfloat16()}
        x["beta"] = torch.rand(B, T, HV, device="cuda").bfloat16()
        grouped = (
            x if H == HV else x | {n: x[n].repeat_interleave(HV // H, 2) for n in "qk"}
        )  # FLA's stages do not support groups
        theirs = of_fla(grouped, K**-0.5)
        for name, (call, count) in ours(x, K**-0.5).items():
            time = graph_milliseconds(call, flush=True)
            row: dict[str, Any] = {
                "stage": name,
                "B": B,
                "T": T,
                "H": H,
                "HV": HV,
                "ms": time,
                "ns": time * 1e6 / (B * T * HV),
            }
            row |= {"GB/s": count / time * 1e-6, "of stream": count / time * 1e-6 / bandwidth}
            if name in theirs:
                row["FLA ms"] = graph_milliseconds(theirs[name], flush=True)
                row["over FLA"] = row["FLA ms"] / time
            rows.append(row)
            print(json.dumps({n: round(y, 4) if isinstance(y, float) else y for n, y in row.items()}), flush=True)
    return rows


def prefill_rows() -> list[dict[str, Any]]:
    rows = []
    f32 = torch.float32
    for B, T, H, size in SIZES_F32:
        q, k = (unit(B, H, T, size, dtype=f32) for _ in range(2))
        v, g = normal(B, H, T, size, dtype=f32), -5 * torch.rand(B, H, T, size, device="cuda")
        x = (q, k, v, g, torch.rand(B, H, T, device="cuda"))
        for chunk in (32, 64):
            o, w, u = kda.prefill_f32(*x, chunk_size=chunk)
            time = graph_milliseconds(partial(kda.prefill_f32, *x, chunk_size=chunk, w=w, u=u, o=o), flush=True)
            row: dict[str, Any] = {"op": "prefill_f32", "B": B, "T": T, "H": H, "K": size, "chunk": chunk, "ms": time}
            row |= {"ns": time * 1e6 / (B * T * H), "GB/s of inputs and outputs": bytes_of(*x, o, w, u) / time * 1e-6}
            try:
                naive = importlib.import_module("fla.ops.kda.naive").naive_chunk_kda
                call = partial(naive, *(t.transpose(1, 2).contiguous() for t in x), chunk_size=chunk)
                row["error beside torch"] = float((call()[0].transpose(1, 2) - o).norm() / o.norm())
                row["torch ms"] = graph_milliseconds(call, flush=True)
                row["over torch"] = row["torch ms"] / time
            except Exception as error:
                print(f"no row of naive_chunk_kda: {type(error).__name__}: {error}")
            rows.append(row)
            print(json.dumps({n: round(y, 7) if isinstance(y, float) else y for n, y in row.items()}), flush=True)
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="where the record goes, JSON")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    bandwidth = stream_bandwidth()
    record = machine("cuda") | {"GB/s of y = 2 x": bandwidth}
    record |= {"stages": stage_rows(bandwidth), "prefill_f32": prefill_rows()}
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0

"""Prefill of other projects on a GPU, called as their own engines call them: each call starts from raw gates, logits
of beta, and q and k without the norm, and goes from one state to another.

The packages ``fla`` and ``cudnn`` (only the module that launches its fused Hopper kernel is needed), and
``libfkda.so``, a C function around FlashKDA's launcher, come from the module path and from the folder of ``--peers``.
What is missing is left out.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.measure import Call
from bench.peers import file_of_peers
from kda.call.arrays import torch
from kda.cli.problems import Problem

if TYPE_CHECKING:
    from bench.prefill import Inputs

TUNED = "FLA"  # tries variants of its kernels on the first call with a number of heads
CHUNK, SIZE = 16, 128  # FlashKDA's


def _usual(p: Problem) -> None:
    usual = Problem(B=p.B, T=p.T, H=p.H, lengths=p.lengths, gate=p.gate)
    if p != usual:
        options = replace(usual, gate=Problem.gate).options.replace("softplus gate, ", "")
        raise NotImplementedError(f"measured with HV = H, K = V = 128 and {options} only")


def _bounded(p: Problem) -> None:
    if p.gate != "lower_bound":
        raise NotImplementedError("knows gates with a lower bound only")


def _pointer(x: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


def _fla(inputs: Inputs) -> Call:
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    x = inputs.x | {"dt_bias": inputs.x["dt_bias"].flatten(), "safe_gate": "lower_bound" in inputs.x}
    if "cu_seqlens" in x:  # the same tensor in every call: FLA caches what it derives from one
        x["cu_seqlens"] = x["cu_seqlens"].long()
    return lambda: chunk_kda(**x, initial_state=inputs.state, output_final_state=True)


def _flashkda(inputs: Inputs) -> Call:
    """``fkda_fwd(is there an initial state, a final one, are they float32, are sequences packed, q, k, v, g, beta
    [H, tokens], initial state, scale, final state, out, workspace, tiles, tokens, H, N, offsets, A_log, dt_bias, lower
    bound in powers of two, stream)``."""
    _bounded(inputs.problem)
    function = ctypes.CDLL(str(file_of_peers("libfkda.so"))).fkda_fwd
    p, x = inputs.problem, inputs.x
    tokens = p.B * p.T
    most = -(-tokens // CHUNK) + p.N  # a sequence ends in its own tile
    tiles = most if p.lengths else p.N * -(-p.T // CHUNK)
    tile = 3 * CHUNK * SIZE * 2 + SIZE * 4 + 2 * CHUNK * CHUNK * 2
    offsets = x["cu_seqlens"].long() if p.lengths else None
    out, state = inputs.new_out(), torch.empty_like(inputs.state)
    workspace = torch.empty(p.H * most * tile + (p.N + 32) * 4, dtype=torch.uint8, device=out.device)
    bound = ctypes.c_float(x["lower_bound"] * 1.4426950408889634)

    def run() -> Any:
        beta = x["beta"].view(tokens, p.H).t().contiguous()
        status = function(
            1, 1, 1, int(bool(p.lengths)), *(_pointer(x[name]) for name in "qkvg"), _pointer(beta),
            _pointer(inputs.state), ctypes.c_float(p.K**-0.5), _pointer(state), _pointer(out), _pointer(workspace),
            tiles, tokens, p.H, p.N, _pointer(offsets), _pointer(x["A_log"]), _pointer(x["dt_bias"]), bound,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        if status:
            raise RuntimeError(f"fkda_fwd: status {status}")
        return out, state

    return run


def _cudnn(inputs: Inputs) -> Call:
    """cuDNN takes g and beta in float32, so they are converted, as its own engine does."""
    _bounded(inputs.problem)
    host = importlib.import_module("cudnn.linear_attention.hopper.cuda_host")
    p, x = inputs.problem, inputs.x
    out, state = inputs.new_out(), torch.empty_like(inputs.state)
    g, beta = (torch.empty_like(x[name], dtype=torch.float32) for name in ("g", "beta"))
    offsets = x.get("cu_seqlens")
    if offsets is None:
        offsets = torch.arange(0, p.B * p.T + 1, p.T, dtype=torch.int32, device=out.device)
    tensors = {name: x[name] for name in ("q", "k", "v", "dt_bias")} | {"a_log": x["A_log"], "g": g, "beta": beta}
    tensors |= {"cu_seqlens": offsets, "initial_state": inputs.state, "o": out, "final_state": state}
    given: dict[str, Any] = {name: int(tensor.data_ptr()) for name, tensor in tensors.items()}
    given |= {"total_tokens": p.B * p.T, "n_seqs": p.N, "n_heads": p.H, "gate_lower_bound": x["lower_bound"]}
    given |= {"flags": host.FLAG_L2NORM | host.FLAG_SAFE_GATE | host.FLAG_BETA_SIGMOID, "device": out.device.index or 0}

    def run() -> Any:
        g.copy_(x["g"])
        beta.copy_(x["beta"])
        host.launch(stream=int(torch.cuda.current_stream().cuda_stream), **given)
        return tensors["o"], tensors["final_state"]

    return run


@dataclass(frozen=True)
class Peer:
    name: str
    make: Callable[[Inputs], Call]

    def prepare(self, inputs: Inputs) -> Call:
        _usual(inputs.problem)
        return self.make(inputs)


PEERS = (Peer(TUNED, _fla), Peer("FlashKDA", _flashkda), Peer("cuDNN", _cudnn))

"""Forward and backward of other projects on a GPU, from the same places as those of :mod:`bench.peers.prefill`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.peers import activated
from bench.peers.prefill import _bounded, _usual
from kda.call.arrays import torch

if TYPE_CHECKING:
    from bench.prefill import Inputs
    from bench.training_steps import Step


def _fla(inputs: Inputs) -> Step:
    from bench.training_steps import by_autograd

    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    inputs.x |= {"dt_bias": inputs.x["dt_bias"].flatten(), "safe_gate": "lower_bound" in inputs.x}
    if "cu_seqlens" in inputs.x:  # the same tensor in every call: FLA caches what it derives from one
        inputs.x["cu_seqlens"] = inputs.x["cu_seqlens"].long()
    return by_autograd(inputs, chunk_kda)


def _cudnn(inputs: Inputs) -> Step:
    """Its kernels have no gradients of the norm, the gate and the sigmoid, so it gets q, k, g and beta after those."""
    from bench.training_steps import Step, gradient_of_outputs

    p = inputs.problem
    _usual(p)
    _bounded(p)
    if p.layout != "V-first":
        raise ValueError("measured with V-first states")
    forward, backward = (
        importlib.import_module(f"cudnn.linear_attention.hopper.cuda_{name}") for name in ("host", "bwd_host")
    )
    x, state, d_o = activated(inputs.x), torch.zeros_like(inputs.state), gradient_of_outputs(inputs)
    offsets = inputs.x.get("cu_seqlens")
    if offsets is None:
        offsets = torch.arange(0, p.B * p.T + 1, p.T, dtype=torch.int32, device=state.device)
    size = {"total_tokens": p.B * p.T, "n_seqs": p.N, "n_heads": p.H, "device": state.device.index or 0}

    def launch(of: Any, **tensors: Any) -> None:
        given: dict[str, Any] = {name: int(t.data_ptr()) for name, t in tensors.items()}
        of.launch(stream=int(torch.cuda.current_stream().cuda_stream), **given, **size)

    def run_forward() -> Sequence[Any]:
        o, last = torch.empty_like(x["v"]), torch.empty_like(state)
        launch(forward, **x, cu_seqlens=offsets, initial_state=state, o=o, final_state=last)
        return [o]

    def run_backward() -> Sequence[Any]:
        d = {f"d{name}": torch.empty_like(t) for name, t in x.items()} | {"d_initial_state": torch.empty_like(state)}
        last = torch.zeros_like(state)
        workspace = torch.empty(backward.workspace_bytes(p.B * p.T, p.H, p.N), dtype=torch.uint8, device=state.device)
        launch(
            backward, **x, **d, cu_seqlens=offsets, initial_state=state, d_final_state=last, dO=d_o, workspace=workspace
        )
        return [*d.values()]

    return Step(run_forward, lambda: [*run_forward(), *run_backward()])


@dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[[Inputs], Step]


PEERS = (Peer("FLA", _fla), Peer("cuDNN", _cudnn))

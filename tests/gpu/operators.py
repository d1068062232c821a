"""A small call of each operator, in memory of its own, for the scenarios of test_scenarios.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import fused_calls
import kda
from memories import (
    STEPS,
    TOKENWISE,
    Memory,
    N,
    both,
    calls,
    convolved,
    convolved_and_packed,
    decode_and_norm,
    differentiated,
    flushing,
    gated,
    heads_first,
    in_parts,
    map_and_merge,
    mapped,
    merged,
    norm_behind_decode,
    normed,
    one_of_each,
    prompt_and_steps,
    prompts,
    requests,
    rounds,
    staged,
    texts,
    texts_of_a_convolution,
    through_stages,
    verifying,
    with_records,
    with_slots_of_snapshots,
    with_snapshots,
    without,
)
from places import DEVICE, LARGE
from support import Tensor

SLOTS = ("state_indices", 0)  # name of the indices into a pool, and its dimension of slots


@dataclass(frozen=True)
class Operator:
    """``make(seed)`` gives the memory of a call, on the CPU. ``run(memory)`` calls, and returns outputs and gradients.
    ``numbers``: inputs that may hold any normal numbers. ``outs``: what the call writes wholly and never reads;
    ``pools``: what it reads and writes in some slots; ``changed``: what else it writes. ``elsewhere``: tensors that a
    sentence names if they are on the CPU."""

    make: Callable[[int], Memory]
    run: Callable[[Memory], Sequence[Tensor]]
    numbers: tuple[str, ...] = TOKENWISE
    outs: tuple[str, ...] = ("out",)
    pools: dict[str, tuple[str, int]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def shuffle(self, m: Memory) -> None:
        """Writes other numbers, lengths and slots into the memory, with some padding, without waiting for the
        device."""
        for name in self.numbers:
            m[name].normal_()
        for at, slots in {at: m[name].shape[dim] for name, (at, dim) in self.pools.items() if at in m}.items():
            m[at].copy_((torch.randperm(slots + 4, device=DEVICE)[: m[at].numel()] - 4).view(m[at].shape))
        T = next((m[name].shape[1] for name in ("x", "v", "records.u") if name in m), 0)
        if "cu_seqlens" in m:
            ends = torch.rand(len(m["cu_seqlens"]) - 1, device=DEVICE) * 1.1 * T
            m["cu_seqlens"][1:] = ends.long().clamp(max=T).sort().values
        if "has_initial_state" in m:
            m["has_initial_state"].copy_(torch.rand(len(m["has_initial_state"]), device=DEVICE) < 0.8)
        if "accept_len" in m:
            m["accept_len"].random_(-1, T + 2)
        for name in ("parents", "last_parents"):
            if name in m:
                m[name].random_(-2, T)


PROMPTS: dict[str, Any] = {
    "pools": {"state": SLOTS, "checkpoints": ("checkpoint_slots", 0)},
    "elsewhere": ("k", "beta", "state", "cu_seqlens", "out", "checkpoints", "checkpoint_slots", "A_log"),
}


def trained(function: Callable[..., Any], **sizes: Any) -> Operator:
    run = differentiated(function, ("d_o", "d_state"), output_final_state=True)
    return Operator(texts(True, **sizes), run, outs=())


def inferred(function: Callable[..., Any], lengths: list[int] | None = None, **more: Any) -> Operator:
    run = torch.inference_mode()(calls(function, output_final_state=True, **more))
    return Operator(texts(False, lengths, dtype=torch.bfloat16, H=2, G=2, K=64, V=64), run, outs=())


RECORDS = {f"records.{n}": SLOTS for n in ("u", "k", "alpha")}
RING = {f"records.{n}": SLOTS for n in ("ring_first", "ring_count")}
SPECULATION: dict[str, Any] = {"K": 64, "V": 64, "dtype": torch.bfloat16}


def convolution_trained(lengths: list[int] | None = None) -> Operator:
    run = differentiated(kda.causal_conv1d, ("dy", "d_state"), output_final_state=True)
    return Operator(texts_of_a_convolution(lengths), run, ("x", "weight", "bias", "initial_state", "dy"), ())


def fused(requests: int, steps: int = 1) -> Operator:
    """A decode step in one call; several of them, each of which begins early and depends on the one before."""

    def memory(seed: int) -> Memory:
        HV = 8 if requests > 100 else 4
        p = fused_calls.call(requests, H=4, HV=HV, K=128, V=128, dtype=torch.bfloat16, seed=seed)
        return {n: x for n, x in p.items() if x is not None} | {"out": torch.zeros_like(p["gate"])}

    def run(m: Memory) -> Sequence[Tensor]:
        for _ in range(steps):
            o = kda.fused_decode(**m)
            if steps > 1:
                m["g"].copy_(o)
        return [o]

    pools, changed = {"state": SLOTS, "conv_state": SLOTS}, ("g",) if steps > 1 else ()
    return Operator(memory, run, ("x", "g", "beta", "gate"), pools=pools, changed=changed)


# Of bf16 and K = V = 128 with a lower bound: kernels that only Hopper has.
HOPPER: dict[str, Any] = {"dtype": torch.bfloat16, "gate": "lower_bound", **LARGE}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "l2norm": True, "H": 2, "G": 2, **LARGE}

OPERATORS: dict[str, Operator] = {
    "prefill": Operator(prompts(dtype=torch.bfloat16), calls(kda.prefill), **PROMPTS),
    "prefill_int32": Operator(prompts(torch.int32, dtype=torch.bfloat16), calls(kda.prefill), **PROMPTS),
    "prefill_128": Operator(prompts(K=128, V=128), calls(kda.prefill), **PROMPTS),
    "prefill_hopper": Operator(prompts(**HOPPER), calls(kda.prefill), **PROMPTS),
    "prefill_decode": Operator(
        requests(70, **LARGE), prompt_and_steps, pools={"state": SLOTS},
    ),
    "chunk_kda": inferred(kda.chunk_kda, [60, 0, 70]),
    "chunk_kda_states": inferred(kda.chunk_kda, return_intermediate_states=True),
    "fused_recurrent_kda": inferred(kda.fused_recurrent_kda, [60, 0, 70]),
    "backward_f32": trained(kda.chunk_kda, H=2, G=2, K=20, V=36),
    "backward": trained(kda.chunk_kda, **BF16),
    "backward_packed": trained(kda.chunk_kda, lengths=[60, 70, 70], **BF16),
    "backward_recurrent": trained(kda.fused_recurrent_kda, H=2, G=2, K=20, V=36),
    "decode": Operator(requests(3, K=64, V=64, dtype=torch.bfloat16), calls(kda.decode), pools={"state": SLOTS}),
    "decode_one": Operator(
        requests(1, "cuda_decode", K=64, V=64, dtype=torch.bfloat16), calls(kda.decode), pools={"state": SLOTS}
    ),
    "decode_sweep": Operator(
        requests(1, "cuda_decode_sweep", K=64, V=64, dtype=torch.bfloat16), calls(kda.decode), pools={"state": SLOTS}
    ),
    "decode_mtp": Operator(
        with_snapshots, calls(kda.decode_mtp), pools={"state": SLOTS}, changed=("snapshots",),
        elsewhere=("k", "beta", "state", "state_indices", "out", "snapshots", "accepted", "A_log"),
    ),
    "decode_mtp_slots": Operator(
        with_slots_of_snapshots, calls(kda.decode_mtp), pools={"state": SLOTS, "snapshots": ("snapshot_slots", 0)},
    ),
    "verify": Operator(
        lambda seed: verifying(seed, **SPECULATION), with_records(kda.verify_kvbuffer),
        pools={"state": SLOTS} | RECORDS, elsewhere=("records.alpha",),
    ),
    "flush": Operator(
        lambda seed: flushing(seed, **SPECULATION), with_records(kda.flush_kvbuffer), (), (), {"state": SLOTS},
        elsewhere=("accept_len", "records.alpha"),
    ),
    "flush_all_layers": Operator(
        lambda seed: flushing(seed, layers=3, **SPECULATION), with_records(kda.flush_kvbuffer_all_layers), (), (),
        {"state": ("state_indices", 1)},
    ),
    "flush_verify": Operator(
        lambda seed: both(seed, **SPECULATION), with_records(kda.flush_verify_kvbuffer),
        pools={"state": SLOTS} | RECORDS, elsewhere=("last.alpha", "state"),
    ),
    "flush_verify_ring": Operator(
        lambda seed: both(seed, ring=True, **SPECULATION), with_records(kda.flush_verify_kvbuffer),
        pools={"state": SLOTS} | RECORDS | RING,
    ),
    "rounds": Operator(
        lambda seed: rounds(seed, **SPECULATION), one_of_each, outs=(),
        pools={f"{r}.{n}": SLOTS for r in ("a", "b", "ring") for n in ("u", "k", "alpha")}
        | {n: SLOTS for n in ("state", "ring_pool", "ring.ring_first", "ring.ring_count")},
    ),
    "gate": Operator(
        lambda seed: {n: x for n, x in gated(seed).items() if n != "dy"}, calls(kda.fused_kda_gate),
        ("g", "A_log", "dt_bias"), (), elsewhere=("A_log",),
    ),
    "gate_backward": Operator(gated, differentiated(kda.fused_kda_gate, ("dy",)), ("g", "A_log", "dt_bias", "dy"), ()),
    "norm_gate": Operator(
        normed(2, 3, 4, 128), calls(kda.norm_gate), ("x", "gate", "weight"), elsewhere=("weight",)
    ),
    "norm_gate_backward": Operator(
        normed(3, 20 * N, 4, 128, gradients=True), differentiated(kda.norm_gate, ("dy",)),
        ("x", "gate", "weight", "dy"), (),
    ),
    "decode_and_norm": Operator(
        decode_and_norm, norm_behind_decode, pools={"state": SLOTS}, changed=("v", "y")
    ),
    "conv": Operator(
        texts_of_a_convolution(), without(calls(kda.causal_conv1d, output_final_state=True), "dy", "d_state"),
        ("x", "weight", "bias", "initial_state"), (),
    ),
    "conv_backward": convolution_trained(),
    "conv_backward_packed": convolution_trained([3, 0, 1, 2, 140, 4, 1, 0]),
    "conv_update": Operator(
        convolved(1), calls(kda.causal_conv1d_update), ("x", "weight", "bias"), pools={"state": SLOTS},
        elsewhere=("weight", "bias", "state", "state_indices", "out"),
    ),
    "conv_update_12": Operator(
        convolved(12), calls(kda.causal_conv1d_update), ("x", "weight", "bias"), pools={"state": SLOTS},
    ),
    "conv_update_f32": Operator(
        convolved(12, dtype=torch.float32), calls(kda.causal_conv1d_update), ("x", "weight", "bias"),
        pools={"state": SLOTS},
    ),
    "conv_update_packed": Operator(
        convolved_and_packed, calls(kda.causal_conv1d_update), ("x", "weight", "bias"), pools={"state": SLOTS},
    ),
    "conv_update_parts": Operator(
        convolved(1, parts=3), in_parts, ("x", "y", "z", "weight", "bias"), pools={"state": SLOTS},
    ),
    "segment_map": Operator(mapped(dtype=torch.bfloat16, **LARGE), map_and_merge, ("v",), ()),
    "segment_map_f32": Operator(mapped(K=36, V=36), map_and_merge, ("v",), ()),
    "segment_merge": Operator(merged, calls(kda.segment_merge), (), (), elsewhere=("h0",)),
    "stages_f32": Operator(staged(), through_stages, ("v",), ()),
    "stages": Operator(staged(dtype=torch.bfloat16), through_stages, ("v",), ()),
    "stages_backward": Operator(
        staged(dtype=torch.bfloat16, G=1), lambda m: through_stages(m, backward=True), ("v", "d_o"), ()
    ),
    "prefill_f32": Operator(
        heads_first, lambda m: kda.prefill_f32(**m), ("v",), ("w", "u", "o", "final_state")
    ),
    "fused_decode": fused(1),
    "fused_decode_8": fused(8, STEPS),
    "fused_decode_130": fused(130, STEPS),
}  # fmt: skip

"""vLLM's layers of KDA, from its files, over small pools: what the tests of ``kda.vllm`` drive.

Stood in for are vLLM's convolution (ours, so that there is a real one), its copies of states, its norm, and what it
needs of a server around it. Its Triton kernels cannot run here; where a test calls one, it says so.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch
from torch import nn

import kda
import kda.plugs.declined
import kda.plugs.engines
import kda.plugs.imports
import kda.vllm
from bench.engine_files import Names
from engine_files import forget, loaded

VERSION = "0.33.0"
Tensor = torch.Tensor
MODULES = {
    "KimiK3DeltaAttention": "vllm.models.kimi_k3.nvidia.kda",
    "KimiGatedDeltaNetAttention": "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
    "Glm5NextLinearAttention": "vllm.models.glm5next.common.kda",
}


class Anything:
    """For Triton: any attribute of it, and any call, is one more. Around a function it is that function."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *args: Any, **given: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not given else Anything()


class Metadata(Space):
    """Of a step: vLLM's class checks which it gets."""


def same(function: Any) -> Any:
    return function


def conv_fn(
    x: Tensor, weight: Tensor, bias: Any, *, conv_states: Tensor, has_initial_state: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, **given: Any,
) -> Tensor:  # fmt: skip
    """vLLM's convolution of prompts: ``x [D, T]``."""
    return kda.causal_conv1d_update(
        x.T[None].contiguous(), conv_states[:, :, : weight.shape[1] - 1], weight, bias, state_indices=cache_indices,
        cu_seqlens=query_start_loc, has_initial_state=has_initial_state, first_valid_slot=1,
    )[0].T  # fmt: skip


def conv_update(x: Tensor, state: Tensor, weight: Tensor, bias: Any = None, **given: Any) -> Tensor:
    """vLLM's convolution of a token or of drafts: ``x [tokens, D]``. Drafts all begin from the state's first rows."""
    slots, cu, W = given["conv_state_indices"], given.get("query_start_loc"), weight.shape[1]
    if cu is None:
        return kda.causal_conv1d_update(x[:, None], state, weight, bias, state_indices=slots, first_valid_slot=1)[:, 0]
    return kda.causal_conv1d_update(
        x[None], state[:, :, : W - 1].contiguous(), weight, bias, state_indices=slots, cu_seqlens=cu[: len(slots) + 1],
        first_valid_slot=1,
    )[0]  # fmt: skip


def gather(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    return torch.where(has_initial_state.view(-1, 1, 1, 1), state[indices.long()], 0)


def scatter(state: Tensor, last: Tensor, indices: Tensor) -> None:
    state[indices.long()] = last


def rearrange(x: Tensor, pattern: str, d: int | None = None) -> Tensor:
    """The patterns of einops that vLLM's layers use."""
    if pattern == "1 n h d -> n (h d)":
        return x[0].flatten(1)
    assert d is not None and pattern in ("n (h d) -> 1 n h d", "... (h d) -> ... h d"), pattern
    heads = x.unflatten(-1, (-1, d))
    return heads[None] if pattern.startswith("n") else heads


class GatedNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5, requires_grad=False)
        self.eps, self.activation = 1e-5, "sigmoid"

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return kda.norm_gate(x, gate.view(x.shape), self.weight, self.eps, self.activation)


def stand_ins(step: list[Any]) -> Names:
    platform = Anything()
    platform.is_rocm = platform.is_xpu = lambda: False  # type: ignore[attr-defined]
    platform.simple_compile_backend = "eager"  # type: ignore[attr-defined]
    mamba = "vllm.model_executor.layers.mamba"
    return {
        "einops": {"rearrange": rearrange},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": Anything(), "tl": Anything()},
        "vllm.logger": {"init_logger": lambda name: Anything()},
        "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b), "next_power_of_2": same, "RCP_LN2": 1.44},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": same},
        "vllm.forward_context": {"get_forward_context": lambda: Space(attn_metadata={"layer": step[0]})},
        "vllm.model_executor.utils": {"maybe_disable_graph_partition": lambda backend: None},
        "vllm.third_party.flash_linear_attention.ops.utils": {"FLA_CHUNK_SIZE": 64, "is_amd": False},
        f"{mamba}.mamba_utils": {"is_conv_state_dim_first": lambda: step[1]},
        f"{mamba}.ops.causal_conv1d": {"causal_conv1d_fn": conv_fn, "causal_conv1d_update": conv_update},
        f"{mamba}.ops.gather_initial_states": {"gather_initial_states": gather},
        f"{mamba}.ops.scatter_states": {"scatter_states": scatter},
        "vllm.models.kimi_k3.nvidia.kda_metadata": {"KimiK3KDAMetadata": Metadata},
        "vllm.v1.attention.backends.gdn_attn": {"GDNAttentionMetadata": Metadata},
    }


@contextmanager
def vllm(
    dim_first: bool = False, version: str = VERSION, cuda: bool = True, asked: str | None = "1"
) -> Iterator[list[Any]]:  # fmt: skip
    """Inside, vLLM's files are importable. What is yielded holds the step's metadata and the layout of convolutions.
    ``asked`` is KDA_VLLM."""
    step: list[Any] = [None, dim_first]
    forget("vLLM")
    try:
        with loaded("vllm", VERSION, stand_ins(step), says=version), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kda.vllm, "built_with_cuda", lambda: cuda)  # as if, whatever the build under test is
            patch.delenv("KDA_VLLM", raising=False)
            if asked is not None:
                patch.setenv("KDA_VLLM", asked)
            yield step
    finally:
        forget("vLLM")


@dataclasses.dataclass
class Sizes:
    H: int = 2
    D: int = 16
    W: int = 4
    spec: int = 0
    slots: int = 9
    bound: float | None = None
    pool: torch.dtype = torch.float32


def layer_of(name: str, sizes: Sizes, dim_first: bool) -> Any:
    """A layer of the class that vLLM instantiates for ``name``, with random parameters and pools."""
    own = getattr(importlib.import_module(MODULES[name]), name)
    layer: Any = own.__new__(own)
    nn.Module.__init__(layer)
    s, width = sizes, 3 * sizes.H * sizes.D
    layer.prefix, layer.num_spec, layer.spec_query_len = "layer", s.spec, 1 + s.spec
    layer.head_dim, layer.local_num_heads, layer.local_projection_size = s.D, s.H, s.H * s.D
    layer.gate_lower_bound = layer.kda_lower_bound = s.bound
    layer.kda_safe_gate, layer._conv_state_dim_first, layer._merged_conv_weight = s.bound is not None, dim_first, None
    layer.kda_prefill_backend = layer.kda_decode_backend = "triton"
    layer.kda_spec_decode_backend, layer.use_recoverssm = "native", False
    layer.decode_conv1d_weight = layer.decode_norm_weight = None
    layer.A_log = nn.Parameter(torch.randn(s.H) / 2, requires_grad=False)
    layer.dt_bias = nn.Parameter(torch.randn(s.H * s.D), requires_grad=False)
    taps = torch.randn(width, 1, s.W) / 2
    layer.conv1d = Space(weight=taps, bias=None)
    for part, names in zip(taps.chunk(3), ("q_conv1d", "k_conv1d", "v_conv1d"), strict=True):
        setattr(layer, names, Space(weight=part, bias=None))
    layer.o_norm = GatedNorm(s.D)
    rows = s.W - 1 + s.spec
    tails = torch.randn(s.slots, *((width, rows) if dim_first else (rows, width))).bfloat16()
    layer.kv_cache = (tails, torch.randn(s.slots, s.H, s.D, s.D).to(s.pool))
    return layer


def inputs(sizes: Sizes, tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Arguments of ``_forward``: slices of one projection each, as vLLM's layers pass them."""
    H, D = sizes.H, sizes.D
    wide = torch.randn(tokens, 4 * H * D + D + H).to(dtype)
    return {
        "mixed_qkv": wide[:, : 3 * H * D], "g2": wide[:, 3 * H * D : 4 * H * D].unflatten(-1, (H, D)),
        "g1": torch.randn(1, tokens, H, D).to(dtype), "beta": wide[None, :, -H:],
    }  # fmt: skip


def step_of(kind: str, slots: list[int], lengths: list[int], fresh: list[bool] | None = None, **more: Any) -> Metadata:
    """The metadata of a step: ``prefill`` or ``decode`` of requests, or ``spec``, all with drafts."""
    cu, indices = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(slots, dtype=torch.int32)
    tokens = int(cu[-1])
    empty = dict.fromkeys((
        "spec_sequence_masks", "spec_query_start_loc", "spec_state_indices_tensor", "spec_token_indx",
        "non_spec_token_indx", "num_accepted_tokens", "spec_token_start", "non_spec_token_start", "checkpoint",
        "has_initial_state",
    ))  # fmt: skip
    given = {
        "num_prefills": len(slots) if kind == "prefill" else 0, "num_decodes": len(slots) if kind == "decode" else 0,
        "num_spec_decodes": 0, "num_actual_tokens": tokens, "non_spec_query_start_loc": cu,
        "non_spec_state_indices_tensor": indices,
    }  # fmt: skip
    if kind == "prefill":
        given["has_initial_state"] = torch.tensor([not x for x in fresh or [False] * len(slots)])
    return Metadata(**empty | given | more)

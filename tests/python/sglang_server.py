"""SGLang's own attention backend for KDA, from its files, over a small pool: what the tests of ``kda.sglang`` drive.

Stood in for are the convolution, which here changes nothing, and what SGLang needs of a server around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch

import kda.plugs.declined
import kda.plugs.engines
import kda.plugs.imports
import kda.sglang
from bench.engine_files import Names
from engine_files import forget, loaded

VERSION = "0.5.23"
Tensor = torch.Tensor


class Struct:
    """For msgspec's: a class whose annotations are its fields."""

    def __init_subclass__(cls, frozen: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=frozen, eq=False)(cls)


def options(base: str = "kda", decode: Any = None, prefill: Any = None, verify: Any = None) -> Space:
    """The server's choices, ``get_exec()``."""
    chosen = {"decode": decode, "prefill": prefill, "verify": verify}
    names = {f"linear_attn_{phase}_backend": name for phase, name in chosen.items()}
    return Space(mamba=Space(linear_attn_backend=base, enable_mamba_extra_buffer=True, **names))


def track(*, ssm_pool: Tensor, h_track: Tensor, track_mode: Tensor, track_dst: Tensor, cache_indices: Tensor) -> None:
    """Copies states for the prefix cache: after a chunk, or the last one."""
    for row, mode in enumerate(track_mode.tolist()):
        if mode:
            ssm_pool[track_dst[row]] = h_track[row] if mode == 1 else ssm_pool[cache_indices[row].long()]


def commit(pools: Tensor, kept: Tensor, slots: Tensor, steps: Tensor, rows: Tensor) -> None:
    """Of all layers, the states after the last accepted drafts."""
    pools[:, slots.long()] = kept[:, rows.long(), steps.long()]


def stand_ins(chosen: Space, called: list[str]) -> Names:
    def own(name: str) -> Any:
        def kernel(*args: Any, **given: Any) -> str:
            called.append(name)
            return f"SGLang's {name}"

        return kernel

    def unchanged(x: Tensor, *args: Any, **given: Any) -> Tensor:
        return x

    kernels = "sglang.kernels.ops.attention"
    platforms = {f"is_{name}": lambda there=name == "cuda": there for name in ("cpu", "cuda", "hip", "npu", "xpu")}
    return {
        "msgspec": {"Struct": Struct},
        "triton": {"cdiv": lambda a, b: -(-a // b)},
        "sglang.srt.utils": {**platforms, "is_pin_memory_available": lambda *a: False},
        "sglang.srt.utils.common": {"is_gfx95_supported": lambda: False, "rank0_log": lambda text: None},
        "sglang.srt.runtime_context": {
            "get_exec": lambda: chosen,
            "get_spec": lambda: Space(speculative_eagle_topk=None, speculative_algorithm=None),
            "mamba_cache_chunk_size": lambda: 64,
        },
        "sglang.kernels.ops.mamba.causal_conv1d_triton": {
            "causal_conv1d_fn": unchanged, "causal_conv1d_update": unchanged, "PAD_SLOT_ID": -1,
            "CAUSAL_CONV1D_FWD_BLOCK_M": 8,
        },
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton": {
            "track_mamba_states_if_needed": lambda *a, **k: None,
            "fused_mamba_state_scatter_with_mask": commit,
        },
        "sglang.kernels.ops.mamba.kda_prefill_track": {
            "TRACK_CHUNK_STATE": 1, "TRACK_FINAL_STATE": 2, "kda_track_conv_window": lambda **given: None,
            "kda_track_ssm_state": track,
        },
        f"{kernels}.fla.kda": {"chunk_kda": own("chunk_kda")},
        f"{kernels}.fla.fused_recurrent": {"fused_recurrent_kda_packed_decode": own("packed_decode")},
        f"{kernels}.linear.fused_recurrent_linear_replayssm": {
            "fused_recurrent_linear_replayssm_decode": own("replayssm_decode")
        },
        f"{kernels}.linear.fused_sigmoid_gating_recurrent": {"fused_sigmoid_gating_delta_rule_update": own("update")},
    }  # fmt: skip


@contextmanager
def sglang(
    chosen: Space | None = None, called: list[str] | None = None, why_not: str | None = None, **names: dict[str, Any]
) -> Iterator[None]:  # fmt: skip
    """Inside, SGLang's files are importable, and what the adapter knows of SGLang is forgotten before and after.
    ``why_not`` is what the library says of the GPU, as if there were one."""
    with_names = stand_ins(options() if chosen is None else chosen, [] if called is None else called)
    for module, more in names.items():
        with_names.setdefault(module.replace("__", "."), {}).update(more)
    forget("SGLang")
    try:
        with loaded("sglang", VERSION, with_names), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kda.sglang, "_why_not", lambda: why_not)
            yield
    finally:
        forget("SGLang")


def dispatcher(decode: str = "kda", prefill: str = "kda", verify: str = "triton") -> Any:
    """SGLang's dispatcher with our hooks on it, built as its backend does."""
    plug = kda.sglang.plug()
    assert plug.state == "plugged", plug
    from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend

    return KDAKernelDispatcher(*map(LinearAttnKernelBackend, (decode, prefill, verify)))


@dataclasses.dataclass
class Layer:
    """A layer with random parameters, in the shapes in which SGLang's models keep them."""

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 16
    lower_bound: float | None = None
    layer_id: int = 0
    conv_weights: Any = None
    bias: Any = None

    def __post_init__(self) -> None:
        self.num_q_heads = self.num_k_heads = self.H
        self.num_v_heads = self.HV
        self.head_q_dim = self.head_k_dim = self.K
        self.head_v_dim = self.V
        self.q_dim = self.k_dim = self.H * self.K
        self.v_dim = self.HV * self.V
        self.A_log = torch.randn(1, 1, self.HV, 1) / 2
        self.dt_bias = torch.randn(self.HV * self.K)

    def inputs(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
        """``mixed_qkv``, ``a`` and ``b``, slices of one projection each, as SGLang's models pass them."""
        width = self.q_dim + self.k_dim + self.v_dim
        mixed = torch.randn(tokens, width + 8).to(dtype)[:, :width]
        a = torch.randn(1, tokens, self.HV * self.K + 8).to(dtype)[:, :, : self.HV * self.K]
        return mixed, a, torch.randn(1, tokens, 3 * self.HV).to(dtype)[:, :, self.HV : 2 * self.HV]

    def problem(self, mixed: Tensor, a: Tensor, b: Tensor) -> dict[str, Any]:
        """The arguments of the oracle, in float64, for one sequence."""
        q, k, v = mixed.double().split([self.q_dim, self.k_dim, self.v_dim], -1)
        return {
            "q": q.unflatten(-1, (-1, self.K))[None], "k": k.unflatten(-1, (-1, self.K))[None],
            "v": v.unflatten(-1, (-1, self.V))[None], "g": a.double().unflatten(-1, (-1, self.K)), "beta": b.double(),
            "A_log": self.A_log.double().reshape(-1), "dt_bias": self.dt_bias.double(),
            "lower_bound": self.lower_bound, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "state_v_first": True,
        }  # fmt: skip


class Server:
    """SGLang's KDA backend over one layer's pool ``[slots, HV, V, K]`` (of any slot stride)."""

    def __init__(self, layer: Layer, pool: Tensor, rows: int = 4, steps: int = 4, conv: Any = None) -> None:
        from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

        self.layer, self.pool = layer, pool
        width = layer.q_dim + layer.k_dim + layer.v_dim
        self.snapshots = torch.zeros(rows + 1, steps, *pool.shape[1:], dtype=pool.dtype)
        cache = Space(
            conv=[torch.zeros(pool.shape[0], 3, width, dtype=torch.bfloat16)], temporal=pool,
            intermediate_ssm=self.snapshots,
            intermediate_conv_window=[torch.zeros(rows + 1, steps, 3, width)],
            replayssm_d=None, replayssm_k=None, replayssm_g=None, replayssm_rawv=None,
        )  # fmt: skip
        self.backend: Any = object.__new__(KDAAttnBackend)
        self.backend.req_to_token_pool = Space(
            mamba2_layer_cache=lambda layer_id: cache, translate_mamba_indices=lambda x: x, size=rows,
            get_mamba_indices=lambda requests: requests, mamba_pool=None,
        )  # fmt: skip
        vars(self.backend).update(
            device="cpu", topk=0, _mamba_chunk_size=64, conv_states_shape=(width, 3), kernel_dispatcher=dispatcher(),
            _fused_override_notice=None, _fused_chain_verify_fn=None, enable_unified_memory=False,
            verify_intermediate_state_indices=torch.arange(rows, dtype=torch.int32),
        )  # fmt: skip

    def batch(self, slots: list[int], lengths: list[int], mode: str, **more: Any) -> Space:
        """SGLang's ForwardBatch, with the fields that KDA reads. Requests are named by their slots."""
        is_mode = {f"is_{name}": lambda *a, there=name == mode, **k: there for name in ("extend", "target_verify")}
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        prefix = more.pop("prefix", [0] * len(lengths))
        forward_mode = Space(
            is_decode_or_idle=lambda: mode == "decode", is_draft_extend_v2=lambda: False,
            is_extend_without_speculative=lambda: mode == "extend", **is_mode,
        )  # fmt: skip
        forward_mode.is_extend = lambda *a, **k: mode != "decode"
        return Space(**{
            "batch_size": len(slots), "req_pool_indices": torch.tensor(slots, dtype=torch.int32),
            "forward_mode": forward_mode, "logical_forward_mode": forward_mode, "tbo_parent_token_range": None,
            "extend_seq_lens_cpu": lengths, "extend_prefix_lens_cpu": prefix, "mamba_track_indices": None,
            "extend_start_loc": torch.tensor(starts, dtype=torch.int32),
            "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "extend_prefix_lens": torch.tensor(prefix), "mamba_track_mask": None, "seq_lens_cpu": None,
            "mamba_track_seqlens_cpu": None, "mamba_prefill_track_mask_cpu": None, "mamba_track_seqlens": None,
            "input_ids": torch.zeros(sum(lengths)), "spec_info": None, **more,
        })  # fmt: skip

    def extend(self, slots: list[int], lengths: list[int], inputs: Any, track: Any = None, **more: Any) -> Tensor:
        """``track``: by request, (how many tokens of the text, into which slot) or None."""
        prefix = more.get("prefix", [0] * len(lengths))
        if track is not None:
            mask, wanted = [t is not None for t in track], [t or (-1, 0) for t in track]
            ends = [length for length, _ in wanted]
            more |= {
                "mamba_track_mask": torch.tensor(mask), "mamba_prefill_track_mask_cpu": mask,
                "mamba_track_indices": torch.tensor([slot for _, slot in wanted]),
                "mamba_track_seqlens_cpu": ends, "mamba_track_seqlens": torch.tensor(ends),
                "mamba_track_aligned_lens": lambda: (torch.tensor(ends) - torch.tensor(prefix)) // 64 * 64,
            }  # fmt: skip
        batch = self.batch(slots, lengths, "extend", **more)
        self.backend.init_forward_metadata(batch)
        return self.backend.forward_extend(self.layer, batch, *inputs)

    def decode(self, slots: list[int], inputs: Any) -> Tensor:
        batch = self.batch(slots, [1] * len(slots), "decode")
        self.backend.init_forward_metadata(batch)
        return self.backend.forward_decode(self.layer, batch, *inputs)

    def verify(self, slots: list[int], T: int, inputs: Any, parents: Any = None) -> Tensor:
        spec = Space(draft_token_num=T, ragged_verify_layout=None)
        batch = self.batch(slots, [T] * len(slots), "target_verify", spec_info=spec)
        self.backend.init_forward_metadata(batch)
        self.backend.forward_metadata.retrieve_parent_token = parents
        return self.backend.forward_extend(self.layer, batch, *inputs)

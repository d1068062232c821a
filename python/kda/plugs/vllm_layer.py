"""vLLM's layers of Kimi-K3 and Kimi-Linear over its pools in place. ``kda.vllm`` registers the classes.

vLLM's own layer copies states out of the pool before a prefill and back after it, and its kernels are several. Here a
prefill is the convolution and one more call, and a decode step is one call; both read and write the pools, and include
the norm and gate of the output. Steps with drafts, and those that keep a state on the way, are vLLM's own, with our
functions in them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ..arguments import Conv, Norm
from ..convolution import causal_conv1d_update
from ..serving import prefill, workspace_size
from .declined import REFUSALS, tell
from .rows import decode_rows

_FIRST = 1  # slot 0 belongs to nobody


def layer_class(own: type) -> type:
    """A class derived from vLLM's ``own`` that takes what it can.

    Raises:
        AttributeError: vLLM's module has not what this needs of it.
    """
    module = sys.modules[own.__module__]
    context, dim_first = module.get_forward_context, module.is_conv_state_dim_first

    def _forward(self: Any, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any) -> None:
        metadata = context().attn_metadata
        step = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if step is not None and _taken(self, step):
            try:
                _run(self, step, dim_first(), mixed_qkv, g1, g2, beta, core_attn_out)
                return
            except REFUSALS as error:
                tell("vLLM", own.__name__, error)
        own._forward(self, mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)  # type: ignore

    return type(own.__name__, (own,), {"_forward": module.eager_break_during_capture(_forward), "__module__": __name__})


def _taken(layer: Any, step: Any) -> bool:
    """With drafts in the configuration, vLLM's state of the convolution has rows for them, too."""
    kept = getattr(step, "checkpoint", None)  # Kimi-Linear's steps have none
    return layer.num_spec == 0 and not step.num_spec_decodes and kept is None and step.num_actual_tokens > 0


def _run(
    layer: Any, step: Any, dim_first: bool, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any
) -> None:
    tails, pool = layer.kv_cache[:2]
    tails = tails if dim_first else tails.transpose(1, 2)
    T, norm, conv1d = step.num_actual_tokens, layer.o_norm, layer.conv1d
    if step.num_prefills:
        gate = Norm(g2[:T][None], norm.weight, norm.eps, norm.activation)
        conv, out = (conv1d.weight.flatten(1), conv1d.bias, tails), core_attn_out[:, :T]
        _prefill(layer, step, mixed_qkv[:T], conv, g1[:, :T], beta[:, :T], pool, norm=gate, out=out)
        return
    slots = step.non_spec_state_indices_tensor
    decode_rows(
        None,
        None,
        None,
        g1,
        beta,
        pool,
        N=T,
        T=1,
        state_indices=slots,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        lower_bound=layer.gate_lower_bound,
        first_valid_slot=_FIRST,
        out=core_attn_out,
        conv=Conv(mixed_qkv, conv1d.weight, conv1d.bias, tails, slots),
        norm=Norm(g2, norm.weight, norm.eps, norm.activation),
    )


def _prefill(
    layer: Any, step: Any, x: Any, conv: tuple[Any, Any, Any], g: Any, beta: Any, pool: Any, *, norm: Norm, out: Any
) -> None:
    (taps, bias, tails), H = conv, layer.local_num_heads
    y = x.new_empty(1, *x.shape)
    q, k, v = torch.split_with_sizes(y.view(1, x.shape[0], 3 * H, layer.head_dim), (H, H, H), 2)
    common: dict[str, Any] = dict(
        cu_seqlens=step.non_spec_query_start_loc,
        state_indices=step.non_spec_state_indices_tensor,
        has_initial_state=step.has_initial_state,
        first_valid_slot=_FIRST,
    )
    options: dict[str, Any] = dict(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        lower_bound=layer.gate_lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        norm=norm,
        out=out,
        **common,
    )
    # Asked before the convolution has moved its states. A forced implementation may take one length and not another.
    if not getattr(layer, "_kda_takes_prefill", False) or "KDA_IMPL" in os.environ:
        workspace_size(q, k, v, g, beta, pool, **options)
        layer._kda_takes_prefill = True
    causal_conv1d_update(x[None], tails, taps, bias, out=y, **common)
    try:
        prefill(q, k, v, g, beta, pool, **options)
    except REFUSALS as error:  # too late for vLLM's own layer
        raise RuntimeError(f"kda: {error}") from error

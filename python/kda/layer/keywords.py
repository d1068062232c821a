"""What the layer refuses among its keywords, and those that it ignores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..nn import KimiDeltaAttention

# Keywords that models pass to all their layers and that change nothing here: about what is returned beside the
# outputs, and about rotary embeddings and kernels of softmax attention. Any other unknown keyword is refused.
IGNORED_KEYWORDS = frozenset(
    {
        "cache_position", "logits_to_keep", "max_length_k", "max_length_q", "max_seqlen", "num_items_in_batch",
        "output_hidden_states", "output_router_logits", "position_embeddings", "return_dict",
    }
)  # fmt: skip


def check_keywords(unknown: dict[str, Any], is_causal: bool | None) -> None:
    for name in unknown:
        if name not in IGNORED_KEYWORDS:
            raise TypeError(
                f"{name}: expected a keyword of KimiDeltaAttention.forward or one of those it ignores"
                f" ({', '.join(sorted(IGNORED_KEYWORDS))}), got one it does not know"
            )
    if is_causal is not None and not is_causal:
        raise ValueError("is_causal: expected True (a recurrence looks back only), got False")


def check_sizes(layer: KimiDeltaAttention, head_dim: int, expand_v: float) -> None:
    if layer.mode not in ("chunk", "fused_recurrent"):
        raise ValueError(f"mode: expected 'chunk' or 'fused_recurrent', got {layer.mode!r}")
    if layer.disable_recompute and layer.mode != "chunk":
        raise ValueError(f"disable_recompute: expected mode='chunk' with it, got {layer.mode!r}")
    if not math.isclose(head_dim * expand_v, layer.head_v_dim, rel_tol=1e-5):
        raise ValueError(f"expand_v: expected a whole number of value channels, got {head_dim} * {expand_v}")
    if layer.num_v_heads < 1 or layer.num_v_heads % layer.num_heads:
        raise ValueError(f"num_v_heads: expected a multiple of num_heads = {layer.num_heads}, got {layer.num_v_heads}")
    if layer.use_short_conv and layer.conv_size not in (1, 2, 3, 4):
        raise ValueError(f"conv_size: expected 1..4, got {layer.conv_size}")
    if layer.safe_gate and (layer.lower_bound is None or not -5 <= layer.lower_bound < 0):
        raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {layer.lower_bound}")

"""What the layer refuses among its keywords, and those that it ignores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Keywords that models pass to all their layers and that change nothing here: about what is returned beside the
# outputs, and about rotary embeddings and kernels of softmax attention. Any other unknown keyword is refused.
_ABOUT_OUTPUTS = {"logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict"}
_OF_SOFTMAX = {"cache_position", "max_length_k", "max_length_q", "max_seqlen", "position_embeddings"}
IGNORED_KEYWORDS = frozenset(_ABOUT_OUTPUTS | _OF_SOFTMAX)


def check_keywords(unknown: dict[str, Any], is_causal: bool | None) -> None:
    for name in unknown:
        if name not in IGNORED_KEYWORDS:
            raise TypeError(
                f"{name}: expected a keyword of KimiDeltaAttention.forward or one of those it ignores"
                f" ({', '.join(sorted(IGNORED_KEYWORDS))}), got one it does not know"
            )
    if is_causal is not None and not is_causal:
        raise ValueError("is_causal: expected True (a recurrence looks back only), got False")


def check_window(given: Any, hidden_states: Tensor, held: Any, use_cache: bool | None, mode: str) -> Any:
    """``given`` as a :class:`kda.cp.Context` that fits the other arguments."""
    from ..cp._fla import as_context

    cp_context = as_context(given)
    if held is not None or use_cache:
        raise ValueError(
            "past_key_values: expected None and use_cache=False with cp_context (states belong to no single rank)"
        )
    if mode != "chunk":
        raise ValueError(f"mode: expected 'chunk' with cp_context, got {mode!r}")
    if hidden_states.shape[:2] != (1, cp_context.tokens):
        raise ValueError(
            f"hidden_states: expected shape [1, {cp_context.tokens}, {hidden_states.shape[2]}], this rank's window of"
            f" the tokens, got {list(hidden_states.shape)}"
        )
    return cp_context

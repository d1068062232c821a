"""Small KDA models of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 300, "num_attention_heads": 2, "num_key_value_heads": 2,
    "linear_num_heads": 2, "linear_head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ONLY_LINEAR = {"layer_types": ["linear_attention"] * 3, "mlp_layer_types": ["dense"] * 3}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def made(Model: Any, Config: Any, **more: Any) -> Any:
    """``more``: sizes of the configuration that differ from SIZES, or come on top."""
    torch.manual_seed(0)
    config = Config(**{**SIZES, **more})
    for name in ("linear_num_heads", "linear_head_dim"):  # some configurations have other names for these
        setattr(config, name, SIZES[name])
    model = Model(config).eval()
    with torch.no_grad():  # its initial values make outputs that hardly depend on the tokens
        for name, x in model.named_parameters():
            if name.endswith("weight") and "norm" not in name:
                x.mul_(5)
    return model

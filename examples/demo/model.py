"""A byte-level language model: pre-norm blocks of Kimi Delta Attention and a SwiGLU MLP."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from kda.nn import DraftCache, KDACache, KimiDeltaAttention

Caches = dict[int, KDACache] | dict[int, DraftCache]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int, hidden: int, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = KimiDeltaAttention(width, num_heads=heads, head_dim=head_dim, layer_idx=index)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, caches: Caches | None) -> Tensor:
        mixed, _, _ = self.attention(self.attention_norm(x), past_key_values=caches)
        x = x + mixed
        value, gate = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(value * F.silu(gate))


class LanguageModel(nn.Module):
    def __init__(
        self, width: int = 128, layers: int = 4, heads: int = 2, head_dim: int = 64, hidden: int = 384
    ) -> None:
        super().__init__()
        self.config = {"width": width, "layers": layers, "heads": heads, "head_dim": head_dim, "hidden": hidden}
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim, hidden, i) for i in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, caches: Caches | None = None) -> Tensor:
        """From bytes ``[B, T]`` to the logits ``[B, T, 256]`` of the bytes that follow; caches are updated in place."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, caches)
        return self.head(self.norm(x))

    def new_caches(self, batch_size: int) -> dict[int, KDACache]:
        return {i: block.attention.new_cache(batch_size) for i, block in enumerate(self.blocks)}

    def draft_caches(self, caches: dict[int, KDACache], max_tokens: int, fused: bool) -> dict[int, DraftCache]:
        """Caches for speculative decoding on top of ``caches``."""
        return {i: DraftCache(b.attention, caches[i], max_tokens, fused=fused) for i, b in enumerate(self.blocks)}

"""One layer learns to recall: it reads pairs of a key and its value, then all keys again in another order.

python examples/train_tiny.py
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

from kda.nn import KimiDeltaAttention

KEYS = VALUES = 32  # the number of each; tokens 0..31 are keys, 32..63 values
PAIRS = 12  # per sequence, of distinct keys


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``k v k v ... | k k ...`` and, for each key of the second part, the value that followed it in the
    first."""
    keys = torch.rand(size, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, KEYS + VALUES, (size, PAIRS))
    order = torch.rand(size, PAIRS).argsort(1)
    pairs = torch.stack([keys, values], 2).flatten(1)
    return torch.cat([pairs, keys.gather(1, order)], 1), values.gather(1, order)


class Recall(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, width)
        self.attention = KimiDeltaAttention(hidden_size=width, num_heads=2, head_dim=32)
        self.head = nn.Linear(width, KEYS + VALUES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed, _, _ = self.attention(self.embedding(tokens))
        return self.head(mixed[:, -PAIRS:])


def main() -> None:
    torch.manual_seed(0)
    model, start = Recall(), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(251):
        tokens, answers = batch(64)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            recalled = float((logits.argmax(-1) == answers).float().mean())
            seconds = time.perf_counter() - start
            print(f"step {step:3}   loss {loss.item():.3f}   recalled {recalled:4.0%}   {seconds:4.1f} s")
    assert loss < 0.2, "the loss should have fallen from log(64) = 4.2 to nearly nothing"
    assert recalled > 0.95, "and nearly every value should be recalled"


if __name__ == "__main__":
    main()

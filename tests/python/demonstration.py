"""A model of examples/demo that knows a sentence by heart: its choices lead so far that rounding cannot reverse
them."""

from __future__ import annotations

import torch
from examples.demo.model import LanguageModel
from torch import Tensor
from torch.nn import functional as F

CONFIG = {"width": 64, "layers": 2, "heads": 1, "head_dim": 64, "hidden": 64}
SENTENCE = b"The quick brown fox jumps over the lazy dog, again and again. "


def sentences(length: int) -> Tensor:
    """``[1, length]`` bytes that repeat the sentence."""
    return torch.tensor([list(SENTENCE) * (length // len(SENTENCE) + 1)])[:, :length]


def trained_model(steps: int = 40) -> LanguageModel:
    """A model trained on the CPU in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LanguageModel(**CONFIG)
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=5e-3), sentences(200)
    for _ in range(steps):
        loss = F.cross_entropy(model(text[:, :-1])[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()

"""A model of examples/demo that knows a sentence by heart: with leads that no rounding turns round."""

from __future__ import annotations

import torch
from examples.demo.model import LanguageModel
from torch import Tensor
from torch.nn import functional as F

CONFIG = {"width": 64, "layers": 2, "heads": 1, "head_dim": 64, "hidden": 64}
SENTENCE = b"The quick brown fox jumps over the lazy dog, again and again. "


def sentences(length: int) -> Tensor:
    """``[1, length]`` bytes of the sentence over and over."""
    return torch.tensor([list(SENTENCE) * (length // len(SENTENCE) + 1)])[:, :length]


def trained_model(steps: int = 40) -> LanguageModel:
    """On the CPU in float32."""
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

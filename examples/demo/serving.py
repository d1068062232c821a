"""Using the trained model: where it can run, saving and loading, prefill and greedy decode, and whether they agree."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda.nn import KDACache, KimiDeltaAttention

from .model import LanguageModel


def choose_device() -> tuple[str, torch.dtype, str]:
    """Device, dtype of the activations, and why: the GPU if a layer trains, prefills and decodes there."""
    if not torch.cuda.is_available():
        return "cpu", torch.float32, "there is no CUDA device"
    why = ""
    for dtype in (torch.bfloat16, torch.float32):
        try:
            layer = KimiDeltaAttention(128, num_heads=2, head_dim=64).cuda()
            x = torch.randn(1, 100, 128, device="cuda")
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                layer(x)[0].float().sum().backward()
                with torch.no_grad():
                    cache = layer.new_cache(1)
                    layer(x, cache=cache)
                    layer(x[:, :1], cache=cache)
            torch.cuda.synchronize()
            return "cuda", dtype, torch.cuda.get_device_name()
        except RuntimeError as error:  # NotImplementedError, the library's refusal, is one
            why = str(error).strip().splitlines()[0][:200]
    return "cpu", torch.float32, f"the GPU is not used: {why}"


def state_bytes(caches: dict[int, KDACache]) -> int:
    return sum(cache.memory_bytes() for cache in caches.values())


@torch.no_grad()
def write(model: LanguageModel, prompt: Tensor, length: int) -> tuple[Tensor, dict[str, Any]]:
    """Prefill of ``prompt`` ``[1, T]``, then ``length`` greedy bytes; the new bytes and measurements."""
    caches = model.new_caches(1)
    start = time.perf_counter()
    following = model(prompt, caches)[:, -1:].argmax(-1)
    following.item()  # waits for a GPU
    prefilled = time.perf_counter()
    before, new = state_bytes(caches), []
    for _ in range(length):
        new.append(following)
        following = model(following, caches)[:, -1:].argmax(-1)
    following.item()
    decoded = time.perf_counter()
    return torch.cat(new, 1), {
        "prefill_bytes_per_second": prompt.shape[1] / (prefilled - start),
        "decode_bytes_per_second": length / (decoded - prefilled),
        "state_bytes_after_prefill": before,
        "state_bytes_after_decode": state_bytes(caches),
    }


@torch.no_grad()
def agreement(model: LanguageModel, tokens: Tensor) -> dict[str, float]:
    """Logits of all ``tokens`` read at once, in pieces of odd sizes, and one at a time."""
    T = tokens.shape[1]
    sizes = [size for size in (1, 63, 100, 513, 2) if size < T // 8]
    sizes.append(T - sum(sizes))
    at_once = model(tokens)
    ways = {}
    for name, pieces in (("pieces", sizes), ("one_by_one", [1] * T)):
        caches = model.new_caches(1)
        ways[name] = torch.cat([model(piece, caches) for piece in tokens.split(pieces, 1)], 1)
    result = {}
    for name, a, b in (
        ("at_once_and_in_pieces", at_once, ways["pieces"]),
        ("in_pieces_and_one_by_one", ways["pieces"], ways["one_by_one"]),
    ):
        difference = (a.double() - b.double()).abs()
        result[f"{name}_max"] = difference.max().item()
        result[f"{name}_relative"] = (difference.square().mean().sqrt() / a.double().square().mean().sqrt()).item()
    return result


def save_and_load(model: LanguageModel, path: Path, tokens: Tensor, device: str) -> tuple[LanguageModel, bool]:
    """The model as read back from ``path``, and whether its logits are the same bits."""
    torch.save({"config": model.config, "state": model.state_dict()}, path)
    stored = torch.load(path, map_location=device, weights_only=True)
    loaded = LanguageModel(**stored["config"]).to(device).eval()
    loaded.load_state_dict(stored["state"])
    with torch.no_grad():
        return loaded, torch.equal(model(tokens), loaded(tokens))

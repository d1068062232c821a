"""Uses the trained model: saving and loading, prefill, greedy and speculative decode, agreement, and the checks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda.nn import KDACache

from .model import LanguageModel

DRAFTS = 8  # tokens in a round of speculative decoding, including the one that is certain

# By the dtype of the activations: how much logits read in several ways may differ (RMS, relative), and the lead in
# logits below which two bytes are tied. Rounding every activation to bfloat16 moves the logits of the trained model
# by 0.002, single ones by up to 0.07, so two ways of rounding may reverse a lead of twice 0.07. Convolutions that
# forget their last inputs, one state lost between pieces, or 1 % of all states lost at every token, make the
# difference 0.012 and more.
TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.01, 0.2)}


def clock(tokens: Tensor) -> float:
    """Seconds on the clock, after the device of ``tokens`` has finished its work."""
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter()


def state_bytes(caches: dict[int, KDACache]) -> int:
    return sum(cache.memory_bytes() for cache in caches.values())


@torch.no_grad()
def write(model: LanguageModel, prompt: Tensor, length: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Prefill of ``prompt`` ``[1, T]``, then ``length`` greedy bytes. Returns the bytes, the lead of each following
    byte over the second best, in logits, and measurements."""
    if prompt.is_cuda:
        model(prompt, model.new_caches(1))  # not measured: the first call loads kernels
    caches = model.new_caches(1)
    start = clock(prompt)
    following = model(prompt, caches)[:, -1:].argmax(-1)
    prefilled = clock(prompt)
    before, new, margins = state_bytes(caches), [following], []
    for _ in range(length):
        logits = model(new[-1], caches)[:, -1:]
        new.append(logits.argmax(-1))
        margins.append(logits.topk(2).values)
    new.pop()
    decoded = clock(prompt)
    best, second = torch.cat(margins, 1).unbind(-1)
    return (
        torch.cat(new, 1),
        (best - second)[0],
        {
            "prefill_bytes_per_second": prompt.shape[1] / (prefilled - start),
            "decode_bytes_per_second": length / (decoded - prefilled),
            "state_bytes_after_prefill": before,
            "state_bytes_after_decode": state_bytes(caches),
        },
    )


def guess(text: bytes, length: int, longest: int = 8, shortest: int = 3) -> bytes:
    """What followed the last time that the current end of ``text`` occurred: at most ``length`` bytes."""
    for n in range(longest, shortest - 1, -1):
        start = text.rfind(text[-n:], 0, len(text) - 1)
        if start >= 0:
            return text[start + n : start + n + length]
    return b""


@torch.no_grad()
def speculate(
    model: LanguageModel, prompt: Tensor, length: int, max_tokens: int, fused: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Writes the greedy bytes of :func:`write` by guessing several and keeping those that the model would have
    written."""
    caches = model.new_caches(1)
    following = int(model(prompt, caches)[:, -1].argmax(-1))
    drafts = model.draft_caches(caches, max_tokens, fused)
    text, end, rounds = bytearray(prompt[0].tolist()), prompt.shape[1] + length, 0
    start = clock(prompt)
    while len(text) < end:
        tokens = [following, *guess(bytes(text) + bytes([following]), max_tokens - 1)]
        best = model(torch.tensor([tokens], device=prompt.device), drafts).argmax(-1)[0].tolist()
        right = 1  # the first is not a guess
        while right < len(tokens) and tokens[right] == best[right - 1]:
            right += 1
        accept_len = torch.tensor([right], dtype=torch.int32, device=prompt.device)
        for cache in drafts.values():
            cache.accept(accept_len)
        text += bytes(tokens[:right])
        following, rounds = best[right - 1], rounds + 1
    for cache in drafts.values():
        cache.flush()
    seconds = clock(prompt) - start
    written = torch.tensor([list(text[prompt.shape[1] : end])], device=prompt.device)
    return written, {
        "bytes_per_second": (len(text) - prompt.shape[1]) / seconds,
        "accepted_per_round": (len(text) - prompt.shape[1]) / rounds,
        "record_bytes": sum(cache.memory_bytes() for cache in drafts.values()),
        "snapshot_bytes": max_tokens * sum(c.state.numel() * c.state.element_size() for c in caches.values()),
    }


def same_or_tied(new: Tensor, other: Tensor, margins: Tensor, tolerance: float) -> bool:
    """Whether two texts are equal up to the first byte where the model's two best choices are tied."""
    differs = (new != other)[0].nonzero()
    return not len(differs) or (bool(differs[0]) and margins[differs[0] - 1].item() < tolerance)


@torch.no_grad()
def agreement(model: LanguageModel, tokens: Tensor) -> dict[str, float]:
    """Compares the logits of ``tokens`` read at once, in pieces of odd sizes, and one at a time."""
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


@dataclass
class Served:
    new: Tensor  # [1, T], written greedily
    measured: dict[str, Any]
    drafting: dict[str, dict[str, Any]]  # key: whether flush and verify are two calls or fused
    differences: dict[str, float]
    checks: dict[str, bool]


def serve(model: LanguageModel, prompt: Tensor, length: int, dtype: torch.dtype) -> Served:
    """Reads ``prompt`` ``[1, T]``, writes ``length`` bytes, and compares the ways to do both; ``dtype`` is that of
    the activations."""
    most, tie = TOLERANCES[dtype]
    new, margins, measured = write(model, prompt, length)
    differences = agreement(model, torch.cat([prompt, new], 1))
    checks = {
        "the state does not grow": measured["state_bytes_after_prefill"] == measured["state_bytes_after_decode"],
        "prefill and decode agree": all(x < most for name, x in differences.items() if name.endswith("relative")),
    }
    drafting = {}
    for name in ("two calls", "fused"):
        text, drafting[name] = speculate(model, prompt, length, DRAFTS, fused=name == "fused")
        checks[f"drafting ({name}) writes the same"] = same_or_tied(new, text, margins, tie)
    return Served(new, measured, drafting, differences, checks)


def save_and_load(model: LanguageModel, path: Path, tokens: Tensor) -> tuple[LanguageModel, bool]:
    """The model as loaded again from ``path``, and whether its logits have the same bits."""
    torch.save({"config": model.config, "state": model.state_dict()}, path)
    stored = torch.load(path, map_location="cpu", weights_only=True)
    loaded = LanguageModel(**stored["config"]).eval()
    loaded.load_state_dict(stored["state"])
    loaded.to(tokens.device)
    with torch.no_grad():
        return loaded, torch.equal(model(tokens), loaded(tokens))

"""Chooses where the demonstration trains and where it serves: each on the GPU if it runs there, otherwise on the
CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .model import LanguageModel
from .serving import serve

Config = dict[str, int]  # of the model


@dataclass(frozen=True)
class Place:
    device: str
    dtype: torch.dtype  # of the activations; weights and states are float32
    why: str

    def autocast(self) -> AbstractContextManager[Any]:
        device_type = torch.device(self.device).type
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def facts(self) -> dict[str, str]:
        return {"device": self.device, "dtype": name_of(self.dtype), "why": self.why}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def train_once(config: Config, place: Place) -> None:
    model = LanguageModel(**config).to(place.device)
    with place.autocast():
        logits = model(torch.zeros(2, 100, dtype=torch.int64, device=place.device))
    logits.float().logsumexp(-1).sum().backward()


def serve_once(config: Config, place: Place) -> None:
    model = LanguageModel(**config).to(place.device).eval()
    with place.autocast():
        serve(model, torch.zeros(1, 100, dtype=torch.int64, device=place.device), 2, place.dtype)


PROBES: dict[str, Callable[[Config, Place], None]] = {"train": train_once, "serve": serve_once}


def choose(what: str, config: Config, forced: str | None = None) -> Place:
    """Returns where to do ``what`` of PROBES with the model of ``config``; "cpu" or "cuda" can be ``forced``."""
    if forced == "cpu":
        return Place("cpu", torch.float32, "as asked for")
    why = "there is no CUDA device"
    if torch.cuda.is_available():
        gpu, refused = torch.cuda.get_device_name(), ""
        for dtype in (torch.bfloat16, torch.float32):
            place = Place("cuda", dtype, gpu + refused)
            try:
                PROBES[what](config, place)
                torch.cuda.synchronize()  # asynchronous failures appear here
                return place
            except RuntimeError as error:  # includes NotImplementedError, the library's refusal
                sentence = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                refused = f" does not {what} in {name_of(dtype)}: {sentence}"
        why = gpu + refused
    if forced:
        raise SystemExit(f"--{what}-on {forced}: {why}")
    return Place("cpu", torch.float32, why)

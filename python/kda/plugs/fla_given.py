"""What :mod:`kda.plugs.fla_takes` and :mod:`kda.plugs.fla_modules` ask of every call of FLA's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..call.tracing import transform_refusal, transforms_active
from .declined import gpu_why_not

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST = 256  # the largest K and V


Given = dict[str, Any]


class Take(NamedTuple):
    why_not: Callable[[Given], str | None]
    run: Callable[[Given], Any]


def by_keyword(why_not: Callable[..., str | None], run: Callable[..., Any]) -> Take:
    return Take(lambda given: why_not(**given), lambda given: run(**given))


def place_why_not(x: Tensor) -> str | None:
    if x.dtype not in DTYPES:
        return f"kda takes bfloat16, float16 and float32, not {x.dtype}"
    if transforms_active():
        return str(transform_refusal())
    if x.is_cuda:
        return gpu_why_not(x.get_device())
    return None if x.is_cpu else f"kda runs on CPUs and CUDA devices, not on {x.device.type}"

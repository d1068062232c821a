"""Parameters one behind the other in one tensor, with gradients that have memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.derivatives import apply, refuse_forward_mode
from .products import copies


class Concatenation(torch.autograd.Function):
    """``torch.cat``, whose gradients would be views of one tensor."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [x.shape[0] for x in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(copies(dy, ctx.rows))


def concatenated(parameters: Sequence[Tensor]) -> Tensor:
    return apply(Concatenation, *parameters)  # type: ignore[no-any-return]

"""The convolution, and the norm with a gate, in the place of those in ``fla.modules``; see :mod:`kda.plugs.fla_takes`.

FLA's states of a convolution hold the last ``W`` inputs, of which only ``W - 1`` are read again; ours hold those. FLA
calls the functions here, except for ``causal_conv1d_update``, inside its own ``torch.autograd.Function``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import ACTIVATIONS
from ..autograd import run_conv, run_conv_backward, run_norm_gate, run_norm_gate_backward
from ..call.inputs import dense_last
from ..call.library import library
from .fla_given import DTYPES, Given, by_keyword, place_why_not

Tensor = torch.Tensor


# ---- the convolution ----


def _conv_why_not(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    **_: Any,
) -> str | None:
    if weight is None or not 2 <= weight.shape[1] <= 4:
        return "kda convolves with 2 to 4 weights per channel"
    if residual is not None:
        return "kda adds no residual to a convolution"
    if activation not in (None, "silu", "swish"):
        return f"kda has SiLU alone behind a convolution, not {activation}"
    if any(t is not None and t.dtype not in DTYPES for t in (weight, bias, initial_state)):
        return "kda takes weights and states in bfloat16, float16 and float32"
    return place_why_not(x)


def _conv_backward_why_not(x: Tensor, dy: Tensor, dht: Tensor | None = None, **given: Any) -> str | None:
    if dht is not None:
        return "kda has no gradient of the oldest column of FLA's final state"
    return "kda takes dy in the dtype of x" if dy.dtype != x.dtype else _conv_why_not(x, **given)


def _three(x: Tensor, D: int) -> Tensor:
    """``[B, T, D]``, also of ``[B, T, heads, D // heads]``."""
    return x if x.ndim == 3 and x.shape[-1] == D else x.reshape(*x.shape[:2], D)


def _read_again(state: Tensor | None) -> Tensor | None:
    return None if state is None else state[..., 1:]


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    D, W = weight.shape
    flat = dense_last(_three(x, D))
    silu = activation is not None
    y, _last = run_conv(flat, dense_last(weight), bias, _read_again(initial_state), cu_seqlens, silu)
    last = _last_inputs(flat, W, initial_state, cu_seqlens) if output_final_state else None
    return y.view(x.shape), last


def _last_inputs(x: Tensor, W: int, state: Tensor | None, cu: Tensor | None) -> Tensor:
    """The last W inputs of each sequence, those of its initial state included: ``[N, D, W]`` in the dtype of x."""
    B, T, D = x.shape
    if cu is None:
        if T >= W:
            return x[:, T - W :].transpose(1, 2).contiguous()
        old = x.new_zeros(B, D, W) if state is None else state.to(x.dtype)
        return torch.cat([old, x.transpose(1, 2)], 2)[..., T:].contiguous()
    begin, end = cu[:-1, None], cu[1:, None]
    at = end + torch.arange(-W, 0, dtype=torch.int64, device=x.device)  # [N, W]
    kept = x[0, at.clamp(0, max(T - 1, 0))] if T else x.new_zeros(*at.shape, D)
    inside = (at >= begin)[..., None]
    if state is None:
        return torch.where(inside, kept, 0).transpose(1, 2).contiguous()
    column = (at - begin + W).clamp(0, W - 1)  # of the state, for tokens before the first
    old = state.to(x.dtype).gather(2, column[:, None].expand(-1, D, -1))
    return torch.where(inside.transpose(1, 2), kept.transpose(1, 2), old).contiguous()


def _conv_backward(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    D = weight.shape[0]
    dx, dw, db, d_state = run_conv_backward(
        dense_last(_three(x, D)),
        dense_last(weight),
        bias,
        _read_again(initial_state),
        cu_seqlens,
        activation is not None,
        _three(dy, D),
        None,
        wanted=(True, True, bias is not None, initial_state is not None),
    )
    if d_state is not None:
        d_state = torch.nn.functional.pad(d_state, (1, 0))
    return None if dx is None else dx.view(x.shape), dw, db, None, d_state


def _update_why_not(x: Tensor, cache: Tensor | None = None, **given: Any) -> str | None:
    if cache is None or not cache.is_contiguous():
        return "kda takes a contiguous cache"
    if x.ndim not in (2, 3) or (x.ndim == 3 and 1 not in x.shape[:2]):
        return "kda takes one token for each sequence"
    return _conv_why_not(x, initial_state=cache, **given)


def _update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    assert weight is not None
    D = weight.shape[0]
    with torch.no_grad():  # FLA's function has no gradients, whatever requires them
        tokens = dense_last(x.reshape(-1, 1, D))
        y = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        cache[..., 0] = cache[..., 1]  # the column that nobody reads, but FLA keeps
        state = cache[..., 1:]
        library().conv(
            x=tokens,
            weight=dense_last(weight),
            bias=bias,
            initial_state=state,
            final_state=state,
            y=y,
            silu=activation is not None,
        )
        torch.autograd.graph.increment_version(cache)
    return y.view(x.shape), cache


# ---- the norm with a gate ----


def _norm_why_not(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    **_: Any,
) -> str | None:
    if not is_rms_norm or bias is not None:
        return "kda has the RMS norm without a bias alone"
    if residual is not None or (residual_dtype is not None and residual_dtype != x.dtype):
        return "kda adds no residual before a norm"
    if out_dtype is not None and out_dtype != x.dtype:
        return "kda writes the norm in the dtype of x"
    if activation not in ACTIVATIONS:
        return f"kda has the gates sigmoid and SiLU, not {activation}"
    if x.shape[-1] > 8192:
        return "kda has norms of at most 8192 channels"
    if g.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        return "kda takes gates and weights in bfloat16, float16 and float32"
    return place_why_not(x)


def _four(x: Tensor) -> Tensor:
    return x.reshape(1, 1, *x.shape)


def _norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swish",
    eps: float = 1e-5,
    **_: Any,
) -> tuple[Tensor, None, Tensor, Tensor]:
    y = run_norm_gate(dense_last(_four(x)), dense_last(_four(g)), weight, eps, ACTIVATIONS[activation], None)
    # FLA keeps 1 / sqrt(..) of each row for its backward. Ours computes it again, and an empty tensor in that place
    # tells our backward that it must run, even where FLA_KDA_LIB has been changed in between.
    return y.view(x.shape), None, x.new_empty(0, dtype=torch.float32), x


def from_our_norm(given: Given) -> bool:
    """Are these the arguments of a backward whose forward was ours?"""
    rstd = given.get("rstd")
    return rstd is not None and rstd.numel() == 0


def _norm_backward_why_not(**given: Any) -> str | None:
    return None if from_our_norm(given) else "its forward was FLA's"


def _norm_backward(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swish",
    eps: float = 1e-5,
    dresidual: Tensor | None = None,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    form, rows, gate = ACTIVATIONS[activation], dense_last(_four(x)), dense_last(_four(g))
    dx, dg, dw = run_norm_gate_backward(
        rows, gate, weight, _four(dy.to(x.dtype)), eps, form, (True, True, weight is not None)
    )
    assert dx is not None and dg is not None
    dx, dg = dx.view(x.shape), dg.view(g.shape)
    if dresidual is not None:  # x went out beside y
        dx = (dx.float() + dresidual.float()).to(dx.dtype)
    if x_dtype is not None:
        dx, dg = dx.to(x_dtype), dg.to(x_dtype)
    if not recompute_output:
        return dx, dg, dw, None, None
    y = run_norm_gate(rows, gate, weight, eps, form, None)
    return dx, dg, dw, None, None, y.view(x.shape).to(dy.dtype)


MODULES = {
    "causal_conv1d_fwd": by_keyword(_conv_why_not, _conv),
    "causal_conv1d_bwd": by_keyword(_conv_backward_why_not, _conv_backward),
    "causal_conv1d_update": by_keyword(_update_why_not, _update),
    "layer_norm_gated_fwd": by_keyword(_norm_why_not, _norm),
    "layer_norm_gated_bwd": by_keyword(_norm_backward_why_not, _norm_backward),
}

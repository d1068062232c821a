"""The layer of kda.nn as formulas, in float64, for its tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kda.nn import KDACache, KimiDeltaAttention


def make(seed: int = 0, **config) -> KimiDeltaAttention:
    torch.manual_seed(seed)
    layer = KimiDeltaAttention(**{"hidden_size": 48, "num_heads": 2, "head_dim": 16, **config})
    with torch.no_grad():  # unlike initial values: norms of 1 hide a missing weight, long memory hides the decay
        layer.o_norm.weight.uniform_(0.5, 1.5)
        layer.A_log.add_(0.3 * torch.randn_like(layer.A_log))
        layer.dt_bias.add_(torch.randn_like(layer.dt_bias))
    return layer


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(expected: Tensor, got: Tensor) -> float:
    """RMS of the difference over the RMS of what was expected."""
    assert expected.shape == got.shape
    assert got.isfinite().all()
    expected, got = expected.detach().double(), got.detach().double()
    return float((expected - got).square().mean().sqrt() / (expected.square().mean().sqrt() + 1e-30))


def in_pieces(layer: KimiDeltaAttention, x: Tensor, sizes: list[int], cache: KDACache, **kwargs) -> Tensor:
    assert sum(sizes) == x.shape[1]
    with torch.no_grad():
        return torch.cat([layer(piece, cache=cache, **kwargs)[0] for piece in x.split(sizes, 1)], 1)


# ---- the model of the layer: one sequence, float64, only formulas ----


def model(p: dict[str, Tensor], x: Tensor, layer: KimiDeltaAttention) -> Tensor:
    """``x`` is ``[T, hidden_size]``; ``p`` has the parameters by name."""
    T, H, HV, K, V = x.shape[0], layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def branch(name: str) -> Tensor:
        y = x @ p[f"{name}_proj.weight"].T
        if f"{name}_conv1d.weight" in p:
            w = p[f"{name}_conv1d.weight"]
            W = w.shape[2]
            rows = []
            for t in range(T):
                taps = [w[:, 0, W - 1 - s] * y[t - s] for s in range(W) if t >= s]
                rows.append(sum(taps) + p.get(f"{name}_conv1d.bias", 0))
            y = torch.stack(rows)
        return y * torch.sigmoid(y)

    def projection(name: str) -> Tensor:
        if f"{name}.weight" in p:
            return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)
        return x @ p[f"{name}.0.weight"].T @ p[f"{name}.1.weight"].T + p.get(f"{name}.1.bias", 0)

    q, k, v = branch("q").view(T, H, K), branch("k").view(T, H, K), branch("v").view(T, HV, V)
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    z = (projection("f_proj") + p["dt_bias"]).view(T, HV, K)
    a = torch.exp(p["A_log"])[:, None]
    log_decay = -a * F.softplus(z) if layer.lower_bound is None else layer.lower_bound * torch.sigmoid(a * z)
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if layer.allow_neg_eigval else 1)

    heads = []
    for h in range(HV):
        group, S, outputs = h * H // HV, x.new_zeros(K, V), []
        for t in range(T):
            S = torch.exp(log_decay[t, h])[:, None] * S
            S = S + torch.outer(k[t, group], beta[t, h] * (v[t, h] - k[t, group] @ S))
            outputs.append(q[t, group] @ S / math.sqrt(K))
        heads.append(torch.stack(outputs))
    o = torch.stack(heads, 1)
    o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + layer.o_norm.eps) * p["o_norm.weight"]
    return (o * torch.sigmoid(projection("g_proj")).view(T, HV, V)).reshape(T, HV * V) @ p["o_proj.weight"].T


def float64_parameters(layer: KimiDeltaAttention) -> dict[str, Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}


def documents(p: dict[str, Tensor], x: Tensor, layer: KimiDeltaAttention, lengths: list[int]) -> Tensor:
    """:func:`model` of each document of a packed row ``[1, T, hidden_size]``; tokens after the last one give zeros."""
    pieces = x[0].split([*lengths, x.shape[1] - sum(lengths)])
    return torch.cat([*(model(p, piece, layer) for piece in pieces[:-1] if len(piece)), 0 * pieces[-1]])[None]

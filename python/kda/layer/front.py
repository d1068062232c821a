"""The projections of hidden_states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .bypass import are_own
from .parts import Rows, heads_of, joint_maps, sizes_of
from .plans import ranks_of_plan
from .projections import joint_linear

if TYPE_CHECKING:
    from ..nn import KimiDeltaAttention


def project(layer: KimiDeltaAttention, x: Tensor) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Returns the rows of q, k and v; the decay's input, ``[B, T, HV, K]``; the logits of beta, ``[B, T, HV]``; the
    gate's input, ``[B, T, HV, V]``."""
    K, V = layer.head_k_dim, layer.head_v_dim
    maps = joint_maps(layer, x)
    if maps is None:
        rows = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
        _check_ranks(layer, rows[0])
        return rows, heads_of(layer.f_proj(x), K), layer.b_proj(x), heads_of(layer.g_proj(x), V)
    weights: list[Any] = [m._parameters["weight"] for m in maps]
    y = joint_linear(x, weights)
    sizes = [sum(sizes_of(layer)), *(w.shape[0] for w in weights[3:])]
    raw, *parts, _ = y.split_with_sizes([*sizes, y.shape[-1] - sum(sizes)], -1)

    def finished(module: Any, first: Tensor) -> Tensor:
        if type(module) is nn.Linear:
            return first
        second: Any = module._modules["1"]
        if not are_own("map", second):  # hooks see what the map would get in an nn.Sequential
            y: Tensor = second(first)
            return y
        y = second(first.flatten(0, 1))  # only rows, [M, n], get their bias inside the product
        return y.view(*x.shape[:2], y.shape[1])

    f_proj, g_proj = layer._modules["f_proj"], layer._modules["g_proj"]
    gate = finished(g_proj, parts[1]) if len(parts) == 3 else layer.g_proj(x)
    return raw, heads_of(finished(f_proj, parts[0]), K), parts[-1], heads_of(gate, V)


def _check_ranks(layer: KimiDeltaAttention, q: Tensor) -> None:
    ranks = ranks_of_plan(layer)
    if q.shape[-1] * ranks != layer.key_dim:
        wanted = "expected all heads of this layer, or a plan of kda.tp.HeadParallel or ColwiseParallel"
        raise ValueError(f"q_proj: {wanted}, got {q.shape[-1]} of {layer.key_dim} channels on each of {ranks} ranks")

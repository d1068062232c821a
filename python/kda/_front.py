"""What the layer does before its recurrence: the projections of hidden_states, and the convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._caches import KDACache
from ._dispatch import dispatched
from ._modules import ShortConvolution, causal_conv_silu, local
from ._plans import mesh_of_plan, ranks_of_plan
from ._projections import has_hooks, is_plain, joint_linear, pack, whole_of

if TYPE_CHECKING:
    from .nn import KimiDeltaAttention

# The rows of q, k and v before the convolution: ``[B, T, D]``, or three tensors.
Rows = Tensor | tuple[Tensor, Tensor, Tensor]


def pack_weights(layer: KimiDeltaAttention) -> None:
    if (maps := _joint_maps(layer)) is not None:
        pack([m.weight for m in maps])
    if convs := convolutions(layer):
        pack([c.weight for c in convs])
        if convs[0].bias is not None:
            pack([c.bias for c in convs])


def _joint_maps(layer: KimiDeltaAttention) -> list[nn.Linear] | None:
    """The maps of hidden_states in the order q, k, v, decay, gate, beta; None if they cannot run as one. A gate of
    full rank with a bias runs by itself and is left out."""
    parts: dict[str, Any] = layer._modules  # attributes of a module take ten times as long
    maps: list[Any] = [parts["q_proj"], parts["k_proj"], parts["v_proj"]]
    for module in (parts["f_proj"], parts["g_proj"]):
        halves = type(module) is nn.Sequential
        if halves and has_hooks(module):
            return None
        first: Any = module._modules["0"] if halves else module
        if halves or type(first) is not nn.Linear or first.bias is None:
            maps.append(first)
    maps.append(parts["b_proj"])
    return maps if all(map(is_plain, maps)) else None


def joint_maps(layer: KimiDeltaAttention, x: Tensor) -> list[nn.Linear] | None:
    """The maps of x that run as one product, or None. Meta tensors, autocast and torch.func's transforms need torch's
    own."""
    if (
        not layer.fuse_projections
        or x.is_meta
        or x.dtype != layer.q_proj.weight.dtype
        or layer.q_proj.weight.shape[0] != layer.key_dim
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    return _joint_maps(layer)


def _heads(x: Tensor, channels: int) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // channels, channels)


def project(layer: KimiDeltaAttention, x: Tensor) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Returns the rows of q, k and v; the decay's input, ``[B, T, HV, K]``; the logits of beta, ``[B, T, HV]``; the
    gate's input, ``[B, T, HV, V]``."""
    K, V = layer.head_k_dim, layer.head_v_dim
    maps = joint_maps(layer, x)
    if maps is None:
        rows = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
        _check_ranks(layer, rows[0])
        return rows, _heads(layer.f_proj(x), K), layer.b_proj(x), _heads(layer.g_proj(x), V)
    weights: list[Any] = [m._parameters["weight"] for m in maps]
    y = joint_linear(x, weights)
    sizes = [sum(_sizes(layer)), *(w.shape[0] for w in weights[3:])]
    raw, *parts, _ = y.split_with_sizes([*sizes, y.shape[-1] - sum(sizes)], -1)

    def finished(module: Any, first: Tensor) -> Tensor:
        """The second half takes rows, ``[M, n]``: only those get their bias inside the product."""
        if type(module) is nn.Linear:
            return first
        second: Tensor = module._modules["1"](first.flatten(0, 1))
        return second.view(*x.shape[:2], second.shape[1])

    gate = finished(layer.g_proj, parts[1]) if len(parts) == 3 else layer.g_proj(x)
    return raw, _heads(finished(layer.f_proj, parts[0]), K), parts[-1], _heads(gate, V)


def _check_ranks(layer: KimiDeltaAttention, q: Tensor) -> None:
    ranks = ranks_of_plan(layer)
    if q.shape[-1] * ranks != layer.key_dim:
        wanted = "expected all heads of this layer, or a plan of kda.tp.HeadParallel or ColwiseParallel"
        raise ValueError(f"q_proj: {wanted}, got {q.shape[-1]} of {layer.key_dim} channels on each of {ranks} ranks")


def queries_keys_values(
    layer: KimiDeltaAttention,
    rows: Rows,
    cache: KDACache | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, ``[B, T, H, K]`` twice and ``[B, T, HV, V]``: the rows after the convolutions and SiLU."""
    convs = convolutions(layer)
    state: Tensor | None = None
    more: dict[str, Any] = {}
    if convs and cp_context is not None:
        from .cp import conv_halo

        more = {"initial_state": conv_halo(joined(rows), cp_context, layer.conv_size)}
    elif convs and cache is not None and cache.conv is not None:
        state, more = cache.conv, {"made_in": cache.made_in}
    y: Tensor | tuple[Tensor, ...]
    if not convs:
        y = F.silu(rows) if isinstance(rows, Tensor) else tuple(map(F.silu, rows))
    elif isinstance(rows, Tensor) and not any(map(has_hooks, convs)):
        y = causal_conv_silu(rows, *conv_parameters(layer), state, cu_seqlens, **more)
    else:
        y = _convolve_each(layer, rows, state, cu_seqlens, more)
    q, k, v = _parts(layer, y)
    return _heads(q, layer.head_k_dim), _heads(k, layer.head_k_dim), _heads(v, layer.head_v_dim)


def joined(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.cat(rows, -1)


def _sizes(layer: KimiDeltaAttention) -> list[int]:
    return [layer.key_dim, layer.key_dim, layer.value_dim]


def _parts(layer: KimiDeltaAttention, rows: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return rows.split_with_sizes(_sizes(layer), -1) if isinstance(rows, Tensor) else rows


def convolutions(layer: KimiDeltaAttention) -> tuple[ShortConvolution, ...]:
    return (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d) if layer.use_short_conv else ()


def _convolve_each(
    layer: KimiDeltaAttention, rows: Rows, state: Tensor | None, cu_seqlens: Tensor | None, more: dict[str, Any]
) -> tuple[Tensor, ...]:
    parts, mesh = _parts(layer, rows), mesh_of_plan(layer)
    sizes, halo = [x.shape[-1] for x in parts], more.get("initial_state")
    states = (None,) * 3 if state is None else state.split_with_sizes(sizes, 1)
    each = [more] * 3 if halo is None else [{"initial_state": x} for x in halo.split_with_sizes(sizes, 1)]
    return tuple(
        conv(x, s, cu_seqlens, **m, mesh=mesh)
        for conv, x, s, m in zip(convolutions(layer), parts, states, each, strict=True)
    )


def conv_parameters(layer: KimiDeltaAttention) -> tuple[Tensor, Tensor | None]:
    """The weights ``[D, W]`` and the biases ``[D]`` of all convolutions, as one tensor each."""
    convs, mesh = convolutions(layer), mesh_of_plan(layer)
    weights = [local(c.weight, mesh) for c in convs]
    biases = [local(c.bias, mesh) for c in convs if c.bias is not None]
    return _as_one(weights).squeeze(1), _as_one(biases) if biases else None


def _as_one(parameters: list[Tensor]) -> Tensor:
    """Their own memory, if they lie side by side and need no gradients; else a copy."""
    whole = None if torch.is_grad_enabled() or dispatched() else whole_of(parameters)
    return torch.cat(parameters) if whole is None else whole

"""The parameters of the layer that run together: its projections, and its convolutions."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..call.dispatch import dispatched
from ..call.tracing import transforms_active
from .bypass import are_own, are_plain_maps, calls_differ, may_bypass
from .cache import KDACache
from .plans import local, mesh_of_plan, ranks_of_plan
from .products import pack, whole_of
from .projections import concatenated

if TYPE_CHECKING:
    from ..nn import KimiDeltaAttention
    from .convolution import ShortConvolution

# The rows of q, k and v before the convolution: ``[B, T, D]``, or three tensors.
Rows = Tensor | tuple[Tensor, Tensor, Tensor]


def pack_weights(layer: KimiDeltaAttention, stay: Container[int] = ()) -> None:
    """``stay``: addresses at which memory is not to be moved."""
    if (maps := _joint_maps(layer)) is not None:
        pack([m.weight for m in maps], stay)
    convs = convolutions(layer)
    if convs and are_own("convolution", *convs):
        pack([c.weight for c in convs], stay)
        if convs[0].bias is not None:
            pack([c.bias for c in convs], stay)


def _joint_maps(layer: KimiDeltaAttention) -> list[nn.Linear] | None:
    """The maps of hidden_states in the order q, k, v, decay, gate, beta; None if they cannot run as one. A gate of
    full rank with a bias runs by itself and is left out."""
    parts: dict[str, Any] = layer._modules  # attributes of a module take ten times as long
    maps: list[Any] = [parts["q_proj"], parts["k_proj"], parts["v_proj"]]
    for module in (parts["f_proj"], parts["g_proj"]):
        halves = type(module) is nn.Sequential
        if halves and not (are_own("pair", module) and module._modules.keys() == {"0", "1"}):
            return None
        first: Any = module._modules["0"] if halves else module
        if halves or type(first) is not nn.Linear or first._parameters.get("bias") is None:
            maps.append(first)
    maps.append(parts["b_proj"])
    return maps if are_plain_maps(*maps) else None


def joint_maps(layer: KimiDeltaAttention, x: Tensor) -> list[nn.Linear] | None:
    """The maps of x that run as one product, or None. Meta tensors, autocast and torch.func's transforms need torch's
    own. Only plain maps are asked for their weights: what else stands in a place may have none."""
    if (
        not layer.fuse_projections
        or x.is_meta
        or torch.is_autocast_enabled(x.device.type)
        or transforms_active()
        or calls_differ()
        or (maps := _joint_maps(layer)) is None
    ):
        return None
    weights: list[Any] = [m._parameters["weight"] for m in maps[:3]]
    q, k, v = weights
    fits = q.shape[0] == k.shape[0] == layer.key_dim and v.shape[0] == layer.value_dim  # or columns are cut wrongly
    return maps if fits and x.dtype == q.dtype else None


def heads_of(x: Tensor, channels: int) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // channels, channels)


def joined(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.cat(rows, -1)


def sizes_of(layer: KimiDeltaAttention) -> list[int]:
    return [layer.key_dim, layer.key_dim, layer.value_dim]


def parts_of(layer: KimiDeltaAttention, rows: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return rows.split_with_sizes(sizes_of(layer), -1) if isinstance(rows, Tensor) else rows


def convolutions(layer: KimiDeltaAttention) -> tuple[ShortConvolution, ...]:
    if not layer.use_short_conv:
        return ()
    parts: dict[str, Any] = layer._modules
    return parts["q_conv1d"], parts["k_conv1d"], parts["v_conv1d"]


def convolve_as_one(layer: KimiDeltaAttention) -> bool:
    """May the convolutions, if there are any, be computed at once from their parameters?"""
    convs: tuple[Any, ...] = convolutions(layer)
    if not convs or not may_bypass("convolution", *convs):
        return False
    each: list[Any] = [c._parameters for c in convs]
    (q, k, v), biased = [p["weight"] for p in each], [p["bias"] is not None for p in each]
    return q.dtype == k.dtype == v.dtype and q.shape[2] == k.shape[2] == v.shape[2] and all(biased) == any(biased)


def conv_parameters(layer: KimiDeltaAttention) -> tuple[Tensor, Tensor | None]:
    """The weights ``[D, W]`` and the biases ``[D]`` of all convolutions, as one tensor each."""
    convs, mesh = convolutions(layer), mesh_of_plan(layer)
    weights = [local(c.weight, mesh) for c in convs]
    biases = [local(c.bias, mesh) for c in convs if c.bias is not None]
    return as_one(weights).squeeze(1), as_one(biases) if biases else None


def as_one(parameters: list[Tensor]) -> Tensor:
    """Their own memory, if they lie side by side and need no gradients; else a copy."""
    if dispatched():
        return torch.cat(parameters)
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        return concatenated(parameters)
    whole = whole_of(parameters)
    return torch.cat(parameters) if whole is None else whole


def check_window(
    layer: KimiDeltaAttention, hidden_states: Tensor, given: Any, held: Any, use_cache: bool | None
) -> Any:
    from ..cp._fla import as_context

    cp_context = as_context(given)
    if held is not None or use_cache:
        raise ValueError(
            "past_key_values: expected None and use_cache=False with cp_context (states belong to no single rank)"
        )
    if layer.mode != "chunk":
        raise ValueError(f"mode: expected 'chunk' with cp_context, got {layer.mode!r}")
    if hidden_states.shape[:2] != (1, cp_context.tokens):
        raise ValueError(
            f"hidden_states: expected shape [1, {cp_context.tokens}, {layer.hidden_size}], this rank's window of the"
            f" tokens, got {list(hidden_states.shape)}"
        )
    return cp_context


def new_cache(
    layer: KimiDeltaAttention, batch_size: int, device: Any, dtype: torch.dtype | None, like: Tensor | None
) -> KDACache:
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"dtype: expected bfloat16, float16, float32 or float64, got {dtype}")
    ranks = ranks_of_plan(layer)
    if device is None:
        device = layer.A_log.device if like is None else like.device
    inputs = None if like is None else like.dtype
    narrow = dtype or _dtype_of(layer.o_proj) or inputs or _dtype_of(layer.o_norm) or layer.A_log.dtype
    shape = batch_size, layer.num_v_heads // ranks, layer.head_v_dim, layer.head_k_dim
    state = torch.zeros(shape, dtype=torch.promote_types(torch.float32, narrow), device=device)
    if not layer.use_short_conv:
        return KDACache(None, state)
    narrow = dtype or _dtype_of(layer.q_conv1d) or inputs or narrow
    channels = (2 * layer.key_dim + layer.value_dim) // ranks
    size = batch_size, layer.conv_size - 1, channels  # channels side by side: the GPU reads whole lines
    return KDACache(torch.zeros(size, dtype=narrow, device=device).transpose(1, 2), state)


def _dtype_of(part: nn.Module) -> torch.dtype | None:
    """That of its weight; None if it has none of real numbers that the kernels read. Quantised parts do not."""
    weight: Any = getattr(part, "weight", None)
    real = isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1
    return weight.dtype if real else None

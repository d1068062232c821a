"""The parameters of the layer that run together: its projections, and its convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..call.dispatch import dispatched
from .cache import KDACache
from .plans import local, mesh_of_plan, ranks_of_plan
from .products import has_hooks, is_plain, pack, whole_of

if TYPE_CHECKING:
    from ..nn import KimiDeltaAttention
    from .convolution import ShortConvolution

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


def heads_of(x: Tensor, channels: int) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // channels, channels)


def joined(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.cat(rows, -1)


def sizes_of(layer: KimiDeltaAttention) -> list[int]:
    return [layer.key_dim, layer.key_dim, layer.value_dim]


def parts_of(layer: KimiDeltaAttention, rows: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return rows.split_with_sizes(sizes_of(layer), -1) if isinstance(rows, Tensor) else rows


def convolutions(layer: KimiDeltaAttention) -> tuple[ShortConvolution, ...]:
    return (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d) if layer.use_short_conv else ()


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


def new_cache(layer: KimiDeltaAttention, batch_size: int) -> KDACache:
    """For new sequences, on the device of the weights."""
    weight, ranks = layer.o_proj.weight, ranks_of_plan(layer)
    shape = batch_size, layer.num_v_heads // ranks, layer.head_v_dim, layer.head_k_dim
    # Not weight.new_zeros, which would give a DTensor if the weight is sharded.
    state = torch.zeros(shape, dtype=torch.promote_types(torch.float32, weight.dtype), device=weight.device)
    if not layer.use_short_conv:
        return KDACache(None, state)
    weight, channels = layer.q_conv1d.weight, (2 * layer.key_dim + layer.value_dim) // ranks
    size = batch_size, layer.conv_size - 1, channels  # channels side by side: the GPU reads whole lines
    conv = torch.zeros(size, dtype=weight.dtype, device=weight.device)
    return KDACache(conv.transpose(1, 2), state)

"""The parts of a layer that run together: its projections, and its convolutions; and the parameters of its decay.
``modules`` are the layer's own by name, as nn.Module keeps them: attributes of a module take ten times as long."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..call.dispatch import dispatched
from ..call.tracing import transforms_active
from .bypass import are_own, are_plain_maps, calls_differ, may_bypass
from .plans import local
from .products import pack, whole_of
from .projections import concatenated

Modules = Mapping[str, Any]
# The rows of q, k and v before the convolution: ``[B, T, D]``, or three tensors.
Rows = Tensor | tuple[Tensor, Tensor, Tensor]


def pack_weights(modules: Modules, stay: Container[int] = ()) -> None:
    """``stay``: addresses at which memory is not to be moved."""
    if (maps := input_maps(modules)) is not None:
        pack([m.weight for m in maps], stay)
    convs = convolutions(modules)
    if convs and are_own("convolution", *convs):
        pack([c.weight for c in convs], stay)
        if convs[0].bias is not None:
            pack([c.bias for c in convs], stay)


def input_maps(modules: Modules) -> list[nn.Linear] | None:
    """The maps of hidden_states in the order q, k, v, decay, gate, beta; None if they cannot run as one. A gate of
    full rank with a bias runs by itself and is left out."""
    maps: list[Any] = [modules["q_proj"], modules["k_proj"], modules["v_proj"]]
    for module in (modules["f_proj"], modules["g_proj"]):
        halves = type(module) is nn.Sequential
        if halves and not (are_own("pair", module) and module._modules.keys() == {"0", "1"}):
            return None
        first: Any = module._modules["0"] if halves else module
        if halves or type(first) is not nn.Linear or first._parameters.get("bias") is None:
            maps.append(first)
    maps.append(modules["b_proj"])
    return maps if are_plain_maps(*maps) else None


def joint_maps(modules: Modules, sizes: list[int], x: Tensor) -> list[nn.Linear] | None:
    """The maps of x that run as one product, or None. Meta tensors, autocast and torch.func's transforms need torch's
    own. Only plain maps are asked for their weights: what else stands in a place may have none."""
    if (
        x.is_meta
        or torch.is_autocast_enabled(x.device.type)
        or transforms_active()
        or calls_differ()
        or (maps := input_maps(modules)) is None
    ):
        return None
    weights: list[Any] = [m._parameters["weight"] for m in maps[:3]]
    fits = [w.shape[0] for w in weights] == sizes  # or columns are cut wrongly
    return maps if fits and x.dtype == weights[0].dtype else None


def heads_of(x: Tensor, channels: int) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // channels, channels)


def joined(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.cat(rows, -1)


def parts_of(rows: Tensor | tuple[Tensor, ...], sizes: list[int]) -> tuple[Tensor, ...]:
    return rows.split_with_sizes(sizes, -1) if isinstance(rows, Tensor) else rows


def second_half(module: Any, first: Tensor, shape: tuple[int, int]) -> Tensor:
    """The output ``[B, T, ..]`` of a map, of which the product with the joint weights has computed the first half, or
    all of it."""
    if type(module) is nn.Linear:
        return first
    second: Any = module._modules["1"]
    if not are_own("map", second):  # hooks see what the map would get in an nn.Sequential
        y: Tensor = second(first)
        return y
    y = second(first.flatten(0, 1))  # only rows, [M, n], get their bias inside the product
    return y.view(*shape, y.shape[1])


def convolutions(modules: Modules) -> tuple[Any, ...]:
    if "q_conv1d" not in modules:
        return ()
    return modules["q_conv1d"], modules["k_conv1d"], modules["v_conv1d"]


def convolve_as_one(modules: Modules) -> bool:
    """May the convolutions, if there are any, be computed at once from their parameters?"""
    convs = convolutions(modules)
    if not convs or not may_bypass("convolution", *convs):
        return False
    each: list[Any] = [c._parameters for c in convs]
    (q, k, v), biased = [p["weight"] for p in each], [p["bias"] is not None for p in each]
    return q.dtype == k.dtype == v.dtype and q.shape[2] == k.shape[2] == v.shape[2] and all(biased) == any(biased)


def conv_parameters(modules: Modules, mesh: Any) -> tuple[Tensor, Tensor | None]:
    """The weights ``[D, W]`` and the biases ``[D]`` of all convolutions, as one tensor each."""
    convs = convolutions(modules)
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


def dtype_of(part: nn.Module) -> torch.dtype | None:
    """That of its weight; None if it has none of real numbers that the kernels read. Quantised parts do not."""
    weight: Any = getattr(part, "weight", None)
    real = isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1
    return weight.dtype if real else None


# ---- A_log and dt_bias ----
#
# They set the decay. Numbers of 16 bits would round the rate of a slow channel by up to 1 %, so they are float32 beside
# weights of any dtype, as in published checkpoints.


def _rates(layer: nn.Module) -> list[nn.Parameter]:
    """The two, or what they are computed from: the originals of parametrizations, ``A_log_orig`` of pruning, .."""
    own = [p for name, p in layer._parameters.items() if name.startswith(("A_log", "dt_bias"))]
    for name in ("A_log", "dt_bias"):
        computed = getattr(layer._modules.get("parametrizations"), name, None)
        own += [] if computed is None else computed._parameters.values()
    return [p for p in own if p is not None]


def mark_rates(layer: nn.Module) -> None:
    """FLA's and other trainers look for the mark."""
    for parameter in _rates(layer):
        parameter._no_weight_decay = True  # type: ignore[attr-defined]


def without_narrowing(layer: nn.Module, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, by which a module is moved or converted, but these two keep 32 bits."""
    kept = [x for p in _rates(layer) for x in (p, p.grad)]

    def converted(x: Tensor) -> Tensor:
        y = fn(x)
        narrower = y.dtype.itemsize < 4 <= x.dtype.itemsize
        return x.to(y.device, torch.float32) if narrower and any(x is one for one in kept) else y

    return converted

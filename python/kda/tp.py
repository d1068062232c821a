"""Tensor parallelism of the layer: every rank has some of the heads.

>>> from torch.distributed.tensor.parallel import parallelize_module
>>> from kda.tp import HeadParallel
>>> model = parallelize_module(model, mesh, {"layers.*.attn": HeadParallel()})  # doctest: +SKIP
"""

from __future__ import annotations

from ._needs_torch import new_torch  # noqa: F401

# isort: split
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .layer.parts import mark_rates
from .nn import KimiDeltaAttention


class HeadParallel(ParallelStyle):
    """A style for :class:`kda.nn.KimiDeltaAttention`: ``ColwiseParallel`` for the projections to heads,
    ``RowwiseParallel`` for the one from them, and the parameters between them sharded by heads. Inputs and outputs
    are the same on every rank; forward has one all-reduce. Every parameter becomes a ``DTensor`` under its own name.
    The layer's head counts and its caches are those of this rank.

    The number of ranks in the one-dimensional mesh must divide the numbers of heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, KimiDeltaAttention):
            raise TypeError(f"HeadParallel: expected a KimiDeltaAttention, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"HeadParallel: expected a mesh of 1 dimension, got {device_mesh.ndim}")
        ranks = device_mesh.size()
        if module.num_heads % ranks:  # ranks that divide these divide the value heads, too
            raise ValueError(f"HeadParallel: expected ranks that divide {module.num_heads} heads, got {ranks}")
        _cut_parameters(module, device_mesh)
        parallelize_module(module, device_mesh, _plan(module))
        for name in ("num_heads", "num_v_heads", "key_dim", "value_dim"):
            setattr(module, name, getattr(module, name) // ranks)
        mark_rates(module)
        return module


class _Replicated(ParallelStyle):
    """The same on every rank, as a ``DTensor``: optimizers cannot mix these with ordinary tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: Any, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: Any, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def _plan(layer: KimiDeltaAttention) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {n: ColwiseParallel() for n in ("q_proj", "k_proj", "v_proj", "b_proj")}
    for name in ("f_proj", "g_proj"):
        if isinstance(getattr(layer, name), nn.Linear):
            plan[name] = ColwiseParallel()
        else:  # low rank: the first half has no heads
            plan |= {f"{name}.0": _Replicated(), f"{name}.1": ColwiseParallel()}
    return plan | {"o_proj": RowwiseParallel()}


def _cut_parameters(layer: KimiDeltaAttention, mesh: DeviceMesh) -> None:
    def spread(module: nn.Module, name: str, placement: Any) -> None:
        parameter = getattr(module, name)
        if parameter is not None:
            cut = distribute_tensor(parameter.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))

    with torch.no_grad():
        for name in ("A_log", "dt_bias"):
            spread(layer, name, Shard(0))
        for part in ("q_conv1d", "k_conv1d", "v_conv1d") if layer.use_short_conv else ():
            for name in ("weight", "bias"):
                spread(getattr(layer, part), name, Shard(0))
        spread(layer.o_norm, "weight", Replicate())

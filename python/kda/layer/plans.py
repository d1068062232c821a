"""Tensor parallelism by a plan of ``ColwiseParallel`` and ``RowwiseParallel`` for the projections of the layer. These
styles know nothing of the parameters between the projections. Every rank keeps all of them and uses the part of its
heads. :class:`kda.tp.HeadParallel` cuts them as well, and needs none of this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..call.shards import own_part


def mesh_of_plan(modules: Mapping[str, Any], A_log: Any) -> Any:
    """The mesh whose ranks share the heads by a plan, or None. Asked if the weight of q_proj is distributed. FSDP2's
    mesh is not meant: outside of forward, all parameters have its dimensions, and those of a plan come behind them."""
    from torch.distributed.fsdp import FSDPModule

    mesh, of_fsdp = modules["q_proj"].weight.device_mesh, A_log.device_mesh.ndim if hasattr(A_log, "to_local") else 0
    # If FSDP2 wraps each module by itself, forward of the layer sees the weights of others as FSDP2 stores them.
    if mesh.ndim == of_fsdp or isinstance(modules["q_proj"], FSDPModule):
        return None
    for name in ("k_proj", "v_proj", "b_proj", "f_proj", "g_proj", "o_proj"):
        module = modules[name]
        last = module[-1] if isinstance(module, nn.Sequential) else module
        if getattr(getattr(last, "weight", None), "device_mesh", None) != mesh:
            raise ValueError(f"{name}: expected a style for heads as q_proj has, or kda.tp.HeadParallel, got none")
    return mesh[mesh.mesh_dim_names[-1]] if of_fsdp else mesh


def for_ranks(mesh: Any) -> dict[str, Any]:
    """The keyword with which the layer's own modules get that mesh. Without a mesh there is none, so modules that
    stand in their places need not know of it."""
    return {} if mesh is None else {"mesh": mesh}


def ranks_of(mesh: Any) -> int:
    return 1 if mesh is None else int(mesh.size())


def local(parameter: Any, mesh: Any = None, by_heads: bool = True) -> Tensor:
    """This rank's part of a parameter that tensor parallelism has distributed (see ``kda.tp``), or the parameter
    itself. Ranks use a replicated parameter for different heads: its gradient is the sum of theirs. With ``mesh``,
    its ranks share the heads, but all have the whole parameter. They use parts of it (``by_heads``), or all of it."""
    spread: Any = parameter
    if mesh is not None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        spread = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        if by_heads:
            return spread.redistribute(placements=[Shard(0)]).to_local()
    elif not hasattr(parameter, "to_local"):
        return spread
    part: Tensor = own_part(spread, [p.is_replicate() for p in spread.placements])
    return part

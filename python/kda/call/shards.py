"""Handles ``DTensor`` arguments of ``chunk_kda`` and ``fused_recurrent_kda``, sharded by rows of the batch or by
heads. Each rank computes its own part, and only sums of gradients that ranks share are communicated. ``retry`` comes
here after a call with them has failed, so other calls do not pay for the check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .dispatch import tensors_of


class _Dims(NamedTuple):
    """Which dimension of an argument is the batch, and which the heads."""

    batch: int | None
    heads: int | None


_ROWS = _Dims(0, 2)
_ARGUMENTS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), _ROWS),
    "initial_state": _Dims(0, 1),
    "A_log": _Dims(None, 0),
    "dt_bias": _Dims(None, 0),
}


def has_shards(arguments: dict[str, Any]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors_of(arguments).values())


def on_shards(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    from torch.distributed.tensor import DTensor

    tensors = tensors_of(arguments)
    if function.__name__ not in ("chunk_kda", "fused_recurrent_kda"):
        name = next(n for n, x in tensors.items() if isinstance(x, DTensor))
        raise ValueError(f"{name}: expected a tensor of this rank, as to_local() gives it, got a DTensor")
    for option in ("cp_context", "return_intermediate_states"):
        if arguments.get(option):
            raise ValueError(f"{option}: expected none with DTensors, got {arguments[option]}")
    for name, x in tensors.items():
        if name in _ARGUMENTS and not isinstance(x, DTensor):
            raise ValueError(f"{name}: expected a DTensor like the others, got a {type(x).__name__}")
    q, v = tensors["q"], tensors["v"]
    by = [_what_is_cut(q, dim, "cu_seqlens" in tensors) for dim in range(q.device_mesh.ndim)]
    parts = {name: _part(name, x, q, by) for name, x in tensors.items()}
    o, state = function(**{**arguments, **parts})
    o = _joined(o, q.device_mesh, by, _ROWS, tuple(v.shape))
    if state is not None:
        state = _joined(state, q.device_mesh, by, _Dims(0, 1), (state.shape[0], v.shape[2], *state.shape[2:]), v)
    return o, state


def _what_is_cut(q: Any, dim: int, packed: bool) -> str | None:
    """``"batch"``, ``"heads"`` or None, along one dimension of the mesh."""
    placement, ranks = q.placements[dim], q.device_mesh.size(dim)
    if placement.is_replicate():
        return None
    if placement.is_shard(0) and not packed:
        return "batch"
    if placement.is_shard(2) and q.shape[2] % ranks == 0:
        return "heads"
    wanted = "Shard(2) of heads that the ranks divide, or Replicate()"
    wanted = wanted if packed else f"Shard(0), {wanted}"
    raise ValueError(f"q: expected {wanted}, got {placement} of {q.shape[2]} heads on {ranks} ranks")


def _placements(by: list[str | None], dims: _Dims) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    found = [None if what is None else getattr(dims, what) for what in by]
    return [Replicate() if dim is None else Shard(dim) for dim in found]


def _part(name: str, x: Any, q: Any, by: list[str | None]) -> Any:
    """This rank's part of an argument. If ranks share it but use it for different rows, its gradient is the sum of
    theirs."""
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):  # cu_seqlens, the same on every rank
        return x
    wanted = _placements(by, _ARGUMENTS.get(name, _Dims(None, None)))
    if x.device_mesh != q.device_mesh or list(x.placements) != wanted:
        raise ValueError(f"{name}: expected {wanted} on the mesh of q, got {list(x.placements)} on {x.device_mesh}")
    return own_part(x, [p.is_replicate() and what is not None for p, what in zip(wanted, by, strict=True)])


def own_part(x: Any, shared: list[bool]) -> Any:
    """This rank's part of a DTensor. Along the ``shared`` dimensions of the mesh each rank uses it for something
    else, and its gradient is the sum of theirs."""
    from torch.distributed.tensor import Partial

    gradient = [Partial() if s else p for p, s in zip(x.placements, shared, strict=True)]
    # redistribute does nothing here; in backward it sums the parts of the gradient
    return x.redistribute(placements=x.placements).to_local(grad_placements=gradient)


def _joined(x: Any, mesh: Any, by: list[str | None], dims: _Dims, shape: tuple[int, ...], batch_of: Any = None) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    if batch_of is not None and "batch" in by:
        shape = (batch_of.shape[0], *shape[1:])
    stride = torch.empty(shape, dtype=torch.int8, device="meta").stride()
    return DTensor.from_local(x, mesh, _placements(by, dims), run_check=False, shape=torch.Size(shape), stride=stride)

"""What functions of several jobs do with their inputs before a call."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from .arrays import Tensor, is_torch, torch
from .options import Options, gate_parameters_ignored
from .tracing import compiling


def gate_parameters(A_log: Any, dt_bias: Any, v: Any, q: Any) -> tuple[Any, Any]:
    """``A_log`` as ``[HV]`` and ``dt_bias`` as ``[HV, K]``; FLA stores the latter flat."""
    # Reading ndim, where it exists, takes half as long as reading the shape.
    if A_log is not None and getattr(A_log, "ndim", 0) != 1 and len(A_log.shape) != 1:
        A_log = A_log.reshape(-1)
    if dt_bias is not None and getattr(dt_bias, "ndim", 0) != 2 and len(dt_bias.shape) != 2:
        try:
            HV, K = v.shape[-2], q.shape[-1]
        except IndexError:  # the library says what is wrong with these
            return A_log, dt_bias
        if tuple(dt_bias.shape) != (HV * K,):
            raise ValueError(f"dt_bias: expected shape [{HV * K}] or [{HV}, {K}], got {list(dt_bias.shape)}")
        dt_bias = dt_bias.reshape(HV, K)
    return A_log, dt_bias


def no_gate_parameters(A_log: Any, dt_bias: Any, lower_bound: float | None) -> tuple[None, None]:
    if (A_log is not None or dt_bias is not None or lower_bound is not None) and not compiling():
        gate_parameters_ignored(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    return None, None


def state_layout_of(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """``state_v_first``, or the value under FLA's old name for it."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first: expected it alone, got transpose_state_layout, its old name, too")
    warnings.warn("transpose_state_layout is FLA's old name of state_v_first", DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def single(x: Any) -> Any:
    """Converts parameters of the gate from a narrower dtype, which FLA accepts; differentiable."""
    return x.float() if is_torch(x) and x.dtype in (torch.bfloat16, torch.float16) else x


def dense_last(x: Any) -> Any:
    """Makes the last dimension dense, as the kernels need it; FLA's functions accept any strides."""
    if not isinstance(x, Tensor) or x.ndim == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1:  # the usual first
        return x
    return x.contiguous()


class TrainingCall(NamedTuple):
    """What forward and backward share, ready for the kernels."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    h0: Any
    cu: Any
    options: Options

    def leaves(self) -> tuple[Any, ...]:
        """The tensors that may have gradients, in the order of these."""
        return self[:8]

    def named(self) -> dict[str, Any]:
        """By the names of the operators' schemas."""
        found = self._asdict()
        found["cu_seqlens"] = found.pop("cu")
        return found


WITH_GRADIENTS = "kda.chunk_kda or kda.fused_recurrent_kda"


def gate_of(use_gate: bool, A_log: Any, dt_bias: Any, lower_bound: float | None, v: Any, q: Any) -> tuple[Any, Any]:
    """``A_log`` and ``dt_bias`` for the library. Every microsecond here shows in decode steps of small models."""
    if use_gate:
        return gate_parameters(A_log, dt_bias, v, q)
    if A_log is None and dt_bias is None and lower_bound is None:
        return None, None
    return no_gate_parameters(A_log, dt_bias, lower_bound)


NORM_WITH_GRADIENTS = "kda.norm_gate of torch tensors alone, without out"


SEGMENTS_WITH_GRADIENTS = "kda.chunk_kda, with a cp_context for segments on several ranks"

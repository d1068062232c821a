"""The norm and gate of the layer's output: with gradients, or in a given output."""

from __future__ import annotations

import math
from typing import Any

from .arguments import NONE, norm_form
from .call.arrays import check_views, is_torch, new_like
from .call.dispatch import dispatched
from .call.eager import check_serving, grad_enabled, mark_written
from .call.errors import Takes
from .call.inputs import NORM_WITH_GRADIENTS, dense_last
from .call.library import library
from .call.retry import retry
from .call.streams import on_stream, without_stream
from .call.tracing import compiling, modes, recording

_TAKES = Takes({"x", "gate", "weight", "out"}, {"x"}, set(), {"eps", "num_threads"}, {"y": "out"}, "x")


def norm_gate(
    x: Any,
    gate: Any = None,
    weight: Any = None,
    eps: float = 1e-5,
    activation: str = "sigmoid",
    out: Any = None,
    *,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> Any:
    """``x / sqrt(mean(x ** 2) + eps) * weight * act(gate)`` over the last dimension, in float32, rounded once.

    Has autograd for torch tensors. Also accepts NumPy and other DLPack arrays, without gradients.

    Args:
        x: ``[..., D]`` bfloat16, float16 or float32, D 1 to 8192. Rows may be slices of a wider buffer.
        gate: like x, of any of these dtypes; or None for a norm without a gate.
        weight: ``[D]`` of any of these dtypes; ones if None.
        eps: finite, >= 0. A row of zeros with ``eps=0`` becomes NaN.
        activation: of the gate, ``"sigmoid"`` or ``"silu"`` (or ``"swish"``); of no effect without one.
        out: written and returned, in its own dtype; made in the dtype of x if None. It may be x or gate itself. There
            are no gradients with it.
        impl: force an implementation, see :func:`kda.implementations`.  num_threads: CPU threads at most, 0 for
            OpenMP's default; of no effect where there are gradients.
        stream: of a GPU, as in :func:`kda.prefill`.

    Returns:
        ``[..., D]``.

    Raises:
        ValueError: the call breaks the contract; the message names the argument.

    >>> import kda, numpy as np
    >>> x = np.array([[3.0, 3.0], [4.0, -4.0]], np.float32)
    >>> kda.norm_gate(x, np.zeros_like(x), eps=0.0).tolist()
    [[0.5, 0.5], [0.5, -0.5]]
    """
    if stream is not None:
        return on_stream(norm_gate, stream, without_stream(locals()))
    try:
        form = NONE if gate is None else norm_form(activation)
        if len(x.shape) != 4:
            return _of_another_rank(x, gate, weight, eps, activation, out, impl, num_threads)
        if (compiling() or modes() or recording()) and dispatched():
            from .operators.norm import norm_gate as compiled_norm_gate

            return compiled_norm_gate(
                dense_last(x), dense_last(gate), dense_last(weight), eps, form, out, impl, num_threads
            )
        if grad_enabled() and out is None and _wants_gradients(x, gate, weight):
            from .call.derivatives import apply
            from .functions import NormGateFunction

            check_views(x, gate, weight)
            return apply(NormGateFunction, dense_last(x), dense_last(gate), dense_last(weight), eps, form, impl)
        y = new_like(x) if out is None else out
        check_serving(NORM_WITH_GRADIENTS, (x, gate, weight, y))
        library().norm_gate(x, gate, weight, y=y, eps=eps, activation=form, impl=impl, num_threads=num_threads)
        if out is not None:
            mark_written(out)
        return y
    except Exception as error:
        if compiling():
            raise
        if "dense last dimension" in str(error):  # rare: asking first would cost every call
            dense = dense_last(x), dense_last(gate), dense_last(weight)
            if any(a is not b for a, b in zip(dense, (x, gate, weight), strict=True)):
                return norm_gate(*dense, eps, activation, out, impl=impl, num_threads=num_threads)
        return retry(norm_gate, error, locals(), _TAKES)


def _wants_gradients(*arrays: Any) -> bool:
    """Is the first a torch tensor, and does any of them require gradients?"""
    return is_torch(arrays[0]) and any(is_torch(x) and x.requires_grad for x in arrays)


def _of_another_rank(
    x: Any, gate: Any, weight: Any, eps: float, activation: str, out: Any, impl: str | None, num_threads: int
) -> Any:
    """Calls :func:`norm_gate` with four dimensions in place of fewer or more."""
    shape = tuple(x.shape)
    if not shape:
        raise ValueError("x: expected at least one dimension, got none")
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out: expected shape {list(shape)} like x, got {list(out.shape)}")
    if gate is not None and tuple(gate.shape) != shape:
        raise ValueError(f"gate: expected shape {list(shape)} like x, got {list(gate.shape)}")
    y = norm_gate(
        _four("x", x),
        None if gate is None else _four("gate", gate),
        weight,
        eps,
        activation,
        None if out is None else _four("out", out, written=True),
        impl=impl,
        num_threads=num_threads,
    )
    return y.reshape(shape) if out is None else out


def _four(name: str, x: Any, written: bool = False) -> Any:
    """A view of four dimensions; if x is only read, else a copy where there is none."""
    shape = tuple(x.shape)
    if len(shape) <= 4:
        return x.reshape((1,) * (4 - len(shape)) + shape)
    if written and not (x.is_contiguous() if is_torch(x) else x.flags.c_contiguous):
        raise ValueError(f"{name}: expected at most 4 dimensions, or dense memory, got shape {list(shape)}")
    return x.reshape((math.prod(shape[:-3]), *shape[-3:]))

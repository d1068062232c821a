"""The short causal convolution before the layer: with gradients, or in place on a pool of states."""

from __future__ import annotations

from typing import Any

from ._arrays import check_views, is_torch, new_like, sequences, shape_of
from ._dispatch import dispatched
from ._lib import library
from ._options import CHUNK
from ._refusal import in_sentences_of
from ._tracking import check_serving, mark_written
from .ops import _dense


@in_sentences_of(leader="x")
def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    initial_state: Any = None,
    activation: str | None = "silu",
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    *,
    impl: str | None = None,
) -> tuple[Any, Any]:
    """``y[t] = bias + sum_j weight[:, j] * x[t - W + 1 + j]`` per channel, then SiLU; in float32, y in the dtype of x.

    Has autograd for torch tensors. Also accepts NumPy and other DLPack arrays, without gradients.

    Args:
        x: ``[B, T, D]`` bfloat16, float16 or float32; rows may be slices of a wider buffer.
        weight: ``[D, W]``, ``W`` 2 to 4; the last column belongs to the current token. weight, bias and states are
            floating point of any dtype.
        bias: ``[D]``, or None.
        initial_state: ``[N, D, W - 1]``, the inputs before the first token, oldest first, any strides; zeros if None.
            (FLA's states have one more column, the first, which is never read.)
        activation: ``"silu"`` (or ``"swish"``), or None.
        output_final_state: also return the last ``W - 1`` inputs, including those of the initial state.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one row (``B = 1``). Outputs beyond
            ``cu_seqlens[-1]`` are zero.
        impl: force an implementation, see :func:`kda.implementations`.

    Returns:
        ``(y, final_state)``: ``[B, T, D]``, and ``[N, D, W - 1]`` in the dtype of initial_state (of x without one) or
        None.

    Raises:
        ValueError: the call breaks the contract; the message names the argument.

    >>> import kda, numpy as np
    >>> x = np.array([[[1.0], [2.0], [3.0]]], np.float32)
    >>> y, state = kda.causal_conv1d(x, np.array([[10, 1]], np.float32), activation=None, output_final_state=True)
    >>> y[0, :, 0].tolist(), state.tolist()
    ([1.0, 12.0, 23.0], [[[3.0]]])
    """
    silu = _silu(activation)
    if not is_torch(x):
        check_serving("kda.causal_conv1d of torch tensors alone", weight, bias, initial_state)
        y = new_like(x)
        shape = _state_shape(x, weight, cu_seqlens)
        last = new_like(x if initial_state is None else initial_state, shape) if output_final_state else None
        library().conv(x, weight, bias, cu_seqlens, initial_state, last, None, None, y, silu, 0, impl, 0, None)
        return y, last
    x, weight = _dense(x), _dense(weight)
    if output_final_state:
        _state_shape(x, weight, cu_seqlens)  # refuses arrays without a shape
    if dispatched():
        from .compiled import conv

        return conv(x, weight, bias, initial_state, cu_seqlens, silu, output_final_state, impl)
    from .autograd import ConvFunction, apply

    check_views(x, weight, bias, initial_state)
    return apply(ConvFunction, x, weight, bias, initial_state, cu_seqlens, silu, output_final_state, impl)


@in_sentences_of(initial_state="state", final_state="state", y="out")
def causal_conv1d_update(
    x: Any,
    state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = "silu",
    *,
    state_indices: Any = None,
    out_state_indices: Any = None,
    update_state: bool = True,
    has_initial_state: Any = None,
    cu_seqlens: Any = None,
    first_valid_slot: int = 0,
    checkpoints: Any = None,
    checkpoint_slots: Any = None,
    checkpoint_every: int = CHUNK,
    checkpoint_offset: Any = None,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
) -> Any:
    """The convolution of the next tokens, one or many, advancing ``state`` in place. No gradients; any DLPack arrays.

    Args:
        x, weight, bias, activation, cu_seqlens: as in :func:`causal_conv1d`; the last dimension of x must be dense.
        state: ``[N, D, W - 1]`` of any float dtype and strides; with ``state_indices`` a pool ``[slots, D, W - 1]``.
        state_indices, out_state_indices, update_state: the slots to read and to write, as in :func:`kda.prefill`.
        has_initial_state: ``[N]`` bool: False starts that sequence from zeros, whatever its slot holds.
        checkpoints, checkpoint_slots, checkpoint_every, checkpoint_offset: the last ``W - 1`` inputs after chosen
            tokens, to a pool like ``state`` or to ``state`` itself; as in :func:`kda.prefill`.
        out: ``[B, T, D]`` in the dtype of x, written and returned; made if None.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.

    Returns:
        ``out``.

    >>> import kda, numpy as np
    >>> pool, weight = np.zeros((3, 1, 1), np.float32), np.array([[10, 1]], np.float32)
    >>> for token in (1, 2):
    ...     x = np.full((1, 1, 1), token, np.float32)
    ...     y = kda.causal_conv1d_update(x, pool, weight, activation=None, state_indices=np.array([2], np.int32))
    >>> y.item(), pool[:, 0, 0].tolist()
    (12.0, [0.0, 0.0, 2.0])
    """
    silu = _silu(activation)
    if out is None:
        out = new_like(x)
    slots = (state_indices, has_initial_state)
    every = 0 if checkpoints is None else checkpoint_every
    kept = (checkpoints, checkpoint_slots, checkpoint_offset, every)
    if dispatched():
        from .compiled import run_in_place

        run_in_place(
            "conv_update", x, weight, bias, cu_seqlens, state, *slots, first_valid_slot, out, silu, impl, num_threads,
            out_state_indices, update_state, *kept,
        )  # fmt: skip
    else:
        check_serving("kda.causal_conv1d", x, weight, bias, state, out, checkpoints)
        library().conv(
            x, weight, bias, cu_seqlens, state, state if update_state else None, *slots, out, silu, first_valid_slot,
            impl, num_threads, None, out_state_indices, *kept,
        )  # fmt: skip
        mark_written(state if update_state else None, out, checkpoints)
    return out


def _silu(activation: str | None) -> bool:
    if activation is not None and (not isinstance(activation, str) or activation not in ("silu", "swish")):
        raise ValueError(f"activation: expected 'silu', 'swish' or None, got {activation!r}")
    return activation is not None


def _state_shape(x: Any, weight: Any, cu_seqlens: Any) -> tuple[int, int, int]:
    B, _, D = shape_of("x", x, 3)
    return sequences(B, cu_seqlens), D, shape_of("weight", weight, 2)[1] - 1

"""The short causal convolution before the layer: with gradients, or in place on a pool of states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from .call.arrays import check_views, is_torch, new_like, sequences, shape_of
from .call.dispatch import dispatched
from .call.eager import check_serving, mark_written
from .call.inputs import dense_last
from .call.library import library
from .call.options import CHUNK
from .call.retry import in_sentences_of

F = TypeVar("F", bound=Callable[..., Any])


def _in_parts(function: F) -> F:
    """Lets x be a tuple or list, whose second and third array the function takes as x1 and x2."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        parts = args[0] if args else kwargs.get("x")
        if not isinstance(parts, tuple | list):
            return function(*args, **kwargs)
        if not 1 <= len(parts) <= 3:
            raise ValueError(f"x: expected up to three arrays, got {len(parts)}")
        for name in ("x1", "x2"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name}: expected none with a tuple or list as x, got one")
        kwargs |= {name: part for name, part in zip(("x", "x1", "x2"), parts, strict=False)}
        if not args:
            return function(**kwargs)
        _parts, *others = args
        return function(kwargs.pop("x"), *others, **kwargs)

    return cast(F, call)


@_in_parts
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
    x1: Any = None,
    x2: Any = None,
    impl: str | None = None,
) -> tuple[Any, Any]:
    """``y[t] = bias + sum_j weight[:, j] * x[t - W + 1 + j]`` per channel, then SiLU; in float32, y in the dtype of x.

    Has autograd for torch tensors. Also accepts NumPy and other DLPack arrays, without gradients.

    Args:
        x: ``[B, T, D]`` bfloat16, float16 or float32; rows may be slices of a wider buffer. Or a tuple or list of up to
            three arrays, such as projections q, k and v, whose channels come one after another: D is the sum of theirs,
            and all else has D channels. The bits are those of one x. Errors call the second and third ``x1``, ``x2``.
        x1, x2: the same, one by one.
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
    silu, more = _silu(activation), _more(x1, x2)
    if not is_torch(x):
        check_serving("kda.causal_conv1d of torch tensors alone", (weight, bias, initial_state, x1, x2))
        y = _new_rows(x, more)
        shape = _state_shape(x, weight, cu_seqlens, more)
        last = new_like(x if initial_state is None else initial_state, shape) if output_final_state else None
        library().conv(
            x=x,
            weight=weight,
            bias=bias,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            final_state=last,
            y=y,
            silu=silu,
            impl=impl,
            x1=x1,
            x2=x2,
        )
        return y, last
    x, weight, more = dense_last(x), dense_last(weight), tuple(map(dense_last, more))
    if output_final_state or more:
        _state_shape(x, weight, cu_seqlens, more)  # refuses arrays without a shape
    if dispatched():
        from .operators.convolution import conv

        rest = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "final_state": output_final_state}
        rest |= zip(("x1", "x2"), more, strict=False)
        return conv(x=x, weight=weight, bias=bias, silu=silu, impl=impl, **rest)
    from .call.derivatives import apply
    from .functions import ConvFunction

    check_views(x, weight, bias, initial_state, *more)
    return apply(ConvFunction, x, weight, bias, initial_state, cu_seqlens, (silu, output_final_state, impl), *more)


@_in_parts
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
    x1: Any = None,
    x2: Any = None,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> Any:
    """The convolution of the next tokens, one or many, advancing ``state`` in place. No gradients; any DLPack arrays.

    Args:
        x, x1, x2, weight, bias, activation, cu_seqlens: as in :func:`causal_conv1d`; the last dimension of x must be
            dense.
        state: ``[N, D, W - 1]`` of any float dtype and strides; with ``state_indices`` a pool ``[slots, D, W - 1]``.
        state_indices, out_state_indices, update_state: the slots to read and to write, as in :func:`kda.prefill`.
        has_initial_state: ``[N]`` bool: False starts that sequence from zeros, whatever its slot holds.
        checkpoints, checkpoint_slots, checkpoint_every, checkpoint_offset: the last ``W - 1`` inputs after chosen
            tokens, to a pool like ``state`` or to ``state`` itself; as in :func:`kda.prefill`.
        out: ``[B, T, D]`` in the dtype of x, written and returned; made if None.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.
        stream: of a GPU, as in :func:`kda.prefill`.

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
    silu, more = _silu(activation), _more(x1, x2)
    if out is None:
        out = _new_rows(x, more)
    every = 0 if checkpoints is None else checkpoint_every
    if dispatched():
        from .call.graph import run_operator

        how = {"silu": silu, "first_valid_slot": first_valid_slot, "impl": impl, "num_threads": num_threads}
        rare = {
            "checkpoints": checkpoints,
            "checkpoint_slots": checkpoint_slots,
            "checkpoint_offset": checkpoint_offset,
        }
        rare |= {"checkpoint_every": every, "x1": x1, "x2": x2, "out_state_indices": out_state_indices}
        inputs = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "state": state, "out": out}
        slots = {"state_indices": state_indices, "has_initial_state": has_initial_state, "update_state": update_state}
        run_operator("conv_update", **inputs, **slots, **how, **rare)
    else:
        indices = (state_indices, out_state_indices, checkpoint_slots, has_initial_state, cu_seqlens, checkpoint_offset)
        check_serving("kda.causal_conv1d", (x, weight, bias, state, out, checkpoints, x1, x2, *indices))
        run = library().conv
        if more or checkpoints is not None or checkpoint_slots is not None or checkpoint_offset is not None:
            rare = {"checkpoints": checkpoints, "checkpoint_slots": checkpoint_slots, "checkpoint_every": every}
            run = functools.partial(run, **rare, checkpoint_offset=checkpoint_offset, x1=x1, x2=x2)
        run(
            x,
            weight,
            bias,
            cu_seqlens,
            state,
            state if update_state else None,
            state_indices,
            has_initial_state,
            y=out,
            silu=silu,
            first_valid_slot=first_valid_slot,
            impl=impl,
            num_threads=num_threads,
            out_state_indices=out_state_indices,
        )
        mark_written(state if update_state else None, out, checkpoints)
    return out


def _silu(activation: str | None) -> bool:
    if activation is not None and (not isinstance(activation, str) or activation not in ("silu", "swish")):
        raise ValueError(f"activation: expected 'silu', 'swish' or None, got {activation!r}")
    return activation is not None


def _more(x1: Any, x2: Any) -> tuple[Any, ...]:
    if x1 is None and x2 is not None:
        raise ValueError("x2: expected x1 with it, got none")
    return () if x1 is None else (x1, x2)


def _channels(x: Any, more: Sequence[Any]) -> int:
    parts = {"x": x, **{name: part for name, part in zip(("x1", "x2"), more, strict=False) if part is not None}}
    return sum(shape_of(name, part, 3)[2] for name, part in parts.items())


def _new_rows(x: Any, more: Sequence[Any]) -> Any:
    return new_like(x, (*shape_of("x", x, 3)[:2], _channels(x, more))) if more else new_like(x)


def _state_shape(x: Any, weight: Any, cu_seqlens: Any, more: Sequence[Any]) -> tuple[int, int, int]:
    B = shape_of("x", x, 3)[0]
    return sequences(B, cu_seqlens), _channels(x, more), shape_of("weight", weight, 2)[1] - 1

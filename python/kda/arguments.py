"""Arguments that are tuples of arrays: a convolution, a norm, and what a verify records."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .call import arrays
from .call.arrays import is_torch
from .call.options import check_flag

NONE, SIGMOID, SILU = range(3)  # kda_norm_activation
ACTIVATIONS = {"sigmoid": SIGMOID, "silu": SILU, "swish": SILU}


class Norm(NamedTuple):
    """The norm and gate of an operator's output, in the same call: ``norm=`` of the serving functions.

    The bits are those of the function followed by :func:`norm_gate` in place. A row of zeros, as padding has, stays
    zeros (or -0), whatever its gate is.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 1, 1, 4), np.float32), np.ones((1, 1, 1), np.float32)
    >>> norm = kda.Norm(gate=0 * x, eps=0.0)
    >>> kda.decode(x, x, x, 0 * x, beta, norm=norm).tolist()
    [[[[0.5, 0.5, 0.5, 0.5]]]]
    """

    gate: Any  #: ``[B, T, HV, V]`` bfloat16, float16 or float32, or None for a norm without a gate
    weight: Any = None  #: ``[V]`` of any of these dtypes; ones if None
    eps: float = 1e-5  #: finite, >= 0
    activation: str = "sigmoid"  #: of the gate: ``"sigmoid"``, ``"silu"`` or ``"swish"``


def norm_fields(norm: Any) -> tuple[Any, ...] | None:
    """What the library takes for a norm."""
    if norm is None:
        return None
    if not isinstance(norm, Norm):
        raise ValueError(f"norm: expected kda.Norm, got {type(norm).__name__}")
    gate, weight, eps, activation = norm
    return gate, weight, eps, NONE if gate is None else norm_form(activation, "norm.activation"), True


def arrays_of(norm: Any) -> tuple[Any, ...]:
    """What a function without gradients has to check; of a norm that :func:`norm_fields` has seen."""
    return () if norm is None else (norm.gate, norm.weight)


def norm_form(activation: str, name: str = "activation") -> int:
    form = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if form is None:
        raise ValueError(f"{name}: expected 'sigmoid', 'silu' or 'swish', got {activation!r}")
    return form


class Records(NamedTuple):
    """What a verify leaves for the flush: slots of ``R`` entries, one entry a token, made by :func:`new_records`.

    Entry t of a request's slot belongs to its token t. With ``ring_first`` and ``ring_count`` a slot is a ring: that
    many committed entries from ``ring_first`` on, then those of the drafts, all positions modulo ``R``. The arrays
    may not share memory with anything else in a call. Entries that no request uses are neither read nor written. Live
    requests need slots of their own; a request with a negative index records and applies nothing.

    >>> import kda, numpy as np
    >>> records = kda.new_records(slots=4, entries=8, H=1, HV=2, K=16, V=32)
    >>> batch = records._replace(indices=np.array([2, -1], np.int32))  # two requests, the second without records
    >>> list(batch.alpha.shape), batch.ring_count is None
    ([4, 8, 2, 16], True)
    """

    u: Any  #: ``[slots, R, HV, V]`` float32, corrections
    k: Any  #: ``[slots, R, H, K]`` float32, keys after the norm
    alpha: Any  #: ``[slots, R, HV, K]`` float32, decays ``exp(g)``
    indices: Any = None  #: ``[N]`` int32 or int64, the slot of each request; row n if None; negative: none
    ring_first: Any = None  #: ``[slots]`` int32: with ``ring_count``, a slot is a ring
    ring_count: Any = None  #: ``[slots]`` int32, committed entries that the state does not hold yet


class Conv(NamedTuple):
    """The causal convolution before the recurrence, fused: raw packed rows replace q, k and v, which are then None.

    The bits are those of :func:`kda.causal_conv1d_update` (with SiLU) followed by the function. In a tree the taps of
    a token are its ancestors. All are floating point arrays, each with its own dtype; ``x`` has that of q, k and v.

    >>> import kda, numpy as np
    >>> x, g, beta = np.ones((1, 2, 16), np.float32), np.zeros((1, 2, 1, 4), np.float32), np.ones((1, 2, 1), np.float32)
    >>> conv = kda.Conv(x, weight=np.ones((16, 4), np.float32), bias=None, state=np.zeros((1, 16, 3), np.float32))
    >>> o = kda.decode_mtp(None, None, None, g, beta, np.zeros((1, 1, 8, 4), np.float32), conv=conv)
    >>> o.shape, conv.state[0, 0].tolist()  # two tokens on
    ((1, 2, 1, 8), [0.0, 1.0, 1.0])
    """

    x: Any  #: ``[N, T, D]``, ``D = 2*H*K + HV*V``: q heads, then k, then v
    weight: Any  #: ``[D, W]``, ``W`` = 2..4; the last column belongs to the current token
    bias: Any  #: ``[D]`` or None
    state: Any  #: ``[slots, D, W - 1]``, the last raw rows, oldest first; any strides
    indices: Any = None  #: ``[N]`` int32 or int64, the slot of each request; row n if None; negative: it has no state


def check_size(name: str, size: Any, low: int = 0, high: float = math.inf) -> None:
    if isinstance(size, bool) or not hasattr(size, "__index__") or not low <= size <= high:
        wanted = f"a number of at least {low}" if high == math.inf else f"{low}..{high}"
        raise ValueError(f"{name}: expected {wanted}, got {size!r}")


def is_on_host(x: Any) -> bool:
    """Does it stand for an array of counts? See :func:`counts`."""
    return isinstance(x, int | list | tuple | arrays.numpy.integer)


def counts(name: str, x: Any, N: int, like: Any, most: int = 2**31 - 1) -> Any:
    """``[N]`` int32 beside ``like``, from a list or one integer for all requests."""
    given = x if isinstance(x, list | tuple) else [x]
    for count in given:
        if isinstance(count, bool) or not hasattr(count, "__index__") or not 0 <= count <= most:
            raise ValueError(f"{name}: expected integers of 0..{most}, got {count!r}")
    if given is x and len(given) != N:
        raise ValueError(f"{name}: expected {N} integers, one for each request, got {len(given)}")
    if not is_torch(like):
        return arrays.numpy.full(N, x, arrays.numpy.int32)
    if given is x:
        return arrays.torch.tensor(given, dtype=arrays.torch.int32, device=like.device)
    return arrays.torch.full((N,), int(x), dtype=arrays.torch.int32, device=like.device)


def _check_device(device: Any) -> None:
    if arrays.torch is None:
        if device not in (None, "cpu"):
            raise ValueError(f"device: expected None or 'cpu' where torch is missing, got {device!r}")
        return
    try:
        arrays.torch.empty(0, dtype=arrays.torch.uint8, device=device)
    except Exception as error:
        got = f"{device!r}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"device: expected one that torch has here, got {got}") from None


def new_records(
    slots: int,
    entries: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    ring: bool = False,
    layers: int | None = None,
    device: Any = None,
) -> Records:
    """Returns zeroed records: torch tensors, or NumPy arrays if torch is missing.

    >>> import kda
    >>> list(kda.new_records(2, 8, 1, 1, 16, 32).u.shape)
    [2, 8, 1, 32]
    """
    for name, size in {"slots": slots, "entries": entries}.items():
        check_size(name, size)
    for name, size in {"H": H, "HV": HV}.items():
        check_size(name, size, 1)
    for name, size in {"K": K, "V": V}.items():
        check_size(name, size, 1, 256)
    if HV % H:
        raise ValueError(f"HV: expected a multiple of H = {H}, got {HV}")
    if layers is not None:
        check_size("layers", layers)
    check_flag("ring", ring)
    _check_device(device)
    lead = (slots, entries) if layers is None else (layers, slots, entries)
    if (torch := arrays.torch) is not None:
        tensors = [torch.zeros(*lead, *s, dtype=torch.float32, device=device) for s in ((HV, V), (H, K), (HV, K))]
        cursors = [torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2 * ring)]
    else:
        import numpy

        tensors = [numpy.zeros((*lead, *s), numpy.float32) for s in ((HV, V), (H, K), (HV, K))]
        cursors = [numpy.zeros(slots, numpy.int32) for _ in range(2 * ring)]
    u, k, alpha = tensors
    first, count = cursors or (None, None)
    return Records(u, k, alpha, None, first, count)


def check_kind(name: str, x: Any, kind: Any, optional: bool = True) -> None:
    """Refuses what is no ``kind`` (:class:`Conv` or :class:`Records`)."""
    if not isinstance(x, kind) and not (x is None and optional):
        raise ValueError(f"{name}: expected kda.{kind.__name__}, got {type(x).__name__}")

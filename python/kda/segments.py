"""Segment maps: how a run of tokens maps the state before it to the state after it, and their composition."""

from __future__ import annotations

from typing import Any

from .call.arrays import shape_of
from .call.dispatch import dispatched
from .call.eager import check_serving
from .call.inputs import SEGMENTS_WITH_GRADIENTS, gate_of
from .call.options import make_options
from .call.retry import in_sentences_of
from .call.shared import SegmentMap, run_segment_map, run_segment_merge


@in_sentences_of()
def segment_map(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    d_o: Any = None,
    *,
    want: str = "Mb",
    cu_seqlens: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    impl: str | None = None,
    num_threads: int = 0,
) -> SegmentMap:
    """The maps of every sequence, seen as a segment of a longer one: for the states, ``S_out = M S_in + b``, and for
    their gradients, ``dS_in = M^T dS_out + d``. Has no gradients itself; any DLPack arrays.

    Args:
        q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, cu_seqlens, allow_neg_eigval, use_*: as in
            :func:`kda.prefill`. ``M`` and ``b`` do not depend on q, and ``d`` not on v.
        d_o: ``[B, T, HV, V]``, the gradient of the outputs; given if and only if ``d`` is wanted.
        want: which of the letters M, b and d to compute.
        state_v_first: ``b`` and ``d`` are ``[N, HV, V, K]`` if true, else ``[N, HV, K, V]``. ``M`` is
            ``[N, HV, K, K]`` either way; its rows are the channels of ``S_out``.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.

    Returns:
        ``(M, b, d)``, float32, None where not wanted. For a sequence without tokens ``M`` is 1, and ``b`` and ``d``
        are 0.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 3, 1, 1), np.float32), np.full((1, 3, 1), 0.5, np.float32)
    >>> M, b, _ = kda.segment_map(x, x, x, 0 * x, beta)
    >>> M.item(), b.item()
    (0.125, 0.875)
    """
    if not isinstance(want, str) or set(want) - set("Mbd"):
        raise ValueError(f"want: expected some of the letters M, b, d, got {want!r}")
    if (d_o is not None) != ("d" in want):
        raise ValueError(f"d_o: expected with d among what is wanted, and only then, got want={want!r}")
    A, bias = gate_of(use_gate_in_kernel, A_log, dt_bias, lower_bound, v, q)
    in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    options = make_options(A, scale, lower_bound, in_kernel, allow_neg_eigval, state_v_first)
    call = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias, "cu_seqlens": cu_seqlens}
    call |= {"options": options, "d_o": d_o, "want_M": "M" in want, "want_b": "b" in want}
    call |= {"impl": impl, "num_threads": num_threads}
    if dispatched():
        from .call.graph import run_operator

        maps = run_operator("segment_map", **call)
        return SegmentMap(*(x if name in want else None for name, x in zip("Mbd", maps, strict=True)))
    check_serving(SEGMENTS_WITH_GRADIENTS, (q, k, v, g, beta, A, bias, d_o, cu_seqlens))
    for name, x in (("q", q), ("v", v)):
        shape_of(name, x, 4)
    return run_segment_map(**call)


@in_sentences_of()
def segment_merge(
    M: Any,
    b: Any,
    h0: Any = None,
    *,
    reverse: bool = False,
    state_v_first: bool = True,
    impl: str | None = None,
    num_threads: int = 0,
) -> Any:
    """The states between segments, from their maps: ``states[p + 1] = M[p] states[p] + b[p]``, starting from
    ``states[0] = h0``. In reverse, ``states[p] = M[p]^T states[p + 1] + b[p]``, starting from ``states[P] = h0``:
    then ``b`` are the ``d`` of :func:`segment_map`, and the states are gradients of states. Has no gradients itself;
    any DLPack arrays.

    Args:
        M: ``[P, HV, K, K]`` float32.
        b: ``[P, HV, V, K]`` float32 (``[P, HV, K, V]`` with ``state_v_first=False``).
        h0: ``[HV, V, K]`` (or ``[HV, K, V]``), float32 or bfloat16; zeros if None.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.

    Returns:
        ``states``, ``[P + 1, HV, V, K]`` (or ``[P + 1, HV, K, V]``) float32.

    >>> import kda, numpy as np
    >>> M, b = np.full((2, 1, 1, 1), 0.5, np.float32), np.ones((2, 1, 1, 1), np.float32)
    >>> kda.segment_merge(M, b).ravel().tolist()
    [0.0, 1.0, 1.5]
    """
    shape_of("M", M, 4)
    if dispatched():
        from .call.graph import run_operator

        return run_operator(
            "segment_merge", M=M, b=b, h0=h0, reverse=reverse, v_first=state_v_first, impl=impl, num_threads=num_threads
        )
    check_serving(SEGMENTS_WITH_GRADIENTS, (M, b, h0))
    return run_segment_merge(M, b, h0, reverse, state_v_first, impl, num_threads)

"""Prefill of whole prompts in float32, with heads before tokens."""

from __future__ import annotations

from typing import Any

from .call.arrays import new_like, shape_of
from .call.dispatch import dispatched
from .call.eager import check_serving
from .call.retry import in_sentences_of
from .call.shared import run_prefill_f32


@in_sentences_of(h0="initial_state", hT="final_state", chunk="chunk_size")
def prefill_f32(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    chunk_size: int = 64,
    w: Any = None,
    u: Any = None,
    o: Any = None,
    *,
    initial_state: Any = None,
    final_state: Any = None,
    scale: float | None = None,
    state_v_first: bool = True,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> tuple[Any, Any, Any]:
    """Chunked forward in float32, heads before tokens, with ``w`` and ``u`` of the chunks. No gradients; any DLPack
    arrays.

    ``w = (I + Akk)^-1 beta k exp(G)`` and ``u = (I + Akk)^-1 beta v``; ``u - w S`` are the corrections of a chunk
    that begins with state ``S``. They depend on the chunk size; the outputs do not.

    Args:
        q, k: ``[B, H, T, K]`` float32, normalised. All tensors may have any strides, except that the last is dense.
        v: ``[B, HV, T, V]``.
        g: ``[B, HV, T, K]``, the natural-log decay (``<= 0``, ``-inf`` allowed).
        beta: ``[B, HV, T]``, activated.
        chunk_size: 32 or 64. Any K and V in 1..256; ``(K, V, chunk_size)`` of (64, 64, 32), (64, 64, 64),
            (128, 128, 32) and (128, 128, 64) fill tiles of tensor cores. T need not be a multiple.
        w, u: ``[B, HV, ceil(T / chunk_size), chunk_size, K]`` and ``[.., V]``, written; made if None. Rows after the
            last token are zero.
        o: ``[B, HV, T, V]``, written; made if None.
        initial_state: ``[B, HV, V, K]`` (K-first with ``state_v_first=False``); zeros if None.
        final_state: same shape, written; may be ``initial_state`` itself, to work in place.
        scale: factor of the scores, ``K ** -0.5`` by default.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.
        stream: of a GPU, as in :func:`kda.prefill`.

    Returns:
        ``(o, w, u)``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 1, 70, 4), np.float32) / 2, np.ones((1, 1, 70), np.float32)
    >>> o, w, u = kda.prefill_f32(x, x, x, 0 * x, beta, 32)
    >>> w.shape, bool(np.allclose(o, kda.prefill_f32(x, x, x, 0 * x, beta, 64)[0]))
    ((1, 1, 3, 32, 4), True)
    """
    K = shape_of("q", q, 4)[3]
    B, HV, T, V = shape_of("v", v, 4)
    if chunk_size not in (32, 64) or not hasattr(chunk_size, "__index__"):
        raise ValueError(f"chunk_size: expected 32 or 64, got {chunk_size}")
    if scale == 0:
        raise ValueError("scale: expected a number other than 0, got 0")
    chunks = (T + chunk_size - 1) // chunk_size
    w = new_like(v, (B, HV, chunks, chunk_size, K)) if w is None else w
    u = new_like(v, (B, HV, chunks, chunk_size, V)) if u is None else u
    o = new_like(v) if o is None else o
    run: Any = run_prefill_f32
    if dispatched():
        from .operators import prefill_f32

        run = prefill_f32.prefill_f32
    else:
        check_serving("kda.chunk_kda", (q, k, v, g, beta, initial_state, final_state, w, u, o))
    run(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        chunk_size=chunk_size,
        w=w,
        u=u,
        o=o,
        initial_state=initial_state,
        final_state=final_state,
        scale=scale,
        state_v_first=state_v_first,
        impl=impl,
        num_threads=num_threads,
    )
    return o, w, u

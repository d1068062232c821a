"""The classic stages of chunked KDA one by one: for kernel work, tests, and libraries that replace single stages.

Names are those of the formulas (docs/operators/stages.md has all of them), and a name means the same tensor in every
stage. Sizes: ``q, k [B, T, H, K]``; ``g, G, w, qG, kg, dq, dk, dG, dg [B, T, HV, K]``; ``v, u, v_new, o`` and their
gradients ``[B, T, HV, V]``; ``beta, dbeta [B, T, HV]``; ``Aqk, Akk_inv, dAqk, dAkk [B, T, HV, 64]``: the row of a
token holds the columns of its chunk; states ``[N, HV, K, V]`` and, one per chunk, ``h, dh [NT, HV, K, V]``
(``[.., V, K]`` with ``state_v_first``). ``q`` and ``k`` must be normalised, ``g`` (a natural logarithm) and ``beta``
activated.

The stages have no gradients themselves. They accept torch tensors, or any DLPack arrays (and then return NumPy
arrays). Tensors that the classic split stores in 16 bits have the dtype of the inputs. ``G``, ``Akk_inv`` (in
bfloat16 it would lose everything where one key repeats with beta near 2) and the gradients
``dAqk, dAkk, dq, dk, dG, dbeta`` are float32. With ``cu_seqlens``, ``h`` and ``dh`` have ``T // 64 + N`` rows, of
which the sequences own the first ones. Errors are those of :mod:`kda.training`.

>>> import kda, numpy as np
>>> from kda import stages
>>> x, beta = np.ones((1, 70, 1, 4), np.float32) / 2, np.ones((1, 70, 1), np.float32)
>>> G = stages.cumsum(0 * x - 0.1)
>>> w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(x, x, x, G, beta)
>>> h, v_new, hT = stages.delta_h(kg, w, u, G, output_final_state=True)
>>> o = stages.fwd_o(x, v_new, G, Aqk, h)
>>> bool(np.allclose(o, kda.prefill(x, x, x, 0 * x - 0.1, beta), atol=1e-6))
True
"""

from __future__ import annotations

from typing import Any

from .call.arrays import is_torch, new_like, sequences, shape_of
from .call.dispatch import dispatched
from .call.eager import check_serving, mark_written
from .call.library import library
from .call.options import CHUNK, STATE_K_FIRST, STATE_V_FIRST
from .call.retry import in_sentences_of
from .call.shared import STAGES, wide_name
from .call.tracing import compiling

_in_sentences = in_sentences_of(h0="initial_state", hT="output_final_state", dhT="d_final_state", dh0="d_final_state")


_NAMES = {stage: names.replace("?", "").replace("->", "").split() for stage, names in STAGES.items()}


def _run(
    stage: str, given: tuple[Any, ...], cu: Any, impl: str | None, *, scale: float | None = None, v_first: bool = False
) -> None:
    """``given``: the tensors in the order of the table."""
    if scale == 0:
        raise ValueError("scale: expected a number other than 0, got 0")
    tensors = dict(zip(_NAMES[stage], given, strict=True))
    form = {"scale": 0.0 if scale is None else scale, "state_layout": STATE_V_FIRST if v_first else STATE_K_FIRST}
    if dispatched():
        from .call.graph import run_operator

        run_operator(f"stage_{stage}", cu_seqlens=cu, **form, **tensors, impl=impl)
        return
    check_serving("kda.chunk_kda", (*tensors.values(), cu))
    try:
        getattr(library(), f"stage_{stage}")(cu_seqlens=cu, **form, **tensors, impl=impl)
    except ValueError:
        first = next(iter(tensors.values()))
        if is_torch(cu) and is_torch(first) and cu.device != first.device:
            wanted = f"expected device {first.device} like the other tensors"
            raise ValueError(f"cu_seqlens: {wanted}, got {cu.device}") from None
        raise


def _gates(k: Any, HV: int) -> tuple[int, ...]:
    B, T, _, K = k.shape
    return B, T, HV, K


def _scores(x: Any) -> tuple[int, ...]:
    B, T, HV, _ = x.shape
    return B, T, HV, CHUNK


def _states(G: Any, V: int, cu: Any, v_first: bool, a_chunk: bool = False) -> tuple[int, ...]:
    B, T, HV, K = G.shape
    rows = sequences(B, cu)
    if a_chunk:
        rows = B * ((T + CHUNK - 1) // CHUNK) if cu is None else T // CHUNK + rows
    return (rows, HV, V, K) if v_first else (rows, HV, K, V)


def _state_dtype(x: Any) -> str:
    return "bfloat16" if str(x.dtype).endswith("bfloat16") else wide_name(x)


# ---- forward ----


@_in_sentences
def cumsum(g: Any, *, cu_seqlens: Any = None, impl: str | None = None) -> Any:
    """``G``: ``g * log2(e)``, at least -160 (a decay of 0 in float32), summed from each chunk's start. Always finite.

    Args:
        g: ``[B, T, HV, K]`` natural-log decay, ``<= 0``, ``-inf`` allowed.

    >>> import numpy as np
    >>> from kda import stages
    >>> stages.cumsum(np.full((1, 2, 1, 1), -np.inf, np.float32)).ravel().tolist()
    [-160.0, -320.0]
    """
    shape_of("g", g, 4)
    G = new_like(g, tuple(g.shape), wide_name(g))
    _run("cumsum", (g, G), cu_seqlens, impl)
    return G


@_in_sentences
def chunk_intra(
    q: Any,
    k: Any,
    v: Any,
    G: Any,
    beta: Any,
    scale: float | None = None,
    *,
    cu_seqlens: Any = None,
    impl: str | None = None,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """``(w, u, qG, kg, Aqk, Akk_inv)``: scores, ``(I + Akk)^-1``, and what follows from it without a state.

    >>> import numpy as np
    >>> from kda import stages
    >>> x, beta = np.ones((1, 2, 1, 1), np.float32), np.full((1, 2, 1), 0.5, np.float32)
    >>> w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(x, x, x, 0 * x, beta, scale=1.0)
    >>> Akk_inv[0, :, 0, :2].tolist(), u.ravel().tolist()
    ([[1.0, 0.0], [-0.5, 1.0]], [0.5, 0.25])
    """
    shape_of("k", k, 4)
    HV = shape_of("v", v, 4)[2]
    w, qG, kg = (new_like(k, _gates(k, HV)) for _ in range(3))
    u, Aqk, Akk_inv = new_like(v), new_like(k, _scores(v)), new_like(v, _scores(v), wide_name(v))
    _run("chunk_intra", (q, k, v, G, beta, Aqk, Akk_inv, w, u, qG, kg), cu_seqlens, impl, scale=scale)
    return w, u, qG, kg, Aqk, Akk_inv


@_in_sentences
def recompute_w_u(
    k: Any, v: Any, beta: Any, Akk_inv: Any, G: Any, q: Any = None, *, cu_seqlens: Any = None, impl: str | None = None
) -> tuple[Any, Any, Any, Any]:
    """``(w, u, qG, kg)`` again from ``Akk_inv``, bit for bit as in :func:`chunk_intra`. ``qG`` is None without
    ``q``."""
    shape_of("k", k, 4)
    HV = shape_of("v", v, 4)[2]
    w, kg, u = new_like(k, _gates(k, HV)), new_like(k, _gates(k, HV)), new_like(v)
    qG = None if q is None else new_like(k, _gates(k, HV))
    _run("recompute_w_u", (q, k, v, G, beta, Akk_inv, w, u, qG, kg), cu_seqlens, impl)
    return w, u, qG, kg


@_in_sentences
def delta_h(
    kg: Any,
    w: Any,
    u: Any,
    G: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    impl: str | None = None,
) -> tuple[Any, Any, Any]:
    """``(h, v_new, final_state)``: the scan over chunks. ``h`` are the states before each chunk; the final state is
    float32, or None."""
    shape_of("G", G, 4)
    V = shape_of("u", u, 4)[3]
    h = new_like(u, _states(G, V, cu_seqlens, state_v_first, a_chunk=True), _state_dtype(u))
    v_new = new_like(u)
    hT = new_like(u, _states(G, V, cu_seqlens, state_v_first), wide_name(u)) if output_final_state else None
    _run("delta_h", (kg, w, u, G, initial_state, h, v_new, hT), cu_seqlens, impl, v_first=state_v_first)
    return h, v_new, hT


@_in_sentences
def fwd_o(
    q: Any,
    v_new: Any,
    G: Any,
    Aqk: Any,
    h: Any,
    scale: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    impl: str | None = None,
) -> Any:
    """``o = scale q 2^G h + Aqk v_new``, zero beyond ``cu_seqlens[-1]``."""
    o = new_like(v_new)
    _run("fwd_o", (q, v_new, G, Aqk, h, o), cu_seqlens, impl, scale=scale, v_first=state_v_first)
    return o


# ---- backward ----


@_in_sentences
def bwd_local(
    v_new: Any, d_o: Any, Aqk: Any, scale: float, *, cu_seqlens: Any = None, impl: str | None = None
) -> tuple[Any, Any]:
    """``(dAqk, dv_local)``. No tensor here has the size ``K``, so ``scale`` has no default."""
    shape_of("v_new", v_new, 4)
    dAqk, dv_local = new_like(v_new, _scores(v_new), wide_name(v_new)), new_like(v_new)
    _run("bwd_local", (v_new, d_o, Aqk, dAqk, dv_local), cu_seqlens, impl, scale=scale)
    return dAqk, dv_local


@_in_sentences
def bwd_delta_h(
    qG: Any,
    kg: Any,
    w: Any,
    G: Any,
    d_o: Any,
    dv_local: Any,
    d_final_state: Any = None,
    scale: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    impl: str | None = None,
) -> tuple[Any, Any, Any]:
    """``(dh, d_initial_state, dv_new)``: the scan over chunks, last to first. ``dh`` are the gradients of the states
    after each chunk."""
    shape_of("G", G, 4)
    V = shape_of("d_o", d_o, 4)[3]
    dh = new_like(d_o, _states(G, V, cu_seqlens, state_v_first, a_chunk=True), _state_dtype(d_o))
    dh0, dv_new = new_like(d_o, _states(G, V, cu_seqlens, state_v_first), wide_name(d_o)), new_like(dv_local)
    tensors = (qG, kg, w, G, d_o, dv_local, d_final_state, dh, dv_new, dh0)
    _run("bwd_delta_h", tensors, cu_seqlens, impl, scale=scale, v_first=state_v_first)
    return dh, dh0, dv_new


@_in_sentences
def bwd_wy_dqkg(
    q: Any,
    k: Any,
    v: Any,
    v_new: Any,
    G: Any,
    beta: Any,
    Akk_inv: Any,
    h: Any,
    d_o: Any,
    dh: Any,
    dv_new: Any,
    scale: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    impl: str | None = None,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """``(dq, dk, dv, dbeta, dG, dAkk)``: all gradients that involve a state. ``dq`` and ``dk`` are per value head,
    ``[B, T, HV, K]``."""
    B, T, HV, _ = shape_of("v", v, 4)
    shape_of("k", k, 4)
    wide = wide_name(v)
    dq, dk, dG = (new_like(v, _gates(k, HV), wide) for _ in range(3))
    dv, dbeta, dAkk = new_like(v), new_like(v, (B, T, HV), wide), new_like(v, _scores(v), wide)
    tensors = (q, k, v, v_new, G, beta, Akk_inv, h, dh, d_o, dv_new, dq, dk, dv, dbeta, dG, dAkk)
    _run("bwd_wy_dqkg", tensors, cu_seqlens, impl, scale=scale, v_first=state_v_first)
    return dq, dk, dv, dbeta, dG, dAkk


@_in_sentences
def bwd_intra(
    q: Any,
    k: Any,
    G: Any,
    beta: Any,
    dAqk: Any,
    dAkk: Any,
    dq: Any,
    dk: Any,
    dbeta: Any,
    dG: Any,
    *,
    cu_seqlens: Any = None,
    impl: str | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Adds the contribution of pairs inside a chunk to ``dq, dk, dbeta, dG``, in place, and returns them."""
    _run("bwd_intra", (q, k, G, beta, dAqk, dAkk, dq, dk, dbeta, dG), cu_seqlens, impl)
    if not compiling():
        mark_written(dq, dk, dbeta, dG)
    return dq, dk, dbeta, dG


@_in_sentences
def cumsum_backward(dG: Any, g: Any = None, *, cu_seqlens: Any = None, impl: str | None = None) -> Any:
    """``dg``: ``dG`` summed from each token to its chunk's end; 0 where the decay of ``g``, if given, is 0 in float32.

    >>> import numpy as np
    >>> from kda import stages
    >>> stages.cumsum_backward(np.ones((1, 3, 1, 1), np.float32)).ravel().tolist()
    [3.0, 2.0, 1.0]
    """
    dg = new_like(dG)
    _run("cumsum_backward", (g, dG, dg), cu_seqlens, impl)
    return dg

"""A decode step of the layer between its projections, in one call."""

from __future__ import annotations

from typing import Any

from .arguments import NONE, norm_form
from .call.arrays import new_like, shape_of
from .call.dispatch import dispatched
from .call.eager import check_serving, mark_written
from .call.errors import Takes
from .call.inputs import WITH_GRADIENTS, gate_parameters
from .call.library import library
from .call.options import make_options
from .call.retry import retry
from .call.streams import on_stream, without_stream
from .call.tracing import compiling, modes, recording

_REQUIRED = {"x", "conv_weight", "conv_state", "g", "beta", "state"}
_TAKES = Takes(
    _REQUIRED
    | {"conv_bias", "A_log", "dt_bias", "gate", "norm_weight", "state_indices", "conv_indices", "cu_seqlens", "out"},
    _REQUIRED,
    {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first"},
    {"eps", "lower_bound", "scale"},
    {
        "conv.x": "x",
        "conv.weight": "conv_weight",
        "conv.bias": "conv_bias",
        "conv.state": "conv_state",
        "conv.indices": "conv_indices",
        "norm.gate": "gate",
        "norm.weight": "norm_weight",
        "norm.eps": "eps",
        "norm.activation": "activation",
        "h0": "state",
        "hT": "state",
        "o": "out",
    },
    None,
)


def fused_decode(
    x: Any,
    conv_weight: Any,
    conv_bias: Any,
    conv_state: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    state: Any,
    gate: Any,
    norm_weight: Any,
    *,
    eps: float = 1e-5,
    activation: str = "sigmoid",
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_indices: Any = None,
    conv_indices: Any = None,
    cu_seqlens: Any = None,
    first_valid_slot: int = 0,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
) -> Any:
    """A layer's decode step for an engine: convolution, KDA, and the output's norm and gate, in one call.

    The bits are those of :func:`kda.causal_conv1d_update`, :func:`kda.decode` and :func:`kda.norm_gate`. Both states
    advance in place by all tokens of the call. The call waits for no GPU, and allocates the output and a workspace, so
    it can be captured in a CUDA graph. No gradients; any DLPack arrays.

    Args:
        x: ``[N, T, D]``, ``D = 2*H*K + HV*V``: the projections of q, k and v, bfloat16, float16 or float32. T is
            typically 1.
        conv_weight, conv_bias: ``[D, W]`` with ``W`` 2..4, and ``[D]`` or None.
        conv_state: ``[slots, D, W - 1]``, the last raw rows, oldest first; any strides, so that rows of an engine's
            cache ``[slots, W - 1, D]`` are given transposed. Read and written.
        g: ``[N, T, HV, K]``, the raw gate input: the decay is ``-exp(A_log) * softplus(g + dt_bias)``, or with
            ``lower_bound`` it is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        beta: ``[N, T, HV]``, logits; activated numbers with ``use_beta_sigmoid_in_kernel=False``.
        A_log, dt_bias: ``[HV]``, and ``[HV, K]`` or ``[HV * K]``, float32; dt_bias may be None.
        state: ``[N, HV, V, K]`` float32 or bfloat16 (K-first with ``state_v_first=False``), or with ``state_indices`` a
            pool of any number of slots. Read and written.
        gate, norm_weight, eps, activation: of :func:`kda.norm_gate`: ``[N, T, HV, V]`` or None, ``[V]`` or None.
        state_indices: ``[N]`` int32 or int64, the slot of each request in ``state``; ``< first_valid_slot`` is padding:
            its outputs are zero, and no state of it is touched.
        conv_indices: the same for ``conv_state``, where a negative slot is that of a request without a state.
            ``state_indices`` if None.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of requests packed into one row.
        out: ``[N, T, HV, V]``, written and returned; made in the dtype of x if None.
        impl: force an implementation of decode.  num_threads: CPU threads at most, 0 for OpenMP's default.
        stream: of a GPU, as in :func:`kda.prefill`.

    Returns:
        ``out``.

    Raises:
        ValueError: the call breaks the contract; the message names the argument.

    >>> import kda, numpy as np
    >>> x, state, tail = np.ones((2, 1, 12), np.float32), np.zeros((4, 1, 4, 4), np.float32), np.zeros((4, 12, 3), "f")
    >>> g, beta, gate = np.ones((2, 1, 1, 4), "f"), np.ones((2, 1, 1), "f"), np.zeros((2, 1, 1, 4), "f")
    >>> slots = np.array([2, -1], np.int32)  # the second is padding
    >>> o = kda.fused_decode(x, np.ones((12, 4), "f"), None, tail, g, beta, np.zeros(1, "f"), None, state, gate, None,
    ...                      eps=0.0, state_indices=slots)
    >>> o[:, 0, 0].tolist(), tail[:, 0, 2].tolist()
    ([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]], [0.0, 0.0, 1.0, 0.0])
    """
    if stream is not None:
        return on_stream(fused_decode, stream, without_stream(locals()))
    try:
        form = NONE if gate is None else norm_form(activation)
        if out is None:
            V = shape_of("state", state, 4)[2 if state_v_first else 3]
            out = new_like(x, (*shape_of("g", g, 4)[:3], V))
        A_log, dt_bias = gate_parameters(A_log, dt_bias, g, g)
        in_kernel = (use_qk_l2norm_in_kernel, True, use_beta_sigmoid_in_kernel)
        options = make_options(A_log, scale, lower_bound, in_kernel, allow_neg_eigval, state_v_first)
        if conv_indices is None:
            conv_indices = state_indices
        conv = (x, conv_weight, conv_bias, conv_state, conv_indices)
        norm = (gate, norm_weight, eps, form, True)
        if (compiling() or modes() or recording()) and dispatched():
            from .call.graph import run_operator

            inputs = {"q": None, "k": None, "v": None, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
            slots = {"state_indices": state_indices, "has_initial_state": None, "first_valid_slot": first_valid_slot}
            drafts = {"snapshots": None, "snapshot_slots": None, "accepted": None, "update_state": True}
            how = {"cu_seqlens": cu_seqlens, "options": options, "impl": impl, "num_threads": num_threads}
            parts = {"state": state, "out": out, "conv": conv, "norm": norm}
            run_operator("decode_mtp", **inputs, **slots, **drafts, **how, **parts)
            return out
        arrays = (*conv, g, beta, A_log, dt_bias, state, gate, norm_weight, out, state_indices, cu_seqlens)
        check_serving(WITH_GRADIENTS, arrays)
        library().decode(
            None,
            None,
            None,
            g,
            beta,
            A_log,
            dt_bias,
            cu_seqlens,
            options=options,
            h0=state,
            hT=True,
            state_indices=state_indices,
            first_valid_slot=first_valid_slot,
            o=out,
            impl=impl,
            num_threads=num_threads,
            conv=conv,
            norm=norm,
        )
        mark_written(state, conv_state, out)
        return out
    except Exception as error:
        if compiling():
            raise
        return retry(fused_decode, error, locals(), _TAKES)

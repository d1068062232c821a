"""Training: the chunked form and the token recurrence, with autograd and the signatures of ``fla.ops.kda``.

Shapes, here and in the other modules: ``B`` rows of ``T`` tokens, ``N`` sequences, ``H`` query/key heads, ``HV`` value
heads (a multiple of ``H``), and head sizes ``K`` and ``V`` in 1..256. Errors are ``ValueError`` (the call breaks the
contract; the message names the argument, what was expected and what came), ``NotImplementedError`` (no implementation
takes a legal call; the message gives every reason) and ``RuntimeError`` (CUDA).
"""

from __future__ import annotations

from typing import Any

from .call.arrays import check_views, is_torch, new_like, torch
from .call.dispatch import dispatched
from .call.eager import check_serving
from .call.inputs import TrainingCall, dense_last, gate_of, single, state_layout_of
from .call.library import library
from .call.options import CHUNK, Options, make_options
from .call.retry import retry, with_operators
from .call.tracing import compiling, is_true, is_wrapper


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    impl: str | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Chunked KDA with autograd: prefill, and the training forward. Signature and semantics of FLA's ``chunk_kda``.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]``, of the same dtype.
        g: ``[B, T, HV, K]``, floating point. The natural-log decay (``<= 0``, ``-inf`` allowed), or with
            ``use_gate_in_kernel`` the raw gate input: then the decay is ``-exp(A_log) * softplus(g + dt_bias)``, or
            with ``lower_bound`` it is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        beta: ``[B, T, HV]``, floating point, activated; logits with ``use_beta_sigmoid_in_kernel``.
        scale: factor of the scores, ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]`` float32 (or bfloat16), ``[N, HV, V, K]`` with ``state_v_first``; zeros if None.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide each row of q and k by ``sqrt(sum of squares + 1e-6)`` first.
        allow_neg_eigval: ``2 * sigmoid(beta)`` instead of ``sigmoid(beta)``.
        safe_gate: a promise that ``lower_bound <= g``. It is checked as in FLA but not needed here: any gate is
            computed exactly.
        disable_recompute: keep what backward would otherwise recompute. On the CPU this takes ``K*V/16 + 4*V + 512``
            bytes per token and value head instead of ``K*V/128`` (a state every 512 tokens). On a GPU it takes
            ``K*V/32 + 2*V`` bytes for 16-bit inputs with ``state_v_first``; in all other cases nothing is kept, as
            without it.
        return_intermediate_states: also return the state before every 64-token chunk; only under
            ``torch.inference_mode()``, or in a graph of ``torch.compile`` without gradients. Packed sequences need
            ``use_graph`` there.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one row (``B = 1``). Values on a GPU
            are not checked. Outputs beyond ``cu_seqlens[-1]`` are zero.
        cu_seqlens_cpu: a copy on the CPU. It is used only for the shape of the intermediate states, for which a call
            on a GPU otherwise waits for ``cu_seqlens``. Refused if its length differs or, on the CPU, a value.
        cp_context: a :class:`kda.cp.Context`, or an ``FLACPContext``: the tokens are this rank's window of sequences
            that are spread over several ranks. ``initial_state`` and the final state then have a row for each
            sequence of the window. A sequence that begins on an earlier rank does not read its row, and one that goes
            on on a later rank returns its state at the border. ``cu_seqlens`` and intermediate states are refused.
            Gradients of parameters are this rank's share of their sums. Every rank must make the call, forward and
            backward.
        use_graph: for capture into a CUDA graph. Only the intermediate states need it: packed sequences then have
            ``ceil(T / 64) + N - 1`` of them, whatever their lengths, and those after the last chunk are undefined.
        max_num_seqs: with ``use_graph``, the number of sequences in ``cu_seqlens``, including empty ones at the end.
        A_log, dt_bias: ``[HV]`` and ``[HV, K]`` or ``[HV * K]``, float32.
        impl: force an implementation, see :func:`implementations`.
        chunk_size: FLA's, 32 or 64. It changes no result: chunks here always have 64 tokens.
        transpose_state_layout: FLA's old name for ``state_v_first``.

    Returns:
        ``(o, final_state)`` with ``o`` ``[B, T, HV, V]`` in the dtype of q and ``final_state`` float32 or None; with
        ``return_intermediate_states`` also ``h`` ``[B, NT, HV, K, V]`` in bfloat16 for bfloat16 inputs, else float32.

    >>> import kda, torch
    >>> x = torch.randn(1, 100, 2, 8)
    >>> o, state = kda.chunk_kda(x, x, x, -x.abs(), torch.ones(1, 100, 2), use_qk_l2norm_in_kernel=True,
    ...                          output_final_state=True)
    >>> list(o.shape), list(state.shape)
    ([1, 100, 2, 8], [1, 2, 8, 8])
    """
    try:
        if not is_torch(q):
            raise ValueError(f"q: expected a torch tensor (prefill takes other arrays), got {type(q).__name__}")
        from .functions import chunks_between_states, eager_forward

        state_v_first = state_layout_of(state_v_first, kwargs)
        kwargs.pop("chunk_indices", None)  # FLA's cached metadata, not needed here
        _check_chunk_size(kwargs.pop("chunk_size", CHUNK), return_intermediate_states)
        if kwargs:
            raise TypeError(f"chunk_kda: unexpected arguments {sorted(kwargs)}")
        if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
            raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {lower_bound}")
        _check_copy(getattr(cp_context, "cu_seqlens", cu_seqlens), cu_seqlens_cpu)
        if use_graph and cu_seqlens is not None and max_num_seqs not in (None, cu_seqlens.shape[0] - 1):
            raise ValueError(f"max_num_seqs: expected {cu_seqlens.shape[0] - 1} as in cu_seqlens, got {max_num_seqs}")
        if return_intermediate_states and not compiling() and not torch.is_inference_mode_enabled():
            raise ValueError("return_intermediate_states: expected torch.inference_mode(), got autograd's mode")
        if return_intermediate_states and disable_recompute:
            raise ValueError("return_intermediate_states: expected disable_recompute=False with it, got True")

        tensors, gate = (q, k, v, g, beta, initial_state, cu_seqlens), (A_log, dt_bias, lower_bound)
        in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
        call = training_call(tensors, gate, scale, in_kernel, allow_neg_eigval, state_v_first, safe_gate)
        if cp_context is not None:
            from .cp._chunk import chunk_kda as on_this_rank
            from .cp._fla import as_context

            how = (output_final_state, return_intermediate_states, disable_recompute, impl)
            return on_this_rank(cp_context, as_context(cp_context), call, *how)
        if return_intermediate_states:
            offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
            return _with_intermediate_states(call, offsets, use_graph, output_final_state, impl)
        h_every = chunks_between_states(call.leaves(), disable_recompute)
        if dispatched():
            from .operators.training import forward

            return forward(call, output_final_state, h_every, recurrent=False, impl=impl)
        return eager_forward(call, output_final_state, h_every, recurrent=False, impl=impl)
    except Exception as error:
        if compiling():
            raise
        return with_operators(chunk_kda, error, locals())


def fused_recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    impl: str | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """KDA token by token, for short sequences. Signature and semantics of FLA's ``fused_recurrent_kda``.

    Arguments and results are those of :func:`chunk_kda`. ``use_graph`` and ``max_num_seqs`` are accepted and have no
    effect: calls on a GPU can be captured as they are. Unlike FLA's function, this one has gradients (through the
    chunked backward). Without gradients it also accepts NumPy and other DLPack arrays.

    >>> import kda, numpy as np
    >>> x = np.ones((1, 3, 1, 2), np.float32)
    >>> o, _ = kda.fused_recurrent_kda(x, x, x, 0 * x, np.full((1, 3, 1), 0.5, np.float32), scale=1.0)
    >>> o[0, :, 0, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    try:
        state_v_first = state_layout_of(state_v_first, kwargs)
        for name in ("use_graph", "max_num_seqs"):  # arguments of FLA's chunk_kda without effect here
            kwargs.pop(name, None)
        if kwargs:
            raise TypeError(f"fused_recurrent_kda: unexpected arguments {sorted(kwargs)}")
        tensors, gate = (q, k, v, g, beta, initial_state, cu_seqlens), (A_log, dt_bias, lower_bound)
        in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
        call = training_call(tensors, gate, scale, in_kernel, allow_neg_eigval, state_v_first)
        if not is_torch(q):
            return _recurrent_arrays(call, output_final_state, impl)
        from .functions import chunks_between_states, eager_forward

        h_every = chunks_between_states(call.leaves(), disable_recompute=False)
        if dispatched():
            from .operators.training import forward

            return forward(call, output_final_state, h_every, recurrent=True, impl=impl)
        return eager_forward(call, output_final_state, h_every, recurrent=True, impl=impl)
    except Exception as error:
        if compiling():
            raise
        return retry(fused_recurrent_kda, error, locals())


def training_call(
    tensors: tuple[Any, ...],
    gate: tuple[Any, Any, float | None],
    scale: float | None,
    in_kernel: tuple[bool, bool, bool],
    allow_neg_eigval: bool,
    state_v_first: bool,
    safe_gate: bool = False,
) -> TrainingCall:
    """``tensors``: q, k, v, g, beta, initial_state and cu_seqlens; ``gate``: A_log, dt_bias and lower_bound."""
    (q, k, v, g, beta, initial_state, cu_seqlens), (A_log, dt_bias, lower_bound) = tensors, gate
    for name, x in (("q", q), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {list(x.shape)}")
    if cu_seqlens is not None and (len(cu_seqlens.shape) != 1 or is_true(cu_seqlens.shape[0] < 1)):
        raise ValueError(f"cu_seqlens: expected shape [N+1], got {list(cu_seqlens.shape)}")
    A_log, dt_bias = gate_of(in_kernel[1], A_log, dt_bias, None if safe_gate else lower_bound, v, q)
    options = make_options(A_log, scale, lower_bound, in_kernel, allow_neg_eigval, state_v_first)
    if not compiling():
        check_views(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if torch is not None:
        A_log, dt_bias = single(A_log), single(dt_bias)
    q, k, v, g, A_log, dt_bias, initial_state = map(dense_last, (q, k, v, g, A_log, dt_bias, initial_state))
    return TrainingCall(q, k, v, g, beta, A_log, dt_bias, initial_state, cu=cu_seqlens, options=Options(*options))


def _recurrent_arrays(call: TrainingCall, output_final_state: bool, impl: str | None) -> tuple[Any, Any]:
    q, k, v, g, beta, A_log, dt_bias, h0, cu, options = call
    B, T, _, K = q.shape
    _, _, HV, V = v.shape
    N = B if cu is None else cu.shape[0] - 1
    check_serving("kda.fused_recurrent_kda of torch tensors alone", (k, v, g, beta, A_log, dt_bias, h0))
    blame = f"q: expected a torch or NumPy array, got {type(q).__name__}"
    o = new_like(q, (B, T, HV, V), None, blame)
    state = (N, HV, K, V) if options.state_layout else (N, HV, V, K)
    hT = new_like(q, state, "float32", blame) if output_final_state else None
    library().decode(q, k, v, g, beta, A_log, dt_bias, cu, options=options, h0=h0, hT=hT, o=o, impl=impl)
    return o, hT


def _check_chunk_size(size: Any, return_intermediate_states: bool) -> None:
    if not isinstance(size, int) or size not in (32, 64):
        # Contains FLA's words as well, because tests of its users look for them.
        raise ValueError(f"chunk_size: expected 32 or 64 (`chunk_size` must be either 32 or 64), got {size}")
    if return_intermediate_states and size != CHUNK:
        raise NotImplementedError(f"chunk_size: expected {CHUNK} with return_intermediate_states, got {size}")


def _check_copy(cu: Any, copy: Any) -> None:
    """Checks ``cu_seqlens_cpu`` against ``cu_seqlens``, without waiting for a GPU."""
    if copy is None:
        return
    if cu is None:
        raise ValueError("cu_seqlens_cpu: expected None without cu_seqlens, got an array")
    if tuple(copy.shape) != tuple(cu.shape):
        raise ValueError(f"cu_seqlens_cpu: expected shape {list(cu.shape)} like cu_seqlens, got {list(copy.shape)}")
    on_cpu = is_torch(cu) and is_torch(copy) and cu.device.type == copy.device.type == "cpu"
    on_cpu = on_cpu and not is_wrapper(cu) and not is_wrapper(copy)  # the values of fake tensors are unknown
    if on_cpu and not compiling() and bool((cu != copy).any()):
        raise ValueError(f"cu_seqlens_cpu: expected {cu.tolist()} like cu_seqlens, got {copy.tolist()}")


def _with_intermediate_states(
    call: TrainingCall, cu_seqlens: Any, use_graph: bool, output_final_state: bool, impl: str | None
) -> tuple[Any, ...]:
    """``cu_seqlens``: also those of the CPU, if there are."""
    rows, chunks = _chunk_count(call.q, cu_seqlens, use_graph)
    if dispatched():
        from .operators.training import forward_states

        o, hT, h = forward_states(call, output_final_state, rows * chunks, impl)
    else:
        from .autograd import run_states

        o, hT, h = run_states(call, output_final_state, rows * chunks, impl)
    return o, hT, h.view(rows, chunks, *h.shape[1:])


def _chunk_count(q: Any, cu_seqlens: Any, use_graph: bool) -> tuple[int, int]:
    """Rows, and chunks in each."""
    if cu_seqlens is None:
        return q.shape[0], (q.shape[1] + CHUNK - 1) // CHUNK
    if use_graph:  # the same for all offsets
        return 1, max((q.shape[1] + CHUNK - 1) // CHUNK + cu_seqlens.shape[0] - 2, 0)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    most = q.shape[1] // CHUNK + cu_seqlens.shape[0]  # only offsets that the library refuses can give more
    return 1, min(max(int(((lengths + CHUNK - 1) // CHUNK).sum()), 0), most)

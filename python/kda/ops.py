"""The public functions. Shapes: ``B`` rows of ``T`` tokens, ``N`` sequences, ``H`` query/key heads, ``HV`` value
heads (a multiple of ``H``), and head sizes ``K`` and ``V`` in 1..256. Errors are ``ValueError`` (the call breaks the
contract; the message names the argument, what was expected and what came), ``NotImplementedError`` (no implementation
takes a legal call; the message gives every reason) and ``RuntimeError`` (CUDA)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy import ndarray

from . import _arrays
from ._arrays import check_views, is_torch, new_like, without_views
from ._dispatch import compiling, dispatched, is_wrapper, modes
from ._lib import _OPERATORS, library
from ._options import CHUNK, GATE_LOWER_BOUND, Options, gate_form, gate_parameters_ignored, make_options
from ._tracking import check_serving, check_step, mark_step, mark_written
from ._views import again, with_operators

if TYPE_CHECKING:
    from .norm import Norm

torch: Any = _arrays.torch


def _gate_parameters(A_log: Any, dt_bias: Any, v: Any, q: Any) -> tuple[Any, Any]:
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


def _no_gate_parameters(A_log: Any, dt_bias: Any, lower_bound: float | None) -> tuple[None, None]:
    if (A_log is not None or dt_bias is not None or lower_bound is not None) and not compiling():
        gate_parameters_ignored(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    return None, None


# ---- training: the functions of fla.ops.kda ----


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
            ``torch.inference_mode()``.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one row (``B = 1``). Values on a GPU
            are not checked. Outputs beyond ``cu_seqlens[-1]`` are zero.
        cu_seqlens_cpu: a copy on the CPU. It is used only for the shape of the intermediate states, for which a call
            on a GPU otherwise waits for ``cu_seqlens``. Refused if its length differs or, on the CPU, a value.
        cp_context: a :class:`kda.cp.Context`: the tokens are this rank's window of sequences that are spread over
            several ranks. ``initial_state`` and the final state then have a row for each sequence of the window. A
            sequence that begins on an earlier rank does not read its row, and one that goes on on a later rank
            returns its state at the border. ``cu_seqlens`` and intermediate states are refused. Gradients of
            parameters are this rank's share of their sums. Every rank must make the call, forward and backward.
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
        from .autograd import KDAFunction, apply, chunks_between_states

        state_v_first = _layout(state_v_first, kwargs)
        kwargs.pop("chunk_indices", None)  # FLA's cached metadata, not needed here
        _check_chunk_size(kwargs.pop("chunk_size", CHUNK), return_intermediate_states)
        if kwargs:
            raise TypeError(f"chunk_kda: unexpected arguments {sorted(kwargs)}")
        if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
            raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {lower_bound}")
        _check_copy(getattr(cp_context, "cu_seqlens", cu_seqlens), cu_seqlens_cpu)
        if use_graph and cu_seqlens is not None and max_num_seqs not in (None, cu_seqlens.shape[0] - 1):
            raise ValueError(f"max_num_seqs: expected {cu_seqlens.shape[0] - 1} as in cu_seqlens, got {max_num_seqs}")
        if return_intermediate_states and not torch.is_inference_mode_enabled():
            raise ValueError("return_intermediate_states: expected torch.inference_mode(), got autograd's mode")
        if return_intermediate_states and disable_recompute:
            raise ValueError("return_intermediate_states: expected disable_recompute=False with it, got True")

        call = _training_call(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, lower_bound, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, safe_gate,
        )  # fmt: skip
        if cp_context is not None:
            from .cp import chunk_kda as on_this_rank

            return on_this_rank(
                cp_context, call, output_final_state, return_intermediate_states, disable_recompute, impl
            )
        if return_intermediate_states:
            chunks = _chunk_count(q, cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, use_graph)
            return _with_intermediate_states(call, output_final_state, chunks, impl)
        h_every = chunks_between_states(call[:8], disable_recompute)
        if dispatched():
            from .compiled import forward

            return forward(*call, output_final_state, h_every, False, impl)
        return apply(KDAFunction, *call, output_final_state, h_every, False, impl)
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
        state_v_first = _layout(state_v_first, kwargs)
        for name in ("use_graph", "max_num_seqs"):  # arguments of FLA's chunk_kda without effect here
            kwargs.pop(name, None)
        if kwargs:
            raise TypeError(f"fused_recurrent_kda: unexpected arguments {sorted(kwargs)}")
        call = _training_call(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, lower_bound, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        )  # fmt: skip
        if not is_torch(q):
            return _recurrent_arrays(call, output_final_state, impl)
        from .autograd import KDAFunction, apply, chunks_between_states

        h_every = chunks_between_states(call[:8], disable_recompute=False)
        if dispatched():
            from .compiled import forward

            return forward(*call, output_final_state, h_every, True, impl)
        return apply(KDAFunction, *call, output_final_state, h_every, True, impl)
    except Exception as error:
        if compiling():
            raise
        return again(fused_recurrent_kda, error, locals())


class _TrainingCall(NamedTuple):
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


def _layout(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """``state_v_first``, or the value under FLA's old name for it."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first: expected it alone, got transpose_state_layout, its old name, too")
    warnings.warn("transpose_state_layout is FLA's old name of state_v_first", DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def _single(x: Any) -> Any:
    """Converts parameters of the gate from a narrower dtype, which FLA accepts; differentiable."""
    return x.float() if is_torch(x) and x.dtype in (torch.bfloat16, torch.float16) else x


def _dense(x: Any) -> Any:
    """Makes the last dimension dense, as the kernels need it; FLA's functions accept any strides."""
    if not is_torch(x) or x.ndim == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    return x.contiguous()


def _training_call(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, scale: float | None, initial_state: Any,
    lower_bound: float | None, l2norm: bool, use_gate: bool, beta_sigmoid: bool, neg_eigval: bool, v_first: bool,
    cu: Any, bounded: bool = False,
) -> _TrainingCall:  # fmt: skip
    for name, x in (("q", q), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {list(x.shape)}")
    if cu is not None and (len(cu.shape) != 1 or cu.shape[0] < 1):
        raise ValueError(f"cu_seqlens: expected shape [N+1], got {list(cu.shape)}")
    if use_gate:
        A_log, dt_bias = _gate_parameters(A_log, dt_bias, v, q)
    else:
        A_log, dt_bias = _no_gate_parameters(A_log, dt_bias, None if bounded else lower_bound)
    options = Options(*make_options(A_log, scale, lower_bound, l2norm, use_gate, beta_sigmoid, neg_eigval, v_first))
    if not compiling():
        check_views(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if torch is not None:
        A_log, dt_bias = _single(A_log), _single(dt_bias)
    q, k, v, g, A_log, dt_bias, initial_state = map(_dense, (q, k, v, g, A_log, dt_bias, initial_state))
    return _TrainingCall(q, k, v, g, beta, A_log, dt_bias, initial_state, cu, options)


def _recurrent_arrays(call: _TrainingCall, output_final_state: bool, impl: str | None) -> tuple[Any, Any]:
    q, k, v, g, beta, A_log, dt_bias, h0, cu, options = call
    B, T, _, K = q.shape
    _, _, HV, V = v.shape
    N = B if cu is None else cu.shape[0] - 1
    check_serving("kda.fused_recurrent_kda of torch tensors alone", k, v, g, beta, A_log, dt_bias, h0)
    blame = f"q: expected a torch or NumPy array, got {type(q).__name__}"
    o = new_like(q, (B, T, HV, V), None, blame)
    state = (N, HV, K, V) if options.state_layout else (N, HV, V, K)
    hT = new_like(q, state, "float32", blame) if output_final_state else None
    library().decode(
        q, k, v, g, beta, A_log, dt_bias, cu, *options, h0, hT, None, None, 0, o, impl, 0, None,
    )  # fmt: skip
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


def _chunk_count(q: Any, cu_seqlens: Any, use_graph: bool) -> int:
    if cu_seqlens is None:
        return q.shape[0] * ((q.shape[1] + CHUNK - 1) // CHUNK)
    if use_graph:  # the same for all offsets
        return max((q.shape[1] + CHUNK - 1) // CHUNK + cu_seqlens.shape[0] - 2, 0)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    most = q.shape[1] // CHUNK + cu_seqlens.shape[0]  # only offsets that the library refuses can give more
    return min(max(int(((lengths + CHUNK - 1) // CHUNK).sum()), 0), most)


def _with_intermediate_states(
    call: _TrainingCall, output_final_state: bool, chunks: int, impl: str | None
) -> tuple[Any, ...]:
    q, k, v, g, beta, A_log, dt_bias, h0, cu, options = call
    B, T, _, K = q.shape
    _, _, HV, V = v.shape
    N = B if cu is None else cu.shape[0] - 1
    state = (HV, K, V) if options.state_layout else (HV, V, K)
    o = q.new_empty(B, T, HV, V)
    hT = q.new_empty(N, *state, dtype=torch.float32) if output_final_state else None
    h = q.new_empty(chunks, *state, dtype=torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32)
    library().forward(
        q, k, v, g, beta, A_log, dt_bias, cu, *options, h0, hT, None, None, 0, o, None, None, h, None, None, None, 0,
        0, impl, 0, None,
    )  # fmt: skip
    return o, hT, h.view(B, chunks // B if B else 0, *state)


# ---- serving: in place on a pool of states ----

_WITH_GRADIENTS = "kda.chunk_kda or kda.fused_recurrent_kda"


def prefill(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any = None,
    *,
    state_indices: Any = None,
    out_state_indices: Any = None,
    update_state: bool = True,
    has_initial_state: Any = None,
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
    first_valid_slot: int = 0,
    checkpoints: Any = None,
    checkpoint_slots: Any = None,
    checkpoint_every: int = CHUNK,
    checkpoint_offset: Any = None,
    norm: Norm | None = None,
    out: Any = None,
    workspace: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
) -> Any:
    """Chunked forward over prompts, updating ``state`` in place. No gradients, no copies; any DLPack arrays.

    Args:
        q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, cu_seqlens, allow_neg_eigval, use_*: as in
            :func:`chunk_kda`. The last dimension of q, k, v, g must be dense; other strides are free (slices of fused
            projections).
        state: ``[N, HV, V, K]`` float32 or bfloat16 (K-first with ``state_v_first=False``), read and written. With
            ``state_indices`` a pool ``[slots, HV, V, K]`` of any slot stride. If None, sequences start from zeros and
            no state is kept.
        state_indices: ``[N]`` int32 or int64: the slot of each sequence. A slot ``< first_valid_slot`` marks padding:
            its outputs are zero and no state is touched. Two sequences may share a slot only if it is not written.
        out_state_indices: ``[N]`` int32 or int64: the slots to write, if they are not those to read. Then several
            sequences may read one slot. A slot ``< first_valid_slot`` keeps no state of that sequence. No sequence
            may write a slot that another one reads or writes: on the CPU that is refused.
        update_state: False leaves ``state`` as it is.
        has_initial_state: ``[N]`` bool: False starts that sequence from zeros, whatever its slot holds.
        first_valid_slot: 0 if only negative indices are padding, 1 if slot 0 is padding, too.
        checkpoints, checkpoint_slots: a pool like ``state``, or ``state`` itself, and ``[N, M]`` int32 or int64. After
            ``m * checkpoint_every`` tokens of sequence n, if it has that many, its state is copied to slot
            ``checkpoint_slots[n, m - 1]``. Slots ``< first_valid_slot`` are skipped. In ``state``, no sequence may
            read or write the slot of a checkpoint.
        checkpoint_every: tokens between checkpoints, a multiple of 16.
        checkpoint_offset: ``[N]`` int32 or int64, how many tokens each request has had before. Its checkpoints are
            then at multiples of ``checkpoint_every`` of the request, not of the call, and the first of the call is
            the one in ``checkpoint_slots[n, 0]``. Chunked kernels on GPUs keep no checkpoints with an offset, or with
            an ``every`` that is no multiple of 64: such calls run token by token there.
        norm: a :class:`kda.Norm`: the norm and gate of the output, in the same call.
        out: ``[B, T, HV, V]``, written and returned; made if None. Rows beyond ``cu_seqlens[-1]`` are zeroed.
        workspace: scratch memory of at least :func:`workspace_size` bytes, 256-byte aligned; made for the call if
            None.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.

    Returns:
        ``out``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 70, 1, 4), np.float32) / 2, np.ones((1, 70, 1), np.float32)
    >>> pool = np.zeros((3, 1, 4, 4), np.float32)
    >>> o = kda.prefill(x, x, x, 0 * x, beta, pool, state_indices=np.array([2], np.int32))
    >>> o.shape, float(pool[2, 0, 0, 0]), float(pool[1].sum())
    ((1, 70, 1, 4), 0.25, 0.0)
    """
    try:
        call = _serving_call(
            q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        )  # fmt: skip
        if out is None:
            out = new_like(v)
        every = checkpoint_every if checkpoints is not None else 0
        behind = () if norm is None else _norm_fields(norm)
        if dispatched():
            from .compiled import prefill as compiled_prefill

            if workspace is not None and compiling():
                raise ValueError("workspace: expected None under torch.compile, got an array")
            compiled_prefill(
                call,
                state,
                state_indices,
                has_initial_state,
                first_valid_slot,
                out,
                checkpoints,
                checkpoint_slots,
                every,
                impl,
                num_threads,
                out_state_indices,
                update_state,
                checkpoint_offset,
                *behind,
            )
            return out
        arrays = (state, checkpoints, out, workspace, *behind[:2])
        check_serving(_WITH_GRADIENTS, q, k, v, g, beta, A_log, dt_bias, *arrays)
        library().forward(
            *call, state, state is not None and update_state, state_indices, has_initial_state, first_valid_slot, out,
            checkpoints, checkpoint_slots, None, None, None, None, every, 0, impl, num_threads, workspace,
            out_state_indices, checkpoint_offset, *behind,
        )  # fmt: skip
        mark_written(state if update_state else None, out, checkpoints, workspace)
        return out
    except Exception as error:
        if compiling():
            raise
        return again(prefill, error, locals())


def workspace_size(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, *, num_threads: int = 0, **kwargs: Any
) -> int:
    """Bytes of workspace that :func:`prefill` needs with these arguments: a function of shapes, options and device.

    >>> import kda, numpy as np
    >>> x = np.zeros((1, 70, 1, 4), np.float32)
    >>> kda.workspace_size(x, x, x, x, x[..., 0], num_threads=1) > 0
    True
    """
    try:
        arguments = _forward_arguments(q, k, v, g, beta, state, num_threads=num_threads, **kwargs)
        return library().forward_workspace(*arguments)
    except Exception as error:
        return again(workspace_size, error, locals())


def decode(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any = None,
    *,
    state_indices: Any = None,
    out_state_indices: Any = None,
    update_state: bool = True,
    has_initial_state: Any = None,
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
    first_valid_slot: int = 0,
    norm: Norm | None = None,
    out: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
) -> Any:
    """The token recurrence for a few tokens a sequence, updating ``state`` in place. No gradients; any DLPack arrays.

    Arguments are those of :func:`prefill`. Typically ``T = 1``, and ``N = B`` requests have their slots in
    ``state_indices``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((2, 1, 1, 4), np.float32) / 2, np.ones((2, 1, 1), np.float32)
    >>> pool = np.zeros((3, 1, 4, 4), np.float32)
    >>> o = kda.decode(x, x, x, 0 * x, beta, pool, state_indices=np.array([2, -1], np.int32), scale=1.0)
    >>> o[:, 0, 0, 0].tolist()
    [0.5, 0.0]
    """
    try:
        call = _serving_call(
            q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        )  # fmt: skip
        if out is None:
            out = new_like(v)
        behind = () if norm is None else _norm_fields(norm)
        if (compiling() or modes()) and dispatched():  # the call itself is most of the cost
            from .compiled import decode as compiled_decode

            compiled_decode(
                call, state, state_indices, has_initial_state, first_valid_slot, out, impl, num_threads,
                out_state_indices, update_state, *behind,
            )  # fmt: skip
            return out
        check = check_serving if type(q) is ndarray else check_step
        check(_WITH_GRADIENTS, q, k, v, g, beta, A_log, dt_bias, state, out)
        more = () if out_state_indices is None else (out_state_indices,)
        if norm is not None:
            check_serving(_WITH_GRADIENTS, *behind[:2])
            more = (out_state_indices, *_NO_FRONT, *behind)
        library().decode(
            *call,
            state,
            state is not None and update_state,
            state_indices,
            has_initial_state,
            first_valid_slot,
            out,
            impl,
            num_threads,
            None,
            *more,
        )
        mark_step(state if update_state else None, out)
        return out
    except Exception as error:
        if compiling():
            raise
        return again(decode, error, locals())


_NO_FRONT = (None,) * 8  # no convolution, and no snapshots: what lies between in the binding's arguments


def _norm_fields(norm: Any) -> tuple[Any, ...]:
    from .norm import norm_fields

    return norm_fields(norm)


def _serving_call(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, scale: float | None, lower_bound: float | None,
    l2norm: bool, use_gate: bool, beta_sigmoid: bool, neg_eigval: bool, v_first: bool, cu: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The binding's arguments for ``kda_inputs``. Every microsecond here shows in decode steps of small models."""
    if use_gate:
        A_log, dt_bias = _gate_parameters(A_log, dt_bias, v, q)
    elif A_log is not None or dt_bias is not None or lower_bound is not None:
        A_log, dt_bias = _no_gate_parameters(A_log, dt_bias, lower_bound)
    options = make_options(A_log, scale, lower_bound, l2norm, use_gate, beta_sigmoid, neg_eigval, v_first)
    return (q, k, v, g, beta, A_log, dt_bias, cu, *options)


# ---- the gate alone ----


def fused_kda_gate(
    g: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: float | None = None,
    output_dtype: Any = None,
    *,
    impl: str | None = None,
) -> Any:
    """The gate activation, with autograd for torch tensors. Signature and semantics of FLA's ``fused_kda_gate``.

    Args:
        g: ``[..., HV, K]`` raw gate input, floating point.
        A_log: ``[HV]`` float32; may be None with ``lower_bound``.
        dt_bias: ``[HV, K]`` or ``[HV * K]`` float32, or None.
        lower_bound: None for ``-exp(A_log) * softplus(g + dt_bias)``, else a negative number for
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        output_dtype: float32 by default.
        impl: force an implementation, see :func:`implementations`.

    Returns:
        The natural-log decay, ``[..., HV, K]``.

    >>> import kda, numpy as np
    >>> kda.fused_kda_gate(np.zeros((1, 1, 2), np.float32), lower_bound=-4.0).tolist()
    [[[-2.0, -2.0]]]
    """
    try:
        if len(g.shape) < 2 or 0 in g.shape[-2:]:
            raise ValueError(f"g: expected shape [..., HV, K] with HV and K >= 1, got {list(g.shape)}")
        HV, K = g.shape[-2:]
        form = gate_form(A_log, lower_bound)
        if not compiling():
            check_views(g, A_log, dt_bias)
        A_log, dt_bias = _gate_parameters(A_log, dt_bias, g, g)
        bound = lower_bound if form == GATE_LOWER_BOUND else 0.0
        if not is_torch(g):
            check_serving("kda.fused_kda_gate of torch tensors alone", A_log, dt_bias)
            x = g.reshape(-1, HV, K)
            blame = f"g: expected a torch or NumPy array, got {type(g).__name__}"
            if output_dtype is not None:
                blame = f"output_dtype: expected one that NumPy has, got {output_dtype}"
            y = new_like(x, tuple(x.shape), "float32" if output_dtype is None else output_dtype, blame)
            library().gate(x, A_log, dt_bias, y, form, bound, impl, 0, None)
            return without_views(y.reshape(g.shape))
        dtype = torch.float32 if output_dtype is None else output_dtype
        x, A_log, dt_bias = _dense(g.reshape(-1, HV, K)), _dense(_single(A_log)), _dense(_single(dt_bias))
        if dispatched():
            from .compiled import gate

            return gate(x, A_log, dt_bias, form, bound, dtype, impl).view(g.shape)
        from .autograd import GateFunction, apply

        return apply(GateFunction, x, A_log, dt_bias, form, bound, dtype, impl).view(g.shape)
    except Exception as error:
        if compiling():
            raise
        return again(fused_kda_gate, error, locals())


# ---- information ----


def _forward_arguments(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    *,
    num_threads: int = 0,
    impl: str | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """The binding's arguments for the forward that ``prefill(q, ..., **kwargs)`` would run."""
    states = [kwargs.pop(n, None) for n in ("state_indices", "has_initial_state")]
    update, written_slots = kwargs.pop("update_state", True), kwargs.pop("out_state_indices", None)
    first_valid_slot = kwargs.pop("first_valid_slot", 0)
    checkpoints, slots = kwargs.pop("checkpoints", None), kwargs.pop("checkpoint_slots", None)
    every = kwargs.pop("checkpoint_every", CHUNK) if checkpoints is not None else 0
    offset, behind = kwargs.pop("checkpoint_offset", None), _norm_fields(kwargs.pop("norm", None))
    out = kwargs.pop("out", None)
    defaults = dict.fromkeys(("A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens")) | dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), False
    )
    unknown = set(kwargs) - set(defaults) - {"state_v_first"}
    if unknown:
        raise TypeError(f"unexpected arguments {sorted(unknown)}")
    o = {**defaults, "state_v_first": True, **kwargs}
    call = _serving_call(
        q, k, v, g, beta, o["A_log"], o["dt_bias"], o["scale"], o["lower_bound"], o["use_qk_l2norm_in_kernel"],
        o["use_gate_in_kernel"], o["use_beta_sigmoid_in_kernel"], o["allow_neg_eigval"], o["state_v_first"],
        o["cu_seqlens"],
    )  # fmt: skip
    out = new_like(v) if out is None else out
    return (
        *call, state, state if update else None, *states, first_valid_slot, out, checkpoints, slots, None, None, None,
        None, every, 0, impl, num_threads, None, written_slots, offset, *behind,
    )  # fmt: skip


_EXPLAINED = ("forward", "backward", "decode", "verify", "flush", "flush_verify")


def explain(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    g: Any = None,
    beta: Any = None,
    state: Any = None,
    *,
    op: str = "forward",
    **kwargs: Any,
) -> str:
    """Explains which implementation would run with these arguments, and why not the others.

    One line each, with ``*`` before the chosen one, and in brackets the file of the source tree where its code begins.
    Nothing is computed.

    Args:
        op: the kind of call: ``"forward"`` (:func:`prefill`), ``"backward"`` (of :func:`chunk_kda`, with gradients of
            all inputs and outputs), ``"decode"`` (:func:`decode` and :func:`kda.decode_mtp`), ``"verify"``
            (:func:`kda.verify_kvbuffer`), ``"flush"`` (:func:`kda.flush_kvbuffer`) or ``"flush_verify"``
            (:func:`kda.flush_verify_kvbuffer`).
        q, k, v, g, beta, state, ...: arguments of that function. Its later arguments are passed by keyword, and for a
            flush all of them. ``chunk_kda`` has no ``state``: pass ``initial_state`` there.

    >>> import kda, numpy as np
    >>> x = np.zeros((1, 70, 1, 4), np.float32)
    >>> [line for line in kda.explain(x, x, x, x, x[..., 0]).splitlines() if line[0] == "*"]
    ['* cpu_chunk: chunks of 64 tokens as matrix products, SIMD and threads [src/cpu/chunk_forward.cc]']
    >>> pool, records = np.zeros((1, 1, 4, 4), np.float32), kda.new_records(1, 3, 1, 1, 4, 4)
    >>> accept_len = np.array([2], np.int32)
    >>> text = kda.explain(state=pool, records=records, accept_len=accept_len, op="flush")
    >>> [line for line in text.splitlines() if line[0] == "*"]
    ['* cpu_flush: rank-m update in one pass over the state, SIMD and threads [src/cpu/speculation.cc]']
    """
    if op not in _EXPLAINED:
        raise ValueError(f"op: expected one of {', '.join(_EXPLAINED)}, got {op!r}")
    if op != "forward":
        from ._explain import explain_backward, explain_call

        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if op == "backward":
            return explain_backward(inputs | ({} if state is None else {"initial_state": state}) | kwargs)
        if op == "flush":  # which has none of these
            inputs = {name: x for name, x in inputs.items() if x is not None}
        return explain_call(op, {**inputs, "state": state, **kwargs})
    try:
        return library().forward_explain(*_forward_arguments(q, k, v, g, beta, state, **kwargs))
    except Exception as error:
        return again(explain, error, locals())


def implementations(op: str) -> Sequence[str]:
    """The names of the implementations of ``op`` (forward, backward, decode, ..), in order of preference.

    >>> import kda
    >>> kda.implementations("backward")[-2:]  # a library with CUDA has its own before these
    ['cpu_chunk', 'reference']
    """
    if not isinstance(op, str) or op not in _OPERATORS:
        raise ValueError(f"op: expected one of {', '.join(_OPERATORS)}, got {op!a}")
    names: list[str] = []
    while name := library().implementation(op, len(names)):
        names.append(str(name))
    return names


def use_batch_invariant(enabled: bool = True) -> bool:
    """Sets whether the bits of a sequence must not depend on the rest of the call. Returns the previous setting.

    The setting holds for all threads from now on. Bits do not depend on the rest anyway, except in prefill and
    training with few heads and long sequences on Hopper, where the default splits sequences where it suits the call.
    Without these splits an H200 takes 1.2 to 2.6 times as long for such a prefill (docs/numerics.md). Workspaces need
    the size that :func:`workspace_size` returns after the change.

    >>> import kda
    >>> kda.use_batch_invariant(), kda.use_batch_invariant(False)
    (False, True)
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled: expected True or False, got {enabled!r}")
    return bool(library().use_batch_invariant(enabled))


def info() -> dict[str, str]:
    """What the library was built with and what it finds here: version, CPU instruction set, CUDA.

    >>> import kda
    >>> kda.info()["version"]
    '0.1.0'
    """
    return dict(line.split(": ", 1) for line in str(library().info()).splitlines())

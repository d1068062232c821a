"""Serving: prefill and decode, in place on a pool of states. Shapes and errors are those of :mod:`kda.training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy import ndarray

from .arguments import arrays_of, norm_fields
from .call.arrays import new_like
from .call.dispatch import dispatched
from .call.eager import check_serving, is_plain_step, mark_step, mark_written
from .call.inputs import WITH_GRADIENTS, gate_of
from .call.library import library
from .call.options import CHUNK, make_options
from .call.retry import in_sentences, retry
from .call.streams import on_stream, without_stream
from .call.tracing import compiling, modes, recording

if TYPE_CHECKING:
    from .arguments import Norm


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
    cp_context: Any = None,
    state_rank: int | None = None,
    out: Any = None,
    workspace: Any = None,
    impl: str | None = None,
    num_threads: int = 0,
    stream: object = None,
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
            the one in ``checkpoint_slots[n, 0]``. Chunks then end at multiples of 64 tokens of the request. On GPUs
            calls with an ``every`` that is no multiple of 64 run token by token.
        norm: a :class:`kda.Norm`: the norm and gate of the output, in the same call.
        cp_context: a :class:`kda.cp.Context`, or an ``FLACPContext``: the tokens are this rank's window of prompts that
            are spread over several ranks. ``state`` without indices, ``state_indices`` and ``has_initial_state`` then
            have a row for each sequence of all ranks. The rank with the first token of a sequence reads its state, and
            the rank with the last token writes it. A padded sequence has outputs, from zeros. ``cu_seqlens``,
            checkpoints, ``out_state_indices`` and ``workspace`` are refused.
        state_rank: with ``cp_context``, the rank of the group whose ``state`` is read and written for all sequences,
            because it decodes them. That costs a broadcast and an all-gather of states.
        out: ``[B, T, HV, V]``, written and returned; made if None. Rows beyond ``cu_seqlens[-1]`` are zeroed.
        workspace: scratch memory of at least :func:`workspace_size` bytes, 256-byte aligned; made for the call if
            None.
        impl: force an implementation.  num_threads: CPU threads at most, 0 for OpenMP's default.
        stream: of a GPU, on which the call runs, whosever the arrays are: its handle, or an object that has one (by
            ``__cuda_stream__``, ``cuda_stream`` or ``ptr``). By default torch's current stream, and where torch is
            missing CUDA's default one.

    Returns:
        ``out``.

    >>> import kda, numpy as np
    >>> x, beta = np.ones((1, 70, 1, 4), np.float32) / 2, np.ones((1, 70, 1), np.float32)
    >>> pool = np.zeros((3, 1, 4, 4), np.float32)
    >>> o = kda.prefill(x, x, x, 0 * x, beta, pool, state_indices=np.array([2], np.int32))
    >>> o.shape, float(pool[2, 0, 0, 0]), float(pool[1].sum())
    ((1, 70, 1, 4), 0.25, 0.0)
    """
    if stream is not None:
        return on_stream(prefill, stream, without_stream(locals()))
    try:
        A, bias = gate_of(use_gate_in_kernel, A_log, dt_bias, lower_bound, v, q)
        in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
        options = make_options(A, scale, lower_bound, in_kernel, allow_neg_eigval, state_v_first)
        if out is None:
            out = new_like(v)
        every = checkpoint_every if checkpoints is not None else 0
        behind = None if norm is None else norm_fields(norm)
        if cp_context is not None or state_rank is not None:
            given = (q, k, v, g, beta, A, bias)
            check_serving(WITH_GRADIENTS, (q, k, v, g, beta, A_log, dt_bias, state, out, *arrays_of(norm)))
            others = {"checkpoints": checkpoints, "out_state_indices": out_state_indices, "workspace": workspace}
            pool = (state, state_indices, has_initial_state, first_valid_slot, update_state, state_rank)
            rest = {"out": out, "norm": behind, "impl": impl, "num_threads": num_threads}
            return _prefill_window(cp_context, given, cu_seqlens, options, pool, others, **rest)
        if dispatched():
            from .call.graph import run_operator

            if workspace is not None and compiling():
                raise ValueError("workspace: expected None under torch.compile, got an array")
            slots = {"state_indices": state_indices, "out_state_indices": out_state_indices}
            slots |= {"has_initial_state": has_initial_state, "first_valid_slot": first_valid_slot}
            kept = {"checkpoints": checkpoints, "checkpoint_slots": checkpoint_slots, "checkpoint_every": every}
            kept["checkpoint_offset"] = checkpoint_offset
            how = {"options": options, "norm": behind, "impl": impl, "num_threads": num_threads}
            inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias}
            states = {"state": state, "out": out, "update_state": update_state, "cu_seqlens": cu_seqlens}
            run_operator("prefill", **inputs, **states, **slots, **kept, **how)
            return out
        arrays = (q, k, v, g, beta, A_log, dt_bias, state, checkpoints, out, workspace, *arrays_of(norm))
        indices = (cu_seqlens, state_indices, out_state_indices, has_initial_state, checkpoint_slots, checkpoint_offset)
        check_serving(WITH_GRADIENTS, (*arrays, *indices))
        library().forward(
            q,
            k,
            v,
            g,
            beta,
            A,
            bias,
            cu_seqlens,
            options=options,
            h0=state,
            hT=state is not None and update_state,
            state_indices=state_indices,
            has_initial_state=has_initial_state,
            first_valid_slot=first_valid_slot,
            o=out,
            checkpoints=checkpoints,
            checkpoint_slots=checkpoint_slots,
            checkpoint_every=every,
            impl=impl,
            num_threads=num_threads,
            workspace=workspace,
            out_state_indices=out_state_indices,
            checkpoint_offset=checkpoint_offset,
            norm=behind,
        )
        mark_written(state if update_state else None, out, checkpoints, workspace)
        return out
    except Exception as error:
        if compiling():
            raise
        return retry(prefill, error, locals())


def _prefill_window(
    cp_context: Any,
    inputs: tuple[Any, ...],
    cu: Any,
    options: tuple[Any, ...],
    pool: tuple[Any, ...],
    others: dict[str, Any],
    **rest: Any,
) -> Any:
    """:func:`prefill` of this rank's window."""
    if cp_context is None:
        raise ValueError("state_rank: expected None without cp_context, got a rank")
    from .cp._fla import as_context
    from .cp._prefill import Pool
    from .cp._prefill import prefill as on_this_rank

    for name, x in others.items():
        if x is not None:
            raise ValueError(f"{name}: expected None with cp_context, got {type(x).__name__}")
    states = Pool(*pool)
    out = on_this_rank(as_context(cp_context), inputs, cu, options, states, **rest)
    mark_written(states.state if states.update else None, out)
    return out


@in_sentences
def workspace_size(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, *, num_threads: int = 0, **kwargs: Any
) -> int:
    """Bytes of workspace that :func:`prefill` needs with these arguments: a function of shapes, options and device.

    >>> import kda, numpy as np
    >>> x = np.zeros((1, 70, 1, 4), np.float32)
    >>> kda.workspace_size(x, x, x, x, x[..., 0], num_threads=1) > 0
    True
    """
    arguments = forward_arguments(q, k, v, g, beta, state, num_threads=num_threads, **kwargs)
    if not compiling():
        return int(library().forward_workspace(**arguments))
    from .call.graph import run_operator

    held, written, out = (arguments.pop(name) for name in ("h0", "hT", "o"))
    size: int = run_operator("prefill_workspace", **arguments, state=held, update_state=written is not None, out=out)
    return size


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
    stream: object = None,
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
    if stream is not None:
        return on_stream(decode, stream, without_stream(locals()))
    try:
        A, bias = gate_of(use_gate_in_kernel, A_log, dt_bias, lower_bound, v, q)
        in_kernel = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
        options = make_options(A, scale, lower_bound, in_kernel, allow_neg_eigval, state_v_first)
        if out is None:
            out = new_like(v)
        behind = None if norm is None else norm_fields(norm)
        if (compiling() or modes() or recording()) and dispatched():  # the call itself is most of the cost
            from .call.graph import run_operator

            inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias}
            slots = {"state_indices": state_indices, "out_state_indices": out_state_indices}
            slots |= {"has_initial_state": has_initial_state, "first_valid_slot": first_valid_slot}
            how = {"cu_seqlens": cu_seqlens, "options": options, "impl": impl, "num_threads": num_threads}
            states = {"state": state, "out": out, "update_state": update_state, "norm": behind}
            run_operator("decode", **inputs, **slots, **states, **how)
            return out
        indices = (state_indices, out_state_indices, has_initial_state, cu_seqlens)
        if type(q) is ndarray or not is_plain_step(q, k, v, g, beta, state, out, (A_log, dt_bias), indices=indices):
            check_serving(WITH_GRADIENTS, (q, k, v, g, beta, A_log, dt_bias, state, out, *indices))
        if norm is not None:
            check_serving(WITH_GRADIENTS, arrays_of(norm))
        library().decode(
            q,
            k,
            v,
            g,
            beta,
            A,
            bias,
            cu_seqlens,
            options=options,
            h0=state,
            hT=state is not None and update_state,
            state_indices=state_indices,
            has_initial_state=has_initial_state,
            first_valid_slot=first_valid_slot,
            o=out,
            impl=impl,
            num_threads=num_threads,
            out_state_indices=out_state_indices,
            norm=behind,
        )
        mark_step(state if update_state else None, out)
        return out
    except Exception as error:
        if compiling():
            raise
        return retry(decode, error, locals())


def forward_arguments(
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
) -> dict[str, Any]:
    """The operands of the forward that ``prefill(q, ..., **kwargs)`` would run."""
    found = {"impl": impl, "num_threads": num_threads, "norm": norm_fields(kwargs.pop("norm", None))}
    for name in ("state_indices", "has_initial_state", "out_state_indices", "checkpoint_slots", "checkpoint_offset"):
        found[name] = kwargs.pop(name, None)
    update, out, _ = kwargs.pop("update_state", True), kwargs.pop("out", None), kwargs.pop("stream", None)
    found["first_valid_slot"] = kwargs.pop("first_valid_slot", 0)
    found["checkpoints"] = checkpoints = kwargs.pop("checkpoints", None)
    found["checkpoint_every"] = kwargs.pop("checkpoint_every", CHUNK) if checkpoints is not None else 0
    defaults = dict.fromkeys(("A_log", "dt_bias", "scale", "lower_bound", "cu_seqlens")) | dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), False
    )
    unknown = set(kwargs) - set(defaults) - {"state_v_first"}
    if unknown:
        raise TypeError(f"unexpected arguments {sorted(unknown)}")
    o = {**defaults, "state_v_first": True, **kwargs}
    A, bias = gate_of(o["use_gate_in_kernel"], o["A_log"], o["dt_bias"], o["lower_bound"], v, q)
    in_kernel = (o["use_qk_l2norm_in_kernel"], o["use_gate_in_kernel"], o["use_beta_sigmoid_in_kernel"])
    options = make_options(A, o["scale"], o["lower_bound"], in_kernel, o["allow_neg_eigval"], o["state_v_first"])
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A, "dt_bias": bias, "cu_seqlens": o["cu_seqlens"]}
    states = {"h0": state, "hT": state if update else None, "o": new_like(v) if out is None else out}
    return {**inputs, "options": options, **states, **found}

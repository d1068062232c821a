"""FLA's decode for serving engines, under its own name: states in a pool, several tokens per request."""

from __future__ import annotations

import re
from typing import Any

from .call.arrays import is_torch, torch
from .call.eager import check_serving
from .call.inputs import WITH_GRADIENTS, dense_last, single, state_layout_of
from .call.retry import in_sentences
from .call.tracing import compiling, is_readable, is_true
from .serving import decode
from .speculation import decode_mtp

_NAMES = {"state": "initial_state", "snapshots": "initial_state", "accepted": "num_accepted_tokens"}
_NAMES |= dict.fromkeys(("state_indices", "snapshot_slots"), "ssm_state_indices")


@in_sentences
def fused_recurrent_kda_fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    initial_state: Any = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Any = None,
    *,
    impl: str | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """The token recurrence on torch tensors, in place on a pool of states. Signature and semantics of
    ``fla.ops.kda.fused_recurrent``; :func:`kda.decode` and :func:`kda.decode_mtp` can do more. No gradients.

    Args:
        q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, cu_seqlens, allow_neg_eigval, use_*, impl: as in
            :func:`kda.fused_recurrent_kda`.
        initial_state: ``[N, HV, K, V]`` float32 or bfloat16, ``[N, HV, V, K]`` with ``state_v_first``; with
            ``ssm_state_indices`` a pool of any number of slots. Zeros if None.
        output_final_state: return the state after the last token. Only without ``inplace_final_state``.
        inplace_final_state: write it over the initial state, which must then be given, and return that.
        ssm_state_indices: integers. ``[N]``: the slot of each request, which has one token. ``[N, S]`` with
            ``S >= T``, only in place: request n starts from slot ``[n, 0]``, and its state after token t goes to slot
            ``[n, t]``. Negative ones are padding.
        num_accepted_tokens: ``[N]`` integers, with ``[N, S]`` slots: request n starts from slot
            ``[n, num_accepted_tokens[n] - 1]``.
        out: ``[B, T, HV, V]``, written and returned; made if None.

    Returns:
        ``(out, final_state)``; the latter is ``initial_state``, a float32 tensor, or None.

    >>> import kda, torch
    >>> x, pool = torch.ones(2, 1, 1, 4) / 2, torch.zeros(3, 1, 4, 4)
    >>> slots = torch.tensor([2, 0], dtype=torch.int32)
    >>> o, state = kda.fused_recurrent_kda_fwd(x, x, x, 0 * x, torch.ones(2, 1, 1), initial_state=pool, scale=1.0,
    ...                                        ssm_state_indices=slots)
    >>> state is pool, pool[:, 0, 0, 0].tolist(), o.flatten().tolist() == [0.5] * 8
    (True, [0.25, 0.0, 0.25], True)
    """
    if not is_torch(q):
        raise ValueError(f"q: expected a torch tensor (decode takes other arrays), got {type(q).__name__}")
    state_v_first = state_layout_of(state_v_first, kwargs)
    if kwargs:
        raise TypeError(f"fused_recurrent_kda_fwd: unexpected arguments {sorted(kwargs)}")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots, many = _slots(ssm_state_indices, num_accepted_tokens, N, q.shape[0] * q.shape[1], inplace_final_state)
    if initial_state is None and (inplace_final_state or slots is not None):
        name = "inplace_final_state=True" if inplace_final_state else "ssm_state_indices"
        raise ValueError(f"initial_state: expected a tensor with {name}, got None")
    if not compiling():  # operators refuse in graphs
        check_serving(WITH_GRADIENTS, (q, k, v, g, beta, A_log, dt_bias, initial_state, out))
    q, k, v, g, A_log, dt_bias = map(dense_last, (q, k, v, g, single(A_log), single(dt_bias)))
    options = {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "lower_bound": lower_bound,
        "cu_seqlens": cu_seqlens,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first,
        "out": out,
        "impl": impl,
    }
    try:
        if many:
            accepted = None if num_accepted_tokens is None else num_accepted_tokens.int()
            out = decode_mtp(
                q,
                k,
                v,
                g,
                beta,
                initial_state,
                state_indices=slots[:, 0].contiguous(),
                snapshots=initial_state,
                snapshot_slots=slots,
                accepted=accepted,
                update_state=False,
                **options,
            )
            return out, initial_state
        if inplace_final_state:
            return decode(q, k, v, g, beta, initial_state, state_indices=slots, **options), initial_state
        state, slots = _copied(initial_state, slots, N, (v.shape[2], q.shape[3], v.shape[3]), state_v_first, q)
        out = decode(q, k, v, g, beta, state, state_indices=slots, **options)
        return out, state if output_final_state else None
    except ValueError as error:
        raise ValueError(re.sub(r"^\w+(?=:)", lambda m: _NAMES.get(m[0], m[0]), str(error))) from None


def _copied(
    initial_state: Any, slots: Any, N: int, sizes: tuple[int, int, int], v_first: bool, q: Any
) -> tuple[Any, Any]:
    """States in float32, like FLA's final states, for a call that must not change the given ones, and their slots."""
    HV, K, V = sizes
    if initial_state is None:
        return q.new_zeros(N, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32), None
    if slots is None:
        return initial_state.to(torch.float32, copy=True), None
    count = initial_state.shape[0]
    if is_true(slots.shape[0] != N) or (is_true(slots.shape[0] > 0) and is_true(count == 0)):
        raise ValueError(f"state_indices: expected [{N}] slots of a pool, got {list(slots.shape)}")
    if is_readable(slots) and bool((slots >= count).any()):
        raise ValueError(f"state_indices: expected slots below {count}, got {int(slots.max())}")
    state = initial_state[slots.clamp(0, count - 1).long()].float()
    padding = (slots < 0) | (slots >= count)
    return state, torch.where(padding, -1, torch.arange(N, dtype=torch.int32, device=slots.device))


def _slots(indices: Any, accepted: Any, N: int, tokens: int, in_place: bool) -> tuple[Any, bool]:
    """Returns the slots as int32, and whether there is one for every token."""
    if indices is None:
        if accepted is not None:
            raise ValueError("num_accepted_tokens: expected None without ssm_state_indices, got a tensor")
        return None, False
    if not is_torch(indices) or indices.is_floating_point() or indices.ndim not in (1, 2):
        got = f"{list(indices.shape)} {indices.dtype}" if is_torch(indices) else type(indices).__name__
        raise ValueError(f"ssm_state_indices: expected a tensor of integers, [N] or [N, S], got {got}")
    many = indices.ndim == 2
    if not many and (accepted is not None or is_true(tokens > N)):
        wanted = "expected [N, S], a slot for every token, with several tokens a request or num_accepted_tokens"
        raise ValueError(f"ssm_state_indices: {wanted}, got {list(indices.shape)}")
    if many and not in_place:
        raise ValueError("inplace_final_state: expected True with ssm_state_indices [N, S], got False")
    return indices.int(), many

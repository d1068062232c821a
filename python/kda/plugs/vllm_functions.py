"""vLLM's functions for KDA, on ours: the same parameters, results and padding. ``kda.vllm`` puts them into its modules.

Slot 0 of vLLM's pool belongs to nobody, so an index below 1 is padding: its outputs are 0, and no state is touched.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.eager import mark_written
from ..call.inputs import gate_parameters
from ..call.library import library
from ..call.options import make_options
from ..speculation import decode_mtp
from .declined import Declined, check_one_row
from .rows import decode_rows

_FIRST = 1  # the first slot that a request may have


def _prefill(
    inputs: tuple[Any, ...],
    *,
    scale: Any,
    initial_state: Any,
    output: bool,
    lower_bound: Any,
    l2norm: bool,
    cu: Any,
    out: Any,
    sigmoid: bool,
) -> tuple[Any, Any]:
    """The initial states stay as they are, and the last ones have their dtype: vLLM copies them into its pool.
    ``inputs``: q, k, v, g, beta, A_log and dt_bias."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    N, K, (HV, V) = q.shape[0] if cu is None else cu.shape[0] - 1, q.shape[3], v.shape[2:]
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    last = torch.empty(N, HV, V, K, dtype=dtype, device=v.device) if output else None
    A_log, dt_bias = gate_parameters(A_log, dt_bias, v, q)
    options = make_options(A_log, scale, lower_bound, (l2norm, True, sigmoid), neg_eigval=False, v_first=True)
    library().forward(q, k, v, g, beta, A_log, dt_bias, cu, options=options, h0=initial_state, hT=last, o=out)
    mark_written(out)
    return out, last


def _recurrent(
    inputs: tuple[Any, ...],
    *,
    lower_bound: Any,
    pool: Any,
    cu: Any,
    slots: Any,
    accepted: Any,
    out: Any,
    scale: Any = None,
    l2norm: bool = True,
    sigmoid: bool = True,
    gate: bool = True,
) -> tuple[Any, Any]:
    """``slots [N]``: a token of each request. ``slots [N, S]``: up to S tokens of each. The state after token t goes to
    slot ``[n, t]``, and with ``accepted`` a request starts from slot ``[n, accepted - 1]``."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    if cu is None or slots is None or pool is None:
        raise Declined("ssm_state_indices: expected slots of a pool, and cu_seqlens, got None")
    (B, tokens, _, _), N, several = q.shape, cu.shape[0] - 1, slots.ndim == 2
    check_one_row("q", B)
    if not several and (tokens != N or accepted is not None):
        raise Declined(f"ssm_state_indices: expected [N, S] with several tokens a request, got {list(slots.shape)}")
    S = slots.shape[1] if several else 1
    if tokens == N * S:  # all have as many
        out = decode_rows(
            q,
            k,
            v,
            g,
            beta,
            pool,
            N=N,
            T=S,
            out=out,
            state_indices=slots,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            scale=scale,
            l2norm=l2norm,
            gate=gate,
            sigmoid=sigmoid,
            first_valid_slot=_FIRST,
            update_state=not several,
            snapshots=pool if several else None,
            snapshot_slots=slots if several else None,
            accepted=accepted,
        )
        return out, pool
    slots, accepted = slots[:N], None if accepted is None else accepted[:N]
    out = decode_mtp(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices=slots[:, 0],
        cu_seqlens=cu,
        snapshots=pool,
        snapshot_slots=slots,
        accepted=accepted,
        update_state=False,
        out=out,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=gate,
        use_beta_sigmoid_in_kernel=sigmoid,
        first_valid_slot=_FIRST,
    )
    return out, pool


# ---- of Kimi-K3, which Kimi-Linear uses, too ----


def chunk_kda_with_fused_gate(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    g_bias: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    lower_bound: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    inputs = (q, k, v, raw_g, raw_beta, A_log, g_bias)
    return _prefill(
        inputs,
        scale=scale,
        initial_state=initial_state,
        output=output_final_state,
        lower_bound=lower_bound,
        l2norm=use_qk_l2norm_in_kernel,
        cu=cu_seqlens,
        out=out,
        sigmoid=True,
    )


def fused_recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    cu_seqlens: Any,
    ssm_state_indices: Any,
    num_accepted_tokens: Any = None,
    out: Any = None,
    fuse_gate: Any = None,
) -> tuple[Any, Any]:
    inputs = (q, k, v, raw_g, raw_beta, A_log, dt_bias)
    return _recurrent(
        inputs,
        lower_bound=lower_bound,
        pool=initial_state,
        cu=cu_seqlens,
        slots=ssm_state_indices,
        accepted=num_accepted_tokens,
        out=out,
    )


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    state_indices: Any,
    scale: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    out = decode_rows(
        mixed_qkv,
        None,
        None,
        raw_g,
        raw_beta,
        initial_state,
        N=mixed_qkv.shape[0],
        T=1,
        out=out,
        state_indices=state_indices,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        first_valid_slot=_FIRST,
    )
    return out, initial_state


# ---- of GLM-5-next: beta has passed the sigmoid before a prefill, and the gate need not be bounded ----


def _glm_chunk(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    beta: Any,
    A_log: Any,
    g_bias: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    safe_gate: bool = False,
    lower_bound: Any = -5.0,
) -> tuple[Any, Any]:
    inputs = (q, k, v, raw_g, beta, A_log, g_bias)
    return _prefill(
        inputs,
        scale=scale,
        initial_state=initial_state,
        output=output_final_state,
        lower_bound=lower_bound if safe_gate else None,
        l2norm=use_qk_l2norm_in_kernel,
        cu=cu_seqlens,
        out=None,
        sigmoid=False,
    )


def _glm_recurrent(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    out: Any = None,
    sigmoid_beta: bool = False,
    a_log: Any = None,
    g_bias: Any = None,
    compute_gate: bool = False,
    lower_bound: Any = -5.0,
) -> tuple[Any, Any]:
    if not inplace_final_state or beta is None or beta.ndim != 3:
        raise Declined("inplace_final_state, beta: expected True and [B, T, HV]")
    if not compute_gate:
        a_log = g_bias = lower_bound = None
    inputs = (q, k, v, g, beta, a_log, g_bias)
    return _recurrent(
        inputs,
        lower_bound=lower_bound,
        pool=initial_state,
        cu=cu_seqlens,
        slots=ssm_state_indices,
        accepted=num_accepted_tokens,
        out=out,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        sigmoid=sigmoid_beta,
        gate=compute_gate,
    )


K3 = {
    "chunk_kda_with_fused_gate": chunk_kda_with_fused_gate,
    "fused_recurrent_kda": fused_recurrent_kda,
    "fused_recurrent_kda_packed_decode": fused_recurrent_kda_packed_decode,
}
GLM = {"chunk_kda_with_fused_gate": _glm_chunk, "fused_recurrent_kda": _glm_recurrent}

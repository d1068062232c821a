"""SGLang's kernel class for KDA, on our functions. ``kda.sglang`` puts it into SGLang's dispatcher.

States are a pool ``[slots, HV, V, K]``, written in place; an index of -1 is padding, whose outputs are 0. Queries, keys
and values come after the convolution, before the norm; gate and beta raw. What our functions refuse with a
``ValueError`` has touched nothing yet. Then SGLang's own kernel runs, and a warning says once why.

Tables that depend on a batch alone are made in its first layer and kept for the others.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.tracing import raw_stream
from ..serving import decode, prefill
from ..speculation import decode_mtp
from .declined import Declined, check_one_row, or_own
from .rows import decode_rows

CHUNK = 64  # SGLang counts boundaries of states in chunks of so many tokens


def kernel_class(triton: type) -> type:
    """The class for the dispatcher. It derives from ``triton``, SGLang's own kernel: SGLang passes a bounded gate, and
    captures prefill in graphs, only to that class and those derived from it."""
    methods = {name: or_own("SGLang", ours, getattr(triton, name)) for name, ours in _METHODS.items()}
    return type("KDAKernel", (Kernel, triton), methods)


class Kernel:
    """What SGLang asks of a kernel, but for its methods: ``kernel_class`` adds those of ``_METHODS``."""

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_track_state_snapshot = True
    uses_state_checkpoints = False  # the plan behind state_checkpoint_*: track_chunk_idx says the same
    supports_fused_chain_verify = False  # with True, SGLang would run a kernel of its own instead of ours

    def __init__(self) -> None:
        super().__init__()
        self.boundaries = _Kept()
        self.snapshots = _Kept()


class _Kept:
    """A table made from one of SGLang's tensors, kept while the same tensor comes again on the same stream. Another
    stream would not wait until it is made, and may still read it when it is dropped. It is not kept if it was made
    while a graph was captured: memory and contents would be the graph's."""

    def __init__(self) -> None:
        self._source: Any = None
        self._key: Any = None
        self._table: Any = None

    def get(self, source: Any, key: Any, make: Any) -> Any:
        here = key, raw_stream(source.device.index) if source.is_cuda else None
        if self._source is source and self._key == here:
            return self._table
        table = make(source, key)
        if not (source.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._source, self._key, self._table = source, here, table
        return table


# ---- decode ----


def _rows(a: Any, b: Any, N: int, T: int, HV: int, K: int) -> tuple[Any, Any]:
    """Gate and beta by request, in whatever shape SGLang has them."""
    try:
        return a.reshape(N, T, HV, K), b.reshape(N, T, HV)
    except RuntimeError:
        got = f"got shapes {list(a.shape)} and {list(b.shape)}"
        raise Declined(f"a, b: expected {N * T} tokens of {HV} heads, {got}") from None


def _decode(
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    *,
    A_log: Any,
    dt_bias: Any,
    ssm_states: Any,
    cache_indices: Any,
    query_start_loc: Any,
    lower_bound: float | None = None,
) -> Any:
    """``q, k: [1, T, H, K]``, ``v: [1, T, HV, V]``, ``a`` and ``b`` the raw gate and beta: ``[1, T, HV, V]``."""
    (B, T, HV, _), N = v.shape, query_start_loc.shape[0] - 1
    check_one_row("v", B)
    if T == N:  # a token of each request
        return decode_rows(
            q,
            k,
            v,
            a,
            b,
            ssm_states,
            N=N,
            T=1,
            state_indices=cache_indices,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
        )
    a, b = _rows(a, b, 1, T, HV, q.shape[3])
    return decode(
        q,
        k,
        v,
        a,
        b,
        ssm_states,
        cu_seqlens=query_start_loc,
        state_indices=_first(cache_indices, N),
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )


def _packed_decode(
    kernel: Any,
    mixed_qkv: Any,
    a: Any,
    b: Any,
    *,
    A_log: Any,
    dt_bias: Any,
    scale: float,
    ssm_states: Any,
    cache_indices: Any,
    num_v_heads: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    replayssm_d: Any = None,
    replayssm_k: Any = None,
    replayssm_g: Any = None,
    replayssm_write_pos: Any = None,
    replayssm_force_flush: Any = None,
) -> Any:
    """``mixed_qkv: [B, 2*H*K + HV*V]``, a token of each request: ``[1, B, HV, V]``."""
    if replayssm_write_pos is not None:
        raise Declined("replayssm_write_pos: expected None, as SGLang reads its rings with kernels of its own, got one")
    _, HV, V, _ = ssm_states.shape
    if (num_v_heads, head_v_dim) != (HV, V):
        raise Declined(f"ssm_states: expected [slots, {num_v_heads}, {head_v_dim}, K], got {list(ssm_states.shape)}")
    return decode_rows(
        mixed_qkv,
        None,
        None,
        a,
        b,
        ssm_states,
        N=mixed_qkv.shape[0],
        T=1,
        state_indices=cache_indices,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        lower_bound=lower_bound,
    )


def _first(indices: Any, N: int) -> Any:
    """SGLang may pass the slots of more rows than a graph's step has. A slice takes a microsecond."""
    return indices if indices.shape[0] == N else indices[:N]


# ---- prefill ----


def _extend(
    kernel: Kernel,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    ssm_states: Any,
    cache_indices: Any,
    query_start_loc: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    return_intermediate_states: bool = False,
    track_ssm_h_src: Any = None,
    track_state: Any = None,
    track_chunk_idx: Any = None,
    extend_seq_lens_cpu: Any = None,
    extend_prefix_lens: Any = None,
    layer_id: Any = None,
    is_spec_decode: bool = False,
    track_ssm_h_batch_src: Any = None,
    state_checkpoint_cu_starts: Any = None,
    num_state_checkpoints: int = 0,
    state_checkpoint_every_n_tokens: int = 0,
    state_checkpoint_indices: Any = None,
    chunk_indices: Any = None,
    chunk_offsets: Any = None,
) -> Any:
    """Prompts packed into one row: ``o: [1, T, HV, V]``, or ``(o, None)`` if states on the way are asked for. Those go
    to ``track_state``, so nobody reads what SGLang's kernel returns in the place of None."""
    if return_intermediate_states and track_state is None and track_ssm_h_src is not None and track_ssm_h_src.numel():
        raise Declined("track_state: expected a buffer for the states of chunks, got None")
    T, N = q.shape[1], query_start_loc.shape[0] - 1
    checkpoints = slots = None
    if track_state is not None:
        # Under a graph SGLang refills track_chunk_idx before each replay, and passes no lengths.
        chunks = (T if extend_seq_lens_cpu is None else int(max(extend_seq_lens_cpu, default=0))) // CHUNK
        if chunks:
            key = (N, chunks)
            if extend_seq_lens_cpu is None:
                slots = _boundary_slots(track_chunk_idx, key)
            else:
                slots = kernel.boundaries.get(track_chunk_idx, key, _boundary_slots)
            checkpoints = track_state
    o = prefill(
        q,
        k,
        v,
        g if g.shape[1] == T else g[:, :T],
        beta if beta.shape[1] == T else beta[:, :T],
        ssm_states,
        state_indices=_first(cache_indices, N),
        cu_seqlens=query_start_loc,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=A_log is not None,
        use_beta_sigmoid_in_kernel=beta_is_raw,
        checkpoints=checkpoints,
        checkpoint_slots=slots,
        checkpoint_every=CHUNK,
    )
    return (o, None) if return_intermediate_states else o


def _boundary_slots(track_chunk_idx: Any, key: tuple[int, int]) -> Any:
    """``[N, chunks]``: row n of the buffer where the state after chunk ``track_chunk_idx[n]`` is wanted, else -1."""
    N, chunks = key
    chunk, row = _counting(chunks, track_chunk_idx.device), _counting(N, track_chunk_idx.device)
    return torch.where(track_chunk_idx[:N, None] == chunk[1:], row[:N, None], -1)


_counted: dict[Any, Any] = {}  # by device and stream


def _counting(last: int, device: torch.device) -> Any:
    """0 .. last, int32. Never written, so one tensor serves all calls of a stream. Those of another one would not wait
    until it is made."""
    here = device, raw_stream(device.index) if device.type == "cuda" else None
    numbers = _counted.get(here)
    if numbers is None or numbers.shape[0] <= last:
        numbers = torch.arange(max(last, 1023) + 1, dtype=torch.int32, device=device)
        if not (numbers.is_cuda and torch.cuda.is_current_stream_capturing()):
            _counted[here] = numbers
    return numbers[: last + 1]


# ---- drafts ----


def _target_verify(
    kernel: Kernel,
    A_log: Any,
    dt_bias: Any,
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    *,
    ssm_states: Any,
    cache_indices: Any,
    query_start_loc: Any,
    intermediate_states_buffer: Any,
    intermediate_state_indices: Any,
    cache_steps: int,
    retrieve_parent_token: Any,
    lower_bound: float | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
) -> Any:
    """Outputs of drafts, with the state after each in ``intermediate_states_buffer``; the pool stays."""
    if cache_ring:
        raise Declined("cache_ring: expected False, as SGLang folds its rings with kernels of its own, got True")
    if intermediate_states_buffer is None:
        raise Declined("intermediate_states_buffer: expected a buffer for the states of drafts, got None")
    (B, tokens, HV, V), N, T = v.shape, query_start_loc.shape[0] - 1, cache_steps
    check_one_row("v", B)
    apart, step, *strides = intermediate_states_buffer.stride()  # a row may have more states than this round's
    slots = kernel.snapshots.get(intermediate_state_indices, (N, apart // step, T), _snapshot_slots)
    if tokens == N * T and retrieve_parent_token is None:
        return decode_rows(
            q,
            k,
            v,
            a,
            b,
            ssm_states,
            N=N,
            T=T,
            state_indices=cache_indices,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            update_state=False,
            snapshots=intermediate_states_buffer,
            snapshot_slots=slots,
        )
    (H, K), (rows, last, *state) = q.shape[2:], intermediate_states_buffer.shape
    snapshots = intermediate_states_buffer.as_strided(((rows - 1) * (apart // step) + last, *state), (step, *strides))
    common: dict[str, Any] = dict(
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    if retrieve_parent_token is None:
        a, b = _rows(a, b, 1, tokens, HV, K)
        return decode_mtp(
            q,
            k,
            v,
            a,
            b,
            ssm_states,
            state_indices=_first(cache_indices, N),
            cu_seqlens=query_start_loc,
            update_state=False,
            snapshots=snapshots,
            snapshot_slots=slots,
            **common,
        )
    if tokens != N * T:
        raise Declined("query_start_loc: expected as many drafts in every tree, got other lengths")
    drafts = (q.view(N, T, H, K), k.view(N, T, H, K), v.view(N, T, HV, V), *_rows(a, b, N, T, HV, K))
    out = v.new_empty(N, T, HV, V)
    _verify_tree(drafts, ssm_states, cache_indices[:N], snapshots, slots, retrieve_parent_token, out, common)
    return out.view(1, tokens, HV, V)


def _snapshot_slots(rows: Any, key: tuple[int, int, int]) -> Any:
    """``[N, T]``: where the state after each draft goes, counted in states. Below 0 for rows below 0."""
    N, steps, T = key
    return (rows[:N, None] * steps + _counting(T, rows.device)[:T]).int()


def _verify_tree(
    drafts: tuple[Any, ...],
    pool: Any,
    cache_indices: Any,
    snapshots: Any,
    slots: Any,
    parents: Any,
    out: Any,
    common: dict[str, Any],
) -> None:
    """One call a depth would need the tree on the host. One a token does not: a parent comes before its children, so
    token t starts from the snapshot of its parent and leaves its own."""
    live = cache_indices[:, None] >= 0
    starts = torch.where(live, slots[:, :1] + parents[: slots.shape[0]].clamp(min=0), -1).int()
    ends = torch.where(live, slots, -1)
    for t in range(out.shape[1]):
        q, k, v, g, beta = (x[:, t : t + 1] for x in drafts)
        here: dict[str, Any] = {"out": out[:, t : t + 1], **common}
        if t == 0:
            here |= {"state_indices": cache_indices, "snapshots": snapshots, "snapshot_slots": slots[:, :1]}
            decode_mtp(q, k, v, g, beta, pool, update_state=False, **here)
        else:
            here |= {"state_indices": starts[:, t], "out_state_indices": ends[:, t]}
            decode(q, k, v, g, beta, snapshots, **here)


_METHODS = {
    "decode": _decode,
    "packed_decode": _packed_decode,
    "extend": _extend,
    "target_verify": _target_verify,
}

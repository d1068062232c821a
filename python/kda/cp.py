"""Context parallelism: packed sequences whose tokens are spread over the ranks of a ``torch.distributed`` group.

Every rank owns a window of the tokens, in the order of the ranks. Only the last sequence of a window can continue in
the next one, so one map per rank and head, ``S_out = M S_in + b`` (docs/operators/segments.md), carries everything
across the borders.
Ranks exchange their maps in one all-gather, and each composes the maps that it needs into the initial state of its
first sequence. Gradients go the other way with the dual maps. Nothing depends on which rank is faster: results have
the same bits every time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._lib import library
from ._options import Options
from ._packing import integer, offsets_of
from .autograd import (
    apply,
    chunks_between_states,
    first_derivatives,
    plain,
    run_backward,
    run_forward,
    state_shape,
    wide_dtype,
)
from .segment import run_segment_merge

Tensor = torch.Tensor

# Newer versions of torch have renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Context:
    """Where the tokens of this rank lie among those of all ranks. Every rank of the group makes one from the same
    arguments and passes it as ``cp_context`` to :func:`kda.chunk_kda`, or to the whole layer,
    :class:`kda.nn.KimiDeltaAttention`.

    Args:
        cu_seqlens: ``[N + 1]`` integers, a tensor or a sequence: offsets of the sequences among the tokens of all
            ranks. Its values are read on the host, once.
        group: the process group, None for the default one, or a ``DeviceMesh`` of one dimension, such as
            ``mesh["cp"]``. Its backend must gather bytes: gloo on CPUs, NCCL on GPUs.
        tokens: the number on all ranks together, if more than ``cu_seqlens[-1]``: the rest is padding at the end.
        windows: how many tokens the ranks hold; 0 is allowed. Either ``[ranks]`` integers, the same on every rank, or
            one integer, this rank's own number. One integer costs an all-gather, which also compares ``cu_seqlens``
            and ``tokens`` of all ranks. None for equal windows: the number of ranks must then divide that of tokens.

    Attributes:
        cu_seqlens: the offsets in this rank's window, on the device of the given ones (for a sequence on the CPU,
            int64). Sequences without tokens here are left out.
        tokens: the number in the window.  start: of those before it.  windows: the numbers of all ranks, a list.
        rank, ranks: in the group.
        before: how many ranks before this one hold tokens of its first sequence.  after: the same for its last
            sequence.

    Raises:
        ValueError: arguments that are not as above, windows that do not add up to the tokens, or no such group. What
            the all-gather compares is refused on all ranks alike.

    >>> import kda.cp, os, tempfile, torch.distributed as dist
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ...     context = kda.cp.Context([0, 3, 3, 8])
    ...     dist.destroy_process_group()
    >>> context.tokens, context.cu_seqlens.tolist(), context.before, context.after
    (8, [0, 3, 8], 0, 0)
    """

    def __init__(
        self,
        cu_seqlens: Tensor | Sequence[int],
        group: dist.ProcessGroup | DeviceMesh | None = None,
        tokens: int | None = None,
        windows: int | Sequence[int] | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: expected torch.distributed to be initialised, got no process group")
        self.group = group = _process_group(group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: expected one that this rank is a member of, got another")
        cu = offsets_of("cu_seqlens", cu_seqlens)
        total = cu[-1] if tokens is None else integer("tokens", tokens)
        self.windows = self._sizes(windows, cu, total)
        if total < cu[-1]:
            raise ValueError(f"tokens: expected at least cu_seqlens[-1] = {cu[-1]}, got {tokens}")
        starts = list(accumulate(self.windows, initial=0))
        self.tokens = P = self.windows[self.rank]
        self.start, end = starts[self.rank : self.rank + 2]
        inside = sorted({0, *(x - self.start for x in cu if self.start < x < end), min(max(cu[-1] - self.start, 0), P)})
        like = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.empty(0, dtype=torch.int64)
        self.cu_seqlens = torch.tensor(inside, dtype=like.dtype, device=like.device)
        self.first = slice(inside[0], inside[1]) if len(inside) > 1 else slice(0, 0)
        self.last = slice(inside[-2], inside[-1]) if len(inside) > 1 else slice(0, 0)
        self.sequences = len(inside) - 1

        # Only ranks with tokens count from here on: this one is at `place` among them.
        self.holders = [rank for rank, n in enumerate(self.windows) if n]
        self.place = bisect_left(self.holders, self.rank)
        self.starts = [starts[rank] for rank in self.holders]
        # The sequence that crosses each border, as (its start, its end), or None.
        across = [_sequence_across(cu, x) for x in (*self.starts, total)]
        into, out_of = across[self.place : self.place + 2] if P else (None, None)
        self.preceding = self.start - into[0] if into else 0  # tokens of the first sequence on earlier ranks
        self.before = self.place - bisect_right(self.starts, into[0]) + 1 if into else 0
        self.after = bisect_left(self.starts, out_of[1]) - 1 - self.place if out_of else 0
        self.any_across = any(across)
        # A rank that lies entirely within one sequence passes states on; only the M of such ranks matters.
        self.passes_on = into is not None and into == out_of
        self.any_passes_on = any(x is not None and x == y for x, y in pairwise(across))

    def _sizes(self, windows: Any, cu: list[int], total: int) -> list[int]:
        """The numbers of tokens of all ranks."""
        if windows is None:
            if total % self.ranks:
                raise ValueError(
                    f"tokens: expected a number divisible by the {self.ranks} ranks, or windows, got {total}"
                )
            return [total // self.ranks] * self.ranks
        given = windows.tolist() if hasattr(windows, "tolist") else windows  # of tensors and NumPy's arrays
        if isinstance(given, Sequence):
            sizes = [integer(f"windows[{rank}]", n) for rank, n in enumerate(given)]
        else:
            sizes = self._gather_sizes(integer("windows", given), cu, total)
        if len(sizes) != self.ranks:
            raise ValueError(f"windows: expected one for each of the {self.ranks} ranks, got {len(sizes)}")
        for rank, n in enumerate(sizes):
            if n < 0:
                raise ValueError(f"windows[{rank}]: expected >= 0, got {n}")
        if sum(sizes) != total:
            raise ValueError(
                f"windows: expected {total} tokens together (cu_seqlens[-1], or tokens with padding), got {sum(sizes)}"
            )
        return sizes

    def _gather_sizes(self, own: int, cu: list[int], total: int) -> list[int]:
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, (own, cu, total), group=self.group)
        for rank, given in enumerate(everyone):
            for name, x, wanted in zip(("cu_seqlens", "tokens"), given[1:], everyone[0][1:], strict=True):
                if x != wanted:
                    raise ValueError(f"{name}: expected the same on every rank, got others on rank {rank} than on 0")
        return [n for n, *_ in everyone]

    def __repr__(self) -> str:
        return (
            f"kda.cp.Context(rank {self.rank} of {self.ranks}, {self.tokens} tokens, cu_seqlens"
            f" {self.cu_seqlens.tolist()}, before {self.before}, after {self.after})"
        )

    def gather(self, x: Tensor) -> Tensor:
        """``[ranks with tokens, *x.shape]``: their ``x``, sent as bytes because not every backend knows every dtype.
        Every rank must call it."""
        x = x.contiguous()
        out = x.new_empty(self.ranks, *x.shape)
        if x.numel():
            _all_gather(out.flatten().view(torch.uint8), x.flatten().view(torch.uint8), group=self.group)
        return out if len(self.holders) == self.ranks else torch.stack([out[rank] for rank in self.holders])


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = f", {', '.join(group.mesh_dim_names)}" if group.mesh_dim_names else ""
        raise ValueError(f'group: expected a mesh of 1 dimension, such as mesh["cp"], got one of {group.ndim}{names}')
    members = group.mesh.tolist()
    if members != sorted(members):  # torch sorts the ranks of a group, so its windows would not be those of the mesh
        raise ValueError(f"group: expected a mesh whose ranks go up, got {members}")
    if group.get_coordinate() is None:
        raise ValueError("group: expected one that this rank is a member of, got another")
    return group.get_group()


def _sequence_across(cu: list[int], border: int) -> tuple[int, int] | None:
    """The sequence with tokens on both sides of the border, or None."""
    n = bisect_right(cu, border) - 1
    return (cu[n], cu[n + 1]) if n < len(cu) - 1 and cu[n] < border else None


# ---- chunk_kda ----


def _exchange(
    cp: Context, inputs: Sequence[Any], options: Options, d_o: Tensor | None, M: Tensor | None, given: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Returns (maps, states, this rank's M). ``maps`` are those of all ranks with tokens, ``[places, HV, K, K]``, or
    None if no rank passes states on. ``states`` are the ``b`` of their last sequences, ``[places, HV, ..]``; with
    ``d_o`` the ``d`` of their first ones. ``M`` is this rank's, if it is already known. What no rank needs is 0.
    ``given`` is the state that the last sequence begins with, ``[HV, ..]``; with ``d_o`` the gradient of the state
    that this rank returns for the first one. It is mapped and added: ``b + M given``, ``d + M^T given``."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    size = HV * K * V
    wide = wide_dtype(q)
    own = q.new_zeros(size + (HV * K * K if cp.any_passes_on else 0), dtype=wide)
    state = own[:size].view(1, HV, *((K, V) if options.state_layout else (V, K)))
    known, M = M, own[size:].view(1, HV, K, K) if cp.passes_on else None
    if cp.after if d_o is None else cp.before:
        tokens = cp.last if d_o is None else cp.first
        part = [x[:, tokens] for x in (q, k, v, g, beta)]
        b, d, d_part = (state, None, None) if d_o is None else (None, state, d_o[:, tokens])
        across = q.new_empty(1, HV, K, K, dtype=wide) if M is None and given is not None else M
        wanted = across if known is None else None
        library().segment_map(*part, A_log, dt_bias, None, *options, d_part, wanted, b, d, None, 0, None)
        if given is not None:
            merged = run_segment_merge(
                across if known is None else known, state, given, d_o is not None, options.state_layout == 0, None, 0
            )
            state.copy_(merged[:1] if d_o is not None else merged[1:])
    if M is not None and known is not None:
        M.copy_(known)
    everyone = cp.gather(own)
    maps = everyone[:, size:].unflatten(1, (HV, K, K)) if cp.any_passes_on else None
    return maps, everyone[:, :size].unflatten(1, state.shape[1:]), M


def _merged(maps: Tensor | None, states: Tensor, first: int, last: int, options: Options) -> Tensor:
    """The state after places ``first`` .. ``last`` of one sequence. Backwards (``last`` < ``first``), the gradient of
    the state before them. The map of the first place is not used: it would be multiplied by 0."""
    reverse = last < first
    if first == last:
        return states[first]
    assert maps is not None  # a rank between two others passes states on
    between = slice(last, first) if reverse else slice(first + 1, last + 1)
    v_first = options.state_layout == 0
    merged = run_segment_merge(maps[between], states[between], states[first], reverse, v_first, None, 0)
    return merged[0 if reverse else -1]


def _one_of(sequences: int, n: int, state: Tensor) -> Tensor:
    """States of all sequences: zeros except for sequence n."""
    states = state.new_zeros(sequences, *state.shape)
    states[n] = state
    return states


class ContextParallelFunction(torch.autograd.Function):
    """Autograd of chunk_kda on the window of this rank. ``h0`` has the states of sequences that begin in it; the first
    one does not if earlier ranks have tokens of it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
        dt_bias: Tensor | None, h0: Tensor | None, cp: Context, options: Options, final_state: bool, h_every: int,
        impl: str | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        inputs = (q, k, v, g, beta, A_log, dt_bias)
        M = only_first = None
        starts = None if h0 is None else h0.to(wide_dtype(q), copy=True)
        if cp.any_across:
            given = starts[-1] if starts is not None and cp.after and not cp.passes_on else None
            maps, states, M = _exchange(cp, inputs, options, None, None, given)
            if cp.before:
                state = _merged(maps, states, cp.place - cp.before, cp.place - 1, options)
                if starts is None:  # the other sequences start from zeros and never read it
                    starts = state.expand(cp.sequences, *state.shape)
                    only_first = torch.arange(cp.sequences, device=q.device) == 0
                else:
                    starts[0] = state
        o, hT, saved = run_forward(
            *inputs, starts, cp.cu_seqlens, options, final_state, h_every, False, impl, only_first
        )  # fmt: skip
        if h_every:
            if only_first is not None:
                starts = state.clone()  # a view of a larger buffer
            ctx.save_for_backward(*inputs, starts, None if M is None else M.clone(), *saved)
            ctx.cp, ctx.options, ctx.h_every = cp, options, h_every
            ctx.dtype = None if h0 is None else h0.dtype
        ctx.set_materialize_grads(False)
        return o, hT

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_o: Tensor | None, dhT: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, A_log, dt_bias, starts, M, *saved = kept
        inputs, cp, options = (q, k, v, g, beta, A_log, dt_bias), ctx.cp, ctx.options
        d_o = torch.zeros_like(v) if d_o is None else plain(d_o)
        dhT = None if dhT is None else plain(dhT).clone()
        h0 = starts if starts is None or ctx.dtype is not None else _one_of(cp.sequences, 0, starts)
        if cp.any_across:
            given = dhT[0] if dhT is not None and cp.before else None
            maps, states, _ = _exchange(cp, inputs, options, d_o, M, given)
            if cp.after:
                after = _merged(maps, states, cp.place + cp.after, cp.place + 1, options)
                if dhT is None:
                    dhT = _one_of(cp.sequences, -1, after)
                else:
                    dhT[-1] += after
        wanted = ctx.needs_input_grad[:8]
        grads = run_backward(*inputs, h0, cp.cu_seqlens, options, saved, ctx.h_every, d_o, dhT, wanted)
        d_h0 = grads[7]
        if d_h0 is not None:
            if cp.before:
                d_h0[0] = 0  # not read: the state comes from the ranks before
            d_h0 = d_h0.to(ctx.dtype)
        return (*grads[:7], d_h0, None, None, None, None, None)


def _chunk_kda(
    cp: Any, call: tuple[Any, ...], output_final_state: bool, return_intermediate_states: bool,
    disable_recompute: bool, impl: str | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """:func:`kda.chunk_kda` with a ``cp_context``."""
    *inputs, h0, cu, options = call
    if not isinstance(cp, Context):
        raise ValueError(f"cp_context: expected a kda.cp.Context, got {type(cp).__name__}")
    if return_intermediate_states:
        raise ValueError("return_intermediate_states: expected False with cp_context, got True")
    if cu is not None and cu is not cp.cu_seqlens:
        raise ValueError("cu_seqlens: expected None with cp_context, which has its own, got a tensor")
    if tuple(inputs[0].shape[:2]) != (1, cp.tokens):
        raise ValueError(
            f"q: expected [1, {cp.tokens}, H, K], this rank's window of the tokens, got {list(inputs[0].shape)}"
        )
    shape = list(state_shape(inputs[2], inputs[0].shape[3], cp.cu_seqlens, options))
    if h0 is not None and list(h0.shape) != shape:
        raise ValueError(
            f"initial_state: expected {shape}, one for each sequence in this rank's window, got {list(h0.shape)}"
        )
    h_every = chunks_between_states((*inputs, h0), disable_recompute)
    result: tuple[Tensor, Tensor | None] = apply(
        ContextParallelFunction, *inputs, h0, cp, options, output_final_state, h_every, impl
    )
    return result


chunk_kda = torch.compiler.disable(_chunk_kda)  # graphs cannot hold our collectives


# ---- the convolution before the layer ----


class HaloFunction(torch.autograd.Function):
    """The rows before the window that belong to the first sequence, up to ``rows``, stored at the end of the halo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Context, rows: int) -> Tensor:
        ctx.cp, ctx.rows, ctx.dtype = cp, rows, x.dtype
        halo = x.new_zeros(cp.sequences, x.shape[2], rows)
        if rows and cp.any_across:
            sizes = [min(rows, cp.windows[rank]) for rank in cp.holders]
            own = x.new_zeros(max(sizes), x.shape[2])  # the last rows of this window, behind zeros if it is shorter
            tail = x[0, max(cp.tokens - len(own), 0) :]
            own[len(own) - len(tail) :] = tail
            tails = cp.gather(own)
            count = min(rows, cp.preceding)
            if count:  # if windows are shorter than the halo, it spans several
                earlier = [tails[place, len(own) - sizes[place] :] for place in range(cp.place - cp.before, cp.place)]
                halo[0, :, rows - count :] = torch.cat(earlier)[-count:].T
        return halo

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_halo: Tensor) -> tuple[Any, ...]:
        cp, rows, P, D = ctx.cp, ctx.rows, ctx.cp.tokens, d_halo.shape[1]
        dx = torch.zeros(1, P, D, dtype=torch.promote_types(ctx.dtype, torch.float32), device=d_halo.device)
        if rows and cp.any_across:
            own = d_halo.new_zeros(rows, D)
            count = min(rows, cp.preceding)
            if count:
                own[rows - count :] = d_halo[0, :, rows - count :].T
            everyone = cp.gather(own)
            for place in range(cp.place + 1, len(cp.starts)):
                at = cp.starts[place] - rows - cp.start  # row i of that rank's halo is token at + i of this window
                first, last = max(at, 0), min(at + rows, P)
                if first < last:
                    dx[0, first:last] += everyone[place, first - at : last - at]
        return dx.to(ctx.dtype), None, None


_apply: Any = torch.compiler.disable(apply)


def conv_halo(x: Tensor, cp_context: Context, width: int) -> Tensor:
    """The raw rows before this rank's window that a causal convolution of ``width`` taps needs as its initial state,
    one per sequence of the window. Gradients go back to the ranks that own the rows.

    Args:
        x: ``[1, P, D]``, the input of the convolution, this rank's window.
        width: the number of taps, including the current token.

    Returns:
        ``[sequences, D, width - 1]``, oldest row first; zeros where a sequence has no earlier token.
    """
    if not isinstance(cp_context, Context):
        raise ValueError(f"cp_context: expected a kda.cp.Context, got {type(cp_context).__name__}")
    if not isinstance(x, Tensor) or x.ndim != 3 or tuple(x.shape[:2]) != (1, cp_context.tokens):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected [1, {cp_context.tokens}, D], this rank's window of the tokens, got {got}")
    if integer("width", width) < 1:
        raise ValueError(f"width: expected >= 1, got {width}")
    halo: Tensor = _apply(HaloFunction, x, cp_context, width - 1)
    return halo

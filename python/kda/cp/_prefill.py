"""``kda.prefill`` with a ``cp_context``: a prompt over several GPUs, whose state lands on the rank that decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..call.arrays import Tensor as AnyTensor
from ..call.arrays import integer
from ..call.derivatives import state_shape, wide_dtype
from ..call.library import library
from ..call.options import Options
from ._agree import in_sentences, process_group
from ._exchange import Exchange, check_window_call, same_kernels, starts_of
from ._message import Message, Ticket

if TYPE_CHECKING:
    from ._context import Context

Tensor = torch.Tensor


class Pool(NamedTuple):
    """The states of all sequences, those of other ranks, too."""

    state: Tensor | None
    indices: Tensor | None  # [N]
    has_initial_state: Tensor | None  # [N]
    first_valid_slot: int
    update: bool
    rank: int | None  # that has them, or None: the one with the first token reads, the one with the last token writes


def _prefill(
    cp: Context, inputs: tuple[Any, ...], cu: Any, options: tuple[Any, ...], pool: Pool, *, out: Any, **rest: Any
) -> Any:
    form = Options(*options)

    def facts(layout: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(inputs[0], AnyTensor):
            raise ValueError(f"q: expected a torch tensor with cp_context, got {type(inputs[0]).__name__}")
        if cu is not None and cu is not cp.cu_seqlens:
            raise ValueError("cu_seqlens: expected None with cp_context, which has its own, got a tensor")
        _check_pool(cp, pool)
        about = {"state": pool.state is not None, "state_rank": pool.rank, "update_state": pool.update}
        return {**layout, **check_window_call(cp, inputs, None, form), **about}

    cp.compare("prefill", facts)
    _run(cp, inputs, form, pool, o=out, **rest)
    return out


prefill: Any = torch.compiler.disable(_prefill)


def _check_pool(cp: Context, pool: Pool) -> None:
    N = len(cp.layout.cu) - 1
    for name, x in (("state_indices", pool.indices), ("has_initial_state", pool.has_initial_state)):
        if x is not None and list(x.shape) != [N]:
            raise ValueError(f"{name}: expected [{N}], one for each sequence of all ranks, got {list(x.shape)}")
    if pool.state is not None and pool.indices is None and pool.state.shape[0] != N:
        raise ValueError(
            f"state: expected {N} rows, one for each sequence of all ranks (or state_indices), got"
            f" {pool.state.shape[0]}"
        )
    if pool.rank is not None and not 0 <= integer("state_rank", pool.rank) < cp.ranks:
        raise ValueError(f"state_rank: expected one of the {cp.ranks} ranks, got {pool.rank}")
    if pool.state is None and (pool.rank is not None or pool.indices is not None):
        raise ValueError("state: expected a tensor with state_rank or state_indices, got None")


def _run(cp: Context, inputs: tuple[Any, ...], options: Options, pool: Pool, **rest: Any) -> None:
    """``rest``: operands that every rank takes as they are."""
    q, v = inputs[0], inputs[2]
    like = q.new_empty(state_shape(v, q.shape[3], cp.cu_seqlens, options)[1:], dtype=wide_dtype(q))
    everyone = None if pool.state is None else _initial(cp, pool, like)
    sequences = [cp.segments[i].sequence for i in cp.first_of_row]
    rows = None if everyone is None else everyone[cp.tensor(sequences, q.device, torch.int64)]
    ticket = cp.ticket()
    exchange = Exchange(cp, cp.forward, "prefill", inputs, options, ticket, given=_given(cp, rows))
    starts, has_state = starts_of(cp, rows, exchange.states(), like)
    hT, slots = _targets(cp, pool, like)
    with same_kernels(cp):
        library().forward(
            *inputs,
            cp.offsets(q.device),
            options=options,
            h0=starts,
            hT=hT,
            has_initial_state=has_state,
            out_state_indices=slots,
            **rest,
        )
    if pool.rank is not None and pool.update:
        assert everyone is not None and hT is not None
        _deliver(cp, inputs, options, pool, everyone, hT, ticket)


def _given(cp: Context, rows: Tensor | None) -> dict[int, Tensor]:
    """The initial states of sequences that other segments continue."""
    if rows is None:
        return {}
    begins = [(row, i) for row, i in enumerate(cp.first_of_row) if not cp.segments[i].joined_before]
    return {i: rows[row] for row, i in begins if i in cp.forward.cells}


def _slots(pool: Pool, N: int) -> Tensor:
    assert pool.state is not None
    if pool.indices is not None:
        return pool.indices
    return torch.arange(N, dtype=torch.int64, device=pool.state.device)


def _initial(cp: Context, pool: Pool, like: Tensor) -> Tensor:
    """``[N, HV, ..]``: the states of all sequences before the call, zeros where there is none."""
    assert pool.state is not None
    slots = _slots(pool, len(cp.layout.cu) - 1)
    valid = slots >= pool.first_valid_slot
    if pool.has_initial_state is not None:
        valid = valid & pool.has_initial_state
    states = pool.state[slots.clamp(min=0).long()].to(like.dtype)
    states = torch.where(valid[:, None, None, None], states, 0)
    if pool.rank is not None and cp.ranks > 1:
        source = dist.get_global_rank(process_group(cp.group), pool.rank)
        in_sentences("prefill", lambda: dist.broadcast(states, source, group=cp.group))
    return states


def _targets(cp: Context, pool: Pool, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Where the states of segments go: a tensor, and the slot of each segment in it, -1 for nowhere."""
    if pool.state is None or not pool.update:
        return None, None
    ends = [not s.joined_after for s in cp.segments]
    if pool.rank is not None:  # one row for each that ends here, in their order
        places = [sum(ends[:i]) if end else -1 for i, end in enumerate(ends)]
        return like.new_zeros(_most_ends(cp), *like.shape), cp.tensor(places, like.device, torch.int32)
    sequences = cp.tensor([s.sequence for s in cp.segments], like.device, torch.int64)
    slots = _slots(pool, len(cp.layout.cu) - 1)[sequences]
    here = cp.tensor(ends, like.device, torch.bool)
    return pool.state, torch.where(here & (slots >= pool.first_valid_slot), slots, -1)


def _ends(cp: Context) -> list[list[int]]:
    """For each rank the sequences whose last token it has."""
    found: list[list[int]] = [[] for _ in range(cp.ranks)]
    for s in cp.layout.segments:
        if not s.joined_after:
            found[s.rank].append(s.sequence)
    return found


def _most_ends(cp: Context) -> int:
    return max(1, *map(len, _ends(cp)))


def _deliver(
    cp: Context,
    inputs: tuple[Any, ...],
    options: Options,
    pool: Pool,
    states: Tensor,
    ended: Tensor,
    ticket: Ticket,
) -> None:
    """Sends final states to the rank that decodes, and writes them there. Sequences without tokens keep theirs."""
    message = Message(ended, ended.shape, ended.dtype)
    message.x.copy_(ended)
    everyone = cp.gather(message, "prefill, final states", ticket)()
    if cp.rank != pool.rank:
        return
    for rank, sequences in enumerate(_ends(cp)):
        if sequences:
            where = cp.tensor(sequences, states.device, torch.int64)
            states[where] = everyone[rank, : len(sequences)]
    # A call without tokens copies states to slots, and knows which of them are padding.
    *tokenwise, A_log, dt_bias = inputs
    nothing = [x[:, :0] for x in tokenwise]
    cu = cp.tensor([0] * (len(states) + 1), states.device)
    library().forward(
        *nothing,
        A_log,
        dt_bias,
        cu,
        options=options,
        h0=states,
        hT=pool.state,
        first_valid_slot=pool.first_valid_slot,
        o=torch.empty_like(nothing[2]),
        out_state_indices=_slots(pool, len(states)),
    )

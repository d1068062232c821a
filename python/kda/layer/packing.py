"""Turns what trainers pass for document boundaries and padding into offsets of sequences in one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.arrays import offsets_of
from ..call.tracing import is_true, is_wrapper, makes_graph


class Layout(NamedTuple):
    cu_seqlens: Tensor | None  # offsets of the sequences, rows one after another; None: every row is a sequence
    kept: Tensor | None  # indices in all B * T of the tokens that are not padding, which the offsets count; None: all
    real: Tensor | None = None  # where the host cannot read how many to keep, padding comes last in kept: False here


def find_layout(
    hidden_states: Tensor,
    offsets: Mapping[str, Any],
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> Layout:
    """Finds the one layout that all arguments describe. Arguments that say the same thing must agree.

    Offsets alone are used as they are; everything else is read on the host, which waits for a GPU.
    """
    B, T, _ = hidden_states.shape
    given = _as_tensors(offsets, hidden_states.device)
    first = next(iter(given.values()), None)
    if first is not None and is_true(B != 1):
        raise ValueError(f"hidden_states: expected one row with {next(iter(given))}, got {B}")
    _check_shapes(B, T, seq_idx, position_ids, None if given else attention_mask)
    if first is not None:
        attention_mask = None
    if is_true(T <= 1):  # there is no boundary within a row, and decoding must not wait
        seq_idx = position_ids = None
    alone = seq_idx is None and position_ids is None and all(x is first for x in given.values())
    if attention_mask is None and (alone or (first is not None and _cannot_wait(hidden_states))):
        return Layout(None if first is None else first.to(hidden_states.device), None)
    if attention_mask is not None and seq_idx is None and position_ids is None and _cannot_wait(hidden_states):
        return _padding_last(attention_mask.to(hidden_states.device)[:, attention_mask.shape[1] - T :] != 0)
    layout: Layout = _read(hidden_states, given, seq_idx, position_ids, attention_mask)
    return layout


def _as_tensors(offsets: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The offsets that are given, as tensors. Lists, tuples and arrays of NumPy are copied to the device in each call.
    An object given under several names stays one tensor."""
    found: dict[str, Tensor] = {}
    for name, x in offsets.items():
        if isinstance(x, Tensor):
            if x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name}: expected [N + 1] int32 or int64, got {list(x.shape)} {x.dtype}")
            found[name] = x
        elif x is not None:
            same = next((found[other] for other in found if offsets[other] is x), None)
            found[name] = torch.tensor(offsets_of(name, x), dtype=torch.int64, device=device) if same is None else same
    return found


def _check_shapes(
    B: int, T: int, seq_idx: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None
) -> None:
    for name, x, rows in (("seq_idx", seq_idx, (B,)), ("position_ids", position_ids, (1, B))):
        if x is None:
            continue
        if x.ndim != 2 or all(is_true(x.shape[0] != n) for n in rows) or is_true(x.shape[1] != T):
            raise ValueError(f"{name}: expected shape [{B}, {T}], got {list(x.shape)}")
        if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
            raise ValueError(f"{name}: expected integers, got {x.dtype}")
    if attention_mask is not None:
        shape = attention_mask.shape
        if len(shape) != 2 or is_true(shape[0] != B) or is_true(shape[1] < T):
            raise ValueError(f"attention_mask: expected shape [{B}, {T}], got {list(shape)}")


def _cannot_wait(x: Tensor) -> bool:
    if makes_graph() or x.is_meta or is_wrapper(x):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def _padding_last(mask: Tensor) -> Layout:
    """All tokens of one row after another, then all padding, behind the last offset. No size depends on numbers."""
    kept = torch.argsort((~mask).flatten().byte(), stable=True)
    return Layout(F.pad(mask.sum(1).cumsum(0), (1, 0)), kept, mask.flatten()[kept])


@torch.no_grad()
def _read_on_host(
    hidden_states: Tensor,
    given: Mapping[str, Tensor],
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> Layout:
    (B, T, _), device = hidden_states.shape, hidden_states.device
    cu = torch.arange(B + 1, dtype=torch.int64, device=device) * T  # offsets of the rows
    at, kept = torch.arange(B * T, dtype=torch.int64, device=device), None
    if attention_mask is not None:
        mask = _padding(attention_mask.to(device)[:, attention_mask.shape[1] - T :])
        if mask is not None:
            at = kept = mask.flatten().nonzero().flatten()
            cu = F.pad(mask.sum(1).cumsum(0), (1, 0))
    if not given and seq_idx is None and position_ids is None:
        return Layout(None if kept is None else cu, kept)
    rows = begins = _begins(cu, len(at))  # bool per token: whether a sequence begins there
    name = ""  # the argument that the boundaries come from

    if given:
        name = next(iter(given))
        cu = _agreed(given, T).to(device)
        begins = _begins(cu, len(at))
    end = int(cu[-1])  # tokens beyond belong to no sequence
    if seq_idx is not None:
        number = seq_idx.to(device).flatten()[at]
        if bool((number < 0).any()):
            raise ValueError(f"seq_idx: expected numbers from 0 on, got {int(number.min())}")
        changes = rows | F.pad(number[1:] != number[:-1], (1, 0))
        if name and not torch.equal(changes[:end], begins[:end]):
            raise ValueError(f"seq_idx: expected the documents of {name}, got others")
        if not name:
            name, begins = "seq_idx", changes
    if position_ids is not None:
        restarts = _restarts(position_ids.to(device).expand(B, T).flatten()[at], at, rows, counted=not name)
        if name and bool((restarts & ~begins)[:end].any()):
            raise ValueError(f"position_ids: expected the documents of {name}, got others")
        begins = begins if name else rows | restarts
    if not given and not torch.equal(begins, rows):
        cu = F.pad(begins.nonzero().flatten(), (0, 1), value=len(at))
    elif not given and kept is None:
        return Layout(None, None)
    return Layout(cu, kept)


_read: Any = torch.compiler.disable(_read_on_host)


def _padding(mask: Tensor) -> Tensor | None:
    """The mask as bool, or None without padding. Numbers other than 0 and 1 mean something else to the caller and are
    refused."""
    strange = (mask != 0) & (mask != 1)
    wrong, full = torch.stack([strange.any(), (mask != 0).all()]).tolist()  # waits for a GPU once
    if wrong:
        raise ValueError(f"attention_mask: expected 0 for padding and 1 elsewhere, got {mask[strange][0].item()}")
    return None if full else mask.bool()


def _agreed(given: Mapping[str, Tensor], T: int) -> Tensor:
    name, first = next(iter(given.items()))
    cu = offsets_of(name, first)
    if cu[-1] > T:
        raise ValueError(f"{name}: expected offsets up to {T} tokens, got {cu[-1]}")
    for other, x in given.items():
        if x is not first and offsets_of(other, x) != cu:
            raise ValueError(f"{other}: expected the offsets of {name}, got others")
    return first


def _begins(cu: Tensor, tokens: int) -> Tensor:
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=cu.device)
    begins[cu.long()] = True
    return begins[:tokens]


def _restarts(position: Tensor, at: Tensor, rows: Tensor, counted: bool) -> Tensor:
    """bool per token: whether its position is not above that of the token before it in the same row.

    ``counted``: nothing else separates documents, so positions must go up by one. Positions may have counted padding
    that was taken out.
    """
    position = position.long()
    step = position.diff()
    within = ~rows[1:]
    jumps = within & (step > 1) & (step != at.diff())
    if counted and bool(jumps.any()):
        t = int(jumps.nonzero()[0])
        raise ValueError(
            f"position_ids: expected steps of 1 and restarts (or cu_seqlens), got {int(position[t + 1])} after"
            f" {int(position[t])}"
        )
    return F.pad(within & (step <= 0), (1, 0))

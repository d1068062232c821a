"""What ranks send each other: bytes with a tag in front, which says what they are.

Bytes of another exchange may have the right number, and would be taken for what was expected. The tag travels with
them, so it costs no message. It holds the kind of the exchange, the number of the call among those of the group, and a
hash of what ranks compare before a first call. On the CPU every rank reads the tags of all others before it uses
their bytes. On a GPU nothing waits: what has another tag becomes NaN there, and the sentence is raised by the next
exchange that finds the tags on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist

from ._agree import in_sentences, process_group

Tensor = torch.Tensor

HEADER = 16  # bytes: the tag, and what keeps the rest aligned
KINDS = (
    "chunk_kda",
    "chunk_kda, backward",
    "conv_halo",
    "conv_halo, backward",
    "prefill",
    "prefill, final states",
)
_NUMBERS = 1 << 27  # 63 bits together: 4 of the kind, 27 of the number, 32 of the hash

# Newer versions of torch have renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Ticket = tuple[int, int]  # of a call: its number, the hash of its layout. Its backward has the same


def layout_hash(facts: Any) -> int:
    return crc32(json.dumps(facts, default=str).encode())


def tag_of(call: str, ticket: Ticket) -> int:
    number, layout = ticket
    return (KINDS.index(call) * _NUMBERS + number % _NUMBERS << 32) + layout


def told(tag: int) -> str:
    kind, number = divmod(tag >> 32, _NUMBERS)
    return f"{KINDS[kind] if kind < len(KINDS) else kind} of call {number} (layout {tag & 0xFFFFFFFF:08x})"


class Line:
    """The exchanges of a group."""

    def __init__(self) -> None:
        self.number = 0  # of calls so far
        self.most = HEADER  # bytes of the longest message that any rank may send
        self.pending: tuple[Tensor, Any] | None = None  # tags on their way to the host, and when they are there

    def compare(self, tags: Sequence[int]) -> None:
        """Raises the same sentence on every rank unless all have sent the same. Then they count alike again."""
        for rank, tag in enumerate(tags):
            if tag != tags[0]:
                self.number = max((x >> 32) % _NUMBERS for x in tags)
                raise ValueError(
                    f"kda.cp: expected every rank to make the same exchange, got {told(tags[0])} on rank 0 and"
                    f" {told(tag)} on rank {rank}"
                )

    def wait(self) -> None:
        """Compares the tags of the last exchange on a GPU."""
        if self.pending is not None:
            self.pending[1].synchronize()
        self.look()

    def look(self) -> None:
        """Compares tags that have reached the host since."""
        if self.pending is not None and self.pending[1].query():
            tags, self.pending = self.pending[0].tolist(), None
            self.compare(tags)


_lines: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()


def line_of(group: dist.ProcessGroup | None) -> Line:
    return _lines.setdefault(process_group(group), Line())


class Message:
    """Zeros to be filled and sent: ``x`` of this shape, of which the first ``sent`` rows travel."""

    def __init__(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype, sent: int | None = None) -> None:
        size, row = dtype.itemsize, 1
        for n in shape[1:]:
            row *= n
        self.dtype, self.shape = dtype, (shape[0] if sent is None else sent, *shape[1:])
        self.memory = like.new_zeros(HEADER + shape[0] * row * size, dtype=torch.uint8)
        self.x = self.memory[HEADER:].view(dtype).view(*shape)
        self.length = HEADER + self.shape[0] * row * size

    def of(self, everyone: Tensor) -> Tensor:
        """``[ranks, *shape]`` from the bytes of all ranks."""
        return everyone[:, HEADER : self.length].view(self.dtype).unflatten(1, self.shape)


def send(group: dist.ProcessGroup | None, message: Message, call: str, ticket: Ticket) -> Callable[[], Tensor]:
    """Begins to send a message to all ranks. Returns a function that waits: it gives ``[ranks, *shape]``."""
    line, tag = line_of(group), tag_of(call, ticket)
    if message.memory.is_cuda and not torch.cuda.is_current_stream_capturing():
        line.look()
    message.memory[:8].view(torch.int64).fill_(tag)
    line.most = max(line.most, message.length)
    if message.memory.is_cuda:
        return _gather(group, line, message, call, tag)
    return _exchange(group, line, message, call)


def _exchange(group: dist.ProcessGroup | None, line: Line, message: Message, call: str) -> Callable[[], Tensor]:
    """One message from each rank to each other one. Its room is that of the longest one that another rank may send:
    gloo ends the process where a message does not fit, and takes a shorter one."""
    pg = process_group(group)
    rank, ranks, room = dist.get_rank(pg), dist.get_world_size(pg), -(-line.most // 64) * 64
    everyone = message.memory.new_empty(ranks, room)
    given = everyone[rank, : message.length].copy_(message.memory[: message.length])
    others = [(r, dist.get_global_rank(pg, r)) for r in range(ranks) if r != rank]

    def begin() -> list[Any]:
        got = [dist.irecv(everyone[r], peer, group=group) for r, peer in others]
        return got + [dist.isend(given, peer, group=group) for _, peer in others]

    works = in_sentences(call, begin)

    def wait() -> Tensor:
        for work in works:
            in_sentences(call, work.wait)
        line.compare(everyone[:, :8].view(torch.int64).flatten().tolist())
        return message.of(everyone)

    return wait


def _gather(group: dist.ProcessGroup | None, line: Line, message: Message, call: str, tag: int) -> Callable[[], Tensor]:
    ranks, given = dist.get_world_size(process_group(group)), message.memory[: message.length]
    everyone = given.new_empty(ranks, message.length)
    work = in_sentences(call, lambda: _all_gather(everyone.flatten(), given, group=group, async_op=True))

    def wait(sent: Tensor = given) -> Tensor:  # what is sent lives as long as this function
        in_sentences(call, work.wait)
        x, tags = message.of(everyone), tags_of(everyone)
        poison(x, tags, tag)
        if line.pending is None and not torch.cuda.is_current_stream_capturing():
            host, event = torch.empty(ranks, dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event()
            host.copy_(tags, non_blocking=True)
            event.record()
            line.pending = host, event
        return x

    return wait


def tags_of(everyone: Tensor) -> Tensor:
    # Rows may begin at any byte, and a view as numbers of eight bytes asks for more.
    return everyone[:, :8].contiguous().view(torch.int64).flatten()


def poison(x: Tensor, tags: Tensor, tag: int) -> None:
    """What ranks with another tag have sent becomes NaN: one number of each row, which is enough for the results."""
    if not x.is_floating_point():  # announcements have no numbers
        return
    first = x[..., 0]
    first.masked_fill_(tags.ne(tag).view(-1, *(1 for _ in first.shape[1:])), float("nan"))

"""Where the tokens of a rank lie among those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..call.arrays import integer, offsets_of
from ..call.streams import Users
from ..call.tracing import recording
from ._agree import agree, ask
from ._layout import Layout, Run, check_cuts, check_window, contiguous_runs, equal_runs, given_runs, nearest_cut
from ._message import HEADER, Message, Ticket, layout_hash, line_of, send
from ._plan import plan

Tensor = torch.Tensor

INVARIANT_WINDOW = 8192  # tokens between cuts that give the same bits on any number of ranks


class Context:
    """Where the tokens of this rank lie among those of all ranks. Every rank of the group makes one from the same
    arguments and passes it as ``cp_context`` to :func:`kda.chunk_kda`, to :func:`kda.prefill`, or to the whole layer,
    :class:`kda.nn.KimiDeltaAttention`.

    Args:
        cu_seqlens: ``[N + 1]`` integers, a tensor or a sequence: offsets of the sequences among the tokens of all
            ranks. Its values are read on the host, once.
        group: the process group, None for the default one, or a ``DeviceMesh`` of one dimension, such as
            ``mesh["cp"]``. Its backend must gather bytes: gloo on CPUs, NCCL on GPUs.
        tokens: the number on all ranks together, if more than ``cu_seqlens[-1]``: the rest is padding at the end.
        windows: how many tokens the ranks hold; 0 is allowed. Either ``[ranks]`` integers, the same on every rank, or
            one integer, this rank's own number. Ranks then tell each other their numbers, through the store of the
            group. None for equal windows: the number of ranks must then divide that of tokens.
        layout: ``"contiguous"``: the windows lie one after another, in the order of the ranks. ``"zigzag"``: the
            tokens are cut into ``2 * ranks`` equal pieces, and rank r has pieces r and ``2 * ranks - 1 - r``, one
            behind the other. Or for each rank a list of pieces, ``(first, one beyond the last)`` of the tokens.
        cp_window: sequences are cut every so many tokens, a multiple of 64, and the parts run beside each other. That
            maps every part but the last ones, and makes long sequences of few heads faster on a GPU. None for no cuts.
        cp_invariant: bits of outputs, states and gradients of tokens do not depend on the number of ranks. Cuts are
            then counted from the first token of a sequence, every 8192 without ``cp_window``, and ranks have borders
            at such places only. Without ``windows`` they are as equal as that allows.
        check: before the first call of a kind, ranks compare what they call. It costs a question to the store.

    Attributes:
        cu_seqlens: the offsets in this rank's window, on the device of the given ones. For a sequence they are int64
            on the CPU, or with NCCL on the current GPU. Sequences without tokens here are left out. What a sequence
            has in two pieces counts twice.
        tokens: the number in the window.  windows: the numbers of all ranks, a list.
        pieces: of the window, ``(first, one beyond the last)`` of the tokens.  start: the first token's number.
        rank, ranks: in the group.
        before: how many earlier pieces hold tokens of this rank's first sequence.  after: how many later ones hold
            tokens of its last sequence.  In the contiguous layout, these are ranks.

    Raises:
        ValueError: arguments that are not as above, windows that do not add up to the tokens, or no such group. What
            ranks compare is refused on all of them alike.

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
        *,
        layout: str | Sequence[Sequence[Run]] = "contiguous",
        cp_window: int | None = None,
        cp_invariant: bool = False,
        check: bool = True,
    ) -> None:
        self.group, self.rank, self.ranks = check_group(group)
        cu = offsets_of("cu_seqlens", cu_seqlens)
        total = cu[-1] if tokens is None else integer("tokens", tokens)
        if cp_invariant and cp_window is None:
            cp_window = INVARIANT_WINDOW
        self.cp_invariant, every = cp_invariant, None if cp_window is None else check_window(cp_window)
        runs = self._runs(layout, windows, cu, total, every if cp_invariant else None)
        if total < cu[-1]:
            raise ValueError(f"tokens: expected at least cu_seqlens[-1] = {cu[-1]}, got {tokens}")
        if every is not None and cp_invariant:
            check_cuts(runs, cu, every)
        self.layout = Layout(cu, runs, every)
        self._facts = {"cu_seqlens": cu, "layout": runs, "cp_window": every, "cp_invariant": cp_invariant}
        self._unchecked = {"chunk_kda", "conv_halo", "prefill"} if check and self.ranks > 1 else set()
        self._checks = bool(self._unchecked)
        self._compared: dict[str, list[tuple[dict[str, Any], int]]] = {}  # layouts of calls so far, and their hashes
        self._first: dict[str, tuple[int, Tensor]] = {}  # of each kind: how long a message was, and where
        self._layout = 0
        self._tensors: dict[Any, tuple[Tensor, Users]] = {}

        self.pieces = [run for run in runs[self.rank] if run[0] < run[1]]
        self.windows, self.tokens = self.layout.windows, self.layout.windows[self.rank]
        self.start = runs[self.rank][0][0] if runs[self.rank] else 0
        self.sequences = len(self.layout.rows[self.rank]) - 1
        self.segments = [s for s in self.layout.segments if s.rank == self.rank]
        self.first_of_row = [i for i, s in enumerate(self.segments) if not i or s.row != self.segments[i - 1].row]
        self.last_of_row = [i - 1 for i in (*self.first_of_row[1:], len(self.segments))] if self.segments else []
        self.before, self.after = self._pieces_beside()
        self.forward, self.reverse = (plan(self.layout, self.rank, reverse) for reverse in (False, True))

        like = cu_seqlens
        if not isinstance(like, Tensor):
            like = torch.empty(0, dtype=torch.int64, device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        self.cu_seqlens = torch.tensor(self.layout.rows[self.rank], dtype=like.dtype, device=like.device)

    def _runs(self, layout: Any, windows: Any, cu: list[int], total: int, every: int | None) -> list[list[Run]]:
        """The pieces of all ranks."""
        if windows is not None and layout != "contiguous":
            raise ValueError(f"windows: expected None with the layout {layout!r}, got {windows}")
        if windows is not None:
            return contiguous_runs(self._sizes(windows, cu, total))
        if isinstance(layout, str) and layout in ("contiguous", "zigzag"):
            return equal_runs(layout, self.ranks, total, None if every is None else nearest_cut(cu, every))
        return given_runs(layout, self.ranks, total)

    def _sizes(self, windows: Any, cu: list[int], total: int) -> list[int]:
        """The numbers of tokens of all ranks."""
        given = windows.tolist() if hasattr(windows, "tolist") else windows  # of tensors and NumPy's arrays
        if isinstance(given, Sequence):
            sizes = [integer(f"windows[{rank}]", n) for rank, n in enumerate(given)]
        else:
            sizes = self._ask_sizes(integer("windows", given), cu, total)
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

    def _ask_sizes(self, own: int, cu: list[int], total: int) -> list[int]:
        everyone = ask(self.group, "kda.cp.Context", [own, cu, total])
        for rank, given in enumerate(everyone):
            for name, x, wanted in zip(("cu_seqlens", "tokens"), given[1:], everyone[0][1:], strict=True):
                if x != wanted:
                    raise ValueError(f"{name}: expected the same on every rank, got others on rank {rank} than on 0")
        return [n for n, *_ in everyone]

    def _pieces_beside(self) -> tuple[int, int]:
        if not self.segments:
            return 0, 0
        first, last, cu = self.segments[0], self.segments[-1], self.layout.cu
        begin, end = cu[first.sequence], cu[last.sequence + 1]
        earlier = [p for p in self.layout.pieces if p.start < self.pieces[0][0] and p.end > begin]
        later = [p for p in self.layout.pieces if p.start >= last.end and p.start < end]
        return len(earlier), len(later)

    def __repr__(self) -> str:
        return (
            f"kda.cp.Context(rank {self.rank} of {self.ranks}, {self.tokens} tokens, cu_seqlens"
            f" {self.layout.rows[self.rank]}, before {self.before}, after {self.after})"
        )

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's window of ``x``, which has the tokens of all ranks in dimension ``dim``. One piece is a view."""
        parts = [x.narrow(dim, start, end - start) for start, end in self.pieces]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x.narrow(dim, 0, 0)

    # ---- for the functions of this package ----

    def tensor(self, values: Sequence[int | bool], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of the plan on a device. They are copied there once: a captured call must not do it."""
        dtype = self.cu_seqlens.dtype if dtype is None else dtype
        key = (tuple(values), device, dtype)
        if key not in self._tensors:
            self._tensors[key] = torch.tensor(values, dtype=dtype, device=device), Users()
        numbers, users = self._tensors[key]
        users.note(numbers, lambda: [numbers])
        return numbers

    def offsets(self, device: torch.device) -> Tensor:
        """Of the segments in the window."""
        ends = [s.at + s.end - s.start for s in self.segments]
        return self.tensor((0, *ends), device)

    def compare(self, call: str, facts: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Checks a call by ``facts``, which is given what all calls share, and may raise. Before the first call of
        this kind and layout, ranks compare what it returns."""
        if recording():
            wanted = "expected calls without cp_context, whose exchanges it cannot record"
            raise NotImplementedError(f"torch.jit.trace: {wanted}, got {call} with one")
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        compared = self._compared.setdefault(call, [])
        if call in self._unchecked and not capturing:
            agree(self.group, call, lambda: facts(self._facts))
            self._unchecked.discard(call)
            compared.append(self._with_hash(facts({})))
            self._layout = compared[0][1]
            return
        own = facts({})
        for layout, number in compared:
            if layout == own:
                self._layout = number
                return
        layout, self._layout = self._with_hash(own)
        if self._checks and compared and not capturing:
            self._announce(call)
            agree(self.group, call, lambda: own)
        compared.append((layout, self._layout))

    def _with_hash(self, facts: dict[str, Any]) -> tuple[dict[str, Any], int]:
        return facts, layout_hash([self._facts, facts])

    def _announce(self, call: str) -> None:
        """A call of another layout, of which the other ranks may not know: they may be about to make one like the
        last. So this rank sends a message as long as its first one, with a tag that says it."""
        if (first := self._first.get(call)) is not None:
            message, line = Message(first[1], (first[0] - HEADER,), torch.uint8), line_of(self.group)
            line.wait()
            send(self.group, message, call, self.ticket())()
            line.wait()

    def ticket(self) -> Ticket:
        """Of a call that was compared: its exchanges have it, also those of its backward."""
        line = line_of(self.group)
        line.number += 1
        return line.number, self._layout

    def gather(self, message: Message, call: str, ticket: Ticket) -> Callable[[], Tensor]:
        """Begins to send a message to all ranks. Returns a function that waits: it gives ``[ranks, *shape]``. Every
        rank must call it."""
        if self.ranks == 1 or message.length == HEADER:
            alone = message.x[: message.shape[0]].expand(self.ranks, *message.shape)
            return lambda: alone
        self._first.setdefault(call, (message.length, message.memory.new_empty(0)))
        return send(self.group, message, call, ticket)

    def expect(self, length: int) -> None:
        """Makes room for messages of so many bytes, which other ranks may send in place of what this one awaits."""
        line = line_of(self.group)
        line.most = max(line.most, HEADER + length)


def check_group(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """Returns the group, this rank in it, and the number of ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialised, got no process group")
    group = _process_group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group: expected one that this rank is a member of, got another")
    return group, rank, ranks


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

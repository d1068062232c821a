"""Ranks tell each other what they are about to call, through the store of their group, before they exchange tensors.

A collective whose ranks disagree hangs, or mixes numbers up. The store holds short texts on the host: asking it needs
no collective and no GPU. What a rank says is an error where it cannot make the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # questions so far, by group


def process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def patience(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of the group's collectives."""
    pg: Any = process_group(group)
    for device in pg._device_types:
        timeout = getattr(getattr(pg._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return _store(group).timeout  # type: ignore[no-any-return]


def _store(group: dist.ProcessGroup | None) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(process_group(group))


def ask(group: dist.ProcessGroup | None, call: str, own: Any) -> list[Any]:
    """What all ranks say, in their order. ``own`` is what JSON can hold, or an exception, which is raised here and, as
    a ``ValueError`` with its sentence, on every other rank. All ranks must ask in the same order.

    Raises:
        RuntimeError: ranks that do not ask within the group's timeout, by number.
    """
    pg = process_group(group)
    rank, ranks = dist.get_rank(pg), dist.get_world_size(pg)
    failed = isinstance(own, Exception)
    if ranks > 1:
        answers = _exchange(pg, call, {"error": str(own)} if failed else {"says": own}, rank, ranks)
    else:
        answers = [{"says": own}]
    if failed:
        raise own
    for other, answer in enumerate(answers):
        if "error" in answer:
            raise ValueError(
                f"{call}: expected a call that every rank can make, got on rank {other}: {answer['error']}"
            )
    return [answer["says"] for answer in answers]


def _exchange(pg: dist.ProcessGroup, call: str, own: dict[str, Any], rank: int, ranks: int) -> list[dict[str, Any]]:
    store, count = _store(pg), _counts.get(pg, 0)
    _counts[pg] = count + 1

    def key(number: int, of: int) -> str:
        return f"kda.cp/{number}/{of}"

    store.set(key(count, rank), json.dumps({"call": call, **own}))
    keys = [key(count, other) for other in range(ranks)]
    try:
        store.wait(keys, patience(pg))
    except RuntimeError as error:  # torch's DistStoreError is one
        absent = [other for other in range(ranks) if not store.check([keys[other]])]
        raise RuntimeError(
            f"{call}: expected every rank of the group to make this call within {patience(pg).total_seconds():g} s, got"
            f" nothing from {_numbers(absent)}"
        ) from error
    answers: list[dict[str, Any]] = [json.loads(store.get(k)) for k in keys]
    if count:  # whoever has asked this time has read the answers of last time
        store.delete_key(key(count - 1, rank))
    for other, answer in enumerate(answers):
        if answer["call"] != answers[0]["call"]:
            raise ValueError(
                f"{call}: expected all ranks to make the same call, got {answers[0]['call']} on rank 0 and"
                f" {answer['call']} on rank {other}"
            )
    return answers


def _numbers(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def compare(call: str, answers: list[dict[str, Any]]) -> None:
    """Refuses answers that differ from those of rank 0, on all ranks with the same sentence."""
    for rank, answer in enumerate(answers):
        for name, x in answer.items():
            if x != answers[0][name]:
                raise ValueError(
                    f"{name}: expected the same on every rank, got {answers[0][name]!s:.60} on rank 0 and {x!s:.60} on"
                    f" rank {rank} ({call})"
                )


def agree(group: dist.ProcessGroup | None, call: str, facts: Callable[[], dict[str, Any]]) -> None:
    """Compares what the ranks are about to call. ``facts`` checks this rank's arguments, and may raise."""
    own: Any
    try:
        own = facts()
    except Exception as error:
        own = error
    compare(call, ask(group, call, own))


def in_sentences(call: str, wait: Callable[[], T]) -> T:
    """Waits for a collective. Says what a rank that does not take part means."""
    try:
        return wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: expected every rank of the group to make this call, forward and backward, got an exchange that"
            f" failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error

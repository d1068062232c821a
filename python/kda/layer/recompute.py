"""Refuses states that are overwritten in place where backward runs a forward again.

``torch.utils.checkpoint`` (selective or not, reentrant or not) and similar tools discard what a function computed and
run it again in backward. A state that the first run has advanced is no longer the one that run started from: the
second run would compute other gradients and advance the state once more. Nothing here can tell which of several calls
runs again, so this is refused. A state that the function itself makes is new in every run, which is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.tracing import backward_number


def current_backward() -> int:
    """The number of the backward pass that this thread runs, -1 outside of any."""
    return -1 if torch.compiler.is_compiling() else backward_number()


def check_first_run(name: str, made_in: int) -> None:
    """Refuses a state from outside of a recomputation. ``made_in``: the backward pass in which the state was made, -1
    for none."""
    running = current_backward()
    if running not in (-1, made_in):
        raise ValueError(
            f"{name}: expected None in a function that backward runs again (use_cache=False with gradient"
            " checkpointing), got one that its first run has already moved on"
        )


def old_state(state: Tensor, made_in: int) -> Tensor:
    """A copy that backward can read after the state has advanced."""
    if torch.compiler.is_compiling():
        copy: Tensor = torch.ops.kda.old_state(state)  # registered when the namespace is looked into
        return copy
    check_first_run("state", made_in)
    return state.clone()

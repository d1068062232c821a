"""Float32 prefill on a CUDA device, next to the same in torch's own operations: which problems, times in a CUDA
graph, and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import kda
from bench import measure
from bench.measure import Call
from bench.subject import Row, Run, Subject, number, who
from kda.call.arrays import torch
from kda.cli import problems
from kda.cli.arrays import DeviceSource
from kda.cli.operators import implementations_on
from kda.cli.problems import Problem, combinations

DEVICE = "cuda"
CHUNKS = (64, 32)  # all that exist
TORCH_CHUNK = 64
MOST = 1e-4  # results may differ from torch's by this much: root mean squares, relative

FIXED = {"dtype": "float32", "state_dtype": "float32", "gate": "log", "beta": "activated"}
SHAPES: tuple[dict[str, Any], ...] = (  # unless sizes are given
    {"H": 16, "T": 2048},
    {"H": 32, "T": 4096},
    {"H": 32, "T": 4096, "K": 64, "V": 64},
)


def sweep(given: dict[str, list[Any]], names: Sequence[str] = (), quick: bool = False) -> list[Problem]:
    """All combinations of the sizes, or the problems listed above."""
    fixed = {name: [value] for name, value in FIXED.items()}
    if given:
        return combinations(Problem(H=32), given | fixed)
    return [p for sizes in SHAPES for p in combinations(Problem(**sizes), fixed)]


def in_torch(
    q: Any, k: Any, v: Any, g: Any, beta: Any, chunk_size: int, initial_state: Any, state_v_first: bool
) -> tuple[Any, ...]:
    """``kda.prefill_f32`` in batched torch operations, except for the states, which go from chunk to chunk. With the
    letters of docs/notation.md, and G as the sum of g from the chunk's first token:

        w = (I + Akk)^-1 beta kG      u = (I + Akk)^-1 beta v      v_new = u - w S      o = scale qG S + Aqk v_new
        S <- exp(G_last) S + kg^T v_new

    The decay of a score is the decay from the middle of the chunk to its row times that from its column to the
    middle. One of the two grows: g may add up to 88 in half a chunk, not more.

    Returns ``(o, final state, w, u)``.
    """
    (B, HV, T), K, group = beta.shape, q.shape[3], v.shape[1] // q.shape[1]
    if group > 1:
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    x = [a.flatten(0, 1) for a in (q, k, v, g, beta[..., None])]
    if T % chunk_size:
        x = [torch.nn.functional.pad(a, (0, 0, 0, -T % chunk_size)) for a in x]
    q, k, v, g, beta = (a.unflatten(1, (-1, chunk_size)) for a in x)  # [B HV, chunks, C, ..]

    G, scale = g.cumsum(2), K**-0.5
    last, from_middle = G[:, :, -1:], G - G[:, :, chunk_size // 2, None]
    kG, qG, kg = k * G.exp(), q * G.exp(), k * (last - G).exp()
    to_rows, from_columns = from_middle.exp(), (k * (-from_middle).exp()).mT
    Akk = (beta * ((k * to_rows) @ from_columns)).tril(-1)
    Aqk = scale * ((q * to_rows) @ from_columns).tril()
    one = torch.eye(chunk_size, dtype=k.dtype, device=k.device)
    inverse = torch.linalg.solve_triangular(Akk, one, upper=False, unitriangular=True)
    w, u = inverse @ (beta * kG), inverse @ (beta * v)

    S, decay = (initial_state.mT if state_v_first else initial_state).flatten(0, 1), last.exp().mT
    states, v_new = list[Any](), list[Any]()
    for n in range(k.shape[1]):
        states.append(S)
        v_new.append(torch.baddbmm(u[:, n], w[:, n], S, alpha=-1))
        S = torch.baddbmm(decay[:, n] * S, kg[:, n].mT, v_new[-1])
    o = scale * (qG @ torch.stack(states, 1)) + Aqk @ torch.stack(v_new, 1)

    o, w, u, S = (a.unflatten(0, (B, HV)) for a in (o.flatten(1, 2)[:, :T], w, u, S))
    return o, S.mT if state_v_first else S, w, u


def _kda(x: dict[str, Any], chunk_size: int, impl: str) -> Callable[[], tuple[Any, ...]]:
    """Writes into buffers that exist before the call."""
    given = x | {"chunk_size": chunk_size, "final_state": torch.empty_like(x["initial_state"]), "impl": impl}
    buffers = dict(zip("owu", kda.prefill_f32(**given), strict=True))

    def run() -> tuple[Any, ...]:
        o, w, u = kda.prefill_f32(**given, **buffers)
        return o, given["final_state"], w, u

    return run


def _difference(got: Sequence[Any], expected: Sequence[Any]) -> float:
    """The error of the result that differs most."""
    worst = 0.0
    for name, a, b in zip(("o", "the final state", "w", "u"), got, expected, strict=True):
        error = float((a - b).norm() / b.norm())
        if not error < MOST:
            raise ArithmeticError(f"{name} differs from torch's by {error:.1e}, more than {MOST:.0e}")
        worst = max(worst, error)
    return worst


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Inside, torch's products are in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _milliseconds(call: Call, notes: list[str], repeats: int) -> dict[str, Any]:
    """Milliseconds of torch, which may call what a graph cannot hold."""
    try:
        return {"timed": "graph", "ms": measure.graph_milliseconds(call, repeats=repeats, flush=True)}
    except RuntimeError as error:
        measure.note_once(notes, f"torch's time is not from a graph: {error}")
        return {"timed": "stream", "ms": measure.stream_milliseconds(call, repeats=repeats, flush=True)}


def _rows(p: Problem, names: Sequence[str], run: Run) -> list[Row]:
    x = problems.heads_first(p, DeviceSource(DEVICE))
    del x["chunk_size"], x["final_state"]
    contenders = [*((name, chunk_size) for name in names for chunk_size in CHUNKS), (None, TORCH_CHUNK)]
    found: list[Row] = []
    for name, chunk_size in contenders:
        row: Row = {"contender": "kda" if name else "torch", "implementation": name, "chunk": chunk_size}
        row |= {"problem": asdict(p)}
        theirs = partial(in_torch, **x, chunk_size=chunk_size)
        with run.noting(f"{label(row)} for {p.sizes}"):
            if name:
                call = _kda(x, chunk_size, name)
                row["difference"] = _difference(call(), theirs())
                row |= {"timed": "graph", "ms": measure.graph_milliseconds(call, repeats=run.repeats, flush=True)}
            else:
                row |= {"difference": None} | _milliseconds(theirs, run.notes, run.repeats)
            found.append(row)
    ms = {row["contender"]: row["ms"] for row in found}.get("torch")
    for row in found:
        row["ratio"] = ms / row["ms"] if ms and row["contender"] == "kda" else None
    return found


def measured(swept: Sequence[Problem], run: Run) -> Iterator[list[Row]]:
    """For each problem: kda with every implementation that takes it and every chunk size, if the results agree with
    torch's, then torch."""
    names = implementations_on(DEVICE, "prefill_f32", run.impl)
    with torch.inference_mode(), _no_tf32():
        for p in swept:
            run.started(p)
            yield _rows(p, names, run)


def label(row: Row) -> str:
    return f"{who(row)}, chunks of {row['chunk']}"


SUBJECT = Subject(
    sweep=sweep,
    measured=measured,
    name_of=lambda p: p.sizes,
    case_of=lambda row: Problem(**row["problem"]).sizes,
    who=label,
    columns={"ms": number("ms", ".3f"), "ratio": number("ratio", ".2f"), "difference": number("difference", ".1e")},
    what=lambda row: "prefill_f32",
    sizes=("B", "T", "HV", "K", "V"),
)

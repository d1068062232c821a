"""FLA's functions with our backend and without it: for ``python -m bench plugs``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import kda
from bench.measure import Call, least_microseconds
from bench.plugs import Contest
from kda.call.arrays import torch
from kda.cli import problems
from kda.cli.arrays import DeviceSource, Source
from kda.cli.problems import Problem
from kda.plugs import fla_takes

SWITCH = "FLA_KDA_LIB"
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
# FLA tunes itself anew for a number of heads, and for packed sequences.
ON_GPU = {
    "training H32 T8192": Problem(H=32, T=8192, gate="lower_bound"),
    "training H32 8 x 1024": Problem(H=32, lengths=(1024,) * 8, gate="lower_bound"),
    "training H32 T8192 softplus": Problem(H=32, T=8192),
    "prefill H32 T8192": Problem(H=32, T=8192, gate="lower_bound"),
    "prefill H96 T8192": Problem(H=96, T=8192, gate="lower_bound"),
    "decode B1 H32": Problem(B=1, T=1, H=32),
    "decode B32 H32": Problem(B=32, T=1, H=32),
    "decode B128 H32": Problem(B=128, T=1, H=32),
}
ON_CPU = {
    "training H2 T256": Problem(H=2, T=256, K=64, V=64, gate="lower_bound"),
    "prefill H2 T256": Problem(H=2, T=256, K=64, V=64, gate="lower_bound"),
    "decode B4 H2": Problem(B=4, T=1, H=2, K=64, V=64),
}


def contests(device: str) -> Iterator[Contest]:
    """FLA has no kernels for a CPU."""
    for case, p in (ON_GPU if device == "cuda" else ON_CPU).items():
        yield {"training": _training, "prefill": _prefill, "decode": _decode}[case.split()[0]](case, p, device)


def _inputs(p: Problem, device: str) -> dict[str, Any]:
    x = problems.common(p, DeviceSource(device) if device == "cuda" else Source(device))
    x["A_log"], x["dt_bias"] = 0.1 * x["A_log"], 0.1 * x["dt_bias"].flatten()
    if "cu_seqlens" in x:  # the same tensor in every call: FLA caches what it derives from one
        x["cu_seqlens"] = x["cu_seqlens"].long()
    return x


@contextmanager
def _switched(value: str) -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = value
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def _with(value: str, call: Call) -> Call:
    def run() -> Any:
        with _switched(value):
            return call()

    return run


def _contest(case: str, device: str, fla: Call, ours: Call, adapter: Callable[[], float]) -> Contest:
    theirs = _with("0", fla) if device == "cuda" else None
    return Contest(case, _with("1", fla), ours, theirs, adapter)


def _training(case: str, p: Problem, device: str) -> Contest:
    x = _inputs(p, device)
    for name in LEAVES:
        x[name].requires_grad_()
    d_o = torch.randn_like(x["v"])

    def step(function: Callable[..., Any]) -> Any:
        o = function(**x)[0]
        return [o, *torch.autograd.grad(o, [x[name] for name in LEAVES], d_o)]

    theirs = {**x, "safe_gate": "lower_bound" in x}
    chunk = importlib.import_module("fla.ops.kda").chunk_kda
    return _contest(
        case, device, partial(step, partial(chunk, safe_gate=theirs["safe_gate"])), partial(step, kda.chunk_kda),
        partial(_adapter, "chunk_kda", theirs),
    )  # fmt: skip


def _prefill(case: str, p: Problem, device: str) -> Contest:
    x = _inputs(p, device)
    x["initial_state"] = 0.1 * torch.randn(p.N, p.HV, p.V, p.K, dtype=torch.float32, device=device)
    x["output_final_state"] = True
    chunk = importlib.import_module("fla.ops.kda").chunk_kda
    theirs = {**x, "safe_gate": "lower_bound" in x}
    infer = torch.inference_mode()
    return _contest(
        case, device, infer(partial(chunk, **theirs)), infer(partial(kda.chunk_kda, **x)),
        partial(_adapter, "chunk_kda", theirs),
    )  # fmt: skip


def _decode(case: str, p: Problem, device: str) -> Contest:
    x = _inputs(p, device)
    x["initial_state"] = 0.1 * torch.randn(p.B, p.HV, p.V, p.K, dtype=torch.float32, device=device)
    x["output_final_state"] = True
    recurrent, infer = importlib.import_module("fla.ops.kda").fused_recurrent_kda, torch.inference_mode()
    inner = {**x, "inplace_final_state": False, "scale": p.K**-0.5}
    return _contest(
        case, device, infer(partial(recurrent, **x)), infer(partial(kda.fused_recurrent_kda, **x)),
        partial(_adapter, "fused_recurrent_kda_fwd", inner),
    )  # fmt: skip


def _adapter(function: str, given: dict[str, Any]) -> float:
    """What FLA's dispatch calls of ours for one call, with nothing in the place of our own function."""
    backend: Any = importlib.import_module("kda.fla")._backend()()

    def call() -> None:
        assert backend.verify(function, **given)[0]
        getattr(backend, function)(**given)

    def nothing(**_: Any) -> None: ...

    with torch.inference_mode(), mock.patch.multiple(fla_takes, chunk_kda=nothing, fused_recurrent_kda=nothing):
        return least_microseconds(call)

"""Timings of the operators that memory bounds: gate, convolution, norm. Each function returns rows of the record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Row = dict[str, Any]


def of_prompts(
    calls: dict[str, tuple[Callable[[], object], int]], elements: int, bandwidth: float, **sizes: int
) -> list[Row]:
    """By name: a call, and how many bytes an element it reads and writes."""
    from bench.measure import graph_milliseconds

    rows = []
    for name, (call, size) in calls.items():
        ms = graph_milliseconds(call, flush=True)
        share = elements * size / ms * 1e-6 / bandwidth
        rows.append({"what": name, **sizes, "ms": ms, "share_of_stream_bandwidth": share})
    return rows


def gate_timings(torch: Any, HV: int, bandwidth: float) -> list[Row]:
    import kda
    from kda.autograd import run_gate_backward

    T, K = 8192, 128
    x = torch.randn(T, HV, K, device="cuda").bfloat16()
    A_log, dt_bias = torch.randn(HV, device="cuda"), torch.randn(HV, K, device="cuda")
    dg = torch.randn(T, HV, K, device="cuda")
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "gate": (lambda: kda.fused_kda_gate(x, A_log, dt_bias), 2 + 4),
        "gate_backward": (lambda: run_gate_backward(x, A_log, dt_bias, dg, 1, 0.0), 2 + 4 + 2),
    }
    return of_prompts(calls, x.numel(), bandwidth, T=T, HV=HV, K=K)


def conv_timings(torch: Any, D: int, bandwidth: float) -> list[Row]:
    """A prompt, forward and backward; and one token per request, with each call on the next of several pools."""
    import kda
    from bench.measure import graph_milliseconds
    from kda.autograd import run_conv_backward

    random = torch.Generator("cuda").manual_seed(D)

    def new(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device="cuda").bfloat16()

    x, dy, weight = new(1, 8192, D), new(1, 8192, D), new(D, 4)
    backward = partial(
        run_conv_backward, x, weight, None, None, None, True, dy, None, wanted=(True, True, False, False)
    )
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "conv": (lambda: kda.causal_conv1d(x, weight), 2 + 2),
        "conv_backward": (backward, 2 + 2 + 2),
    }
    rows = of_prompts(calls, x.numel(), bandwidth, T=8192, D=D)
    for B in (1, 8, 32, 128, 512):
        pools, token = new(min((64 << 20) // (B * D * 3) + 1, 200), B, D, 3), new(B, 1, D)
        given = {"x": token, "weight": weight, "state_indices": torch.randperm(B, device="cuda").int()}
        given["out"] = torch.empty_like(token)
        updates = [partial(kda.causal_conv1d_update, **given, state=pool) for pool in pools]
        us = graph_milliseconds(partial(call_all, updates)) * 1e3 / len(updates)
        share = B * D * (2 + 2 + 6 + 6) / us * 1e-3 / bandwidth
        rows.append({"what": "conv, one token", "B": B, "D": D, "us": us, "share_of_stream_bandwidth": share})
    return rows


def norm_timings(torch: Any, bandwidth: float) -> list[Row]:
    """A prompt, forward and backward, as the layer has it; and the rows of a decode step, a gate in a wider buffer."""
    import kda
    from bench.measure import graph_milliseconds
    from kda.autograd import run_norm_gate_backward

    def new(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").bfloat16()

    HV, V, SIGMOID = 32, 128, 1
    x, gate, dy, y, weight = *(new(1, 8192, HV, V) for _ in range(4)), torch.randn(V, device="cuda")
    backward = partial(run_norm_gate_backward, x, gate, weight, dy, 1e-5, SIGMOID, (True, True, True))
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "norm_gate": (lambda: kda.norm_gate(x, gate, weight, out=y), 2 + 2 + 2),
        "norm_gate_backward": (backward, 2 + 2 + 2 + 2 + 2),
    }
    rows = of_prompts(calls, x.numel(), bandwidth, T=8192, HV=HV, V=V)
    for B in (1, 8, 32, 128, 512):
        wide = new(B, 1, 4 * HV * V)  # a packed projection
        rest = wide[..., HV * V : 2 * HV * V].unflatten(-1, (HV, V))
        step = partial(kda.norm_gate, new(B, 1, HV, V), rest, weight, out=new(B, 1, HV, V))
        us = graph_milliseconds(partial(call_all, [step] * 100)) * 10  # of a chain of 100
        rows.append({"what": "norm_gate, one token", "B": B, "HV": HV, "V": V, "us": us})
    return rows


def call_all(calls: list[partial[Any]]) -> None:
    for call in calls:
        call()

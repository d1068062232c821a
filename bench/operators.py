"""What ``python -m bench`` measures beside the ceilings of a machine: an entry for each operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import kda
import kda.stages
from bench.layer import new_layer, product_flop
from bench.measure import Call
from kda.call.arrays import torch
from kda.cli import bench, problems
from kda.cli.arrays import Source
from kda.cli.bench import flop, state_bytes
from kda.cli.problems import BYTES, Problem


@dataclass(frozen=True)
class Bench:
    prepare: Callable[[Problem, Source], Call]  # the first six are those of the wheel's bench
    work: Callable[[Problem], float]
    unit: str
    cases: tuple[Problem, ...]
    most_tokens: int = 1 << 40
    needs_torch: bool = False
    peers: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> module it needs, function of peers
    devices: tuple[str, ...] = ("cpu", "cuda")
    only: dict[str, Any] = field(default_factory=dict)  # fields of problems that options do not change


def _prefill_f32(p: Problem, new: Source) -> Call:
    x = problems.heads_first(p, new)
    buffers = dict(zip("owu", kda.prefill_f32(**x), strict=True))
    return partial(kda.prefill_f32, **x, **buffers)


def _records(p: Problem, new: Source) -> kda.Records:
    return kda.Records(**problems.records(p, new))


def _flush(p: Problem, new: Source) -> Call:
    """With all drafts accepted, which takes the longest."""
    x = problems.serving(p, new)
    given = {n: x[n] for n in ("state", "state_indices", "state_v_first")} | {"records": _records(p, new)}
    return partial(kda.flush_kvbuffer, **given, accept_len=new.integers([p.T] * p.N))


def _flush_verify(p: Problem, new: Source) -> Call:
    """With all of the last drafts accepted; two buffers take turns."""
    given = {"records": _records(p, new), "last": _records(p, new), "accept_len": new.integers([p.T] * p.N)}
    return partial(kda.flush_verify_kvbuffer, **problems.serving(p, new), **given)


def _conv(p: Problem, new: Source) -> Call:
    """In place on a state, with a given output: the call allocates nothing."""
    x = problems.convolution(p, new)
    given = {n: x[n] for n in ("x", "weight", "bias")}
    return partial(kda.causal_conv1d_update, **given, state=x["initial_state"], out=x["d_y"])


def _gate(p: Problem, new: Source) -> Call:
    x = problems.gate(p, new)
    return lambda: kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"])


def _norm(p: Problem, new: Source) -> Call:
    """In a given output: the call allocates nothing."""
    x = problems.norm(p, new)
    return partial(kda.norm_gate, out=x.pop("d_y"), **x)


def _layer(p: Problem, new: Source) -> Call:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = new_layer(p, new.device).eval()
    cache, x = layer.new_cache(p.B), new.normal(p.dtype, p.B, p.T, p.hidden)
    return torch.inference_mode()(lambda: layer(x, cache=cache))


def _elements(size: Callable[[Problem], int]) -> Callable[[Problem], float]:
    """Bytes of all tokens, from those of one."""
    return lambda p: p.B * p.T * size(p)


_NAIVE = "fla.ops.kda.naive"
_PLAIN = {"gate": "log", "beta": "activated"}
_LAYER = {"gate": "softplus", "beta": "sigmoid", "layout": "V-first", "state_dtype": "float32"}
_DRAFTS = (Problem(B=256, T=4),)

# To add an operator, add one entry. On CUDA those of on_gpu.py have cases and peers of their own.
BENCHES = {
    "prefill": Bench(*bench.BENCHES["prefill"], peers={"FLA naive_chunk_kda": (_NAIVE, "naive_chunk")}),
    "training": Bench(*bench.BENCHES["training"]),
    "prefill_f32": Bench(
        _prefill_f32,
        flop("prefill_f32"),
        "GFLOP/s",
        (Problem(T=4096, dtype="float32"),),
        only={"dtype": "float32", **_PLAIN},
    ),
    "stages": Bench(
        lambda p, new: partial(kda.stages.bwd_wy_dqkg, **problems.wy_dqkg(p, new)),
        flop("bwd_wy_dqkg"),
        "GFLOP/s",
        (Problem(T=4096, layout="K-first"),),
        only=_PLAIN,
    ),
    "layer": Bench(
        _layer,
        lambda p: product_flop(p) + flop("forward")(p),
        "GFLOP/s",
        (Problem(T=512, H=32),),
        needs_torch=True,
        only=_LAYER,
    ),
    "segment_map": Bench(
        lambda p, new: partial(kda.segment_map, **problems.common(p, new)),
        flop("segment_map"),
        "GFLOP/s",
        (Problem(T=4096),),
    ),
    "segment_d": Bench(
        lambda p, new: partial(kda.segment_map, **problems.segments(p, new), want="d"),
        flop("segment_d"),
        "GFLOP/s",
        (Problem(T=4096),),
    ),
    "segment_merge": Bench(
        lambda p, new: partial(kda.segment_merge, **problems.merging(p, new)),
        lambda p: 2 * p.N * p.HV * p.K * p.K * p.V,
        "GFLOP/s",
        (Problem(B=8, T=1, dtype="float32"),),
        most_tokens=1,
        only={"dtype": "float32"},
    ),
    "decode": Bench(*bench.BENCHES["decode"], peers={"FLA naive_recurrent_kda": (_NAIVE, "naive_recurrent")}),
    "verify": Bench(
        lambda p, new: partial(kda.verify_kvbuffer, **problems.serving(p, new), records=_records(p, new)),
        lambda p: state_bytes(p) / 2,
        "GB/s",
        _DRAFTS,
        most_tokens=16,
        devices=("cpu",),
    ),
    "flush": Bench(_flush, state_bytes, "GB/s", _DRAFTS, most_tokens=16, devices=("cpu",)),
    "flush_verify": Bench(_flush_verify, state_bytes, "GB/s", _DRAFTS, most_tokens=16, devices=("cpu",)),
    "conv": Bench(
        _conv, _elements(lambda p: 2 * (2 * p.H * p.K + p.HV * p.V) * BYTES[p.dtype]), "GB/s", (Problem(H=16),)
    ),
    "gate": Bench(_gate, _elements(lambda p: p.HV * p.K * (BYTES[p.dtype] + 4)), "GB/s", (Problem(H=32),)),
    "norm_gate": Bench(_norm, _elements(lambda p: 3 * p.HV * p.V * BYTES[p.dtype]), "GB/s", (Problem(H=32, T=8192),)),
}

"""What ``python -m bench`` measures: an entry for each operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kda.cli import problems
from kda.cli.problems import BYTES, Problem

if TYPE_CHECKING:
    from kda.cli.arrays import Source

# numpy, torch and the library are imported only where they are used: --threads must be set before that.


@dataclass(frozen=True)
class Bench:
    prepare: Callable[[Problem, Source], Callable[[], object]]  # makes the inputs and returns the call to time
    work: Callable[[Problem], float]  # what the call does, in the unit of the ceiling that it is compared with:
    unit: str  # "GFLOP/s" or "GB/s"
    problems: tuple[Problem, ...]
    peers: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> module it needs, function of peers.py
    devices: tuple[str, ...] = ("cpu",)
    most_tokens: int = 1 << 40  # per request; a larger --T is meant for other operators
    only: dict[str, Any] = field(default_factory=dict)  # fields of problems that options do not change
    needs_torch: bool = False


def _prefill(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.serving(p, new)
    return lambda: kda.prefill(**x)


def _prefill_f32(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.heads_first(p, new)
    buffers = dict(zip("owu", kda.prefill_f32(**x), strict=True))
    return lambda: kda.prefill_f32(**x, **buffers)


def _decode(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.serving(p, new)
    return lambda: kda.decode(**x)


def _verify(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x, records = problems.serving(p, new), kda.Records(**problems.records(p, new))
    return lambda: kda.verify_kvbuffer(**x, records=records)


def _flush(p: Problem, new: Source) -> Callable[[], object]:
    """With all drafts accepted, which takes the longest."""
    import kda

    x, records = problems.serving(p, new), kda.Records(**problems.records(p, new))
    given = {n: x[n] for n in ("state", "state_indices", "state_v_first")}
    accept_len = new.integers([p.T] * p.N)
    return lambda: kda.flush_kvbuffer(**given, records=records, accept_len=accept_len)


def _flush_verify(p: Problem, new: Source) -> Callable[[], object]:
    """With all of the last drafts accepted; two buffers take turns."""
    import kda

    x, (last, records) = problems.serving(p, new), (kda.Records(**problems.records(p, new)) for _ in range(2))
    accept_len = new.integers([p.T] * p.N)
    return lambda: kda.flush_verify_kvbuffer(**x, records=records, last=last, accept_len=accept_len)


def _segment_map(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.common(p, new)
    return lambda: kda.segment_map(**x)


def _segment_d(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.segments(p, new)
    return lambda: kda.segment_map(**x, want="d")


def _segment_merge(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.merging(p, new)
    return lambda: kda.segment_merge(**x)


def _conv(p: Problem, new: Source) -> Callable[[], object]:
    """In place on a state, with a given output: the call allocates nothing."""
    import kda

    x = problems.convolution(p, new)
    given = {n: x[n] for n in ("x", "weight", "bias")}
    return lambda: kda.causal_conv1d_update(**given, state=x["initial_state"], out=x["d_y"])


def _training(p: Problem, new: Source) -> Callable[[], object]:
    import torch

    import kda

    x = problems.training(p, new)
    d = x.pop("d_o")
    del x["d_final_state"], x["initial_state"]
    leaves = [a.requires_grad_() for a in x.values() if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return lambda: torch.autograd.grad(kda.chunk_kda(**x)[0], leaves, d)


def _gate(p: Problem, new: Source) -> Callable[[], object]:
    import kda

    x = problems.gate(p, new)
    return lambda: kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"])


def _norm(p: Problem, new: Source) -> Callable[[], object]:
    """In a given output: the call allocates nothing."""
    import kda

    x = problems.norm(p, new)
    out = x.pop("d_y")
    return lambda: kda.norm_gate(**x, out=out)


def _stages(p: Problem, new: Source) -> Callable[[], object]:
    from kda import stages

    x = problems.wy_dqkg(p, new)
    return lambda: stages.bwd_wy_dqkg(**x)


def _layer(p: Problem, new: Source) -> Callable[[], object]:
    import torch

    from bench.layer import new_layer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = new_layer(p, new.device).eval()
    cache, x = layer.new_cache(p.B), new.normal(p.dtype, p.B, p.T, p.hidden)
    return torch.inference_mode()(lambda: layer(x, cache=cache))


def _layer_flop(p: Problem) -> float:
    from bench.layer import product_flop

    return product_flop(p) + _flop("forward")(p)


def _flop(of: str) -> Callable[[Problem], float]:
    """The work for all tokens and value heads, from a function of kda._flops."""

    def work(p: Problem) -> float:
        from kda.call import flops

        flop: float = getattr(flops, f"{of}_flop")(p.K, p.V)
        return p.B * p.T * p.HV * flop

    return work


def _merge_flop(p: Problem) -> float:
    return 2 * p.N * p.HV * p.K * p.K * p.V


def _state_bytes(p: Problem) -> float:
    """Bytes if every state is read and written once."""
    return 2 * p.N * p.HV * p.K * p.V * BYTES[p.state_dtype]


def _state_bytes_read(p: Problem) -> float:
    return _state_bytes(p) / 2


def _gate_bytes(p: Problem) -> float:
    return p.B * p.T * p.HV * p.K * (BYTES[p.dtype] + 4)


def _conv_bytes(p: Problem) -> float:
    return 2 * p.B * p.T * (2 * p.H * p.K + p.HV * p.V) * BYTES[p.dtype]


def _norm_bytes(p: Problem) -> float:
    return 3 * p.B * p.T * p.HV * p.V * BYTES[p.dtype]


_NAIVE = "fla.ops.kda.naive"

# To add an operator, add one entry.
BENCHES = {
    "prefill": Bench(
        _prefill,
        _flop("forward"),
        "GFLOP/s",
        (Problem(T=512), Problem(T=4096)),
        {"FLA naive_chunk_kda": (_NAIVE, "naive_chunk")},
        devices=("cpu", "cuda"),  # on CUDA with other cases and peers: prefill.py
    ),
    "training": Bench(
        _training,
        _flop("training"),
        "GFLOP/s",
        (Problem(T=512), Problem(T=4096)),
        devices=("cpu", "cuda"),  # on CUDA with other cases and peers: training.py
        needs_torch=True,
    ),
    "prefill_f32": Bench(
        _prefill_f32,
        _flop("prefill_f32"),
        "GFLOP/s",
        (Problem(T=4096, dtype="float32"),),
        devices=("cpu", "cuda"),  # on CUDA beside torch: prefill_f32.py
        only={"dtype": "float32", "gate": "log", "beta": "activated"},
    ),
    "stages": Bench(
        _stages,
        _flop("bwd_wy_dqkg"),
        "GFLOP/s",
        (Problem(T=4096, layout="K-first"),),
        devices=("cpu", "cuda"),  # on CUDA with other cases and beside FLA: stages.py
        only={"gate": "log", "beta": "activated"},
    ),
    "layer": Bench(
        _layer,
        _layer_flop,
        "GFLOP/s",
        (Problem(T=512, H=32),),
        devices=("cpu", "cuda"),  # on CUDA with other cases, decode, training and beside peers: layer.py
        only={"gate": "softplus", "beta": "sigmoid", "layout": "V-first", "state_dtype": "float32"},
        needs_torch=True,
    ),
    "segment_map": Bench(_segment_map, _flop("segment_map"), "GFLOP/s", (Problem(T=4096),), devices=("cpu", "cuda")),
    "segment_d": Bench(_segment_d, _flop("segment_d"), "GFLOP/s", (Problem(T=4096),), devices=("cpu", "cuda")),
    "segment_merge": Bench(
        _segment_merge,
        _merge_flop,
        "GFLOP/s",
        (Problem(B=8, T=1, dtype="float32"),),
        devices=("cpu", "cuda"),
        most_tokens=1,
        only={"dtype": "float32"},
    ),
    "decode": Bench(
        _decode,
        _state_bytes,
        "GB/s",
        (Problem(B=1, T=1), Problem(B=32, T=1), Problem(B=1024, T=1)),
        {"FLA naive_recurrent_kda": (_NAIVE, "naive_recurrent")},
        devices=("cpu", "cuda"),  # on CUDA with rounds of speculation and other peers: serving.py
        most_tokens=16,
    ),
    "verify": Bench(_verify, _state_bytes_read, "GB/s", (Problem(B=256, T=4),), most_tokens=16),
    "flush": Bench(_flush, _state_bytes, "GB/s", (Problem(B=256, T=4),), most_tokens=16),
    "flush_verify": Bench(_flush_verify, _state_bytes, "GB/s", (Problem(B=256, T=4),), most_tokens=16),
    "conv": Bench(_conv, _conv_bytes, "GB/s", (Problem(H=16),), devices=("cpu", "cuda")),
    "gate": Bench(_gate, _gate_bytes, "GB/s", (Problem(H=32),), devices=("cpu", "cuda")),
    "norm_gate": Bench(_norm, _norm_bytes, "GB/s", (Problem(H=32, T=8192),), devices=("cpu", "cuda")),
}

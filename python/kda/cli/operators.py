"""The operators of the library for check and explain: inputs, a call through the public function, and how far each
result may be from the oracle. To add an operator, add one entry to ``OPERATORS``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import kda

from ..call import library
from . import problems
from .problems import DTYPES, GATES, LAYOUTS, Problem

if TYPE_CHECKING:
    from .arrays import Source


@dataclass(frozen=True)
class Operator:
    make: Callable[[Problem, Source], dict[str, Any]]  # from a Problem to keywords for `call`
    call: Callable[[dict[str, Any]], dict[str, Any]]  # runs them and returns the results by name
    allowed: dict[str, float]  # relative RMS error of each result
    example: Problem  # what explain asks about unless told otherwise
    checked: tuple[Problem, ...]  # what check runs, with every dtype, gate and layout
    checked_in_bf16: tuple[Problem, ...] = ()  # the same, but in bfloat16 only: large ones
    gates: tuple[str, ...] = GATES
    layouts: tuple[str, ...] = LAYOUTS
    dtypes: tuple[str, ...] = DTYPES
    needs_torch: bool = False
    in_bf16: float = 0.0  # allowed on CUDA with bfloat16 inputs, where products are in bfloat16 as well
    in_16_bits: dict[str, float] = field(default_factory=dict)  # by implementations whose operands are so narrow


def _prefill(x: dict[str, Any]) -> dict[str, Any]:
    return {"o": kda.prefill(**x), "state": x["state"]}


def _decode(x: dict[str, Any]) -> dict[str, Any]:
    if "snapshots" not in x:
        return {"o": kda.decode(**x), "state": x["state"]}
    return {"o": kda.decode_mtp(**x), "state": x["state"], "snapshots": x["snapshots"]}


def _split(x: dict[str, Any], name: str) -> tuple[dict[str, Any], Any]:
    """Separates the keywords into those that are not records, and the records of this name."""
    fields = {f: x[f"{name}_{f}"] for f in kda.Records._fields if f"{name}_{f}" in x}
    rest = {n: a for n, a in x.items() if n not in {f"{name}_{f}" for f in fields}}
    return rest, kda.Records(**fields) if fields else None


def _recorded(o: Any, x: dict[str, Any], records: kda.Records) -> dict[str, Any]:
    fields = {n: a for n, a in records._asdict().items() if a is not None}
    return {"o": o, "state": x["state"]} | fields


def _verify(x: dict[str, Any]) -> dict[str, Any]:
    x, records = _split(x, "records")
    return _recorded(kda.verify_kvbuffer(**x, records=records), x, records)


def _flush(x: dict[str, Any]) -> dict[str, Any]:
    x, records = _split(x, "records")
    kda.flush_kvbuffer(**x, records=records)
    return {"state": x["state"]}


def _flush_verify(x: dict[str, Any]) -> dict[str, Any]:
    x, records = _split(x, "records")
    x, last = _split(x, "last")
    return _recorded(kda.flush_verify_kvbuffer(**x, records=records, last=last), x, records)


def _backward(x: dict[str, Any]) -> dict[str, Any]:
    import torch

    x = dict(x)
    d = x.pop("d_o"), x.pop("d_final_state")
    leaves = {
        n: x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state") if n in x
    }
    outputs = kda.chunk_kda(**x, output_final_state=True)
    return {f"d{n}": y for n, y in zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), d), strict=True)}


def _segment_map(x: dict[str, Any]) -> dict[str, Any]:
    return kda.segment_map(**x, want="Mbd")._asdict()


def _segment_merge(x: dict[str, Any]) -> dict[str, Any]:
    return {"states": kda.segment_merge(**x), "gradients": kda.segment_merge(**x, reverse=True)}


_CONV = ("x", "weight", "bias", "initial_state")


def _conv(x: dict[str, Any]) -> dict[str, Any]:
    """With a new final state, and in place."""
    keywords = {n: x[n] for n in (*_CONV, "cu_seqlens") if n in x}
    y, last = kda.causal_conv1d(**keywords, output_final_state=True)
    state = keywords.pop("initial_state")
    return {"y": y, "final_state": last, "out": kda.causal_conv1d_update(state=state, **keywords), "state": state}


def _conv_backward(x: dict[str, Any]) -> dict[str, Any]:
    import torch

    leaves = {n: x[n].requires_grad_() for n in _CONV}
    outputs = kda.causal_conv1d(**leaves, output_final_state=True, cu_seqlens=x.get("cu_seqlens"))
    d = x["d_y"], x["d_final_state"]
    return {f"d{n}": y for n, y in zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), d), strict=True)}


def _gate(x: dict[str, Any]) -> dict[str, Any]:
    dtype = x["d_g"].dtype
    return {"gate": kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"], output_dtype=dtype)}


def _gate_backward(x: dict[str, Any]) -> dict[str, Any]:
    import torch

    leaves = {n: x[n].requires_grad_() for n in ("g", "A_log", "dt_bias")}
    g = kda.fused_kda_gate(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"], output_dtype=x["d_g"].dtype)
    return {f"d{n}": y for n, y in zip(leaves, torch.autograd.grad(g, list(leaves.values()), x["d_g"]), strict=True)}


_NORM = ("x", "gate", "weight")


def _norm_gate(x: dict[str, Any]) -> dict[str, Any]:
    """With each gate, without any, and in a given output."""
    given = {n: x[n] for n in _NORM}
    found = {"y": kda.norm_gate(**given), "silu": kda.norm_gate(**given, activation="silu")}
    return found | {"normalised": kda.norm_gate(x["x"]), "out": kda.norm_gate(**given, out=x["d_y"])}


def _norm_gate_backward(x: dict[str, Any]) -> dict[str, Any]:
    import torch

    leaves = {n: x[n].requires_grad_() for n in _NORM}
    y = kda.norm_gate(**leaves, activation="silu")
    return {f"d{n}": d for n, d in zip(leaves, torch.autograd.grad(y, list(leaves.values()), x["d_y"]), strict=True)}


def _prefill_f32(x: dict[str, Any]) -> dict[str, Any]:
    o, w, u = kda.prefill_f32(**x)
    return {"o": o, "w": w, "u": u, "state": x["final_state"]}


# The results of each function of kda.stages.
_STAGES = {
    "cumsum": "G",
    "chunk_intra": "w u qG kg Aqk Akk_inv",
    "recompute_w_u": "w u qG kg",
    "delta_h": "h v_new final_state",
    "fwd_o": "o",
    "bwd_local": "dAqk dv_local",
    "bwd_delta_h": "dh d_initial_state dv_new",
    "bwd_wy_dqkg": "dq dk dv dbeta dG dAkk",
    "bwd_intra": "dq dk dbeta dG",
    "cumsum_backward": "dg",
}


def _stage(name: str, x: dict[str, Any]) -> dict[str, Any]:
    from .. import stages

    results = getattr(stages, name)(**x)
    return dict(zip(_STAGES[name].split(), results if isinstance(results, tuple) else (results,), strict=True))


# Chunks and their borders at a size that every kernel supports; and odd sizes with empty and short sequences.
_CHUNKS = Problem(B=2, T=81, H=1, HV=2, K=64, V=64)
_PACKED = Problem(H=2, HV=4, K=20, V=36, beta="2sigmoid", lengths=(70, 0, 1, 65))
_ODD = Problem(B=2, T=70, H=2, HV=4, K=20, V=36)
# With enough heads that the gradient of A_log, one number per head, does not cancel by chance.
_TRAINED = replace(_CHUNKS, H=8, HV=16), _PACKED
_STEP = Problem(B=3, T=5, H=1, HV=2, K=64, V=64)
_STEPS = _STEP, Problem(B=2, T=1, H=2, HV=4, K=20, V=36, beta="activated")
# What models call, because some CUDA kernels accept nothing else: K = V = 128, one token, few drafts. The prompts are
# so long that cuda_hopper_prefill_segments splits them into three pieces.
_PROMPTS = Problem(B=2, T=300, H=1), Problem(H=1, HV=2, lengths=(300, 70))
_FEW = Problem(B=4, T=3, H=1, HV=2)
_DRAFTS = (*_STEPS, _FEW, *(replace(p, drafts=d) for p, d in ((_STEP, "tree"), (_STEP, "ring"), (_FEW, "ring"))))
_LARGE_CHUNKS = (Problem(B=2, T=81, H=1, HV=2),)
_SPECULATION = {"o": 3e-3} | dict.fromkeys(("state", "u", "k", "alpha", "ring_first", "ring_count"), 1e-5)

OPERATORS = {
    "forward": Operator(
        problems.serving,
        _prefill,
        {"o": 5e-3, "state": 5e-3},
        Problem(),
        checked=(_CHUNKS, _PACKED),
        checked_in_bf16=_PROMPTS,
    ),
    "backward": Operator(
        problems.training,
        _backward,
        {"dq": 6e-3, "dk": 6e-3, "dv": 8e-3, "dg": 1e-2, "dbeta": 1e-2}
        | {"dA_log": 8e-3, "ddt_bias": 8e-3, "dinitial_state": 8e-3},
        Problem(),
        checked=_TRAINED,
        checked_in_bf16=(Problem(T=150, H=16),),
        needs_torch=True,
    ),
    "decode": Operator(
        problems.steps,
        _decode,
        {"o": 3e-3, "state": 1e-5, "snapshots": 1e-5},
        Problem(B=64, T=1),
        checked=(*_STEPS, replace(_STEP, drafts="snapshots"), replace(_FEW, T=1)),
    ),
    "verify": Operator(
        problems.drafts, _verify, _SPECULATION, Problem(B=64, T=4), checked=_DRAFTS
    ),
    "flush": Operator(
        problems.flushing,
        _flush,
        {"state": 1e-5},
        Problem(B=64, T=4),
        checked=_DRAFTS,
        gates=GATES[:1],
        dtypes=("float32",),
    ),
    "flush_verify": Operator(
        problems.flushing_drafts, _flush_verify, _SPECULATION, Problem(B=64, T=4), checked=_DRAFTS
    ),
    "segment_map": Operator(
        problems.segments,
        _segment_map,
        {"M": 1e-5, "b": 1e-5, "d": 1e-5},
        Problem(),
        checked=(_CHUNKS, _PACKED),
        checked_in_bf16=_PROMPTS,
        in_16_bits={"cuda_segment_hopper": 8e-3, "cuda_segment_chunk": 8e-3},
    ),
    "segment_merge": Operator(
        problems.merging,
        _segment_merge,
        {"states": 1e-5, "gradients": 1e-5},
        Problem(B=8, gate="log"),
        checked=(replace(_CHUNKS, B=3), replace(_ODD, B=1)),
        gates=GATES[:1],
        dtypes=("float32",),
    ),
    "conv": Operator(
        problems.convolution,
        _conv,
        dict.fromkeys(("y", "final_state", "out", "state"), 1e-5),
        Problem(),
        checked=(_CHUNKS, _PACKED, *_STEPS),
        gates=GATES[:1],
        layouts=LAYOUTS[:1],
    ),
    "conv_backward": Operator(
        problems.convolution,
        _conv_backward,
        dict.fromkeys(("dx", "dweight", "dbias", "dinitial_state"), 1e-4),
        Problem(),
        checked=(_CHUNKS, _PACKED),
        gates=GATES[:1],
        layouts=LAYOUTS[:1],
        needs_torch=True,
    ),
    "gate": Operator(
        problems.gate, _gate, {"gate": 1e-5}, Problem(), checked=(_CHUNKS,), gates=GATES[1:], layouts=LAYOUTS[:1]
    ),
    "gate_backward": Operator(
        problems.gate,
        _gate_backward,
        {"dg": 1e-4, "dA_log": 1e-4, "ddt_bias": 1e-4},
        Problem(),
        checked=(_CHUNKS,),
        gates=GATES[1:],
        layouts=LAYOUTS[:1],
        needs_torch=True,
    ),
    "norm_gate": Operator(
        problems.norm,
        _norm_gate,
        dict.fromkeys(("y", "silu", "normalised", "out"), 1e-5),
        Problem(),
        checked=(_CHUNKS, _ODD),
        checked_in_bf16=_LARGE_CHUNKS,
        gates=GATES[:1],
        layouts=LAYOUTS[:1],
    ),
    "norm_gate_backward": Operator(
        problems.norm,
        _norm_gate_backward,
        dict.fromkeys(("dx", "dgate", "dweight"), 1e-5),
        Problem(),
        checked=(_CHUNKS, _ODD),
        checked_in_bf16=_LARGE_CHUNKS,
        gates=GATES[:1],
        layouts=LAYOUTS[:1],
        needs_torch=True,
    ),
    "prefill_f32": Operator(
        problems.heads_first,
        _prefill_f32,
        {"o": 1e-5, "w": 1e-5, "u": 1e-5, "state": 1e-5},
        Problem(dtype="float32", gate="log", beta="activated"),
        checked=(_CHUNKS, _ODD),
        gates=GATES[:1],
        dtypes=("float32",),
    ),
} | {
    f"stage_{name}": Operator(
        partial(problems.stage, name),
        partial(_stage, name),
        dict.fromkeys(results.split(), 1e-5),
        Problem(gate="log", beta="activated"),
        checked=(_CHUNKS, _ODD),
        checked_in_bf16=_LARGE_CHUNKS if name == "bwd_wy_dqkg" else (),
        gates=GATES[:1],
        in_bf16=8e-3,
    )
    for name, results in _STAGES.items()
}  # fmt: skip


def current(op: str, impl: str) -> list[str]:
    """The operator's implementations among these names, which commas separate."""
    return [name for name in impl.split(",") if name in kda.implementations(op)]


def known(impl: str | None, ops: Sequence[str]) -> None:
    """Refuses a name that no implementation of these operators has. A library without CUDA lists none on CUDA: what it
    thinks of such a name, it says itself."""
    for name in impl.split(",") if impl is not None else ():
        if not any(current(op, name) for op in ops) and (library.built_with_cuda() or not name.startswith("cuda_")):
            names = dict.fromkeys(n for op in ops for n in kda.implementations(op))
            raise ValueError(f"--impl: expected one of {', '.join(names)}, got {name}")


@contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Forces the implementation of this name in operators that have one, in backward as well. Commas separate names."""
    before = os.environ.get("KDA_IMPL")

    def change(value: str | None) -> None:
        if value is None:
            os.environ.pop("KDA_IMPL", None)
        else:
            os.environ["KDA_IMPL"] = value
        library.library().read_environment()

    if name is not None:
        change(name)
    try:
        yield
    finally:
        change(before)


def device_of(implementation: str) -> str:
    return "cpu" if implementation == "reference" or implementation.startswith("cpu") else "cuda"


def implementations_on(device: str, operator: str, impl: str | None) -> list[str]:
    """The implementations of the operator on the device; ``impl`` alone if it is one of its names."""
    chosen = current(operator, impl)[:1] if impl else []
    return chosen or [n for n in kda.implementations(operator) if device_of(n) == device]

"""Sizes and inputs of a call, for check, bench and explain alike."""

from __future__ import annotations

import argparse
import inspect
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrays import Source

DTYPES = ("float32", "bfloat16", "float16")
GATES = ("log", "softplus", "lower_bound")
BETAS = ("activated", "sigmoid", "2sigmoid")
LAYOUTS = ("V-first", "K-first")
DRAFTS = ("chain", "tree", "ring", "snapshots")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Problem:
    B: int = 1
    T: int = 4096
    H: int = 8
    HV: int = 0  # 0: as many as H
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    gate: str = "softplus"
    beta: str = "sigmoid"
    layout: str = "V-first"
    lengths: tuple[int, ...] = ()  # of sequences packed into one row
    checkpoint_every: int = 0
    drafts: str = "chain"  # what becomes of the tokens of a step
    layers: int = 0  # in a pass on a GPU; 0: enough to fill the L2 cache many times
    hidden: int = 2304  # channels of a model, for its whole layer; those of Kimi-Linear

    def __post_init__(self) -> None:
        object.__setattr__(self, "HV", self.HV or self.H)
        if self.lengths:
            object.__setattr__(self, "B", 1)
            object.__setattr__(self, "T", sum(self.lengths))

    @property
    def N(self) -> int:
        """The number of sequences."""
        return len(self.lengths) or self.B

    @property
    def sizes(self) -> str:
        heads = f"H {self.H}" if self.HV == self.H else f"H {self.H}, HV {self.HV}"
        K_V = f"K = V = {self.K}" if self.K == self.V else f"K {self.K}, V {self.V}"
        tokens = f"{self.N} sequences, {self.T} tokens" if self.lengths else f"B {self.B}, T {self.T}"
        drafts = "" if self.drafts == "chain" else f", {self.drafts}"
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{tokens}, {heads}, {K_V}{drafts}{layers}"

    @property
    def options(self) -> str:
        return f"{self.dtype}, {self.gate} gate, {self.beta} beta, {self.layout} {self.state_dtype} states"


def combinations(p: Problem, given: dict[str, list[Any]]) -> list[Problem]:
    """``p`` in every combination with the given values. HV follows H unless it is given itself."""
    changes = [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
    return list(dict.fromkeys(replace(p, **({"HV": 0} if "H" in c else {}) | c) for c in changes))


def common(p: Problem, new: Source) -> dict[str, Any]:
    """The inputs that ``kda.chunk_kda``, ``kda.prefill`` and ``kda.decode`` share."""
    raw = p.gate != "log"
    x = {
        "q": new.normal(p.dtype, p.B, p.T, p.H, p.K),
        "k": new.normal(p.dtype, p.B, p.T, p.H, p.K),
        "v": new.normal(p.dtype, p.B, p.T, p.HV, p.V),
        "g": (new.normal if raw else new.log_unit)(p.dtype, p.B, p.T, p.HV, p.K),
        "beta": (new.unit if p.beta == "activated" else new.normal)(p.dtype, p.B, p.T, p.HV),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": raw,
        "use_beta_sigmoid_in_kernel": p.beta != "activated",
        "allow_neg_eigval": p.beta == "2sigmoid",
        "state_v_first": p.layout == "V-first",
    }
    if raw:
        x |= {"A_log": new.normal("float32", p.HV), "dt_bias": new.normal("float32", p.HV, p.K)}
    if p.gate == "lower_bound":
        x["lower_bound"] = -5.0
    return x | packed(p, new)


def packed(p: Problem, new: Source) -> dict[str, Any]:
    offsets = [sum(p.lengths[:n]) for n in range(len(p.lengths) + 1)]
    return {"cu_seqlens": new.integers(offsets)} if p.lengths else {}


def states_shape(p: Problem, count: int) -> tuple[int, ...]:
    return (count, p.HV, *((p.V, p.K) if p.layout == "V-first" else (p.K, p.V)))


def states(p: Problem, new: Source, count: int) -> Any:
    return new.normal(p.state_dtype, *states_shape(p, count))


def serving(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.prefill`` and ``kda.decode``: in place on a pool with one slot more than sequences."""
    x = common(p, new) | {"state": states(p, new, p.N + 1)}
    x |= {"state_indices": new.integers(range(p.N, 0, -1)), "out": new.nan(p.dtype, p.B, p.T, p.HV, p.V)}
    if p.checkpoint_every:
        count = max(p.lengths or (p.T,)) // p.checkpoint_every
        slots = [list(range(n * count, (n + 1) * count)) for n in range(p.N)]
        x |= {"checkpoints": states(p, new, p.N * count), "checkpoint_slots": new.integers(slots)}
        x["checkpoint_every"] = p.checkpoint_every
    return x


def steps(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.decode``, or of ``kda.decode_mtp``, which starts from one of the snapshots and overwrites
    them."""
    x = serving(p, new)
    if p.drafts == "snapshots":
        x["snapshots"] = new.normal(p.state_dtype, p.N, *states_shape(p, p.T))
        x |= {"accepted": new.integers([n % p.T + 1 for n in range(p.N)]), "update_state": False}
    return x


def records(p: Problem, new: Source, prefix: str = "") -> dict[str, Any]:
    """A record for each of p.T drafts, filled with numbers that a verify might have left. A ring also has three
    committed entries before them, across its end."""
    entries = 2 * p.T + 3 if p.drafts == "ring" else p.T
    x = {
        f"{prefix}u": new.normal("float32", p.N, entries, p.HV, p.V),
        f"{prefix}k": new.keys("float32", p.N, entries, p.H, p.K),
        f"{prefix}alpha": new.unit("float32", p.N, entries, p.HV, p.K),
    }
    if p.drafts == "ring":
        x |= {f"{prefix}ring_first": new.integers([entries - 2] * p.N), f"{prefix}ring_count": new.integers([3] * p.N)}
    return x


def tree(p: Problem, new: Source) -> Any:
    """A tree of drafts: two branches from the committed text, and every next token follows the one before the last."""
    return new.integers([[t - 2 for t in range(p.T)]] * p.N)


def drafts(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.verify_kvbuffer``."""
    x = serving(p, new) | records(p, new, "records_")
    return x | ({"parents": tree(p, new)} if p.drafts == "tree" else {})


def accepted(p: Problem, new: Source) -> Any:
    """0, 1, .. accepted drafts."""
    return new.integers([n % (p.T + 1) for n in range(p.N)])


def flushing(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.flush_kvbuffer``."""
    x = {"state": states(p, new, p.N + 1), "state_indices": new.integers(range(p.N, 0, -1))}
    x |= records(p, new, "records_") | {"accept_len": accepted(p, new), "state_v_first": p.layout == "V-first"}
    return x | ({"parents": tree(p, new)} if p.drafts == "tree" else {})


def flushing_drafts(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.flush_verify_kvbuffer``: a ring holds the last round itself."""
    x = drafts(p, new) | {"accept_len": accepted(p, new)}
    if p.drafts != "ring":
        x |= records(p, new, "last_")
    return x | ({"last_parents": tree(p, new)} if p.drafts == "tree" else {})


def training(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.chunk_kda``, and the gradients of its results."""
    x = common(p, new) | {"initial_state": states(p, new, p.N), "d_o": new.normal(p.dtype, p.B, p.T, p.HV, p.V)}
    return x | {"d_final_state": states(p, new, p.N)}


def gate(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.fused_kda_gate``, and the gradient of its result."""
    x = {"g": new.normal(p.dtype, p.B, p.T, p.HV, p.K), "A_log": new.normal("float32", p.HV)}
    x |= {"dt_bias": new.normal("float32", p.HV, p.K), "lower_bound": -5.0 if p.gate == "lower_bound" else None}
    return x | {"d_g": new.normal("float32", p.B, p.T, p.HV, p.K)}


def segments(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.segment_map``."""
    return common(p, new) | {"d_o": new.normal(p.dtype, p.B, p.T, p.HV, p.V)}


def merging(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.segment_merge``: one segment per sequence."""
    x = {"M": new.keys("float32", p.N, p.HV, p.K, p.K), "b": new.normal("float32", *states_shape(p, p.N))}
    _N, *state = states_shape(p, 1)
    return x | {"h0": new.normal(p.state_dtype, *state), "state_v_first": p.layout == "V-first"}


def convolution(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.causal_conv1d`` before q, k and v, and the gradients of its results."""
    D = 2 * p.H * p.K + p.HV * p.V
    x = {"x": new.normal(p.dtype, p.B, p.T, D), "weight": new.normal("float32", D, 4), "bias": new.normal(p.dtype, D)}
    x |= {"initial_state": new.normal(p.dtype, p.N, D, 3), "d_y": new.normal(p.dtype, p.B, p.T, D)}
    return x | {"d_final_state": new.normal(p.dtype, p.N, D, 3)} | packed(p, new)


def norm(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.norm_gate``, and the gradient of its result."""
    x, gate, d_y = (new.normal(p.dtype, p.B, p.T, p.HV, p.V) for _ in range(3))
    return {"x": x, "gate": gate, "weight": new.normal("float32", p.V), "d_y": d_y}


def heads_first(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.prefill_f32``, with the state in place."""
    x = {"q": new.normal("float32", p.B, p.H, p.T, p.K), "k": new.keys("float32", p.B, p.H, p.T, p.K)}
    x |= {"v": new.normal("float32", p.B, p.HV, p.T, p.V), "g": new.log_unit("float32", p.B, p.HV, p.T, p.K)}
    state = new.normal("float32", *states_shape(p, p.B))
    x |= {"beta": new.unit("float32", p.B, p.HV, p.T), "initial_state": state, "final_state": state}
    return x | {"chunk_size": 32, "state_v_first": p.layout == "V-first"}


def wy_dqkg(p: Problem, new: Source) -> dict[str, Any]:
    """Inputs of ``kda.stages.bwd_wy_dqkg``, as the stages before it leave them."""
    from .. import stages

    v_first = p.layout == "V-first"
    q, k = (new.keys(p.dtype, p.B, p.T, p.H, p.K) for _ in range(2))
    v, d_o = (new.normal(p.dtype, p.B, p.T, p.HV, p.V) for _ in range(2))
    beta, G = new.unit(p.dtype, p.B, p.T, p.HV), stages.cumsum(new.log_unit(p.dtype, p.B, p.T, p.HV, p.K))
    w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(q, k, v, G, beta)
    h, v_new, _ = stages.delta_h(kg, w, u, G, state_v_first=v_first)
    dv_local = stages.bwd_local(v_new, d_o, Aqk, p.K**-0.5)[1]
    dh, _, dv_new = stages.bwd_delta_h(qG, kg, w, G, d_o, dv_local, state_v_first=v_first)
    x = {"q": q, "k": k, "v": v, "v_new": v_new, "G": G, "beta": beta, "Akk_inv": Akk_inv, "h": h, "d_o": d_o}
    return x | {"dh": dh, "dv_new": dv_new, "scale": p.K**-0.5, "state_v_first": v_first}


# Shapes of the stages' tensors; those not listed are [B, T, HV, K].
_STAGE_SHAPES = {
    **dict.fromkeys(("q", "k"), "keys"),
    **dict.fromkeys(("v", "u", "v_new", "d_o", "dv_local", "dv_new"), "values"),
    **dict.fromkeys(("Aqk", "Akk_inv", "dAqk", "dAkk"), "scores"),
    **dict.fromkeys(("beta", "dbeta"), "betas"),
    **dict.fromkeys(("initial_state", "d_final_state"), "states"),
    **dict.fromkeys(("h", "dh"), "chunk states"),
}


def stage(name: str, p: Problem, new: Source) -> dict[str, Any]:
    """Numbers for every argument of one of ``kda.stages``."""
    from .. import stages

    chunks = p.B * ((p.T + 63) // 64)
    state = (p.HV, *((p.V, p.K) if p.layout == "V-first" else (p.K, p.V)))
    shapes = {
        "keys": (p.B, p.T, p.H, p.K),
        "values": (p.B, p.T, p.HV, p.V),
        "scores": (p.B, p.T, p.HV, 64),
        "betas": (p.B, p.T, p.HV),
        "states": (p.B, *state),
        "chunk states": (chunks, *state),
    }
    x: dict[str, Any] = {}
    for argument in inspect.signature(getattr(stages, name)).parameters:
        if argument in ("cu_seqlens", "impl"):
            continue
        if argument in ("scale", "output_final_state", "state_v_first"):
            x[argument] = {"scale": 0.5, "output_final_state": True}.get(argument, p.layout == "V-first")
            continue
        shape = shapes.get(_STAGE_SHAPES.get(argument, ""), (p.B, p.T, p.HV, p.K))
        wide = argument in ("G", "dG", "dq", "dk", "dAqk", "dAkk", "dbeta", "initial_state", "d_final_state")
        wide = wide or (argument in ("h", "dh") and p.dtype != "bfloat16")
        make = {"g": new.log_unit, "G": new.log_unit, "k": new.keys}.get(argument, new.normal)
        x[argument] = make("float32" if wide else p.dtype, *shape)
        if argument == "G":  # never rises
            x[argument] = stages.cumsum(x[argument])
    return x


def size_arguments(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """Adds options named like the fields of :class:`Problem`; absent ones are not in the namespace. With ``many``,
    some take several values, and sizes also as 1,2,3."""
    sizes = {"B": "rows", "T": "tokens of a row", "H": "query/key heads", "HV": "value heads, as many as H by default"}
    sizes |= {"K": "key size, 1..256", "V": "value size, 1..256"}
    if many:
        sizes |= {"layers": "of a model whose decode is measured on a GPU", "hidden": "channels of a model, for layer"}
    words = {"B": ["--batches"], "T": ["--tokens"], "H": ["--heads"]}
    count: dict[str, Any] = {"nargs": "+"} if many else {}
    several: dict[str, Any] = {"type": naturals, "action": _Flat, "metavar": "N"} if many else {"type": natural}
    for name, what in sizes.items():
        names = [f"--{name}", *(words.get(name, []) if many else [])]
        parser.add_argument(*names, default=argparse.SUPPRESS, help=what, **several, **count)
    choices = {"dtype": (*DTYPES, "float64"), "state-dtype": ("float32", "bfloat16", "float64"), "gate": GATES}
    choices |= {"beta": BETAS, "layout": LAYOUTS}
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=argparse.SUPPRESS, **count)


def given_sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name in Problem.__dataclass_fields__}


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return int(text)


class _Flat(argparse.Action):
    """Flattens lists into one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [v for group in values for v in group])


def naturals(text: str) -> list[int]:
    return [natural(word) for word in text.split(",")]


def natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)

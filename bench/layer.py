"""The whole layer ``kda.nn.KimiDeltaAttention`` on a CUDA device, ours and the peers': which cases, times of prefill,
decode and training, the floor under them, where the time goes, and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import kda
from bench import cases, measure
from bench.cases import named
from bench.measure import Call
from bench.peers import layer as layer_peers
from bench.peers.layer import Calls, Inputs, calls_of
from bench.subject import Cell, Rates, Row, Run, Subject, number, over_peers, ratios, who
from bench.tuning import compiled_at_once
from kda.call.arrays import torch
from kda.cli.problems import BYTES, Problem, combinations

DEVICE = "cuda"
LAYERS = 4  # that a pass of decode goes through: their weights do not fit the L2 cache
CONV_SIZE = 4
MOST = 0.05  # what a peer's outputs may differ from ours: more means another layer, not another rounding
PARTS = ("projections", "convolution", "recurrence", "norm and gate", "output projection")

FIXED = {"gate": "softplus", "beta": "sigmoid", "layout": "V-first", "state_dtype": "float32"}
DEFAULT = Problem(H=32, **FIXED)  # type: ignore[arg-type]
SHAPES: tuple[tuple[str, dict[str, int]], ...] = (  # unless sizes are given
    *(("prefill", {"B": 1, "T": T}) for T in (8192, 2048, 512)),
    *(("decode", {"B": B, "T": 1}) for B in (1, 8, 32, 128)),
    ("training", {"B": 1, "T": 8192}),
)

# Name, kernels if not its own, and a function that makes the calls.
Contender = tuple[str, "str | None", Callable[["Case", Mapping[str, Any], Inputs], Calls]]


@dataclass(frozen=True)
class Case(cases.Case):
    what: str = "prefill"  # or "decode", "training"

    @property
    def sizes(self) -> str:
        p = self.problem
        tokens = "" if self.what == "decode" else f" T{p.T}"
        names = [n for n in ("H", "HV", "K", "V", "hidden", "dtype") if getattr(p, n) != getattr(DEFAULT, n)]
        if p.HV == p.H and "HV" in names:
            names.remove("HV")
        others = [f" {getattr(p, n) if n == 'dtype' else f'{n}{getattr(p, n)}'}" for n in names]
        return f"B{p.B}{tokens}{''.join(others)}"

    @property
    def name(self) -> str:
        return f"{self.what} {self.sizes}"


def sweep(given: dict[str, list[Any]], names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """The cases listed above, with the given sizes in every combination; of those, only the ones with these names,
    such as decodeB8 or prefill*. Decode has one token whatever is given, the others more than one."""
    found: list[Case] = []
    for what, usual in SHAPES:
        values = {name: [value] for name, value in usual.items()} | given | {n: [v] for n, v in FIXED.items()}
        values["T"] = [1] if what == "decode" else [T for T in values["T"] if T > 1]
        found += [Case(p, p.gate, what) for p in combinations(DEFAULT, values)]
    return named([*dict.fromkeys(found)], names)


def products(p: Problem) -> list[tuple[int, int]]:
    """Inputs and outputs of each matrix that multiplies the channels of a token: q, k, v, the two halves of the decay
    and of the gate, beta, the outputs."""
    keys, values = p.H * p.K, p.HV * p.V
    from_hidden = [keys, keys, values, p.V, p.V, p.HV]
    return [*((p.hidden, n) for n in from_hidden), (p.V, p.HV * p.K), (p.V, values), (values, p.hidden)]


def product_flop(p: Problem) -> int:
    """Operations of these products for all tokens, two a multiply-add."""
    return 2 * p.B * p.T * sum(n * m for n, m in products(p))


def weight_bytes(p: Problem) -> int:
    return BYTES[p.dtype] * sum(n * m for n, m in products(p))


def moved_bytes(case: Case) -> int:
    """Bytes if everything but the products reads its inputs once and writes its results once, and hidden states are
    read and outputs written once. What the products read and write between those is theirs, and is not counted; nor
    are the small parameters.

    With D the channels of q, k and v together, and per token: the convolution moves D twice. The recurrence reads D,
    the decay, beta and writes o; the norm reads o and the gate and writes the output's rows. Prefill and decode also
    read and write the states of the recurrence and of the convolution, per sequence.

    Training has no states. Its backward reads hidden states and the outputs' gradient, and writes one of hidden
    states. The norm reads its two inputs and its result's gradient and writes two; the recurrence reads its inputs
    and o's gradient, and writes one of each input; the convolution reads its rows and its result's gradient, and
    writes that of the rows."""
    p, size = case.problem, BYTES[case.problem.dtype]
    D, values, decays = 2 * p.H * p.K + p.HV * p.V, p.HV * p.V, p.HV * (p.K + 1)
    forward = 2 * p.hidden + 2 * D + (D + decays + values) + 3 * values
    if case.what == "training":
        backward = 3 * p.hidden + 5 * values + (2 * (D + decays) + values) + 3 * D
        return size * p.B * p.T * (forward + backward)
    states = BYTES[p.state_dtype] * p.HV * p.K * p.V + size * D * (CONV_SIZE - 1)
    return size * p.B * p.T * forward + 2 * p.B * states


def floor_ms(case: Case, rates: Rates) -> float:
    """Milliseconds of the products and, after them, of all other bytes at the rate of y = 2 x. The products take as
    long as their operations at the rate of a large one, or as long as their weights take to be read, whichever is
    longer. Training has three times the products: its backward multiplies twice, for inputs and for weights."""
    p = case.problem
    product = max(product_flop(p) / rates.product, weight_bytes(p) / rates.bandwidth)
    times = 3 if case.what == "training" else 1
    return 1e-6 * (times * product + moved_bytes(case) / rates.bandwidth)


def new_layer(p: Problem, device: str) -> Any:
    """Ours, as it is made, but without a bias of the gate: transformers' layer has none, so it is zero."""
    from kda.nn import KimiDeltaAttention

    sizes: dict[str, Any] = {"hidden_size": p.hidden, "head_dim": p.K, "num_heads": p.H, "num_v_heads": p.HV}
    sizes |= {"expand_v": p.V / p.K, "conv_size": CONV_SIZE, "dtype": getattr(torch, p.dtype), "device": device}
    layer = KimiDeltaAttention(**sizes, layer_idx=0)
    torch.nn.init.zeros_(layer.get_parameter("g_proj.1.bias"))
    return layer


def new_weights(p: Problem) -> dict[str, Any]:
    """The weights of all contenders, always the same ones on every device."""
    return {name: x.to(DEVICE) for name, x in _weights(replace(p, B=1, T=1)).items()}


@lru_cache(1)
def _weights(p: Problem) -> dict[str, Any]:
    """Drawing them takes seconds; the cases of a sweep have the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights: dict[str, Any] = new_layer(p, "cpu").state_dict()
    return weights


def prepare_kda(case: Case, weights: Mapping[str, Any], inputs: Inputs) -> Calls:
    """Our cache is made once, and each call goes on from the states that the call before has left in it."""
    layer = new_layer(case.problem, DEVICE)
    layer.load_state_dict(weights)
    with torch.inference_mode():
        cache = None if case.what == "training" else layer.new_cache(case.problem.B)

    def run(x: Any, cache: Any) -> Any:
        return layer(x, cache=cache)[0]

    calls = calls_of(case, layer, inputs, run, lambda: cache)
    return calls._replace(parts={} if cache is None else _parts(layer, inputs.x))


def _parts(layer: Any, x: Any) -> dict[str, Call]:
    """Calls of the parts of prefill or decode, each with what the part before it makes, and with a cache of their
    own."""
    from kda.nn import DECODE_TOKENS

    recurrence = kda.decode if x.shape[1] <= DECODE_TOKENS else kda.prefill
    with torch.inference_mode():
        cache = layer.new_cache(x.shape[0])
        rows, g, beta, gate = layer._project(x)
        qkv: tuple[Any, Any, Any] = layer._convolve(rows, cache)
        attend = partial(recurrence, *qkv, g, beta, cache.state, **layer._options())
        o = attend()
        y = layer.o_norm(o, gate).flatten(2)
    calls: tuple[Call, ...] = (
        partial(layer._project, x),
        partial(layer._convolve, rows, cache),
        attend,
        partial(layer.o_norm, o, gate),
        partial(layer.o_proj, y),
    )
    return dict(zip(PARTS, calls, strict=True))


def measured(cases: Sequence[Case], run: Run) -> Iterator[list[Row]]:
    """The rows of one case after the other: kda, then the peers. With ``few``, peers are not trained, because FLA's
    kernels tune themselves for minutes."""
    for case in cases:
        run.started(case)
        weights, found, first = new_weights(case.problem), list[Row](), None
        contenders: list[Contender] = [("kda", run.impl, prepare_kda)]
        if not (run.few and case.what == "training"):
            contenders += [(peer.name, peer.kernels(), peer.prepare) for peer in layer_peers.PEERS]
        else:
            measure.note_once(
                run.notes, "no rows of peers in training: FLA's kernels would tune themselves for minutes"
            )
        for name, kernels, prepare in contenders:
            row: Row = {"what": case.what, "case": case.sizes, "contender": name}
            row |= {"implementation": kernels, "problem": asdict(case.problem)}
            with run.noting(who(row), f"{case.name}: "):
                o, found_here = _measure(case, partial(prepare, case, weights), who(row), first, run)
                first = o if name == "kda" else first
                floor = floor_ms(case, run.rates)
                found.append(row | found_here | {"floor_ms": floor, "share_of_floor": floor / found_here["ms"]})
        yield over_peers(found, PEERS)


def _measure(
    case: Case, prepare: Callable[[Inputs], Calls], name: str, expected: Any, run: Run
) -> tuple[Any, dict[str, Any]]:
    """Returns the outputs of the first call, and what was measured."""
    layers = [prepare(Inputs(case, DEVICE, seed)) for seed in range(LAYERS if case.what == "decode" else 1)]
    with torch.inference_mode(case.what != "training"):
        with compiled_at_once():
            outputs = [calls.whole()[0].detach() for calls in layers]  # compiles and tunes
        row: dict[str, Any] = {"difference": None if expected is None else _difference(outputs[0], expected)}
        return outputs[0], row | _times(case, layers, name, run)


def _difference(o: Any, expected: Any) -> float:
    difference = float((o.float() - expected.float()).norm() / expected.float().norm())
    if not difference < MOST:
        raise ArithmeticError(f"its outputs differ from kda's by {difference:.1e}, more than {MOST:.0e}")
    return difference


def _times(case: Case, layers: Sequence[Calls], name: str, run: Run) -> dict[str, Any]:
    """Times of one layer. Several take turns; one alone finds nothing in the L2 cache."""
    count = len(layers)
    how: dict[str, Any] = {"repeats": run.repeats, "flush": count == 1}
    whole = measure.in_turn([calls.whole for calls in layers])
    row: dict[str, Any] = {"eager_ms": measure.stream_milliseconds(whole, **how) / count}
    row["host_us"] = measure.host_microseconds(whole) / count if case.what == "decode" else None
    if layers[0].forward is not None:
        row["peak_gib"] = measure.own_bytes(layers[0].whole, peak=True) / 2**30
        row["kept_gib"] = measure.own_bytes(layers[0].forward) / 2**30
    try:
        row |= {"timed": "graph", "ms": measure.graph_milliseconds(whole, **how) / count}
    except RuntimeError as error:
        run.notes.append(f"{case.name}: the time of {name} is that of eager calls, not of a graph: {error}")
        row |= {"timed": "eager", "ms": row["eager_ms"]}
    parts = {part: measure.in_turn([calls.parts[part] for calls in layers]) for part in layers[0].parts}
    row["parts_ms"] = {part: measure.graph_milliseconds(call, **how) / count for part, call in parts.items()}
    return row


def _part(name: str) -> Cell:
    return lambda row: f"{row['parts_ms'][name]:.4f}" if row["parts_ms"] else ""


PEERS = [peer.name for peer in layer_peers.PEERS]
SUBJECT = Subject(
    sweep=sweep,
    measured=measured,
    name_of=lambda case: case.name,
    case_of=lambda row: f"{row['what']} {row['case']}",
    who=who,
    columns={
        "ms": number("ms", ".4f"),
        "eager ms": number("eager_ms", ".4f"),
        "host us": number("host_us", ".0f"),
        "of the floor": number("share_of_floor", ".0%"),
        "peak GiB": number("peak_gib", ".3f"),
        "kept GiB": number("kept_gib", ".3f"),
        **ratios(PEERS),
        "difference": number("difference", ".1e"),
    },
    second={f"ms of {part}": _part(part) for part in PARTS},
    what=lambda row: f"layer, {row['what']}",
    sizes=("B", "T", "H", "HV", "K", "V", "hidden"),
    needs_product=True,
)

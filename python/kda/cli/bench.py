"""Measures operators on this machine, next to installed peers and to the machine's own ceilings: a large matrix
product, and reading and writing memory. Times are medians over repetitions that alternate between the things
compared. Nothing else should run at the same time."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import INTERRUPTED, problems, show
from .problems import BYTES, Problem, combinations, given_sizes, natural, size_arguments

if TYPE_CHECKING:
    from . import prefill
    from .arrays import Source

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

    from .layer import new_layer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = new_layer(p, new.device).eval()
    cache, x = layer.new_cache(p.B), new.normal(p.dtype, p.B, p.T, p.hidden)
    return torch.inference_mode()(lambda: layer(x, cache=cache))


def _layer_flop(p: Problem) -> float:
    from .layer import product_flop

    return product_flop(p) + _flop("forward")(p)


def _flop(of: str) -> Callable[[Problem], float]:
    """The work for all tokens and value heads, from a function of kda._flops."""

    def work(p: Problem) -> float:
        from .. import _flops

        flop: float = getattr(_flops, f"{of}_flop")(p.K, p.V)
        return p.B * p.T * p.HV * flop

    return work


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
    "segment_map": Bench(_segment_map, _flop("segment_map"), "GFLOP/s", (Problem(T=4096),)),
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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m kda bench [OPERATOR ...] [options]"
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(BENCHES)}; all by default")
    size_arguments(parser, many=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where all of OPERATOR run there, else cpu")
    parser.add_argument("--impl", metavar="NAME,..", help="force implementations, see `python -m kda info`")
    parser.add_argument("--threads", type=natural, metavar="N", help="as if OMP_NUM_THREADS were set")
    parser.add_argument("--repeats", type=natural, default=7, metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, help="a slow call stops repeating after these")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="of kernels to measure beside ours on cuda")
    parser.add_argument("--rows", nargs="+", default=[], metavar="CASE", help="on cuda, as H64T8192 or H12*")
    parser.add_argument("--quick", action="store_true", help="a few cases of prefill on cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart: .png, .svg or .pdf; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    for name in options.operators:
        if name not in BENCHES:
            raise ValueError(f"operators: expected some of {', '.join(BENCHES)}, got {name}")
    _check_files(options)

    from kda._arrays import torch
    from kda._lib import _OPERATORS

    from .arrays import Source
    from .measure import machine, stream_bandwidth
    from .operators import forced, known
    from .peers import add_folder, missing

    options.device = options.device or _best_device(options.operators)
    names = options.operators or [n for n, b in BENCHES.items() if options.device in b.devices]
    known(options.impl, _OPERATORS)
    for name in names:
        if options.device not in BENCHES[name].devices:
            raise ValueError(
                f"--device: expected {' or '.join(BENCHES[name].devices)} for {name}, got {options.device}"
            )
    notes = []
    given = given_sizes(options)
    if torch is None:
        given.setdefault("dtype", ["float32"])  # NumPy has no bfloat16
    special = [name for name in names if options.device == "cuda" and name in _ON_GPU]
    if options.quick and "prefill" not in special:
        raise ValueError("--quick: expected prefill on cuda with it")
    if options.rows and not {"layer", "prefill", "stages", "training"} & {*special}:
        raise ValueError("--rows: expected prefill, stages, layer or training on cuda with it")
    rows = [(name, p) for name in names if name not in special for p in _problems(BENCHES[name], given)]
    if torch is None:
        notes = [f"no rows of {n}: it needs torch, which is not installed" for n in names if BENCHES[n].needs_torch]
        rows = [(name, p) for name, p in rows if not BENCHES[name].needs_torch]
    add_folder(options.peers)
    modules = {module for n in names for module, _ in BENCHES[n].peers.values()} if options.device == "cpu" else set()
    notes += missing(modules)
    absent = {m for m in modules if any(f" {m}:" in note for note in notes)}

    Source(options.device)  # reports a problem with the device before anything is measured
    record: dict[str, Any] = {"command": " ".join(["python -m kda", *sys.argv[1:]]), **machine(options.device)}
    record |= {"ceilings": {}, "rows": []}
    status = 0
    try:
        with forced(options.impl):
            if rows:
                _measure_rows(rows, record, options, absent, notes)
            if special:
                record["stream_gb_per_s"] = stream_bandwidth()
            for name in special:
                _ON_GPU[name](given, record, options, notes)
    except KeyboardInterrupt:
        notes.append("interrupted: the rest was not measured")
        record["interrupted"], status = True, INTERRUPTED
    _print(record, notes)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.plot and any(record.get(part) for part in ("rows", *_ON_GPU, "serving")):
        from .plot import draw

        draw(record, options.plot)
    return status


def _best_device(operators: list[str]) -> str:
    import kda

    from .arrays import cuda_device

    built = "cuda_gate" in kda.implementations("gate")
    everywhere = operators and all("cuda" in BENCHES[name].devices for name in operators)
    return "cuda" if built and everywhere and cuda_device() else "cpu"


def _check_files(options: argparse.Namespace) -> None:
    """Reports problems with output files now, not after minutes of measuring."""
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}: expected a file in a folder that exists, got {path}")
    if options.plot:
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--plot: needs matplotlib, which is not installed; `pip install libkda[cli]` brings it")
        if options.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot: expected a file that ends in .png, .svg or .pdf, got {options.plot}")


def _problems(bench: Bench, given: dict[str, list[Any]]) -> list[Problem]:
    """The operator's own problems, in every combination with the given values."""
    given = {name: [v for v in values if name != "T" or v <= bench.most_tokens] for name, values in given.items()}
    given = {name: values for name, values in given.items() if values} | {n: [v] for n, v in bench.only.items()}
    return list(dict.fromkeys(x for p in bench.problems for x in combinations(p, given)))


def _measure_rows(
    rows: list[tuple[str, Problem]],
    record: dict[str, Any],
    options: argparse.Namespace,
    absent: set[str],
    notes: list[str],
) -> None:
    from .measure import ceilings

    with show.Progress(2 + len(rows) * options.repeats, lines=True) as progress:

        def measure_ceilings() -> None:
            progress.label("ceilings")
            for unit, rate in ceilings(options.device).items():
                record["ceilings"][unit] = max(rate, record["ceilings"].get(unit, 0.0))
            progress.step()

        measure_ceilings()
        for name, p in rows:
            progress.label(f"{name}: {p.sizes}")
            record["rows"] += _measure(name, p, options, absent, notes, progress)
        measure_ceilings()  # again: a disturbance may have passed


def _measure(
    name: str, p: Problem, options: argparse.Namespace, absent: set[str], notes: list[str], progress: show.Progress
) -> list[dict[str, Any]]:
    """Returns a row for kda, then one for each peer."""
    from . import peers
    from .arrays import Source
    from .measure import medians, synchronizer

    bench = BENCHES[name]
    calls = {"kda": bench.prepare(p, Source(options.device))}
    for peer, (module, function) in bench.peers.items():
        if module in absent or options.device != "cpu":
            continue
        try:
            call = getattr(peers, function)(p, Source(options.device))
            call()
        except Exception as error:  # a peer may not support this shape
            notes.append(f"no row of {peer} for {p.sizes}: {type(error).__name__}: {error}")
        else:
            calls[peer] = call
    done = itertools.count(1)
    times = medians(
        calls,
        options.repeats,
        seconds=options.seconds,
        synchronize=synchronizer(options.device),
        tick=lambda: progress.step() if next(done) % len(calls) == 0 else None,
    )
    return [
        {
            "operator": name,
            "contender": contender,
            "problem": asdict(p),
            "ms": seconds * 1e3,
            "tokens_per_s": p.B * p.T / seconds,
            "rate": bench.work(p) / seconds * 1e-9,
            "unit": bench.unit,
            "times_kda": seconds / times["kda"],
        }
        for contender, seconds in times.items()
    ]


def _measure_serving(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    """Measures decode and rounds of speculation on the GPU."""
    from . import serving

    swept = serving.sweep(given)
    record["serving"] = []
    try:
        with show.Progress(len(swept), lines=True) as progress:
            for p in swept:
                progress.label(serving.about(p))
                found = serving.rows(p, record["stream_gb_per_s"], notes, impl=options.impl, repeats=options.repeats)
                record["serving"] += found
                progress.step()
    finally:
        serving.compare(record["serving"])


def _names(options: argparse.Namespace) -> list[str]:
    return [name for word in options.rows for name in word.split(",")]


def _measure_prefill(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from . import prefill

    cases = prefill.sweep(given, _names(options), options.quick)
    how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "few": options.quick}
    found: list[dict[str, Any]] = []
    try:
        with show.Progress(2 * len(cases), lines=True) as progress:

            def started(case: prefill.Case) -> None:
                progress.label(f"{case.name}, {case.gate}")
                progress.step()

            for some in prefill.measured(cases, record["stream_gb_per_s"], notes, **how, started=started):
                found += some
    finally:
        record["prefill"] = prefill.compared(cases, found)


def _measure_prefill_f32(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from . import prefill_f32

    swept = prefill_f32.sweep(given)
    record["prefill_f32"] = []
    with show.Progress(len(swept), lines=True) as progress:

        def started(p: Problem) -> None:
            progress.label(p.sizes)
            progress.step()

        how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
        for some in prefill_f32.measured(swept, notes, **how):
            record["prefill_f32"] += some


def _measure_training(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from . import training

    cases, found = training.sweep(given, _names(options)), list[dict[str, Any]]()
    try:
        with show.Progress(len(cases), lines=True) as progress:

            def started(case: prefill.Case) -> None:
                progress.label(f"{training.name_of(case)}, {case.gate}")
                progress.step()

            how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
            for some in training.measured(cases, notes, **how):
                found += some
    finally:
        record["training"] = training.compared(found)


def _measure_stages(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from . import stages

    cases = stages.sweep(given, _names(options))
    record["stages"] = []
    with show.Progress(len(cases), lines=True) as progress:

        def started(case: prefill.Case) -> None:
            progress.label(stages.name_of(case))
            progress.step()

        how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
        for some in stages.measured(cases, record["stream_gb_per_s"], notes, **how):
            record["stages"] += some


def _measure_layer(
    given: dict[str, list[Any]], record: dict[str, Any], options: argparse.Namespace, notes: list[str]
) -> None:
    from . import layer, measure

    cases = layer.sweep(given, _names(options))
    record["product_gflop_per_s"] = measure.ceilings(options.device)["GFLOP/s"]
    rates = layer.Rates(record["product_gflop_per_s"], record["stream_gb_per_s"])
    record["layer"] = []
    with show.Progress(len(cases), lines=True) as progress:

        def started(case: layer.Case) -> None:
            progress.label(case.name)
            progress.step()

        how: dict[str, Any] = {"impl": options.impl, "repeats": options.repeats, "started": started}
        for some in layer.measured(cases, rates, notes, **how):
            record["layer"] += some


# Operators that are measured in another way on a GPU.
_ON_GPU = {
    "prefill": _measure_prefill,
    "prefill_f32": _measure_prefill_f32,
    "stages": _measure_stages,
    "layer": _measure_layer,
    "decode": _measure_serving,
    "training": _measure_training,
}


def _print(record: dict[str, Any], notes: list[str]) -> None:
    print(f"{record['cpu']}, {record['threads']} threads, {record['library']['cpu']}")
    if record["device"] != "cpu":
        print(record["device"])
    if record["rows"]:
        _print_rows(record)
    if "stream_gb_per_s" in record:
        print(f"y = 2 x: {record['stream_gb_per_s']:.0f} GB/s")
    if "prefill" in record:
        _print_prefill(record)
    if "prefill_f32" in record:
        _print_prefill_f32(record)
    if "stages" in record:
        _print_stages(record)
    if "layer" in record:
        _print_layer(record)
    if "training" in record:
        _print_training(record)
    if "serving" in record:
        _print_serving(record)
    for note in notes:
        print(f"\n{note}")


def _print_rows(record: dict[str, Any]) -> None:
    limits = record["ceilings"]
    print(f"ceilings: {limits['GFLOP/s']:.0f} GFLOP/s matrix product, {limits['GB/s']:.1f} GB/s read + write\n")
    rows = []
    for r in record["rows"]:
        p = Problem(**r["problem"])
        mine = r["contender"] == "kda"
        what = [r["operator"], f"{p.sizes}, {p.dtype}"] if mine else ["", r["contender"]]
        rate = [f"{r['rate']:.3g} {r['unit']}", f"{r['rate'] / limits[r['unit']]:.0%}"] if mine else ["", ""]
        rows.append([*what, _time(r["ms"]), f"{r['tokens_per_s']:.3g}", *rate, "" if mine else f"{r['times_kda']:.3g}"])
    show.table(["operator", "problem", "time", "tokens/s", "rate", "of ceiling", "time / kda's"], rows)
    if any(r["unit"] == "GB/s" and r["rate"] > limits["GB/s"] for r in record["rows"] if r["contender"] == "kda"):
        print("\nMore GB/s than the memory gives: what these calls touch stays in the caches.")


def _print_serving(record: dict[str, Any]) -> None:
    from .serving import about, label

    print()
    rows, last = [], None
    for r in record["serving"]:
        sizes = about(Problem(**r["problem"]))
        share = f"{r['share_of_stream_bandwidth']:.0%}"
        ratios = [f"{r[over]:.2f}" if r[over] else "" for over in ("over_baseline", "over_plain")]
        rows.append(["" if sizes == last else sizes, label(r), f"{r['us']:.4g}", share, *ratios])
        last = sizes
    show.table(["problem", "what", "us a layer", "of the floor", "over baseline", "over plain"], rows)


def _print_prefill(record: dict[str, Any]) -> None:
    from .prefill import label, over
    from .prefill_peers import PEERS

    ratios = {f"over {peer.name}": over(peer.name) for peer in PEERS} | {"times strong": "times_strong"}
    ratios = {what: key for what, key in ratios.items() if any(r[key] for r in record["prefill"])}
    print()
    rows, errors, last = [], [], None
    for r in record["prefill"]:
        case = f"{r['case']}, {r['gate']}"
        what = ["" if case == last else case, label(r)]
        cells = [f"{r[key]:.2f}" if r[key] else "" for key in ratios.values()]
        rows.append([*what, f"{r['ms']:.3f}", f"{r['share_of_stream_bandwidth']:.0%}", *cells])
        if "error_o" in r:
            errors.append([case, label(r), f"{r['error_o']:.1e}", f"{r['error_state']:.1e}"])
        last = case
    show.table(["case", "what", "ms", "of the floor", *ratios], rows)
    if errors:
        print()
        show.table(["error against float64", "what", "o", "state"], errors)


def _print_prefill_f32(record: dict[str, Any]) -> None:
    from .prefill_f32 import label

    print()
    rows, last = [], None
    for r in record["prefill_f32"]:
        sizes = Problem(**r["problem"]).sizes
        found = [f"{r['ratio']:.2f}" if r["ratio"] else "", f"{r['difference']:.1e}" if r["difference"] else ""]
        rows.append(["" if sizes == last else sizes, label(r), f"{r['ms']:.3f}", *found])
        last = sizes
    show.table(["problem", "what", "ms", "ratio", "difference"], rows)


def _print_stages(record: dict[str, Any]) -> None:
    from .prefill import label, over
    from .stages import FLA

    print()
    rows, last = [], None
    for r in record["stages"]:
        case = f"{r['stage']}, {r['case']}"
        found = [f"{r['ms']:.4f}", f"{r['least_bytes'] / 1e6:.1f}", f"{r['share_of_stream_bandwidth']:.0%}"]
        rows.append(["" if case == last else case, label(r), *found, f"{r[over(FLA)]:.2f}" if r[over(FLA)] else ""])
        last = case
    show.table(["case", "what", "ms", "MB", "of the floor", f"over {FLA}"], rows)


def _print_layer(record: dict[str, Any]) -> None:
    from .layer import table, table_of_parts

    print(f"a large bfloat16 matrix product: {record['product_gflop_per_s'] / 1e3:.0f} TFLOP/s")
    for columns, cells in (table(record["layer"]), table_of_parts(record["layer"])):
        if cells:
            print()
            show.table(columns, cells)


def _print_training(record: dict[str, Any]) -> None:
    from .prefill import over
    from .training import label
    from .training_peers import PEERS

    print()
    rows, last = [], None
    for r in record["training"]:
        case = f"{r['case']}, {r['gate']}"
        times = [f"{r[key]:.3f}" for key in ("forward_ms", "backward_ms", "ms")]
        ratios = [f"{ratio:.2f}" if (ratio := r[over(peer.name)]) else "" for peer in PEERS]
        rows.append(["" if case == last else case, label(r), *times, f"{r['peak_gib']:.3f}", *ratios])
        last = case
    columns = ["case", "what", "forward ms", "backward ms", "both ms", "peak GiB"]
    show.table([*columns, *(f"over {peer.name}" for peer in PEERS)], rows)


def _time(ms: float) -> str:
    return f"{ms * 1e3:.3g} us" if ms < 1 else f"{ms:.3g} ms" if ms < 1e3 else f"{ms / 1e3:.3g} s"

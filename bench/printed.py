"""Prints what ``python -m bench`` has measured, as tables."""

from __future__ import annotations

from typing import Any

from kda.cli import show
from kda.cli.problems import Problem


def print_record(record: dict[str, Any], notes: list[str]) -> None:
    print(f"{record['cpu']}, {record['threads']} threads, {record['library']['cpu']}")
    if record["device"] != "cpu":
        print(record["device"])
    if record["rows"]:
        _print_rows(record)
    if "stream_gb_per_s" in record:
        print(f"y = 2 x: {record['stream_gb_per_s']:.0f} GB/s")
    parts = {
        "prefill": _print_prefill,
        "prefill_f32": _print_prefill_f32,
        "stages": _print_stages,
        "layer": _print_layer,
        "training": _print_training,
        "serving": _print_serving,
    }
    for name, print_part in parts.items():
        if name in record:
            print_part(record)
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
    from bench.serving import about, label

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
    from bench.peers.prefill import PEERS
    from bench.prefill import label, over

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
    from bench.prefill_f32 import label

    print()
    rows, last = [], None
    for r in record["prefill_f32"]:
        sizes = Problem(**r["problem"]).sizes
        found = [f"{r['ratio']:.2f}" if r["ratio"] else "", f"{r['difference']:.1e}" if r["difference"] else ""]
        rows.append(["" if sizes == last else sizes, label(r), f"{r['ms']:.3f}", *found])
        last = sizes
    show.table(["problem", "what", "ms", "ratio", "difference"], rows)


def _print_stages(record: dict[str, Any]) -> None:
    from bench.prefill import label, over
    from bench.stages import FLA

    print()
    rows, last = [], None
    for r in record["stages"]:
        case = f"{r['stage']}, {r['case']}"
        found = [f"{r['ms']:.4f}", f"{r['least_bytes'] / 1e6:.1f}", f"{r['share_of_stream_bandwidth']:.0%}"]
        rows.append(["" if case == last else case, label(r), *found, f"{r[over(FLA)]:.2f}" if r[over(FLA)] else ""])
        last = case
    show.table(["case", "what", "ms", "MB", "of the floor", f"over {FLA}"], rows)


def _print_layer(record: dict[str, Any]) -> None:
    from bench.layer import table, table_of_parts

    print(f"a large bfloat16 matrix product: {record['product_gflop_per_s'] / 1e3:.0f} TFLOP/s")
    for columns, cells in (table(record["layer"]), table_of_parts(record["layer"])):
        if cells:
            print()
            show.table(columns, cells)


def _print_training(record: dict[str, Any]) -> None:
    from bench.peers.training import PEERS
    from bench.prefill import over
    from bench.training import label

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

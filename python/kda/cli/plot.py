"""The chart of ``python -m kda bench --plot``: bars of rates, and the machine's ceilings as lines; below them, for
decode and rounds of speculation on a GPU, curves over the batch size."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from .problems import Problem
from .serving import label


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    parts = {"rows": (_bars, 0.42 * (len(record["rows"]) + 3)), "serving": (_curves, 4.0 * _heads(record))}
    parts = {name: part for name, part in parts.items() if record.get(name)}
    heights = [height for _, height in parts.values()]
    figure = Figure(figsize=(9, sum(heights) + 0.8), layout="constrained")
    panels = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (draw_part, _) in zip(panels, parts.values(), strict=True):
        draw_part(panel, record)
    where = record["cpu"] if record["device"] == "cpu" else record["device"]
    figure.suptitle(f"kda {record['library']['version']} on {where}, {record['threads']} threads", fontsize="large")
    figure.savefig(path, dpi=150)


def _bars(figure: Any, record: dict[str, Any]) -> None:
    """A panel for each unit, its ceiling a dashed line."""
    units = list(dict.fromkeys(row["unit"] for row in record["rows"]))
    panels = [[row for row in record["rows"] if row["unit"] == unit] for unit in units]
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(rows) + 1.5 for rows in panels])[:, 0]
    for axis, unit, rows in zip(axes, units, panels, strict=True):
        labels = [f"{r['operator']}: {Problem(**r['problem']).sizes}" for r in rows]
        labels = [x if r["contender"] == "kda" else r["contender"] for x, r in zip(labels, rows, strict=True)]
        colors = ["tab:blue" if r["contender"] == "kda" else "silver" for r in rows]
        bars = axis.barh(range(len(rows)), [r["rate"] for r in rows], color=colors)
        axis.bar_label(bars, [f"{r['rate']:.3g}" for r in rows], padding=3)
        axis.set_yticks(range(len(rows)), labels)
        axis.invert_yaxis()
        ceiling = record["ceilings"][unit]
        axis.axvline(ceiling, color="tab:red", linestyle="--")
        what = "matrix product" if unit == "GFLOP/s" else "memory, read + write"
        axis.set_title(f"{what} of this machine: {ceiling:.3g} {unit}", color="tab:red", loc="right", fontsize="medium")
        axis.set_xlabel(unit)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)


def _heads(record: dict[str, Any]) -> int:
    return len({row["problem"]["HV"] for row in record.get("serving", [])})


def _curves(figure: Any, record: dict[str, Any]) -> None:
    """A panel for each number of heads and of tokens: the share of the memory's rate that a layer's bytes make."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    rows = [(Problem(**row["problem"]), label(row), row["share_of_stream_bandwidth"]) for row in record["serving"]]
    labels = list(dict.fromkeys(name for _, name, _ in rows))
    heads, tokens, batches = (sorted({getattr(p, size) for p, _, _ in rows}) for size in ("HV", "T", "B"))
    axes = figure.subplots(len(heads), len(tokens), squeeze=False, sharex=True, sharey=True)
    styles: dict[str, Any] = {
        n: {"color": colormaps["tab20"](i), "linestyle": "-" if n.startswith("kda") else "--"}
        for i, n in enumerate(labels)
    }
    for axis, (HV, T) in zip(axes.flat, itertools.product(heads, tokens), strict=True):
        for name in labels:
            points = sorted((p.B, share) for p, n, share in rows if (p.HV, p.T, n) == (HV, T, name))
            axis.plot([B for B, _ in points], [share for _, share in points], marker=".", **styles[name])
        axis.set_title(f"HV {HV}, T {T}", fontsize="medium")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xticks(batches, [str(B) for B in batches], minor=False)
    axes[0, 0].minorticks_off()
    axes[0, 0].set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("B, requests")
    axes[-1, 0].set_ylabel("share of the rate of y = 2 x")
    lines = [Line2D([], [], **style) for style in styles.values()]
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize="small")

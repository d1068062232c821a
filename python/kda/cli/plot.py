"""The chart of ``python -m kda bench --plot``: bars of rates, and the machine's ceilings as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .problems import Problem


def draw(record: dict[str, Any], path: Path) -> None:
    """A panel for each unit, its ceiling a dashed line."""
    from matplotlib.figure import Figure

    units = list(dict.fromkeys(row["unit"] for row in record["rows"]))
    panels = [[row for row in record["rows"] if row["unit"] == unit] for unit in units]
    heights = [len(rows) + 1.5 for rows in panels]
    figure = Figure(figsize=(9, 0.42 * sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
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
    where = record["cpu"] if record["device"] == "cpu" else record["device"]
    figure.suptitle(f"kda {record['library']['version']} on {where}, {record['threads']} threads", fontsize="large")
    figure.savefig(path, dpi=150)

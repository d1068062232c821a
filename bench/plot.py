"""Draws the chart of ``python -m bench --plot``: bars of rates, and the machine's ceilings as lines. Below them,
for prefill on a GPU: marks for each case, and in float32 bars of times. For stages on a GPU: bars of times. For the
layer on a GPU: bars of times, and of the shares that its parts have. For training on a GPU: bars of forward and
backward. For decode and rounds of speculation: curves over the batch size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import layer, prefill, prefill_f32, training
from bench.serving import about, label
from kda.cli.problems import Problem

COLUMNS = 4  # of panels for decode
COLORS = [f"C{i}" for i in range(10) if i != 7]  # without grey, which marks peers


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    parts = {"rows": (_bars, 0.42 * (len(record["rows"]) + 3))}
    parts["prefill"] = (_marks, 0.24 * len(_gates_of(record)) + 0.5 * len(set(_gates_of(record))) + 1)
    parts["prefill_f32"] = (_prefill_f32, 0.3 * (len(record.get("prefill_f32", [])) + 4))
    parts["stages"] = (_stages, 0.3 * (len(record.get("stages", [])) + 4))
    parts["layer"] = (_layer, 0.3 * (len(record.get("layer", [])) + 3 * len(_kinds_of_layer(record)) + 8))
    parts["training"] = (_steps, 0.22 * (len(record.get("training", [])) + 5))
    parts["serving"] = (_curves, 2.5 * _lines_of(_panels(record)) + 2)
    parts = {name: part for name, part in parts.items() if record.get(name)}
    heights = [height for _, height in parts.values()]
    figure = Figure(figsize=(14 if "serving" in parts else 9, sum(heights) + 0.8), layout="constrained")
    panels = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (draw_part, _) in zip(panels, parts.values(), strict=True):
        draw_part(panel, record)
    where = record["cpu"] if record["device"] == "cpu" else record["device"]
    figure.suptitle(f"kda {record['library']['version']} on {where}, {record['threads']} threads", fontsize="large")
    figure.savefig(path, dpi=150)


def _bars(figure: Any, record: dict[str, Any]) -> None:
    """Draws a panel for each unit, its ceiling as a dashed line."""
    units = list(dict.fromkeys(row["unit"] for row in record["rows"]))
    panels = [[row for row in record["rows"] if row["unit"] == unit] for unit in units]
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(rows) + 1.5 for rows in panels])[:, 0]
    for axis, unit, rows in zip(axes, units, panels, strict=True):
        labels = [f"{r['operator']}: {Problem(**r['problem']).sizes}" for r in rows]
        labels = [x if r["contender"] == "kda" else r["contender"] for x, r in zip(labels, rows, strict=True)]
        bars = axis.barh(range(len(rows)), [r["rate"] for r in rows], color=_colors(rows))
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


def _gates_of(record: dict[str, Any]) -> list[str]:
    """The gate of each case of prefill."""
    return [gate for _, gate in dict.fromkeys((row["case"], row["gate"]) for row in record.get("prefill", []))]


def _marks(figure: Any, record: dict[str, Any]) -> None:
    """Draws a panel for each kind of gate, and a line for each case: the fraction of the memory rate at which its
    bytes move, by contender. Ours are coloured."""
    rows, gates = record["prefill"], _gates_of(record)
    kinds, names = list(dict.fromkeys(gates)), list(dict.fromkeys(map(prefill.label, record["prefill"])))
    heights = [gates.count(gate) + 2 for gate in kinds]
    axes = figure.subplots(len(kinds), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axis, gate in zip(axes, kinds, strict=True):
        cases = list(dict.fromkeys(row["case"] for row in rows if row["gate"] == gate))
        for n, (name, marker) in enumerate(zip(names, itertools.cycle("osD^v<>P*"))):
            shown = [row for row in rows if row["gate"] == gate and prefill.label(row) == name]
            shares, lines = [row["share_of_stream_bandwidth"] for row in shown], [cases.index(r["case"]) for r in shown]
            color = COLORS[n % len(COLORS)] if name.startswith("kda") else "0.45"
            axis.plot(shares, lines, label=name, color=color, marker=marker, linestyle="", markersize=5)
        axis.set_yticks(range(len(cases)), cases, fontsize="small")
        axis.set_ylim(len(cases) - 0.5, -0.5)
        axis.set_title(f"{gate} gates", fontsize="small")
        axis.grid(axis="y", linewidth=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(left=0)
    axes[-1].set_xlabel("share of the rate of y = 2 x")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")


def _prefill_f32(figure: Any, record: dict[str, Any]) -> None:
    rows = record["prefill_f32"]
    _times(figure, rows, [f"{Problem(**r['problem']).sizes}: {prefill_f32.label(r)}" for r in rows])


def _stages(figure: Any, record: dict[str, Any]) -> None:
    rows = record["stages"]
    _times(figure, rows, [f"{r['stage']}, {r['case']}: {prefill.label(r)}" for r in rows])


def _times(figure: Any, rows: list[dict[str, Any]], labels: list[str]) -> None:
    """Draws a bar for each row."""
    axis = figure.subplots()
    bars = axis.barh(range(len(rows)), [r["ms"] for r in rows], color=_colors(rows))
    _name(axis, bars, rows, labels)
    axis.set_xlabel("ms")


def _kinds_of_layer(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["what"] for row in record.get("layer", [])))


def _layer(figure: Any, record: dict[str, Any]) -> None:
    """Draws a panel for prefill, decode and training each, with a bar for each row and the floor as a line in it.
    Below them, a bar for each row that has parts: their shares of the sum."""
    rows, kinds = record["layer"], _kinds_of_layer(record)
    whole = [r for r in rows if r["parts_ms"]]
    heights = [sum(r["what"] == kind for r in rows) + 2 for kind in kinds] + [len(whole) + 3] * bool(whole)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, kind in zip(axes, kinds, strict=False):
        shown = [r for r in rows if r["what"] == kind]
        bars = axis.barh(range(len(shown)), [r["ms"] for r in shown], color=_colors(shown))
        _name(axis, bars, shown, [f"{kind} {r['case']}: {layer.label(r)}" for r in shown])
        ends = [n + end for n in range(len(shown)) for end in (-0.4, 0.4)]
        floors = [r["floor_ms"] for r in shown]
        axis.vlines(floors, ends[::2], ends[1::2], color="tab:red")
    axes[len(kinds) - 1].set_xlabel("ms, and the floor in red")
    if whole:
        _shares(axes[-1], whole)


def _shares(axis: Any, rows: list[dict[str, Any]]) -> None:
    totals = [sum(r["parts_ms"].values()) for r in rows]
    left = [0.0] * len(rows)
    for part, color in zip(layer.PARTS, COLORS, strict=False):
        shares = [r["parts_ms"][part] / total for r, total in zip(rows, totals, strict=True)]
        axis.barh(range(len(rows)), shares, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set_yticks(range(len(rows)), [f"{r['what']} {r['case']}: {layer.label(r)}" for r in rows], fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel("shares of the sum of the parts")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(layer.PARTS), fontsize="x-small")


def _steps(figure: Any, record: dict[str, Any]) -> None:
    """Draws a bar for each row of training: forward, with a paler bar for backward behind it."""
    axis, rows = figure.subplots(), record["training"]
    forward, backward = ([r[f"{name}_ms"] for r in rows] for name in ("forward", "backward"))
    axis.barh(range(len(rows)), forward, color=_colors(rows))
    bars = axis.barh(range(len(rows)), backward, left=forward, color=_colors(rows), alpha=0.5)
    _name(axis, bars, rows, [f"{r['case']}, {r['gate']}: {training.label(r)}" for r in rows])
    axis.margins(y=0.01)
    axis.set_xlabel("ms of forward and, paler, backward")


def _colors(rows: list[dict[str, Any]]) -> list[str]:
    return ["tab:blue" if r["contender"] == "kda" else "silver" for r in rows]


def _name(axis: Any, bars: Any, rows: list[dict[str, Any]], labels: list[str]) -> None:
    """Labels the bars from top to bottom, and adds their milliseconds."""
    axis.bar_label(bars, [f"{r['ms']:.3g}" for r in rows], padding=3)
    axis.set_yticks(range(len(rows)), labels, fontsize="small")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def _panels(record: dict[str, Any]) -> list[Problem]:
    """One panel for all batch sizes of a problem; the usual options come first, one token before several."""
    problems = dict.fromkeys(replace(Problem(**row["problem"]), B=1) for row in record.get("serving", []))
    return sorted(problems, key=lambda p: (p.layers, p.options != Problem().options, p.options, p.T, p.HV))


def _curves(figure: Any, record: dict[str, Any]) -> None:
    """Draws the fraction of the memory rate at which a layer's bytes move. Ours have a colour per operator, dotted
    except for its first implementation; peers are grey, with a marker each."""
    from matplotlib.lines import Line2D

    panels, rows = _panels(record), [(Problem(**row["problem"]), row) for row in record["serving"]]
    axes = figure.subplots(_lines_of(panels), min(COLUMNS, len(panels)), squeeze=False, sharex=True, sharey=True)
    styles, batches = _styles(record["serving"]), sorted({p.B for p, _ in rows})
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, style in styles.items():
            shown = [(p.B, row) for p, row in rows if replace(p, B=1) == panel and label(row) == name]
            points = sorted((B, row["share_of_stream_bandwidth"]) for B, row in shown)
            if points:
                axis.plot(*zip(*points, strict=True), label=name, **style)
        title = about(panel).split(", ", 1)[1].replace(", K = V = 128", "")
        axis.set_title(title, fontsize="small")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize="small", labelbottom=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xticks(batches, [str(B) for B in batches], minor=False)
    axes[0, 0].minorticks_off()
    axes[0, 0].set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("B, requests")
    axes[-1, 0].set_ylabel("share of the rate of y = 2 x")
    lines = [Line2D([], [], **style) for style in styles.values()]
    figure.legend(lines, list(styles), loc="outside lower center", ncols=4, fontsize="small")


def _lines_of(panels: list[Problem]) -> int:
    return -(-len(panels) // COLUMNS)


def _styles(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Line styles by label, ours first."""
    ours = {label(row): row["operator"] for row in rows if row["contender"] == "kda"}
    peers = dict.fromkeys(label(row) for row in rows if row["contender"] != "kda")
    operators = list(dict.fromkeys(ours.values()))
    first = {operator: name for name, operator in reversed(ours.items())}
    styles: dict[str, dict[str, Any]] = {}
    for name, operator in ours.items():
        line, filled = ("-", "full") if first[operator] == name else (":", "none")
        color = COLORS[operators.index(operator) % len(COLORS)]
        styles[name] = {"color": color, "linestyle": line, "marker": "o", "markersize": 4, "fillstyle": filled}
    for name, marker in zip(peers, itertools.cycle("x+s^vd*")):
        styles[name] = {"color": "0.45", "linestyle": "--", "linewidth": 0.8, "marker": marker, "markersize": 4}
    return styles

"""Plots the loss."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt

from .training import History

matplotlib.use("Agg")  # needs no display


def plot_losses(history: History, losses: dict[str, float], path: Path) -> None:
    per_step = history.bytes_seen / len(history.losses) / 1e6
    right = per_step * len(history.losses)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot([per_step * (i + 1) for i in range(len(history.losses))], history.losses, color="#9ecae1", lw=0.8)
    steps, validation = zip(*history.validation, strict=True)
    axes.plot([per_step * n for n in steps], validation, "o-", color="#08519c", ms=4, lw=1.5)
    labels = (
        ("unigram", losses["unigram"], "#737373"),
        ("bigram", losses["bigram"], "#d94801"),
        ("this model, held out", validation[-1], "#08519c"),
    )
    for name, height, color in labels:
        counted = name.endswith("gram")
        if counted:
            axes.axhline(height, color=color, lw=1, ls="--")
        above = 5 if counted else -16
        text = f"{name} {height:.2f}"
        axes.annotate(text, (right, height), (-2, above), textcoords="offset points", color=color, ha="right")
    limits = {"xlim": (0, 1.01 * right), "ylim": (0, math.log(256))}
    axes.set(xlabel="millions of bytes seen", ylabel="loss, nats per byte", **limits)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Kimi Delta Attention learns Python's documentation", loc="left", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)

"""Training on random windows of the text, under a budget of seconds or of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from .model import LanguageModel

BATCH, LENGTH = 4, 512  # windows in a step, bytes in a window
PEAK_RATE, WARMUP_STEPS, FINAL_RATE = 5e-3, 40, 0.02  # the last relative to the first
FEWEST_STEPS = 80  # 38 steps, in a minute of a busy machine, are no better than counting byte pairs
CHECKS = 10  # validations during training
CHECK_WINDOWS = 16


@dataclass
class History:
    """Losses in nats per byte, and the number of bytes seen."""

    losses: list[float] = field(default_factory=list)  # of every step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss on a few held-out windows)
    seconds: float = 0.0

    @property
    def bytes_seen(self) -> int:
        return len(self.losses) * BATCH * LENGTH

    @property
    def recent(self) -> float:
        last = self.losses[-20:]
        return sum(last) / len(last)


Autocast = Callable[[], AbstractContextManager]


def loss_of(model: LanguageModel, windows: Tensor) -> Tensor:
    """Mean loss of ``windows`` ``[B, T + 1]``: every byte is predicted from those before it."""
    return F.cross_entropy(model(windows[:, :-1]).float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LanguageModel, tokens: Tensor, autocast: Autocast, windows: int | None = None) -> float:
    """Mean loss on ``tokens``, split into windows; with ``windows``, on about that many of them, evenly distributed."""
    every = tokens[: (len(tokens) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    if windows:
        every = every[:: max(1, len(every) // windows)]
    with autocast():
        return sum(loss_of(model, batch).item() * len(batch) for batch in every.split(16)) / len(every)


def optimizer_of(model: LanguageModel) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices, but not for the gate's biases and the norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def learning_rate(step: int, progress: float, steps: int | None) -> float:
    cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
    warmup = min(WARMUP_STEPS, steps // 5 + 1) if steps else WARMUP_STEPS
    return PEAK_RATE * cosine * min(1.0, (step + 1) / warmup)


def train(
    model: LanguageModel,
    text: Tensor,
    held_out: Tensor,
    autocast: Autocast,
    console: Console,
    *,
    seconds: float,
    steps: int | None,
) -> History:
    """Trains for ``steps``, or if that is None for ``seconds``, but at least ``FEWEST_STEPS``."""
    history, optimizer, start = History(), optimizer_of(model), time.perf_counter()
    windows = torch.Generator().manual_seed(0)
    model.train()
    with Reporter(console) as report:
        while True:
            step, elapsed = len(history.losses), time.perf_counter() - start
            progress = min(1.0, step / steps if steps else min(elapsed / seconds, step / FEWEST_STEPS))
            if len(history.validation) <= progress * CHECKS:
                history.validation.append((step, evaluate(model, held_out, autocast, CHECK_WINDOWS)))
            if history.losses:
                report(progress, history, elapsed)
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, progress, steps)
            starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=windows)
            batch = text[(starts + torch.arange(LENGTH + 1)).to(text.device)]
            with autocast():
                loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.losses.append(loss.item())
    history.seconds = time.perf_counter() - start
    model.eval()
    return history


class Reporter:
    """A progress bar on a terminal; elsewhere a line for every tenth of the training."""

    def __init__(self, console: Console) -> None:
        self.console, self.tenths = console, 0
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("training"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:3.0f} %  {task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=1.0)

    def __enter__(self) -> Callable[[float, History, float], None]:
        self.bar.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def report(self, progress: float, history: History, elapsed: float) -> None:
        text = f"step {len(history.losses):4}   loss {history.recent:.3f}   {history.bytes_seen / elapsed:,.0f} bytes/s"
        self.bar.update(self.task, completed=progress, description=text)
        if not self.console.is_terminal and int(progress * 10) > self.tenths:
            self.tenths = int(progress * 10)
            self.console.print(f"  {self.tenths * 10:3} %  {text}   held out {history.validation[-1][1]:.3f}")

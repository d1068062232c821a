"""The demonstration, in one to two minutes: ``python -m examples.demo`` from the root of the repository.

Trains a small byte-level language model of ``kda.nn`` layers on the English text that comes with Python, then saves
and loads it. Reads a long held-out prompt, continues it with a state of constant size, and writes the same again by
guessing several bytes at a time. Checks that reading at once, in pieces and byte by byte agree. Training, and
serving, which is everything after training, each run on the GPU if they can. Results go to ``demo_out/``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import kda

from . import corpus
from .device import PROBES, choose, name_of
from .model import LanguageModel
from .plot import plot_losses
from .serving import DRAFTS, save_and_load, serve
from .training import evaluate, train

QUICK_MODEL = {"width": 64, "layers": 2, "heads": 1, "head_dim": 64, "hidden": 128}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of training, and 80 steps at least (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="train for so many steps instead: the same every time")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see whether everything runs")
    for what in PROBES:
        parser.add_argument(f"--{what}-on", choices=("cpu", "cuda"), help="instead of the GPU if it can, else the CPU")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder to write to (default: %(default)s)")
    return parser.parse_args()


def readable(data: bytes) -> str:
    """Text without characters that disturb a terminal."""
    text = data.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def main() -> int:
    arguments, start = parse_arguments(), time.perf_counter()
    quick, out = arguments.quick, arguments.out
    steps = arguments.steps or (30 if quick else None)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)

    def say(name: str, text: str) -> None:
        console.print(f"  [dim]{name:<10}[/] {text}")

    # ---- devices, text, model ----
    about = kda.info()
    console.print(f"\n[bold]kda {about['version']}[/]   a language model of Kimi Delta Attention, from nothing\n")
    torch.manual_seed(0)
    model = LanguageModel(**(QUICK_MODEL if quick else {}))
    config = model.config
    trained_on, served_on = choose("train", config, arguments.train_on), choose("serve", config, arguments.serve_on)
    for name, place in (("trains on", trained_on), ("serves on", served_on)):
        processor = f" ({torch.get_num_threads()} threads, {about['cpu'].split()[0]})" if place.device == "cpu" else ""
        say(name, f"{place.device}{processor} in {name_of(place.dtype)}: {place.why}")
    text, held_out = corpus.load(quick)
    losses = {"uniform": math.log(256), **corpus.counting_losses(text, held_out)}
    say("text", f"{len(text):,} bytes of Python's documentation, and {len(held_out):,} held out")
    parameters = sum(p.numel() for p in model.parameters())
    say("model", f"{parameters:,} parameters in {config['layers']} blocks of width {config['width']}")

    # ---- train ----
    model.to(trained_on.device)
    text, held_out = text.to(trained_on.device), held_out.to(trained_on.device)
    history = train(model, text, held_out, trained_on.autocast, console, seconds=arguments.seconds, steps=steps)
    losses["model"] = evaluate(model, held_out, trained_on.autocast)
    history.validation[-1] = (len(history.losses), losses["model"])  # was measured on a few windows
    rate = history.bytes_seen / history.seconds
    say("trained", f"{history.bytes_seen:,} bytes in {len(history.losses)} steps, {rate:,.0f} bytes/s")
    table = Table("held-out text", "nats/byte", "bits/byte", box=None, padding=(0, 2), header_style="dim")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, loss in losses.items():
        table.add_row(name, f"{loss:.3f}", f"{loss / math.log(2):.3f}", style="bold" if name == "model" else "")
    console.print(Padding(table, (0, 0, 0, 11)))
    plot_losses(history, losses, out / "loss.png")

    # ---- save, load, serve ----
    model.to(served_on.device)
    prompt = held_out[None, : 512 if quick else 4096].to(served_on.device)
    with served_on.autocast():
        model, same = save_and_load(model, out / "model.pt", prompt)
    stored = (out / "model.pt").stat().st_size
    say("saved", f"{stored / 2**20:.1f} MiB; loaded again, it gives {'the same bits' if same else 'other logits'}")
    with served_on.autocast():
        served = serve(model, prompt, 64 if quick else 400, served_on.dtype)
    measured, whole = served.measured, torch.cat([prompt, served.new], 1)
    before, after = measured["state_bytes_after_prefill"], measured["state_bytes_after_decode"]
    softmax = 2 * config["layers"] * config["heads"] * config["head_dim"] * served_on.dtype.itemsize * whole.shape[1]
    relative = max(value for name, value in served.differences.items() if name.endswith("relative"))
    say("prefill", f"{prompt.shape[1]:,} bytes, {measured['prefill_bytes_per_second']:,.0f} bytes/s")
    say("decode", f"{served.new.shape[1]:,} bytes, {measured['decode_bytes_per_second']:,.0f} bytes/s, greedily")
    say("state", f"{before / 1024:.1f} KiB after the prompt, {after / 1024:.1f} KiB at the end")
    say("", f"(keys and values of softmax attention with these heads: {softmax / 1024:,.0f} KiB)")
    for name, figures in served.drafting.items():
        heading = "" if name == "fused" else "drafts"
        rate_, accepted = figures["bytes_per_second"], figures["accepted_per_round"]
        how = "flush and verify in one pass" if name == "fused" else "verify, then flush"
        say(heading, f"{rate_:,.0f} bytes/s, {accepted:.2f} bytes accepted in a round of {DRAFTS}: {how}")
    figures = served.drafting["two calls"]
    records, snapshots = figures["record_bytes"], figures["snapshot_bytes"]
    say("", f"(records: {records / 1024:.1f} KiB a round; a state after every draft: {snapshots / 1024:,.0f} KiB)")
    say("agreement", f"logits read at once, in pieces and byte by byte differ by {relative:.1e} (RMS, relative)")
    written = Text(readable(bytes(prompt[0, -300:].tolist())), style="dim")
    written.append(readable(bytes(served.new[0].tolist())), style="bold")
    title = "the end of the prompt, and how the model goes on"
    console.print(Padding(Panel(written, title=title, title_align="left", width=88), (1, 0)))

    # ---- judge, and keep ----
    checks = {
        "the loss fell": history.recent < history.losses[0],
        "the loaded model is the saved one": same,
        **served.checks,
    }
    if not (quick or arguments.steps):
        checks["better than the bigram model"] = losses["model"] < losses["bigram"]
    summary = {
        "training": trained_on.facts(),
        "serving": served_on.facts(),
        "library": about,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "text_bytes": len(text),
        "held_out_bytes": len(held_out),
        "model": {**config, "parameters": parameters},
        "steps": len(history.losses),
        "training_seconds": history.seconds,
        "training_bytes_per_second": rate,
        "nats_per_byte": losses,
        **measured,
        "drafting": served.drafting,
        "agreement": served.differences,
        "checks": checks,
        "seconds": time.perf_counter() - start,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "text.txt").write_bytes(bytes(whole[0].tolist()))
    failed = [name for name, passed in checks.items() if not passed]
    verdict = f"[red]failed: {'; '.join(failed)}[/]" if failed else f"[green]all {len(checks)} passed[/]"
    say("checks", verdict)
    say("written", f"loss.png, model.pt, summary.json and text.txt in {out}/")
    say("", f"{time.perf_counter() - start:.0f} seconds in all\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A whole language model with random weights: a training step, tokens a second, memory, the time to the first steps, a
prompt, and a generated token. FLA's KDA model and transformers' Kimi-Linear, each with its own kernels and with ours.

    python -m bench model --json model.json
    python -m bench model --layers 12 --tokens 4096 --contender FLA "FLA on kda"

A contender has a process of its own: kernels that tune themselves on their first call do so in the first steps. A step
is the loss, and the gradients of all parameters, of one row of --tokens; there is no optimizer, which would be the same
one. Weights are bfloat16, but for A_log and dt_bias. Nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import ROOT, measure
from bench.run import check_file
from bench.subject import number
from kda.call.arrays import torch
from kda.cli import show
from kda.cli.arrays import cuda_device
from kda.cli.problems import natural

PROMPT = 64  # tokens before the ones that are generated
FIRST = 3  # steps
KIMI = "transformers.models.kimi_linear"

# The model that is built, and what brings our kernels: a module to import, or layers to replace.
CONTENDERS = {
    "FLA": ("fla", ""),
    "FLA on kda": ("fla", "kda.fla"),
    "transformers": ("transformers", ""),
    "transformers on kda": ("transformers", "kda.fla"),
    "transformers, layers of kda": ("transformers", "layers"),
}
COLUMNS = {
    "parameters": number("parameters", ","),
    f"first {FIRST} steps, s": number("first_s", ".1f"),
    "step ms": number("step_ms", ".1f"),
    "tokens/s": number("tokens_per_s", ",.0f"),
    "peak GiB": number("peak_gib", ".2f"),
    "prompt ms": number("prompt_ms", ".1f"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"layers": 24, "hidden": 2048, "heads": 16, "head-dim": 128, "vocab": 32000, "tokens": 8192}
    for name, usual in sizes.items():
        parser.add_argument(f"--{name}", type=natural, default=usual, metavar="N", help=f"{usual} unless given")
    parser.add_argument("--batches", type=natural, nargs="+", default=[1, 16], metavar="B", help="that generate: 1 16")
    parser.add_argument("--new-tokens", type=natural, default=33, metavar="N", help="that each generates (33)")
    parser.add_argument("--repeats", type=natural, default=7, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    parser.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    check_file(options.json)
    options.device = options.device or ("cuda" if cuda_device() else "cpu")
    if options.work:
        print(json.dumps(row_of(options.work, options)))
        return 0
    rows, notes = list[dict[str, Any]](), list[str]()
    for name in options.contender or CONTENDERS:
        print(name, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "bench", *options.words, "--work", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            notes.append(f"no row of {name}: {(done.stderr.strip() or 'its process failed').splitlines()[-1]}")
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    record = {"command": " ".join(["python -m bench", *options.words]), **measure.machine(options.device)}
    print_rows(rows, options)
    print(*(f"\n{note}" for note in notes), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(record | {"model": rows}, indent=2) + "\n")
    return 0


def print_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    columns = COLUMNS | {f"a token of {B}, ms": number(f"token_ms_of_{B}", ".1f") for B in options.batches}
    print(f"{options.layers} layers of {options.hidden} channels, {options.heads} heads, {options.tokens} tokens\n")
    show.table(["what", *columns], [[row["contender"], *(cell(row) for cell in columns.values())] for row in rows])


def build(name: str, options: argparse.Namespace) -> Any:
    """The model with random weights, always the same ones on every contender of it."""
    kind, ours = CONTENDERS[name]
    if ours.startswith("kda."):
        importlib.import_module("fla.ops.kda")  # else its model would run without any kernels of ours
        importlib.import_module(ours)
    sizes: dict[str, Any] = {"hidden_size": options.hidden, "num_hidden_layers": options.layers}
    sizes |= {"vocab_size": options.vocab, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    with torch.device(options.device):
        model = (_fla if kind == "fla" else _kimi)(sizes, options)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    for parameter, x in model.named_parameters():
        if not parameter.endswith(("A_log", "dt_bias")):
            x.data = x.data.to(dtype)
    if ours == "layers":
        importlib.import_module("kda.transformers").replace_layers(model)
    return model


def _fla(sizes: dict[str, Any], options: argparse.Namespace) -> Any:
    models = importlib.import_module("fla.models.kda")
    sizes |= {"num_heads": options.heads, "head_dim": options.head_dim}
    return models.KDAForCausalLM(models.KDAConfig(**sizes))


def _kimi(sizes: dict[str, Any], options: argparse.Namespace) -> Any:
    """Every fourth layer is of full attention, as published; no experts, whose time would hide the rest."""
    heads, layers = options.heads, range(1, options.layers + 1)
    if options.layers < 4:
        why = "whose cache counts tokens in a layer of full attention"
        raise ValueError(f"--layers: expected at least 4 for transformers, {why}, got {options.layers}")
    sizes |= {"linear_num_heads": heads, "linear_head_dim": options.head_dim, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": heads, "intermediate_size": 256 * -(-options.hidden * 8 // 768)}
    sizes["layer_types"] = ["linear_attention" if n % 4 else "full_attention" for n in layers]
    config = importlib.import_module(f"{KIMI}.configuration_kimi_linear").KimiLinearConfig
    model = importlib.import_module(f"{KIMI}.modeling_kimi_linear").KimiLinearForCausalLM
    return model(config(**sizes, mlp_layer_types=["dense" for _ in layers]))


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one contender takes."""
    model, device = build(name, options), options.device
    synchronize = measure.synchronizer(device)
    ids = torch.randint(3, options.vocab, (1, options.tokens), dtype=torch.int64, device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    row: dict[str, Any] = {"contender": name, "parameters": sum(x.numel() for x in model.parameters())}
    row |= {n: getattr(options, n) for n in ("layers", "hidden", "heads", "head_dim", "vocab", "tokens")}
    model.train()
    begin = time.perf_counter()
    for _ in range(FIRST):
        step()
    synchronize()
    row["first_s"] = time.perf_counter() - begin
    row["step_ms"] = 1e3 * measure.medians({"step": step}, options.repeats, synchronize=synchronize)["step"]
    row["tokens_per_s"] = options.tokens / row["step_ms"] * 1e3
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.inference_mode():
        calls: dict[str, measure.Call] = {"prompt": lambda: model(input_ids=ids, use_cache=True)}
        for B in options.batches:
            prompts = torch.randint(3, options.vocab, (B, PROMPT), dtype=torch.int64, device=device)
            for count in (1, options.new_tokens):
                calls[f"{count} of {B}"] = _generating(model, prompts, count)
        ms = {n: 1e3 * t for n, t in measure.medians(calls, options.repeats, synchronize=synchronize).items()}
    row["prompt_ms"] = ms["prompt"]
    for B in options.batches:
        more = options.new_tokens - 1
        row[f"token_ms_of_{B}"] = (ms[f"{options.new_tokens} of {B}"] - ms[f"1 of {B}"]) / more if more else None
    return row


def _generating(model: Any, prompts: Any, count: int) -> measure.Call:
    mask = torch.ones_like(prompts)
    how: dict[str, Any] = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    return lambda: model.generate(prompts, attention_mask=mask, **how)

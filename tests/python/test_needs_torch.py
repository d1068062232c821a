"""What parts of kda say in a process without torch, with one that is too old, and with one that lacks private names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kda.call import tracing

WITHOUT = "torch: expected torch for this part of kda (pip install 'libkda[torch]'), got none"
OLD = (
    "torch: expected 2.10 or newer for kda.nn, kda.tp and kda.transformers (pip install 'libkda[torch]'), got"
    " 2.6.0+cu124"
)

IMPORTS = """
import importlib

def said(part):
    try:
        importlib.import_module(f"kda.{part}")
    except ImportError as error:
        return str(error)
    return "imported"
"""


def printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", IMPORTS + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_torch() -> None:
    parts = ("nn", "tp", "transformers", "cp", "operators")
    code = f"""
import sys
sys.modules["torch"] = None
for part in {(*parts, "serving")}:
    print(said(part))
"""
    assert printed(code) == [WITHOUT] * len(parts) + ["imported"]


def test_an_old_torch() -> None:
    """kda.cp and the functions need no newer one. A build from before a release has its number."""
    code = """
import torch
torch.__version__ = "2.6.0+cu124"
for part in ("nn", "tp", "transformers", "cp"):
    print(said(part))
torch.__version__ = "2.10.0a0+git"
print(said("nn"))
"""
    assert printed(code) == [OLD] * 3 + ["imported"] * 2


def test_names_that_torch_lacks() -> None:
    """The layer's steps need no look at hooks of all modules: without it they run in the general way."""
    code = """
import torch
of_modules, name = torch.nn.modules.module, "_global_backward_pre_hooks"
kept = vars(of_modules).pop(name)
del torch._C._profiler._RecordFunctionFast
from kda.nn import KimiDeltaAttention
setattr(of_modules, name, kept)  # modules themselves look there
layer, x = KimiDeltaAttention(hidden_size=8, num_heads=1, head_dim=4), torch.ones(1, 2, 8)
with torch.no_grad():
    whole, cache = layer(x)[0], layer.new_cache(1)
    steps = torch.cat([layer(token, cache=cache)[0] for token in x.split(1, 1)], 1)
print(bool(torch.allclose(whole, steps, atol=1e-6)), layer.step_weights)
"""
    assert printed(code) == ["True None"]


def test_a_name_that_must_be_there() -> None:
    with pytest.raises(ImportError, match=r"torch: expected a version from 2\.10 on that has torch\._C\._none .*, got"):
        tracing._of_torch("_C._none")
    assert tracing._of_torch("_C._none", 3) == 3

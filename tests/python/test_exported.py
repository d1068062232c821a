"""The operators of torch.ops after only ``import kda``, and exported models in a process that knows nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda.nn import KimiDeltaAttention

ORDERS = ("import torch, kda", "import kda, torch", "import kda.nn, torch", "import kda.operators, torch")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer as a program, its inputs, and its outputs."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(hidden_size=32, num_heads=2, head_dim=16), torch.randn(1, 70, 32)
    torch.export.save(torch.export.export(layer, (x,)), folder / "layer.pt2")
    with torch.no_grad():
        torch.save({"x": x, "want": layer(x)[0]}, folder / "tensors.pt")
    return folder


@pytest.mark.parametrize("order", ORDERS[:2])
def test_an_exported_layer_runs_in_a_new_process(exported: Path, order: str) -> None:
    code = f"""{order}
program = torch.export.load({str(exported / "layer.pt2")!r})
tensors = torch.load({str(exported / "tensors.pt")!r})
with torch.no_grad():
    o = program.module()(tensors["x"])[0]
assert "kda.forward.default" in {{str(node.target) for node in program.graph.nodes}}
print((o - tensors["want"]).abs().max().item())
"""
    assert float(run(code)) < 1e-6, "loaded weights lie apart, and products of other sizes may sum in another order"


@pytest.mark.parametrize("order", ORDERS)
def test_every_operator_is_there(order: str) -> None:
    names = ["kda.forward", "kda.decode", "kda.flush", "kda.conv", "kda.stage_cumsum", "kda_prefill.forward"]
    names += ["kda_prefill.write", "kda.norm_gate"]
    code = f"{order}\nfor op in {names}: print(eval('torch.ops.' + op))"
    assert run(code).split() == names
    assert run(f"{order}\nprint(hasattr(torch.ops.kda, 'nonsense'))") == "False"


def test_import_registers_nothing_yet() -> None:
    """Registering takes 20 ms, and programs that need no operators import kda, too."""
    loaded = "print([m for m in sys.modules if m.startswith('kda.operators') or m == 'tvm_ffi'])"
    for order in ORDERS[:2]:
        assert run(f"import sys\n{order}\n{loaded}") == "[]"


def test_torch_is_imported_as_ever() -> None:
    """The hook leaves no trace in the finder and the loader, and works after an import that failed."""
    code = """
import sys, kda
hooks = lambda: [f for f in sys.meta_path if type(f).__module__.startswith("kda")]
assert len(hooks()) == 1
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C": raise ImportError("broken")
sys.meta_path.insert(0, Broken())
try: import torch
except ImportError: pass
else: raise AssertionError("torch was imported")
del sys.meta_path[0]
for name in [n for n in sys.modules if n.partition(".")[0] == "torch"]: del sys.modules[name]
import torch, inspect
assert not hooks() and "exec_module" not in vars(torch.__loader__)
assert inspect.getsource(torch) and torch.__spec__.loader is torch.__loader__
print(torch.ops.kda.gate)
"""
    assert run(code) == "kda.gate"


def test_an_operator_computes() -> None:
    code = """
import kda, torch
x = torch.linspace(-3, 3, 32).view(1, 2, 16)
g = torch.ops.kda.gate(x, None, None, 2, -4.0, torch.float32, None)
compiled = torch.compile(lambda x: torch.ops.kda.gate(x, None, None, 2, -4.0, torch.float32, None), backend="eager")
want = -4 * torch.sigmoid(x.double())
print(max((g - want).abs().max().item(), (compiled(x) - want).abs().max().item()) < 1e-6)
"""
    assert run(code) == "True"

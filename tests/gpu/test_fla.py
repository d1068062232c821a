"""kda.fla on a GPU: FLA's functions, layer and model with our backend beside FLA's own kernels; and FLA's own tests
with the backend on.

FLA, einops and triton come from where Python finds them, or from the folder of KDA_PEERS. FLA's tests are its
repository's folder ``tests`` as ``fla_tests`` in KDA_PEERS. What is missing is skipped."""

from __future__ import annotations

import copy
import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flas_own_tests
import kda
from bench import peers
from kda.plugs import engines as _plugs
from places import only_cuda
from support import rel_rmse, same_bits

pytestmark = [only_cuda, pytest.mark.usefixtures("untuned")]
BF16 = torch.bfloat16
# The bounds of FLA's own tests.
MOST = {"o": 0.012, "state": 0.012, "dg": 0.02, "dbeta": 0.02, "dA_log": 0.02, "ddt_bias": 0.02}


@pytest.fixture(autouse=True)
def plug(monkeypatch: pytest.MonkeyPatch) -> Any:
    """kda.fla, plugged; after the test FLA's functions are its own, as the tests of other files expect."""
    peers.add_folder(None)
    if _plugs.installed("FLA") is None:
        pytest.skip("FLA is not installed, nor in KDA_PEERS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flas_own_tests.plug()
    monkeypatch.setenv("FLA_KDA_LIB", "1")
    found.report(reset=True)
    yield found
    os.environ["FLA_KDA_LIB"] = "0"


def both(plug: Any, call: Callable[[], dict[str, Any]], *takes: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, FLA's own)."""
    ours = call()
    told = plug.report(reset=True)
    assert set(takes) <= told.taken.keys(), told
    assert not set(takes) & told.left.keys(), told
    os.environ["FLA_KDA_LIB"] = "0"
    theirs = call()
    os.environ["FLA_KDA_LIB"] = "1"
    assert not plug.report(reset=True).taken
    return ours, theirs


def compare(ours: dict[str, Any], theirs: dict[str, Any], most: dict[str, float], usual: float = 0.012) -> None:
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == theirs[n].dtype for n in ours)
    found = {n: rel_rmse(theirs[n], x) for n, x in ours.items()}
    assert {n: e for n, e in found.items() if not e < most.get(n, usual)} == {}


def inputs(T: int = 700, H: int = 4, HV: int = 4, D: int = 128, dtype: torch.dtype = BF16, **more: Any) -> Any:
    random = torch.Generator("cuda").manual_seed(0)

    def new(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device="cuda")

    x = {"q": new(1, T, H, D), "k": new(1, T, H, D), "v": new(1, T, HV, D), "g": new(1, T, HV, D)}
    x = {n: t.to(dtype) for n, t in x.items()} | {"beta": new(1, T, HV).to(dtype)}
    x |= {"A_log": 0.1 * new(HV), "dt_bias": 0.1 * new(HV * D)}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    return x, dict.fromkeys(flags, True) | more


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bounded": ({}, {"lower_bound": -5.0, "safe_gate": True}),
    "bounded_v_first": ({}, {"lower_bound": -5.0, "safe_gate": True, "state_v_first": True}),
    "softplus": ({}, {}),
    "groups_2sigmoid": ({"H": 2}, {"allow_neg_eigval": True}),
    "small_heads_f16": ({"D": 64, "dtype": torch.float16}, {"lower_bound": -5.0, "safe_gate": True}),
    "packed": ({}, {"lower_bound": -5.0, "safe_gate": True, "lengths": (300, 1, 64, 0, 335)}),
}


@pytest.mark.parametrize("states", [False, True], ids=["no_states", "states"])
@pytest.mark.parametrize("name", CASES)
def test_chunk_kda(name: str, states: bool, plug: Any) -> None:
    """Outputs and all gradients; and through FLA the bits of a call of ours."""
    sizes, options = CASES[name]
    leaves, given = inputs(**sizes, **options)
    lengths = given.pop("lengths", None)
    if lengths:
        given["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    N, HV, D = len(lengths or (1,)), leaves["v"].shape[2], leaves["v"].shape[3]
    if states:
        leaves["initial_state"] = 0.1 * torch.randn(N, HV, D, D, device="cuda")
        given["output_final_state"] = True

    def step(function: Callable[..., Any]) -> dict[str, Any]:
        x = {n: t.clone().requires_grad_() for n, t in leaves.items()}
        o, state = function(**x, **given)
        random = torch.Generator("cuda").manual_seed(1)
        outputs = [t for t in (o, state) if t is not None]
        seeds = [torch.randn(t.shape, generator=random, device="cuda").to(t.dtype) for t in outputs]
        d = torch.autograd.grad(outputs, list(x.values()), seeds)
        found = {"o": o.detach()} | ({"state": state.detach()} if states else {})
        return found | {f"d{n}": t for n, t in zip(x, d, strict=True)}

    chunk = importlib.import_module("fla.ops.kda").chunk_kda
    ours, theirs = both(plug, lambda: step(chunk), "chunk_kda")
    compare(ours, theirs, MOST)
    direct = step(kda.chunk_kda)
    assert all(same_bits(direct[n], x) for n, x in ours.items())


@pytest.mark.parametrize("sizes", [{"D": 100}, {"dtype": torch.float32}], ids=str)
def test_left_to_fla(sizes: dict[str, Any], plug: Any) -> None:
    """Where we have nothing but a kernel that goes token by token."""
    leaves, given = inputs(T=100, **sizes)
    with torch.no_grad():
        importlib.import_module("fla.ops.kda").chunk_kda(**leaves, **given)
    told = plug.report()
    assert "chunk_kda" not in told.taken
    assert list(told.left["chunk_kda"]) == [
        "on GPUs kda has chunked kernels for 16 bits and K and V of 64 and 128 alone"
    ]


@pytest.mark.parametrize("B", [1, 33])
@pytest.mark.parametrize("v_first", [False, True])
def test_decode(B: int, v_first: bool, plug: Any) -> None:
    x, given = inputs(T=B, state_v_first=v_first, output_final_state=True)
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].transpose(0, 1).contiguous()
    x["initial_state"] = torch.randn(B, 4, 128, 128, device="cuda")
    recurrent = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    names = ("o", "state")
    call = lambda: dict(zip(names, recurrent(**x, **given), strict=True))  # noqa: E731
    compare(*both(plug, call, "fused_recurrent_kda_fwd"), {"o": 4e-3, "state": 1e-5})


@pytest.mark.parametrize("accepted", [False, True])
def test_decode_in_place(accepted: bool, plug: Any) -> None:
    """As engines call it: a pool of states, a slot for every token."""
    N, S = 5, 3 if accepted else 1
    x, given = inputs(T=N * S)
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].reshape(N, S, *x[name].shape[2:])
    slots = torch.randperm(20, device="cuda")[: N * S].view(N, S).int()
    given["ssm_state_indices"] = slots if accepted else slots[:, 0].contiguous()
    if accepted:
        given["num_accepted_tokens"] = torch.tensor([1, 2, 3, 1, 2], device="cuda", dtype=torch.int32)
    pool = torch.randn(20, 4, 128, 128, device="cuda")
    function = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd

    def call() -> dict[str, Any]:
        o, state = function(**x, **given, initial_state=pool.clone())
        return {"o": o, "state": state}

    compare(*both(plug, call, "fused_recurrent_kda_fwd"), {"o": 4e-3, "state": 1e-5})


SIZES = {"hidden_size": 256, "head_dim": 128, "num_heads": 2, "layer_idx": 0}
LAYER = ("chunk_kda", "causal_conv1d_fwd", "causal_conv1d_bwd", "layer_norm_gated_fwd", "layer_norm_gated_bwd")


@pytest.mark.parametrize("options", [{}, {"safe_gate": True, "lower_bound": -5.0}, {"num_v_heads": 4}], ids=str)
def test_layer(options: dict[str, Any], plug: Any) -> None:
    """A training step of FLA's layer, then packed sequences without gradients."""
    torch.manual_seed(0)
    layer = importlib.import_module("fla.layers").KimiDeltaAttention(**SIZES, **options).to("cuda", BF16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=BF16)
    seed = torch.randn(2, 300, 256, device="cuda", dtype=BF16)
    cu_seqlens = torch.tensor([0, 100, 101, 600], device="cuda")

    def call() -> dict[str, Any]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        layer.train()(leaf)[0].backward(seed)
        found = {"dx": leaf.grad} | {f"d{n}": p.grad.clone() for n, p in layer.named_parameters()}
        with torch.no_grad():
            found["o"] = layer.eval()(x.view(1, 600, 256), cu_seqlens=cu_seqlens)[0]
        return found

    ours, theirs = both(plug, call, *LAYER)
    compare(ours, theirs, {}, 0.03)


def test_model_generates(plug: Any) -> None:
    """FLA's model: a prompt in chunks, then tokens from the states that it left. Skipped without all of FLA."""
    try:
        models = importlib.import_module("fla.models")
        config = models.KDAConfig(**{n: v for n, v in SIZES.items() if n != "layer_idx"}, num_hidden_layers=2)
    except (ImportError, AttributeError) as reason:
        pytest.skip(str(reason))
    config.vocab_size, config.intermediate_size = 100, 128
    torch.manual_seed(0)
    model = models.KDAForCausalLM(config).to("cuda", BF16).eval()
    ids = torch.randint(3, 100, (2, 130), device="cuda")

    def generate() -> dict[str, Any]:
        with torch.no_grad():
            first = model(ids, use_cache=True)
            step = model(first.logits[:, -1:].argmax(-1), past_key_values=copy.deepcopy(first.past_key_values))
        return {"prompt": first.logits, "step": step.logits}

    compare(*both(plug, generate, "chunk_kda", "causal_conv1d_update", "fused_recurrent_kda_fwd"), {}, 0.03)


def test_through_fla_in_a_graph(plug: Any) -> None:
    """Forward and backward are captured, and replayed on other numbers."""
    leaves, given = inputs(lower_bound=-5.0, safe_gate=True)
    x = {n: t.requires_grad_() for n, t in leaves.items()}
    chunk = importlib.import_module("fla.ops.kda").chunk_kda
    seed = torch.randn_like(leaves["v"])

    def step() -> list[Any]:
        o = chunk(**x, **given)[0]
        return [o.detach(), *torch.autograd.grad(o, list(x.values()), seed)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves["v"].mul_(0.5)
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(captured, step(), strict=True))


# FLA's own tests: a file, which of it, and whose calls must come to us. Those of Ascend and FlashKDA need other things,
# and FLA's naive chunks never come to us. One case ends FLA 0.6.0's own kernels with a misaligned address, without our
# backend too: sequences of 31 to 65 tokens in chunks of 32, D = 60.
OWN = {
    "recurrent": ("ops/test_kda.py", "test_fused_recurrent or test_gate", "fused_recurrent_kda_fwd"),
    "chunk": ("ops/test_kda.py", "test_chunk and not varlen", "chunk_kda"),
    "packed": ("ops/test_kda.py", "test_chunk_varlen and not chunk_size32", "chunk_kda"),
    "models": ("models/test_modeling_kda.py", "", "chunk_kda"),
    "context_parallel": ("context_parallel/test_cp_kda.py", "", "chunk_kda"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_flas_own_tests(name: str) -> None:
    """They compare with FLA's formulations in torch."""
    file, which, wanted = OWN[name]
    folder = Path(os.environ.get("KDA_PEERS", "")) / "fla_tests"
    if not (folder / file).exists():
        pytest.skip(f"KDA_PEERS has no fla_tests/{file}")
    if name == "context_parallel" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("flas_own_tests.py")), wanted]
    command += ["-x", "-p", "no:cacheprovider", "--durations=5", file]
    command += ["-k", which] if which else []
    environment = {**os.environ, "FLA_KDA_LIB": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder.parent), *sys.path])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) is not None

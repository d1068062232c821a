"""kda.norm_gate: against the formula in float64, its gradients, every kind of array, compiled, in place, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import kda
import kda.operators
from bench import measure
from bench.command import main
from kda.nn import RMSNormGated
from support import cpu_implementations, same_bits, take_operators

Tensor = torch.Tensor
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def expected(x: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, **options: Any) -> Tensor:
    """In float64, by torch."""
    y = F.rms_norm(x.double(), x.shape[-1:], None if weight is None else weight.double(), options.get("eps", 1e-5))
    if gate is None:
        return y
    act = torch.sigmoid if options.get("activation", "sigmoid") == "sigmoid" else F.silu
    return y * act(gate.double())


def problem(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    return {"x": x, "gate": gate, "weight": torch.rand(shape[-1], generator=random).to(dtype)}


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / (b.norm() + 1e-8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "swish"])
@pytest.mark.parametrize("absent", [(), ("gate",), ("weight",), ("gate", "weight")])
@pytest.mark.parametrize("D", [8, 300])
def test_values_and_gradients(dtype: torch.dtype, activation: str, absent: tuple[str, ...], D: int) -> None:
    p = {name: x for name, x in problem(2, 3, 4, D, dtype=dtype).items() if name not in absent}
    leaves = {name: x.double().clone().requires_grad_() for name, x in p.items()}
    inputs = {name: x.clone().requires_grad_() for name, x in p.items()}
    y, got = (f(**x, activation=activation, eps=1e-3) for f, x in ((expected, leaves), (kda.norm_gate, inputs)))
    assert got.dtype == dtype and relative(got, y) < ROUNDING[dtype]
    dy = problem(2, 3, 4, D, dtype=dtype, seed=1)["x"]  # (were it x, little of dx would be left)
    torch.autograd.backward([y, got], [dy.double(), dy])
    for name, x in inputs.items():
        assert x.grad is not None and x.grad.dtype == dtype
        assert relative(x.grad, leaves[name].grad) < 2 * ROUNDING[dtype]


def test_gradcheck_in_float64() -> None:
    for activation in ("sigmoid", "silu"):
        inputs = tuple(x.requires_grad_() for x in problem(2, 3, 5, dtype=torch.float64).values())
        assert torch.autograd.gradcheck(lambda *t, a=activation: kda.norm_gate(*t, 1e-2, a), inputs)


def test_some_inputs_need_gradients() -> None:
    p = problem(2, 3, 4, 8)
    whole = {name: x.clone().requires_grad_() for name, x in p.items()}
    grads = torch.autograd.grad(kda.norm_gate(**whole).square().sum(), list(whole.values()))
    for name, of_all in zip(p, grads, strict=True):
        x = p[name].clone().requires_grad_()
        (alone,) = torch.autograd.grad(kda.norm_gate(**{**p, name: x}).square().sum(), x)
        assert same_bits(alone, of_all)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (3, 5, 8), (2, 3, 4, 5, 8), (0, 8), (2, 0, 3, 8)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    p = problem(*shape)
    y = kda.norm_gate(**p)
    assert y.shape == shape and torch.allclose(y.double(), expected(**p), atol=1e-6)
    out = torch.full(shape, 7.0)
    assert kda.norm_gate(**p, out=out) is out and same_bits(out, y)
    leaf = p["x"].clone().requires_grad_()
    kda.norm_gate(**{**p, "x": leaf}).sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == shape
    arrays = {name: x.numpy() for name, x in p.items()}
    got = kda.norm_gate(**arrays)
    assert isinstance(got, np.ndarray) and same_bits(torch.from_numpy(got), y)


def test_a_gate_in_a_packed_projection() -> None:
    """Its rows have strides of their own, and no copy is made."""
    packed = torch.randn(2, 3, 4 * 8 * 2 + 5)
    p = problem(2, 3, 4, 8) | {"gate": packed[..., 4:36].unflatten(-1, (4, 8))}
    assert same_bits(kda.norm_gate(**p), kda.norm_gate(**p | {"gate": p["gate"].contiguous()}))
    for name in p:  # a last dimension that is not dense
        other = p | {name: torch.stack([p[name], p[name]], -1)[..., 1]}
        assert other[name].stride(-1) == 2 and same_bits(kda.norm_gate(**other), kda.norm_gate(**p))
        leaf = other[name].detach().requires_grad_()
        kda.norm_gate(**other | {name: leaf}).sum().backward()
        assert leaf.grad is not None


def test_dtypes_of_their_own() -> None:
    p = problem(2, 3, 4, 8)
    p |= {"x": p["x"].bfloat16(), "weight": p["weight"].half()}
    out = torch.empty(2, 3, 4, 8)
    kda.norm_gate(**p, out=out)
    assert relative(out, expected(**p)) < 1e-6 and same_bits(kda.norm_gate(**p), out.bfloat16())
    leaves = {name: x.requires_grad_() for name, x in p.items()}
    kda.norm_gate(**leaves).sum().backward()
    assert [x.grad.dtype for x in leaves.values()] == [torch.bfloat16, torch.float32, torch.float16]  # type: ignore[union-attr]


def test_in_place() -> None:
    p = problem(2, 3, 4, 8)
    want = kda.norm_gate(**p)
    for name in ("x", "gate"):
        given = {n: x.clone() for n, x in p.items()}
        before = given[name]._version
        assert kda.norm_gate(**given, out=given[name]) is given[name]
        assert same_bits(given[name], want) and given[name]._version > before
    array = p["x"].numpy().copy()
    assert kda.norm_gate(array, p["gate"].numpy(), p["weight"].numpy(), out=array) is array
    assert same_bits(torch.from_numpy(array), want)


@pytest.mark.parametrize("impl", ["cpu_norm_gate", "reference"])
def test_forced(impl: str) -> None:
    p = problem(2, 3, 4, 8)
    leaves = {name: x.requires_grad_() for name, x in p.items()}
    assert relative(kda.norm_gate(**leaves, impl=impl), expected(**p)) < 1e-6


def test_implementations() -> None:
    for op in ("norm_gate", "norm_gate_backward"):
        assert cpu_implementations(op) == ["cpu_norm_gate", "reference"]


# ---- the operators ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absent", [(), ("gate", "weight")])
def test_operators_are_proper(dtype: torch.dtype, absent: tuple[str, ...]) -> None:
    p = problem(2, 3, 4, 8, dtype=dtype)
    tensors = tuple(None if name in absent else x.requires_grad_() for name, x in p.items())
    form, ops = 0 if absent else 2, torch.ops.kda
    torch.library.opcheck(ops.norm_gate.default, (*tensors, 1e-5, form, None, 0), test_utils=OPCHECKS)
    plain = tuple(None if t is None else t.detach() for t in tensors)
    wanted = [t is not None for t in tensors]
    dy = torch.randn_like(p["x"]).detach()
    torch.library.opcheck(ops.norm_gate_backward.default, (*plain, dy, 1e-5, form, wanted), test_utils=OPCHECKS)
    torch.library.opcheck(ops.norm_gate_out.default, (*plain, dy.clone(), 1e-5, form, None, 0), test_utils=OPCHECKS)


def test_exported() -> None:
    norm, p = RMSNormGated(8, activation="swish"), problem(2, 3, 4, 8)
    program = torch.export.export(norm, (p["x"], p["gate"]))
    assert "kda.norm_gate.default" in {str(node.target) for node in program.graph.nodes}
    assert same_bits(program.module()(p["x"], p["gate"]), norm(p["x"], p["gate"]))


def test_meta_and_fake_tensors() -> None:
    p = {name: x.to("meta") for name, x in problem(2, 3, 4, 8, dtype=torch.bfloat16).items()}
    y = kda.norm_gate(**p)
    assert y.is_meta and y.shape == (2, 3, 4, 8) and y.dtype == torch.bfloat16
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 8)
        assert kda.norm_gate(x, x, out=torch.empty(2, 3, 8)).shape == (2, 3, 8)


def test_the_same_through_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(2, 3, 4, 8)
    want, out = kda.norm_gate(**p), torch.empty(2, 3, 4, 8)
    take_operators(monkeypatch)
    assert same_bits(kda.norm_gate(**p), want) and same_bits(kda.norm_gate(**p, out=out), want)


# ---- the module ----


@pytest.mark.parametrize("activation", ["sigmoid", "swish", "silu"])
def test_module(activation: str) -> None:
    norm, p = RMSNormGated(8, 1e-3, activation=activation), problem(2, 3, 4, 8)
    torch.nn.init.uniform_(norm.weight)
    want = expected(p["x"], p["gate"], norm.weight, activation=activation, eps=1e-3)
    assert relative(norm(p["x"], p["gate"]), want) < 1e-6
    assert relative(norm.double()(p["x"].double(), p["gate"].double()), want) < 1e-14
    assert f"activation={activation!r}" in repr(norm) and list(norm.state_dict()) == ["weight"]


def test_module_refuses_other_activations() -> None:
    with pytest.raises(ValueError, match="activation: expected 'sigmoid', 'silu' or 'swish', got 'relu'"):
        RMSNormGated(8, activation="relu")


# ---- refusals ----

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "relu"}, r"^activation: expected 'sigmoid', 'silu' or 'swish', got 'relu'"),
    "activation_None": ({"activation": None}, r"^activation: expected 'sigmoid', 'silu' or 'swish', got None"),
    "gate": ({"gate": torch.zeros(2, 3, 1, 8)}, r"^gate: expected shape \[2,3,4,8\] like x, got \[2,3,1,8\]"),
    "gate_of_another_rank": ({"gate": torch.zeros(4, 8)}, r"^gate: expected 4 dimensions \[2,3,4,8\] like x, got 2"),
    "weight": ({"weight": torch.zeros(7)}, r"^weight: expected shape \[8\] \(\[V\] of x\), got \[7\]"),
    "weight_None_is_fine_but_not_text": ({"weight": "ones"}, r"^weight: expected an array, got 'ones'"),
    "eps": ({"eps": -1.0}, r"^eps: expected a number >= 0 in the range of f32, got -1"),
    "eps_text": ({"eps": "small"}, r"^eps: expected a number, got 'small'"),
    "eps_too_small": ({"eps": 1e-60}, r"^eps: expected a number in the range of float32, got 1e-60"),
    "x_integer": ({"x": torch.zeros(2, 3, 4, 8, dtype=torch.int32)}, r"^x: expected float32 or bfloat16 or float16"),
    "x_scalar": ({"x": torch.tensor(1.0), "gate": None}, r"^x: expected at least one dimension, got none"),
    "out_shape": ({"out": torch.zeros(2, 3, 4, 7)}, r"^out: expected shape \[2,3,4,8\] like x, got \[2,3,4,7\]"),
    "out_overlaps": ({"out": "x, shifted"}, r"^out: expected memory of its own, got memory that overlaps x"),
    "impl": ({"impl": "cpu_gate"}, r"^impl: expected one of .*cpu_norm_gate, reference, got cpu_gate"),
    "threads": ({"num_threads": -1}, r"^num_threads: expected >= 0, got -1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    changes, sentence = REFUSALS[case]
    p = problem(2, 3, 4, 8)
    if changes.get("out") == "x, shifted":
        memory = torch.zeros(2 * 3 * 4 * 8 + 8)
        p["x"], changes = memory[:-8].view(2, 3, 4, 8), {"out": memory[8:].view(2, 3, 4, 8)}
    with pytest.raises(ValueError, match=sentence):
        kda.norm_gate(**{**p, **changes})


def test_no_gradients_with_out() -> None:
    p = problem(2, 3, 4, 8)
    out = torch.full((2, 3, 4, 8), 7.0)
    with pytest.raises(ValueError, match=r"^weight: .*for gradients there is kda\.norm_gate of torch tensors alone"):
        kda.norm_gate(**p | {"weight": torch.nn.Parameter(p["weight"])}, out=out)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=r"^weight: .*kda\.norm_gate of torch tensors alone"):
        kda.norm_gate(p["x"].numpy(), None, torch.nn.Parameter(p["weight"]))


# ---- the command ----


def test_bench_shows_the_share_of_bandwidth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "ceilings", lambda device: {"GFLOP/s": 100.0, "GB/s": 10.0})
    path = tmp_path / "x.json"
    sizes = ["--T", "70", "--H", "2", "--K", "16", "--V", "32", "--repeats", "1"]
    assert main(["norm_gate", "--device", "cpu", *sizes, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    moved = 3 * 70 * 2 * 32 * 2  # x, gate and y in bfloat16
    assert row["unit"] == "GB/s" and row["rate"] == pytest.approx(moved / row["ms"] * 1e-6)
    assert f" {row['rate'] / 10:.0%}" in capsys.readouterr().out

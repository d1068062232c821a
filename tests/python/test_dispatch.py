"""What torch's dispatcher sees of eager calls: tensors without data, modes, transforms, counters and profilers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import kda
from kda.call import flops as _flops
from kda.nn import KimiDeltaAttention
from layer_model import make as make_layer
from layer_model import tokens
from serving_calls import CALLS
from support import Tensor, make
from training_calls import TRAINING, chunk

Change = Callable[[Any], Any]


def described(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x


def to_meta(x: Any) -> Any:
    return x.detach().to("meta").requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def to_fake() -> Change:
    mode = FakeTensorMode()
    return lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x


@pytest.fixture(params=["meta", "fake"])
def without_data(request: pytest.FixtureRequest) -> Change:
    return to_meta if request.param == "meta" else to_fake()


def is_without_data(x: Any) -> bool:
    return not isinstance(x, Tensor) or x.is_meta or isinstance(x, FakeTensor)


# ---- shapes ----


@pytest.mark.parametrize("name", TRAINING)
def test_shapes_with_gradients(name: str, without_data: Change) -> None:
    function, keywords = TRAINING[name]()
    leaves = [n for n, x in keywords.items() if isinstance(x, Tensor) and x.is_floating_point()]
    for n in leaves:
        keywords[n].requires_grad_()
    expected = function(**keywords)
    empty = {n: without_data(x) for n, x in keywords.items()}
    got = function(**empty)
    assert tree_map(described, got) == tree_map(described, expected)
    assert all(tree_map(is_without_data, got)) if isinstance(got, tuple) else is_without_data(got)
    outputs = got if isinstance(got, tuple) else (got,)
    grads = torch.autograd.grad([y for y in outputs if y is not None], [empty[n] for n in leaves], [
        torch.empty_like(y) for y in outputs if y is not None
    ])  # fmt: skip
    assert [described(d) for d in grads] == [described(keywords[n]) for n in leaves]
    assert all(map(is_without_data, grads))


@pytest.mark.parametrize("name", CALLS)
def test_shapes_in_place(name: str, without_data: Change) -> None:
    function, keywords = CALLS[name]()
    empty = tree_map(without_data, keywords)
    expected = function(**keywords)
    got = function(**empty)
    assert tree_map(described, got) == tree_map(described, expected)


def test_shapes_under_the_mode() -> None:
    with FakeTensorMode():
        function, keywords = chunk()
        o, state = function(**keywords)
        assert isinstance(o, FakeTensor) and tuple(o.shape) == (2, 70, 4, 24)
        assert isinstance(state, FakeTensor) and tuple(state.shape) == (2, 4, 8, 24)


@pytest.mark.parametrize("grad", [False, True])
def test_shapes_of_the_layer(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        layer = KimiDeltaAttention(48, num_heads=2, head_dim=16, device="meta", dtype=torch.bfloat16)
        cache = layer.new_cache(3)
        o, _, _ = layer(torch.empty(3, 20, 48, device="meta", dtype=torch.bfloat16), cache=cache)
        assert o.is_meta and tuple(o.shape) == (3, 20, 48) and o.dtype == torch.bfloat16
        with FakeTensorMode():
            layer = KimiDeltaAttention(48, num_heads=2, head_dim=16)
            o, _, _ = layer(torch.randn(3, 1, 48), cache=layer.new_cache(3))
            assert isinstance(o, FakeTensor) and tuple(o.shape) == (3, 1, 48)


@pytest.mark.parametrize("grad", [False, True])
def test_shapes_of_the_layer_with_a_mask(grad: bool, without_data: Change) -> None:
    layer, x, mask = make_layer(), tokens(3, 20, 48).requires_grad_(grad), torch.ones(3, 20)
    mask[1, :7] = 0
    for name, parameter in [*layer.named_parameters()]:
        owner = layer.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(without_data(parameter.detach())))
    with torch.set_grad_enabled(grad):
        o, _, _ = layer(without_data(x), attention_mask=without_data(mask))
    assert is_without_data(o) and tuple(o.shape) == (3, 20, 48)
    if grad:
        o.sum().backward()
        assert all(is_without_data(p.grad) and p.grad.shape == p.shape for p in layer.parameters())


def test_what_is_part_meta_is_refused() -> None:
    p = make(1, 3)
    with pytest.raises(ValueError, match=r"^k: expected a tensor on cpu or cuda, got one on meta"):
        kda.chunk_kda(**p.keywords | {"k": p.tensors["k"].to("meta")})
    state = torch.zeros(1, 2, 24, 16, device="meta")
    with pytest.raises(ValueError, match=r"^state: expected a tensor on cpu or cuda, got one on meta"):
        kda.decode(**make(1, 1, state=False).keywords, state=state)
    with (
        FlopCounterMode(display=False),
        pytest.raises(ValueError, match=r"^state: expected a tensor on cpu or cuda, got"),
    ):
        kda.decode(**make(1, 1, state=False).keywords, state=state)
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^A_log: expected device cpu like the other tensors, got meta"):
        torch.ops.kda.gate(x[:, :, None], torch.ones(3, device="meta"), None, 1, 0.0, torch.float32, None)


def test_functions_without_an_operator_say_so() -> None:
    p = make(1, 3, state=False)
    wanted = r"^q: expected a tensor with memory here .*, got a FakeTensor"
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) for n, x in p.tensors.items()}
        with pytest.raises(ValueError, match=wanted):
            kda.workspace_size(**fake)
        with pytest.raises(ValueError, match=wanted):
            kda.explain(**fake)


# ---- transforms ----


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_of_functions_in_place(transform: str) -> None:
    p = make(2, 3, state=False)
    q, rest = p.tensors["q"], {n: x for n, x in p.keywords.items() if n != "q"}

    def f(q: Tensor) -> Tensor:
        o: Tensor = kda.decode(q, **rest)
        return o.sum()

    run: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(f)(q),
        "vmap": lambda: torch.vmap(f)(torch.stack([q, q])),
        "jvp": lambda: torch.func.jvp(f, (q,), (q,)),
    }
    with pytest.raises(
        (NotImplementedError, ValueError), match=rf"^torch\.(func\.)?{transform}: expected .*, got a call"
    ):
        run[transform]()


@pytest.mark.parametrize("name", TRAINING)
def test_batched_gradients(name: str) -> None:
    function, keywords = TRAINING[name]()
    first = next(iter(keywords))
    keywords[first].requires_grad_()
    y = function(**keywords)
    y = y[0] if isinstance(y, tuple) else y
    with pytest.raises(NotImplementedError, match=r"^is_grads_batched: expected False .* got True"):
        torch.autograd.grad(y, keywords[first], torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)


def test_forward_mode() -> None:
    p = make(1, 3, state=False)
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(p.tensors["q"], torch.ones_like(p.tensors["q"]))
        for function in (kda.chunk_kda, kda.fused_recurrent_kda):
            for mode in (torch.enable_grad, torch.no_grad):
                with mode(), pytest.raises(NotImplementedError, match=r"^forward mode: expected reverse mode"):
                    function(**p.keywords | {"q": q})


@pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_tensors_that_have_outlived_a_transform(function: Any) -> None:
    p, kept = make(1, 3, state=False), list[Tensor]()
    q = p.tensors["q"]

    def f(x: Tensor) -> Tensor:
        kept.append(x * 1)
        return x.sum()

    torch.func.grad(f)(q)
    assert torch._C._functorch.is_functorch_wrapped_tensor(kept[0])
    assert torch.equal(function(**p.keywords | {"q": kept[0]})[0], function(**p.keywords)[0])


# ---- modes that observe ----


def test_flops() -> None:
    p = make(2, 70, 2, 2, 8, 24, state=False)
    q = p.tensors["q"].requires_grad_()
    ops, rows = torch.ops.kda, 2 * 70 * 4
    with FlopCounterMode(display=False) as counter:
        o, _ = kda.chunk_kda(**p.keywords)
        o.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    backward = _flops.again_flop(8, 24) + _flops.backward_flop(8, 24)
    assert counts == {ops.forward: rows * _flops.forward_flop(8, 24), ops.backward: rows * backward}
    with FlopCounterMode(display=False) as counter:
        o, _ = kda.chunk_kda(**p.keywords, disable_recompute=True)
        o.sum().backward()
        with torch.no_grad():
            kda.fused_recurrent_kda(**p.keywords)
            kda.prefill(**p.keywords)
            kda.decode(**p.keywords)
    counts = counter.get_flop_counts()["Global"]
    assert counts[ops.forward] == rows * (_flops.forward_flop(8, 24) + 6 * 8 * 24)
    assert counts[ops.backward] == rows * _flops.backward_flop(8, 24)
    assert counts[ops.prefill] == rows * _flops.forward_flop(8, 24)
    assert counts[ops.decode] == rows * 6 * 8 * 24
    assert q.grad is not None


def test_flops_of_convolutions() -> None:
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(6, 4)
    with FlopCounterMode(display=False) as counter:
        kda.causal_conv1d(x, weight)[0].sum().backward()
        kda.causal_conv1d_update(x.detach(), torch.zeros(2, 6, 3), weight)
    counts = counter.get_flop_counts()["Global"]
    once = 2 * 2 * 5 * 6 * 4
    ops = torch.ops.kda
    assert counts == {ops.conv: once, ops.conv_backward: once, ops.conv_update: once}


def test_flops_of_drafts_and_segments() -> None:
    p, ops, rows = make(2, 4, 2, 2, 8, 24, state=False, v_first=True), torch.ops.kda, 2 * 4 * 4
    records = [kda.new_records(2, 4, 2, 4, 8, 24) for _ in range(2)]
    state, accepted = torch.zeros(2, 4, 24, 8), torch.zeros(2, dtype=torch.int32)
    more = {n: p.tensors[n] for n in ("q", "k", "v", "g", "beta")}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        kda.verify_kvbuffer(**p.keywords, state=state, records=records[0])
        kda.flush_verify_kvbuffer(**p.keywords, state=state, records=records[1], accept_len=accepted, last=records[0])
    counts = counter.get_flop_counts()["Global"]
    assert counts == dict.fromkeys((ops.verify, ops.flush_verify), rows * 6 * 8 * 24)
    with FlopCounterMode(display=False) as counter:
        M, b, _ = kda.segment_map(**more)
        kda.segment_map(**more, d_o=torch.randn(2, 4, 4, 24), want="d")
        kda.segment_merge(M, b)
    counts = counter.get_flop_counts()["Global"]
    assert counts[ops.segment_map] == rows * (_flops.segment_map_flop(8, 24) + _flops.map_flop(8, 24))
    assert counts[ops.segment_merge] == 2 * 2 * 4 * 8 * 8 * 24


def test_flops_of_the_first_call() -> None:
    """The first call of a process whose counter is older than our formulas."""
    code = """
import torch, kda
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 3, 2, 8)
with FlopCounterMode(display=False) as counter:
    kda.decode(x, x, x, -x.abs(), torch.rand(1, 3, 2))
assert counter.get_total_flops() == 3 * 2 * 6 * 64, counter.get_total_flops()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy) -> None:
    layer, x = make_layer(), tokens(1, 70, 48).requires_grad_()
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    seen = []

    def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen.append(str(operator))
        return policy if str(operator).startswith("kda") else CheckpointPolicy.PREFER_RECOMPUTE

    o = checkpoint(
        lambda x: layer(x)[0], x, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(choose),
    )  # fmt: skip
    got = torch.autograd.grad(o.square().sum(), [x, *layer.parameters()])
    ours = {f"kda.{name}.default" for name in ("joint_linear", "conv", "forward", "norm_gate")}
    assert {s for s in seen if "kda" in s} == ours
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(expected, got, strict=True))


def test_results_under_a_mode_are_the_same_bits() -> None:
    p = make(2, 70, gate="softplus", beta="sigmoid")
    expected = kda.chunk_kda(**p.keywords, output_final_state=True)
    with FlopCounterMode(display=False):
        got = kda.chunk_kda(**p.keywords, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_profiler() -> None:
    p = make(1, 3, state=False)
    p.tensors["q"].requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kda.chunk_kda(**p.keywords)[0].sum().backward()
        with torch.no_grad():
            kda.decode(**p.keywords)
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("libkda::")}
    assert counts == {"libkda::forward": 1, "libkda::backward": 1, "libkda::decode": 1}

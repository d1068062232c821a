"""Modes of torch's dispatcher around a forward and not around its backward, or the reverse, and what modes see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import kda
import kda.operators
from layer_model import make as make_layer
from layer_model import relative, tokens
from serving_calls import CALLS
from support import Tensor, same_bits
from training_calls import TRAINING, leaves_of, loss_of

LAYERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, all kept": {"disable_recompute": True},
    "whole, gates of full rank": {"use_full_rank_gate": True, "use_full_rank_decay": True, "conv_bias": True},
    "in parts": {"fuse_projections": False},
    "token by token": {"mode": "fused_recurrent"},
    "without convolutions": {"use_short_conv": False},
}
Loss = tuple[Callable[[], Tensor], list[Tensor]]  # and the tensors that it has gradients for


def _function(name: str) -> Loss:
    function, keywords = TRAINING[name]()
    leaves = [x.requires_grad_() for x in leaves_of(keywords)]
    return lambda: loss_of(function(**keywords)), leaves


def _layer(name: str, offsets: Tensor | None = None) -> Loss:
    layer, x = make_layer(**LAYERS[name]), tokens(1, 70, 48).requires_grad_()
    return lambda: loss_of(layer(x, cu_seqlens=offsets)[0]), [x, *layer.parameters()]


LOSSES: dict[str, Callable[[], Loss]] = {name: lambda name=name: _function(name) for name in TRAINING}  # type: ignore[misc]
LOSSES |= {f"layer {name}": lambda name=name: _layer(name) for name in LAYERS}  # type: ignore[misc]
LOSSES["layer whole, packed"] = lambda: _layer("whole", torch.tensor([0, 3, 3, 70]))
every_loss = pytest.mark.parametrize("name", LOSSES)


class Log(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))

    def ours(self) -> list[str]:
        return [name.split(".")[1] for name in self.names if name.startswith("kda")]


def gradients(y: Tensor, leaves: list[Tensor]) -> list[Any]:
    """By backward(): FlopCounterMode takes no torch.autograd.grad of leaves."""
    for x in leaves:
        x.grad = None
    y.backward()  # type: ignore[no-untyped-call]
    return [x.grad for x in leaves]


def saved_by(loss: Callable[[], Tensor]) -> list[Any]:
    found: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        found.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss()
    return found


# ---- a mode on one side ----


@every_loss
def test_what_is_saved_does_not_depend_on_modes(name: str) -> None:
    loss, _ = LOSSES[name]()
    expected = saved_by(loss)
    with Log() as log:
        got = saved_by(loss)
    assert log.ours() and expected, "the mode has seen it, and something is saved"
    assert got == expected


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_output_projection_keeps_nothing_for_its_weight(bias: bool) -> None:
    """As torch's own linear maps: its input is kept for the gradient of the weight alone."""
    kept = []
    for wanted in (True, False):
        layer = make_layer()
        layer.o_proj = nn.Linear(32, 48, bias)
        layer.o_proj.weight.requires_grad_(wanted)
        kept.append(saved_by(lambda layer=layer: loss_of(layer(tokens(1, 70, 48))[0])))  # type: ignore[misc]
    for x in kept[1]:
        kept[0].remove(x)
    assert kept == [[((1, 70, 32), torch.float32)], kept[1]]


MODES: dict[str, Callable[[], Any]] = {
    "Log": Log,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),  # these two have hooks of all modules, too
    "CommDebugMode": CommDebugMode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@every_loss
def test_checkpoints(name: str, where: str, mode: str) -> None:
    """The forward that backward runs again saves the same tensors, and gradients are the same."""
    loss, leaves = LOSSES[name]()
    expected = gradients(loss(), leaves)

    def around(here: str) -> AbstractContextManager[Any]:
        return MODES[mode]() if where == here else nullcontext()

    # A tensor that requires gradients makes the checkpoint, whatever the function reads.
    with around("forward"):
        y: Any = checkpoint(lambda _: loss(), leaves[0], use_reentrant=False)
    with around("backward"):
        got = gradients(y, leaves)
    if mode == "Log":
        assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    else:  # they compute torch's SiLU from other operators
        assert max(relative(a, b) for a, b in zip(expected, got, strict=True)) < 1e-6


@pytest.mark.parametrize("name", ["layer whole", "layer in parts"])
def test_a_selective_policy_under_another_mode(name: str) -> None:
    loss, leaves = LOSSES[name]()
    expected = gradients(loss(), leaves)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        save = str(operator).startswith("kda.forward")
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    with Log() as log:
        y: Any = checkpoint(
            lambda _: loss(), leaves[0], use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
    assert log.ours().count("forward") == 1
    with Log() as log:
        got = gradients(y, leaves)
    assert "forward" not in log.ours(), "what was saved is not computed again"
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("mode", ["FlopCounterMode", "CommDebugMode"])
def test_hooks_beside_those_of_a_mode_see_all_parts(mode: str) -> None:
    layer = make_layer()
    seen: set[Any] = set()
    with MODES[mode](), register_module_forward_hook(lambda module, *_: seen.add(module)):
        layer(tokens(1, 70, 48))
    missed = {name for name, module in layer.named_modules() if module not in seen}
    assert not missed


# ---- modes that make a graph ----


@pytest.mark.parametrize("tracing", ["real", "symbolic"])
@pytest.mark.parametrize("config", ["whole", "in parts"])
def test_make_fx_of_gradients(config: str, tracing: str) -> None:
    """The graph runs with gradients enabled, so it may have no products into given memory."""
    layer = make_layer(**LAYERS[config])
    weights = [layer.q_proj.weight, layer.f_proj[1].weight, layer.o_proj.weight]  # type: ignore[index]

    def step(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(layer(x, attention_mask=mask)[0]), [x, *weights])

    mask, other = torch.ones(2, 2, 20, dtype=torch.int64)
    other[1, :9] = 0
    graph = make_fx(step, tracing_mode=tracing, _allow_non_fake_inputs=True)(tokens(2, 20, 48).requires_grad_(), mask)
    x = tokens(2, 20, 48, seed=1).requires_grad_()
    assert max(relative(a, b) for a, b in zip(step(x, other), graph(x, other), strict=True)) < 1e-5


# ---- what a mode sees ----


@every_loss
def test_a_backward_is_seen_whatever_saw_its_forward(name: str) -> None:
    loss, leaves = LOSSES[name]()
    with FlopCounterMode(display=False) as both, Log() as log:
        y = loss()
        log.names.clear()
        gradients(y, leaves)
    forward_unseen = loss()
    with FlopCounterMode(display=False) as alone, Log() as log_alone:
        gradients(forward_unseen, leaves)
    assert sorted(log_alone.ours()) == sorted(log.ours()) != []
    counts, of_both = (c.get_flop_counts().get("Global", {}) for c in (alone, both))  # gates count nothing
    ours = {op: n for op, n in of_both.items() if str(op).startswith("kda") and "backward" in str(op)}
    assert {op: n for op, n in counts.items() if op in ours} == ours


def test_a_step_of_the_whole_layer_is_seen() -> None:
    """By the names of the operators, once each; the convolution runs again in backward."""
    loss, leaves = LOSSES["layer whole"]()
    with Log() as log:
        y = loss()
        assert log.ours() == ["joint_linear", "conv", "forward", "norm_gate"]
        log.names.clear()
        gradients(y, leaves)
    assert log.ours() == ["norm_gate_backward", "conv", "backward", "conv_backward", "joint_linear_backward"]


class Accesses(TorchDispatchMode):
    """What torch.cuda._sanitizer takes from operators to find races of streams: whose memory they read and write, by
    their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self.written: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in operator._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_flatten(given.get(argument.name))[0]:
                if isinstance(x, Tensor):
                    (self.written if written else self.read).add(x.data_ptr())
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_what_is_read_and_written(name: str) -> None:
    function, keywords = CALLS[name]()
    given = [x for x in tree_flatten(keywords)[0] if isinstance(x, Tensor) and x.numel()]
    before = [x.clone() for x in given]
    with Accesses() as seen, torch.no_grad():
        function(**keywords)
    pointers = {x.data_ptr() for x in given}
    assert pointers <= seen.read | seen.written
    changed = {x.data_ptr() for x, old in zip(given, before, strict=True) if not same_bits(x, old)}
    assert changed <= seen.written


def test_calls_that_torch_sees_on_request() -> None:
    """Without a mode the profiler lists the library's call; in ``SeenByTorch`` it lists the operator around it, too."""
    function, keywords = CALLS["decode"]()
    expected = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, keywords)
    o = function(**expected)

    def events(seen: bool) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with kda.operators.SeenByTorch() if seen else nullcontext():
                got = function(**keywords)
            assert same_bits(got, o) or not seen
        return {e.key for e in profile.key_averages() if "kda::" in e.key}

    assert events(seen=True) == {"kda::decode", "libkda::decode"}
    assert same_bits(keywords["state"], expected["state"])
    assert events(seen=False) == {"libkda::decode"}

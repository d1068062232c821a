"""The layers of other projects on a GPU, with the weights of ours: FLA's from an installed package or the folder of
``--peers``, and that of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.tuning import compiled_at_once
from kda.call.arrays import torch
from kda.cli.arrays import DeviceSource
from kda.cli.problems import Problem

if TYPE_CHECKING:
    from bench.layer import Case

PROMPT = 64  # tokens before the one that decode adds: one chunk, as transformers' loop takes gigabytes a chunk
SLOW_TOKENS = 512  # the longest prompt for operations of torch in a loop

Tensors = Callable[[], Sequence[Any]]


class Inputs:
    """Numbers for a case, always the same ones for a seed."""

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        p, new = case.problem, DeviceSource(device, seed)
        self.x = new.normal(p.dtype, p.B, p.T, p.hidden)
        self.prompt = new.normal(p.dtype, p.B, PROMPT, p.hidden)
        self.d_o = new.normal(p.dtype, p.B, p.T, p.hidden)


class Calls(NamedTuple):
    """Calls of a layer, which return tensors, the outputs first. ``forward`` is that of training and keeps what
    backward needs; ``parts`` are those that the whole call consists of."""

    whole: Tensors
    forward: Tensors | None = None
    parts: Mapping[str, Callable[[], object]] = {}


def calls_of(
    case: Case, layer: Any, inputs: Inputs, run: Callable[[Any, Any], Any], new_cache: Callable[[], Any]
) -> Calls:
    """``run`` takes hidden states and a cache, or None in training, and returns outputs. A prompt goes into a new
    cache in each call; one token goes again and again into a cache that holds a prompt."""
    x = inputs.x
    layer.train(case.what == "training")
    if case.what == "training":
        leaves = [x.requires_grad_(), *layer.parameters()]

        def step() -> Sequence[Any]:
            o = run(x, None)
            return [o, *torch.autograd.grad(o, leaves, inputs.d_o)]

        return Calls(step, lambda: [run(x, None)])
    if case.what == "prefill":
        return Calls(lambda: [run(x, new_cache())])
    with torch.inference_mode(), compiled_at_once():
        cache = new_cache()
        run(inputs.prompt, cache)
    return Calls(lambda: [run(x, cache)])


@dataclass
class FLACache:
    """What FLA's layer asks of a cache: for each layer what it has been updated with last."""

    states: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def update(self, *, layer_idx: int, recurrent_state: Any, conv_state: Any, offset: int) -> None:
        self.states[layer_idx] = {"recurrent_state": recurrent_state, "conv_state": conv_state}


def _own(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.clone() for name, x in weights.items()}


def _fla(case: Case, weights: Mapping[str, Any], inputs: Inputs) -> Calls:
    p = case.problem
    KimiDeltaAttention = importlib.import_module("fla.layers.kda").KimiDeltaAttention
    sizes = {"hidden_size": p.hidden, "head_dim": p.K, "expand_v": p.V / p.K, "num_heads": p.H, "num_v_heads": p.HV}
    with torch.device(inputs.x.device):
        layer = KimiDeltaAttention(**sizes, layer_idx=0)
    layer.load_state_dict(_own(weights), assign=True)  # and their dtypes

    def run(x: Any, cache: Any) -> Any:
        return layer(x, past_key_values=cache, use_cache=cache is not None)[0]

    return calls_of(case, layer, inputs, run, FLACache)


def kernels_of_transformers() -> str:
    """transformers takes FLA's kernels where it can import them when it is imported itself."""
    try:
        importlib.import_module("fla.ops.kda").chunk_kda  # noqa: B018
    except Exception:  # a foreign package may raise anything when it is imported
        return "torch"
    return "FLA"


def _transformers(case: Case, weights: Mapping[str, Any], inputs: Inputs) -> Calls:
    from kda.nn import to_published

    p, module = case.problem, "transformers.models.kimi_linear"
    configuration = importlib.import_module(f"{module}.configuration_kimi_linear")
    modeling = importlib.import_module(f"{module}.modeling_kimi_linear")
    DynamicCache = importlib.import_module("transformers").DynamicCache
    _suits_transformers(case)
    sizes = {"hidden_size": p.hidden, "linear_num_heads": p.H, "linear_head_dim": p.K, "rms_norm_eps": 1e-5}
    config = configuration.KimiLinearConfig(**sizes, num_hidden_layers=1, layer_types=["linear_attention"])
    with torch.device(inputs.x.device):
        layer = modeling.KimiLinearDeltaAttention(config, 0)
    layer.load_state_dict(to_published(_own(weights), "kimi_linear", in_transformers=True), assign=True)
    return calls_of(case, layer, inputs, lambda x, cache: layer(x, cache=cache), partial(DynamicCache, config=config))


def _suits_transformers(case: Case) -> None:
    p: Problem = case.problem
    if (p.HV, p.V) != (p.H, p.K):
        raise NotImplementedError("it has HV = H and K = V only")
    if kernels_of_transformers() == "torch" and (case.what == "training" or p.T > SLOW_TOKENS):
        raise NotImplementedError(
            f"without FLA it loops over torch's operations; measured in decode and prompts of at most {SLOW_TOKENS}"
            " tokens"
        )


@dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[[Case, Mapping[str, Any], Inputs], Calls]
    kernels: Callable[[], str | None] = lambda: None  # whose, if not its own


PEERS = (Peer("FLA", _fla), Peer("transformers", _transformers, kernels_of_transformers))

"""kda.nn made on the meta device and filled later, as trainers of large models do it: by hand, by FSDP1, by FSDP2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gloo import run_ranks
from kda.nn import KimiDeltaAttention, RMSNormGated, ShortConvolution
from layer_model import float64_parameters, model, relative, tokens

SIZES: dict[str, Any] = {"hidden_size": 48, "num_heads": 3, "head_dim": 16}  # two ranks cannot divide these heads
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"conv_bias": True},
    "no_convolution": {"use_short_conv": False},
    "grouped": {"num_v_heads": 6, "expand_v": 2},
    "safe_gate": {"safe_gate": True, "lower_bound": -5.0},
}


def on_meta(**config: Any) -> KimiDeltaAttention:
    with torch.device("meta"):
        return KimiDeltaAttention(**SIZES, **config)


def fill(module: nn.Module) -> None:
    """What torchtitan and FSDP1 do, in memory that is not zero by luck."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(math.nan)
    for m in module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()


def check(layer: KimiDeltaAttention, parameters: dict[str, torch.Tensor]) -> None:
    """Every parameter has its initial distribution."""
    for name, p in parameters.items():
        assert p.isfinite().all(), name
        if name not in ("A_log", "dt_bias", "o_norm.weight"):
            fan_in = p[0].numel() if p.ndim > 1 else 4 if "conv1d" in name else layer.head_v_dim
            assert 0.5 / math.sqrt(fan_in) < p.abs().max() <= 1.004 / math.sqrt(fan_in), name  # bfloat16 rounds up
    assert torch.equal(parameters["o_norm.weight"], torch.ones(layer.head_v_dim))
    a, dt = parameters["A_log"].exp(), nn.functional.softplus(parameters["dt_bias"])
    assert a.dtype == dt.dtype == torch.float32
    assert torch.equal(a, torch.ones(len(a))) if layer.safe_gate else (1 <= a.min() < a.max() <= 16)
    assert 0.00099 < dt.min() < 0.003 < 0.03 < dt.max() < 0.101


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_by_hand(config):
    layer = on_meta(**config)
    fill(layer)
    check(layer, {n: p.detach() for n, p in layer.named_parameters()})
    for m in layer.modules():
        assert hasattr(m, "reset_parameters") or not list(m.parameters(recurse=False)), type(m)
    x = tokens(1, 9, 48)
    assert relative(model(float64_parameters(layer), x[0].double(), layer), layer(x)[0][0]) < 3e-6


@pytest.mark.parametrize(
    "module", [lambda: RMSNormGated(8), lambda: ShortConvolution(8), lambda: ShortConvolution(8, 3, bias=True)]
)
def test_the_small_modules(module):
    with torch.device("meta"):
        made = module()
    fill(made)
    torch.manual_seed(0)
    made.reset_parameters()
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), module().parameters(), strict=True))


def test_device_and_dtype():
    layer = KimiDeltaAttention(**SIZES, conv_bias=True, device="meta", dtype=torch.bfloat16)
    kept = {"A_log", "dt_bias"}
    assert all(p.is_meta for p in layer.parameters())
    assert {n for n, p in layer.named_parameters() if p.dtype != torch.bfloat16} == kept
    layer = nn.utils.skip_init(KimiDeltaAttention, **SIZES)
    fill(layer)
    check(layer, {n: p.detach() for n, p in layer.named_parameters()})
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = on_meta()
        fill(layer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {n for n, p in layer.named_parameters() if p.dtype != torch.bfloat16} == kept
    check(layer, {n: p.detach() if n in kept else p.detach().float() for n, p in layer.named_parameters()})


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), nn.Module.bfloat16, nn.Module.half])
def test_conversions_leave_the_rates(convert):
    layer = KimiDeltaAttention(**SIZES)
    layer(tokens(1, 9, 48))[0].sum().backward()
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    convert(nn.Sequential(layer))
    assert {n for n, p in layer.named_parameters() if p.dtype == torch.float32} == {"A_log", "dt_bias"}
    assert all(torch.equal(getattr(layer, n), before[n]) for n in ("A_log", "dt_bias"))
    assert all(p.grad.dtype == p.dtype for p in layer.parameters())
    parameters = {n: p.double() for n, p in layer.named_parameters()}
    x = tokens(1, 9, 48).to(layer.q_proj.weight.dtype)
    assert relative(model(parameters, x[0].double(), layer), layer(x)[0][0]) < 2e-2
    assert layer.double().A_log.dtype == torch.float64
    assert convert(layer).A_log.dtype == torch.float32


def test_marks_on_parameters():
    """Trainers leave A_log and dt_bias without weight decay, and transformers marks what it has loaded."""
    layer = on_meta()
    for module in (layer, layer.to_empty(device="cpu"), layer.double(), layer.requires_grad_(False)):
        assert module.A_log._no_weight_decay
        assert module.dt_bias._no_weight_decay
        assert not hasattr(module.q_proj.weight, "_no_weight_decay")
    fill(layer)
    layer.A_log._is_hf_initialized = True
    A_log, dt_bias = layer.A_log.clone(), layer.dt_bias.clone()
    layer.reset_parameters()
    assert torch.equal(layer.A_log, A_log)
    assert not torch.equal(layer.dt_bias, dt_bias)
    assert layer.A_log._is_hf_initialized
    assert layer.A_log._no_weight_decay


# ---- two processes ----


def train_and_serve(layer: nn.Module, plain: KimiDeltaAttention) -> None:
    """A sharded layer does what one with the whole parameters does."""
    losses = [losses_of(trained) for trained in (plain, layer)]
    assert torch.allclose(*losses, rtol=1e-4), losses
    assert losses[0][-1] < losses[0][0]
    x = tokens(2, 20, 48)
    with torch.no_grad():
        expected, cache = plain(x)[0], layer.new_cache(2)
        assert relative(expected, layer(x)[0]) < 1e-3
        pieces = torch.cat([layer(piece, cache=cache)[0] for piece in x.split([15, 1, 4], 1)], 1)
        assert relative(layer(x)[0], pieces) < 2e-6


def losses_of(layer: nn.Module) -> torch.Tensor:
    """Losses of a few steps. All ranks have the same tokens, so averaged gradients are those of one process."""
    optimizer, losses = torch.optim.AdamW(layer.parameters(), 1e-2), []
    for _ in range(4):
        loss = (layer(tokens(2, 20, 48))[0] - tokens(2, 20, 48, seed=5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def whole(parameters: dict[str, torch.Tensor], config: dict[str, Any]) -> KimiDeltaAttention:
    plain = KimiDeltaAttention(**SIZES, **config)
    plain.load_state_dict(parameters)
    check(plain, parameters)
    return plain


def sharded(config: dict[str, Any], every_module: bool, **more: Any) -> KimiDeltaAttention:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer, mesh = on_meta(**config), init_device_mesh("cpu", (2,))
    for m in layer.modules():
        if every_module and isinstance(m, nn.Linear | RMSNormGated | ShortConvolution):
            fully_shard(m, mesh=mesh)
    fully_shard(layer, mesh=mesh, **more)
    fill(layer)
    assert layer.A_log._no_weight_decay
    return layer


def fsdp2(config: dict[str, Any], every_module: bool) -> None:
    layer = sharded(config, every_module)
    plain = whole({n: p.full_tensor() for n, p in layer.named_parameters()}, config)
    train_and_serve(layer, plain)


def fsdp2_computing_in_bfloat16() -> None:
    """FSDP casts a layer's arguments, but not the content of a cache: a cast would be a copy, and only that would
    advance."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    layer = sharded({}, False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x, cache = tokens(2, 20, 48), layer.new_cache(2)
    with torch.no_grad():
        expected = layer(x)[0]
        pieces = torch.cat([layer(piece, cache=cache)[0] for piece in x.split([15, 1, 4], 1)], 1)
    assert expected.dtype == torch.bfloat16
    assert cache.state.abs().max() > 0
    assert relative(expected, pieces) < 0.02


def fsdp1(config: dict[str, Any], use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    layer = FSDP(on_meta(**config), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(layer):
        plain = whole({n: p.detach().clone() for n, p in layer._fsdp_wrapped_module.named_parameters()}, config)
    train_and_serve(layer, plain)


def ddp(**options: Any) -> None:
    """Not made empty, but buckets of gradients are another place where storages meet."""
    from torch.nn.parallel import DistributedDataParallel

    layer, plain = (KimiDeltaAttention(**SIZES, conv_bias=True) for _ in range(2))
    wrapped = DistributedDataParallel(layer, **options)
    plain.load_state_dict(layer.state_dict())
    losses = [losses_of(trained) for trained in (plain, wrapped)]
    assert torch.allclose(*losses, rtol=1e-4), losses


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    for config in (CONFIGS["plain"], CONFIGS["biases"]):
        for choice in (True, False):
            fsdp2(config, choice)
            fsdp1(config, choice)
    fsdp2_computing_in_bfloat16()
    ddp()
    ddp(gradient_as_bucket_view=True, static_graph=True)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_fsdp(tmp_path: Path):
    run_ranks(run_rank, (str(tmp_path),), 2)

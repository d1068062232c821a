"""kda.nn: the layer against a float64 token-by-token model written here, its cache, its parameters against FLA's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kda
from kda.layer import step
from kda.nn import KDACache, KimiDeltaAttention, RMSNormGated, ShortConvolution
from layer_model import float64_parameters, in_pieces, make, model, relative, tokens

# Options that change the arithmetic of the layer, each at a size where chunks, heads and channels do not coincide.
CONFIGS = {
    "kimi_linear": {},
    "grouped_values": {"num_v_heads": 4, "expand_v": 2},
    "negative_eigenvalues": {"allow_neg_eigval": True},
    "lower_bound": {"lower_bound": -5.0, "safe_gate": True},
    "no_convolution": {"use_short_conv": False},
    "narrow_biased_convolution": {"conv_size": 3, "conv_bias": True},
    "recurrent": {"mode": "fused_recurrent"},
    "full_rank_gate": {"use_full_rank_gate": True},
    "full_ranks": {"use_full_rank_gate": True, "use_full_rank_decay": True, "gate_bias": True, "expand_v": 2},
    "no_gate_bias": {"gate_bias": False},
    "kept_for_backward": {"disable_recompute": True},
    "odd_heads": {"head_dim": 20, "expand_v": 0.6, "num_heads": 3, "num_v_heads": 3},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_output_and_every_gradient_equal_the_float64_model(config):
    layer = make(**config)
    x = tokens(2, 70, 48).requires_grad_()
    weight = tokens(2, 70, 48, seed=2)
    o, attentions, cache = layer(x)
    assert attentions is None
    assert cache is None
    (o * weight).sum().backward()

    p, x64 = float64_parameters(layer), x.detach().double().requires_grad_()
    expected = torch.stack([model(p, row, layer) for row in x64])
    (expected * weight).sum().backward()
    assert relative(expected, o) < 3e-6
    assert relative(x64.grad, x.grad) < 2e-5
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert float(p[name].grad.abs().max()) > 0, name
        assert relative(p[name].grad, parameter.grad) < 5e-5, name


def test_the_layer_keeps_more_for_backward_if_asked_to():
    def bytes_kept(**config):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
            make(**config)(tokens(1, 128, 48).requires_grad_())
        return sum(kept)

    assert bytes_kept(disable_recompute=True) > bytes_kept()


def test_in_float64_the_layer_is_the_model_and_passes_gradcheck():
    layer = make().double()
    x = tokens(2, 70, 48).double()
    expected = torch.stack([model(float64_parameters(layer), row, layer) for row in x])
    assert relative(expected, layer(x)[0]) < 1e-14
    assert relative(expected, in_pieces(layer, x, [60, 1, 9], layer.new_cache(2))) < 1e-14

    layer = KimiDeltaAttention(hidden_size=6, num_heads=1, head_dim=4, expand_v=0.5).double()
    names = [name for name, _ in layer.named_parameters()]

    def forward(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0]

    x = torch.randn(1, 5, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(forward, (x, *(p.detach().clone().requires_grad_() for p in layer.parameters())))


def test_nothing_in_nothing_out():
    layer = make()
    for shape in ((0, 5, 48), (2, 0, 48)):
        assert layer(torch.zeros(shape))[0].shape == shape
    o, _, _ = layer(tokens(2, 5, 48), attention_mask=torch.zeros(2, 5))
    assert not o.any()


# ---- parameters: facts read in FLA (fla/layers/kda.py at bc3b101d), hidden 32, H 2, HV 4, K 8, V 16 ----

FLA_PARAMETERS = {
    "A_log": (4,),
    "dt_bias": (32,),
    "q_proj.weight": (16, 32),
    "k_proj.weight": (16, 32),
    "v_proj.weight": (64, 32),
    "q_conv1d.weight": (16, 1, 4),
    "k_conv1d.weight": (16, 1, 4),
    "v_conv1d.weight": (64, 1, 4),
    "f_proj.0.weight": (16, 32),
    "f_proj.1.weight": (32, 16),
    "b_proj.weight": (4, 32),
    "g_proj.0.weight": (16, 32),
    "g_proj.1.weight": (64, 16),
    "g_proj.1.bias": (64,),
    "o_norm.weight": (16,),
    "o_proj.weight": (32, 64),
}
FLA_SIZES = {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 2.0}


def shapes(layer: KimiDeltaAttention) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in layer.state_dict().items()}


def test_parameters_are_those_of_fla():
    assert shapes(KimiDeltaAttention(**FLA_SIZES)) == FLA_PARAMETERS
    biases = {"q_conv1d.bias": (16,), "k_conv1d.bias": (16,), "v_conv1d.bias": (64,)}
    assert shapes(KimiDeltaAttention(**FLA_SIZES, conv_bias=True)) == FLA_PARAMETERS | biases
    without = {name: shape for name, shape in FLA_PARAMETERS.items() if "conv1d" not in name}
    assert shapes(KimiDeltaAttention(**FLA_SIZES, use_short_conv=False)) == without
    with torch.device("meta"):
        layer = KimiDeltaAttention()
    assert shapes(layer)["q_proj.weight"] == (2048, 2048)
    assert shapes(layer)["f_proj.1.weight"] == (2048, 128)
    assert (
        sum(p.numel() for p in layer.parameters()) == 4 * 2048**2 + 4 * 2048 * 128 + 3 * 2048 * 4 + 2048 * 18 + 16 + 128
    )


def test_a_state_dict_of_fla_loads_strictly_and_means_the_same():
    layer, other = KimiDeltaAttention(**FLA_SIZES), KimiDeltaAttention(**FLA_SIZES)
    foreign = {name: 0.3 * tokens(*shape, seed=i) for i, (name, shape) in enumerate(FLA_PARAMETERS.items())}
    layer.load_state_dict(foreign, strict=True)
    other.load_state_dict(layer.state_dict(), strict=True)
    x = tokens(1, 20, 32)
    assert torch.equal(layer(x)[0], other(x)[0])
    expected = model({name: w.double() for name, w in foreign.items()}, x[0].double(), layer)
    assert relative(expected, layer(x)[0][0]) < 3e-6


def test_initial_distributions():
    layer = KimiDeltaAttention(hidden_size=64, num_heads=512, head_dim=16)
    a, dt = layer.A_log.detach().exp(), F.softplus(layer.dt_bias.detach())
    assert 1 <= a.min() < 1.2 < 15.8 < a.max() <= 16
    assert a.mean() == pytest.approx(8.5, abs=1)
    assert 0.00099 < dt.min() < 0.0011 < 0.095 < dt.max() < 0.101
    assert dt.log().mean() == pytest.approx(math.log(0.01), abs=0.1)
    assert torch.equal(layer.o_norm.weight, torch.ones(16))
    for name, fan_in in [("q_proj", 64), ("o_proj", 8192), ("q_conv1d", 4)]:
        w = getattr(layer, name).weight.detach()
        assert w.abs().max() == pytest.approx(fan_in**-0.5, rel=0.01)
        assert w.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.03)
    assert not KimiDeltaAttention(hidden_size=8, head_dim=4, safe_gate=True, lower_bound=-5).A_log.any()
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay


# ---- the cache ----


@pytest.mark.parametrize(
    "sizes",
    [[1] * 150, [100] + [1] * 50, [64, 64, 22], [7, 65, 3, 1, 2, 72], [149, 1], [8, 9, 133], [0, 150, 0]],
    ids=["decode", "prompt_decode", "chunks", "odd", "last", "threshold", "empty"],
)
def test_pieces_equal_one_forward(sizes):
    layer, x = make(num_v_heads=4), tokens(3, 150, 48)
    cache, whole = layer.new_cache(3), layer.new_cache(3)
    expected, _, _ = layer(x)
    assert relative(expected, in_pieces(layer, x, sizes, cache)) < 2e-6
    in_pieces(layer, x, [150], whole)
    assert relative(whole.state, cache.state) < 2e-6
    assert relative(whole.conv, cache.conv) < 1e-5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prefill_and_decode_with_every_option(config):
    layer, x = make(**config), tokens(2, 80, 48)
    expected, _, _ = layer(x)
    assert relative(expected, in_pieces(layer, x, [77, 1, 2], layer.new_cache(2))) < 2e-6


def test_the_cache_is_updated_in_place_and_never_grows():
    layer = make()
    cache = layer.new_cache(2)
    addresses, size = (cache.conv.data_ptr(), cache.state.data_ptr()), cache.memory_bytes()
    assert size == 2 * (2 * 16 * 16 * 4) + 2 * (3 * 32 * 3) * 4
    for T in (1, 500, 3, 1):
        in_pieces(layer, tokens(2, T, 48), [T], cache)
        assert (cache.conv.data_ptr(), cache.state.data_ptr()) == addresses
        assert cache.memory_bytes() == size
    before = cache.state.clone()
    cache.reset(1)
    assert torch.equal(cache.state[0], before[0])
    assert not cache.state[1].any()
    assert not cache.conv[1].any()
    cache.reset()
    assert not cache.state.any()


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [2, 18], [19, 1]])
def test_the_convolution_state_is_the_last_raw_inputs_bit_for_bit(pieces):
    layer, x = make(), tokens(2, 20, 48)
    cache = layer.new_cache(2)
    raw = []
    hooks = [m.register_forward_hook(lambda m, i, o: raw.append(o)) for m in (layer.q_proj, layer.k_proj, layer.v_proj)]
    in_pieces(layer, x, pieces, cache)
    for hook in hooks:
        hook.remove()
    raw = torch.cat([torch.cat(raw[i::3], 1) for i in range(3)], -1)
    assert torch.equal(cache.conv, raw[:, -3:].transpose(1, 2))


def test_flas_calling_convention():
    layer, x = make(layer_idx=3), tokens(1, 12, 48)
    expected, _, _ = layer(x)
    with torch.no_grad():
        first, _, cache = layer(x[:, :9], use_cache=True)
        second, _, same = layer(hidden_states=x[:, 9:], past_key_values=cache, use_cache=True, output_attentions=False)
        assert same is cache
        assert relative(expected, torch.cat([first, second], 1)) < 2e-6
        caches: dict[int, KDACache] = {}
        first, _, same = layer(x[:, :9], past_key_values=caches, use_cache=True, position_ids=None)
        second, _, _ = layer(x[:, 9:], past_key_values=caches)
    assert same is caches
    assert list(caches) == [3]
    assert relative(expected, torch.cat([first, second], 1)) < 2e-6


def test_with_gradients_a_cache_carries_values_but_no_gradient():
    layer, x = make(), tokens(1, 90, 48)
    expected, _, _ = layer(x)
    cache = layer.new_cache(1)
    pieces = [layer(piece, cache=cache)[0] for piece in x.split([50, 40], 1)]
    assert not cache.state.requires_grad
    assert relative(expected, torch.cat(pieces, 1)) < 2e-6
    sum(piece.sum() for piece in pieces).backward()  # nothing that backward needs was overwritten
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_long_pieces_run_in_chunks_and_short_ones_token_by_token(monkeypatch):
    """Short ones with their convolution and norm in one call, where there is a convolution, and single ones as quick
    steps."""
    calls = []
    for module, name in ((kda.nn, "prefill"), (kda.nn, "decode"), (step, "fused_decode"), (step, "_step")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, run=run, name=name, **k: calls.append(name) or run(*a, **k))
    for config, short in (({}, ["fused_decode", "_step", "_step"]), ({"use_short_conv": False}, ["decode"] * 3)):
        layer = make(**config)
        in_pieces(layer, tokens(1, 110, 48), [100, 8, 1, 1], layer.new_cache(1))
        assert calls == ["prefill", *short]
        calls.clear()
    layer = make(conv_size=1)
    in_pieces(layer, tokens(1, 110, 48), [100, 8, 1, 1], layer.new_cache(1))
    assert calls == ["prefill", *["decode"] * 3]


# ---- 16-bit types and the compiler ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters(dtype):
    layer = make().to(dtype)
    x = tokens(2, 100, 48).to(dtype).requires_grad_()
    p, x64 = float64_parameters(layer), x.detach().double().requires_grad_()
    o, _, _ = layer(x)
    assert o.dtype == dtype
    expected = torch.stack([model(p, row, layer) for row in x64])
    roundings = 8 * torch.finfo(dtype).eps  # a dozen roundings of eps/2 between input and output
    assert relative(expected, o) < roundings
    o.sum().backward()
    expected.sum().backward()
    assert relative(x64.grad, x.grad) < 2 * roundings
    cache = layer.new_cache(2)
    assert cache.conv.dtype == dtype
    assert cache.state.dtype == torch.float32
    assert relative(expected, in_pieces(layer, x.detach(), [90, 1, 9], cache)) < roundings


def test_autocast_keeps_parameters_in_float32():
    layer, x = make(), tokens(2, 100, 48)
    expected = torch.stack([model(float64_parameters(layer), row, layer) for row in x.double()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _, _ = layer(x)
        pieces = in_pieces(layer, x, [90, 1, 9], layer.new_cache(2))
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    assert relative(expected, o) < 0.05
    assert relative(expected, pieces) < 0.05


def test_torch_compile_without_graph_breaks():
    layer, x = make(num_v_heads=4), tokens(2, 70, 48)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    weight = tokens(2, 70, 48, seed=2)
    grads = []
    for run in (layer, compiled):
        layer.zero_grad()
        o = run(x)[0]
        (o * weight).sum().backward()
        grads.append([o, *(p.grad.clone() for p in layer.parameters())])
    assert all(relative(a, b) < 1e-5 for a, b in zip(*grads, strict=True))
    cu = torch.tensor([0, 30, 70])
    assert relative(layer(x[:1], cu_seqlens=cu)[0], compiled(x[:1], cu_seqlens=cu)[0]) < 1e-6
    cache = layer.new_cache(2)
    with torch.no_grad():
        pieces = torch.cat([compiled(piece, cache=cache)[0] for piece in x.split([69, 1], 1)], 1)
    assert relative(layer(x)[0], pieces) < 2e-6


# ---- the small modules ----


def test_short_convolution_is_conv1d_and_silu():
    torch.manual_seed(0)
    conv, x = ShortConvolution(6, 4, bias=True), tokens(2, 9, 6)
    expected = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight, conv.bias, groups=6)).transpose(1, 2)
    assert torch.allclose(conv(x), expected, atol=1e-6)
    state = torch.zeros(2, 6, 3)
    pieces = torch.cat([conv(piece, state) for piece in x.split([4, 1, 0, 3, 1], 1)], 1)
    assert torch.allclose(conv(x), pieces, atol=1e-6)
    assert torch.equal(state, x[:, -3:].transpose(1, 2))
    assert isinstance(conv, torch.nn.Conv1d)
    rounded, half = ShortConvolution(6, 4, bias=True), ShortConvolution(6, 4, bias=True).bfloat16()
    rounded.load_state_dict(half.state_dict())
    assert torch.equal(half(x.bfloat16()), rounded(x.bfloat16().float()).bfloat16())  # rounded once, at the end
    pointwise = ShortConvolution(6, 1)  # a width of 1 remembers nothing
    assert torch.allclose(pointwise(x, torch.zeros(2, 6, 0)), F.silu(x * pointwise.weight[:, 0, 0]))
    assert not pointwise(x[:1], cu_seqlens=torch.tensor([0, 2, 7]))[:, 7:].any()
    with pytest.raises(ValueError, match=r"kernel_size: expected 1\.\.4, got 0"):
        ShortConvolution(6, 0)


def test_rms_norm_gated():
    torch.manual_seed(0)
    norm, x, gate = RMSNormGated(8, eps=1e-3), tokens(3, 8), tokens(3, 8, seed=2)
    torch.nn.init.uniform_(norm.weight)
    expected = F.rms_norm(x, (8,), norm.weight, 1e-3) * torch.sigmoid(gate)
    assert torch.allclose(norm(x, gate), expected, atol=1e-6)
    assert norm(x.bfloat16(), gate.bfloat16()).dtype == torch.bfloat16


# ---- refusals ----


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"mode": "parallel"}, "mode: expected 'chunk' or 'fused_recurrent', got 'parallel'"),
        (
            {"mode": "fused_recurrent", "disable_recompute": True},
            "disable_recompute: expected mode='chunk' with it, got 'fused_recurrent'",
        ),
        ({"head_dim": 10, "expand_v": 0.33}, "expand_v: expected a whole number"),
        ({"num_heads": 4, "num_v_heads": 6}, "num_v_heads: expected a multiple of num_heads = 4, got 6"),
        ({"conv_size": 5}, r"conv_size: expected 1\.\.4, got 5"),
        ({"safe_gate": True}, r"lower_bound: expected a number in \[-5, 0\) with safe_gate, got None"),
    ],
)
def test_constructor_refuses(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        KimiDeltaAttention(hidden_size=8, **config)


def test_forward_refuses():
    layer, x = make(), tokens(2, 3, 48)
    with pytest.raises(ValueError, match=r"hidden_states: expected shape \[B, T, 48\], got \[2, 3, 47\]"):
        layer(x[..., :47])
    with pytest.raises(ValueError, match="hidden_states: expected one row with cu_seqlens, got 2"):
        layer(x, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 3\], got \[2, 1, 3, 3\]"):
        layer(x, attention_mask=torch.ones(2, 1, 3, 3))
    with pytest.raises(ValueError, match="cache: expected one for 2 sequences, got one for 1"):
        layer(x, cache=layer.new_cache(1))
    with pytest.raises(ValueError, match="layer_idx: expected a number"):
        layer(x, past_key_values={}, use_cache=True)
    with pytest.raises(NotImplementedError, match=r"past_key_values: expected a KDACache or a dict .* got list"):
        layer(x, past_key_values=[])

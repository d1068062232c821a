"""``kda.vllm``, driven by vLLM's own layers."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kda
import kda.vllm
from support import budget, kda_oracle, rel_rmse
from vllm_layers import MODULES, Sizes, inputs, layer_of, step_of, vllm

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32
KIMI = ("KimiK3DeltaAttention", "KimiGatedDeltaNetAttention")
GLM = "Glm5NextLinearAttention"


@pytest.fixture(params=[False, True], ids=["rows", "channels"])
def server(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    with vllm(dim_first=request.param) as step, warnings.catch_warnings():
        warnings.simplefilter("error")  # among them those of a call that ours declined
        assert kda.vllm.plug().state == "plugged", kda.vllm.plug()
        yield step


def plain(name: str) -> None:
    """From here on vLLM instantiates its own layer, with our functions in it."""
    importlib.import_module(MODULES[name])
    importlib.import_module("vllm.model_executor.custom_op").op_registry_oot.clear()


def run(layer: Any, step: list[Any], metadata: Any, x: dict[str, Tensor], rows: int | None = None) -> Tensor:
    tokens, H, D = x["g1"].shape[1], layer.local_num_heads, layer.head_dim
    out = torch.full((1, tokens, H, D), float("nan"), dtype=x["mixed_qkv"].dtype)
    step[0] = metadata
    if "Glm" in type(layer).__name__:
        layer._forward(x["mixed_qkv"], x["g1"], x["beta"], out)
        out.copy_(layer.o_norm(out, x["g2"]))
    else:
        layer._forward(x["mixed_qkv"], x["g1"], x["g2"], x["beta"], out)
    return out


def expected(layer: Any, x: dict[str, Tensor], begin: int, end: int, tail: Tensor, state: Tensor) -> Any:
    """Outputs and last state of one request in float64; ``tail [D, W - 1]``."""
    rows = torch.cat([tail.double().T, x["mixed_qkv"][begin:end].double()])
    taps = layer.conv1d.weight.double()[:, 0]
    y = torch.stack([(rows[t : t + taps.shape[1]].T * taps).sum(1) for t in range(end - begin)])
    q, k, v = torch.nn.functional.silu(y).unflatten(-1, (3, -1, layer.head_dim)).unbind(1)
    o, last = kda_oracle(
        q=q[None], k=k[None], v=v[None], g=x["g1"][:, begin:end].double(), beta=x["beta"][:, begin:end].double(),
        A_log=layer.A_log.double(), dt_bias=layer.dt_bias.double(), lower_bound=layer.gate_lower_bound,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
        initial_state=state[None].double(),
    )  # fmt: skip
    norm = o * (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * layer.o_norm.weight.double()
    return norm * x["g2"][begin:end].double().sigmoid(), last[0]


def tails_of(layer: Any, dim_first: bool) -> Tensor:
    tails = layer.kv_cache[0]
    return tails if dim_first else tails.transpose(1, 2)


def check(got: Tensor, wanted: Tensor) -> None:
    """Two roundings to 16 bits, behind the convolution and before the norm, come to those of the output."""
    assert rel_rmse(wanted, got) < 2 * budget("o", BF16)


def check_requests(
    layer: Any, x: dict[str, Tensor], slots: list[int], lengths: list[int], fresh: list[bool], before: Any, o: Tensor
) -> None:  # fmt: skip
    (tails, pool), begin = before, 0
    for slot, length, new in zip(slots, lengths, fresh, strict=True):
        end = begin + length
        if slot < 1:
            assert not o[:, begin:end].any()
        else:
            tail, state = (torch.zeros_like(y[slot]) if new else y[slot] for y in (tails, pool))
            wanted, last = expected(layer, x, begin, end, tail, state)
            check(o[:, begin:end], wanted)
            assert rel_rmse(last, layer.kv_cache[1][slot]) < 2 * budget("final_state", BF16)
        begin = end


def before_of(layer: Any, dim_first: bool) -> tuple[Tensor, Tensor]:
    return tails_of(layer, dim_first).clone(), layer.kv_cache[1].clone()


# Layer, whether it is a class of ours, bound of its gate. Of GLM-5-next, whose gate is bounded, functions are ours.
LAYERS = [(name, ours, bound) for name in KIMI for ours in (False, True) for bound in (None, -5.0)] + [
    (GLM, False, -5.0)
]


@pytest.mark.parametrize(("name", "ours", "bound"), LAYERS)
@pytest.mark.parametrize("pool", [F32, BF16])
def test_prefill_then_decode(name: str, ours: bool, bound: float | None, pool: Any, server: list[Any]) -> None:
    if not ours:
        plain(name)
    sizes = Sizes(pool=pool, bound=bound)
    layer = layer_of(name, sizes, server[1])
    assert (type(layer).__module__ == "kda.plugs.vllm_layer") == ours
    slots, lengths, fresh = [3, 7, 1], [70, 1, 33], [True, False, False]
    x, before = inputs(sizes, sum(lengths)), before_of(layer, server[1])
    o = run(layer, server, step_of("prefill", slots, lengths, fresh), x)
    check_requests(layer, x, slots, lengths, fresh, before, o)
    others = [0, 2, 4, 5, 6, 8]
    assert torch.equal(layer.kv_cache[1][others], before[1][others])

    batch, before = [7, 3, 1], before_of(layer, server[1])
    x = inputs(sizes, 3)
    o = run(layer, server, step_of("decode", batch, [1] * 3), x)
    check_requests(layer, x, batch, [1] * 3, [False] * 3, before, o)


@pytest.mark.parametrize("name", KIMI)
@pytest.mark.parametrize("ours", [False, True], ids=["functions", "layers"])
@pytest.mark.parametrize("padding", [0, -1])
def test_both_paddings(name: str, ours: bool, padding: int, server: list[Any]) -> None:
    """Rows with slot 0, which is vLLM's padding, and with a negative one: no state is touched, outputs are 0."""
    if not ours:
        plain(name)
    sizes = Sizes()
    layer = layer_of(name, sizes, server[1])
    batch, before = [4, padding, padding, 2], before_of(layer, server[1])
    x = inputs(sizes, 4)
    o = run(layer, server, step_of("decode", batch, [1] * 4), x)
    check_requests(layer, x, batch, [1] * 4, [False] * 4, before, o)
    assert torch.equal(layer.kv_cache[1][0], before[1][0])
    assert torch.equal(tails_of(layer, server[1])[0], before[0][0])


@pytest.mark.parametrize("name", KIMI)
def test_a_padded_step_of_a_layer(name: str, server: list[Any]) -> None:
    """A graph's rows beyond the step's tokens are read and written by nobody."""
    sizes = Sizes()
    layer = layer_of(name, sizes, server[1])
    x = inputs(sizes, 6)
    for step in (step_of("prefill", [4], [4]), step_of("decode", [4, 2, 5, 0], [1] * 4)):
        o = run(layer, server, step, x)
        assert o[:, :4].isfinite().all() and o[:, 4:].isnan().all()


@pytest.mark.parametrize("name", [*KIMI, GLM])
@pytest.mark.parametrize("full", [False, True])
def test_drafts(name: str, full: bool, server: list[Any]) -> None:
    """Each request starts from the state after its last accepted draft, and leaves one after each new draft."""
    sizes = Sizes(spec=2, slots=14, bound=-5.0)
    layer = layer_of(name, sizes, server[1])
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    lengths, accepted = [3, 3, 3] if full else [2, 3, 1], [2, 1, 3]
    cu, tokens = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    step = step_of(
        "spec", [], [], num_spec_decodes=3, num_spec_decode_tokens=tokens, num_actual_tokens=tokens,
        spec_sequence_masks=torch.ones(3, dtype=torch.bool), spec_query_start_loc=cu, spec_state_indices_tensor=slots,
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32), spec_token_indx=torch.arange(tokens),
        non_spec_token_indx=torch.arange(0),
    )  # fmt: skip
    x, (tails, pool) = inputs(sizes, tokens), before_of(layer, server[1])
    o = run(layer, server, step, x)
    for n in range(3):
        begin, start = int(cu[n]), pool[slots[n, accepted[n] - 1]]
        for t in range(lengths[n]):
            tail = tails[slots[n, 0], :, : sizes.W - 1]
            wanted, last = expected(layer, x, begin, begin + t + 1, tail, start)
            assert rel_rmse(last, layer.kv_cache[1][slots[n, t]]) < 2 * budget("final_state", BF16)
        check(o[:, begin : begin + lengths[n]], wanted)
    assert torch.equal(layer.kv_cache[1][10:], pool[10:]) and torch.equal(layer.kv_cache[1][0], pool[0])


@pytest.mark.parametrize(("name", "apart"), [(KIMI[0], True), (KIMI[0], False), (KIMI[1], False), (GLM, False)])
def test_drafts_beside_a_prompt(name: str, apart: bool, server: list[Any]) -> None:
    """A step with both. Tokens of each kind lie together, or (unless ``apart``) are picked and put back one by one."""
    sizes = Sizes(spec=2, slots=8, bound=-5.0)
    layer = layer_of(name, sizes, server[1])
    drafts, prompt = (list(range(3)), list(range(3, 23))) if apart else ([1, 4, 6], [0, 2, 3, 5, *range(7, 23)])
    slots, cu = torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    places = {"spec_token_start": 0, "non_spec_token_start": 3} if apart else {}
    step = step_of(
        "prefill", [5], [20], [True], num_actual_tokens=23, num_spec_decodes=1, num_spec_decode_tokens=3,
        num_prefill_tokens=20, num_decode_tokens=0, spec_sequence_masks=torch.tensor([True, False]),
        spec_query_start_loc=cu, spec_state_indices_tensor=slots, num_accepted_tokens=torch.tensor([2]).int(),
        spec_token_indx=torch.tensor(drafts), non_spec_token_indx=torch.tensor(prompt), **places,
    )  # fmt: skip
    x, (tails, pool) = inputs(sizes, 23), before_of(layer, server[1])
    o = run(layer, server, step, x)
    for tokens, tail, state, last in (
        (drafts, tails[1, :, : sizes.W - 1], pool[2], 3), (prompt, torch.zeros_like(tails[5, :, :3]), 0 * pool[5], 5)
    ):  # fmt: skip
        here = {n: t[tokens] if t.ndim == 2 or n == "g2" else t[:, tokens] for n, t in x.items()}
        wanted, end = expected(layer, here, 0, len(tokens), tail, state)
        check(o[:, tokens], wanted)
        assert rel_rmse(end, layer.kv_cache[1][last]) < 2 * budget("final_state", BF16)


@pytest.mark.parametrize("name", KIMI)
def test_what_a_layer_leaves_to_vllm(name: str, server: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.import_module(MODULES[name])
    called: list[Any] = []
    monkeypatch.setattr(getattr(own, name), "_forward", lambda self, **given: called.append(self))
    kept = {"checkpoint": object()}
    for sizes, more in ((Sizes(), kept), (Sizes(spec=2), {}), (Sizes(), {"num_spec_decodes": 1})):
        layer = layer_of(name, sizes, server[1])
        run(layer, server, step_of("prefill", [1], [3], **more), inputs(sizes, 3))
        assert called.pop() is layer
    layer = layer_of(name, Sizes(), server[1])
    run(layer, server, None, inputs(Sizes(), 3))  # vLLM measures its memory without metadata
    assert called.pop() is layer
    layer.dt_bias = torch.nn.Parameter(layer.dt_bias[:-1], requires_grad=False)
    with pytest.warns(RuntimeWarning, match=rf"{name}, as ours declined: dt_bias: expected shape"):
        run(layer, server, step_of("prefill", [1], [3]), inputs(Sizes(), 3))
    assert called.pop() is layer


def test_functions_in_their_modules(server: list[Any]) -> None:
    k3 = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
    ours = ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode")
    assert [name for name in k3.__all__ if hasattr(getattr(k3, name), "of_kda")] == sorted(ours)
    glm = importlib.import_module(MODULES[GLM])
    assert all(hasattr(getattr(glm, name), "of_kda") for name in ours[:2])
    assert server[0] is None


def test_functions_that_are_imported_already() -> None:
    with vllm():
        module = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        own = module.fused_recurrent_kda
        assert kda.vllm.plug() is kda.vllm.plug()
        assert module.fused_recurrent_kda.__wrapped__ is own


def test_declined_calls_run_vllms_own() -> None:
    with vllm():
        module = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        called: list[Any] = []

        def fused_recurrent_kda(*args: Any, **given: Any) -> str:
            called.append(given)
            return "vLLM's"

        module.fused_recurrent_kda = fused_recurrent_kda
        kda.vllm.plug()
        x = torch.ones(1, 4, 1, 4)
        call = {
            "q": x, "k": x, "v": x, "raw_g": x, "raw_beta": x[..., 0], "A_log": torch.ones(1), "dt_bias": None,
            "lower_bound": None, "initial_state": torch.ones(3, 1, 4, 4), "cu_seqlens": torch.tensor([0, 2, 4]),
        }  # fmt: skip
        with pytest.warns(RuntimeWarning, match=r"vLLM's own kernel runs for fused_recurrent_kda, as ours declined"):
            assert module.fused_recurrent_kda(**call, ssm_state_indices=torch.tensor([1, 2])) == "vLLM's"
        assert len(called) == 1


def test_what_no_kernel_takes_runs_vllms_own(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[[str, str | None], None]
) -> None:
    environment("KDA_IMPL", "cpu_recurrent")  # which takes no float64
    with vllm():
        module = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        monkeypatch.setattr(module, "chunk_kda_with_fused_gate", lambda *args, **given: "vLLM's")
        kda.vllm.plug()
        x, A_log = torch.ones(1, 4, 1, 4).double(), torch.ones(1)
        with pytest.warns(RuntimeWarning, match="ours declined: cpu_recurrent was forced but float64 runs on"):
            assert module.chunk_kda_with_fused_gate(x, x, x, x, x[..., 0], A_log, None) == "vLLM's"


@pytest.mark.parametrize("name", KIMI)
def test_steps_that_no_kernel_takes(
    name: str, server: list[Any], monkeypatch: pytest.MonkeyPatch, environment: Callable[[str, str | None], None]
) -> None:
    """They are vLLM's, and no state has moved: also a prefill whose first one was ours."""
    own, called = importlib.import_module(MODULES[name]), list[Any]()
    monkeypatch.setattr(getattr(own, name), "_forward", lambda self, **given: called.append(self))
    layer, x = layer_of(name, Sizes(), server[1]), inputs(Sizes(), 3)
    step = step_of("prefill", [1], [3])
    del step.checkpoint  # Kimi-Linear's steps have none
    run(layer, server, step, x)
    assert called == []
    before = before_of(layer, server[1])
    wide = {n: t.double() for n, t in x.items()}
    layer.kv_cache = tuple(t.double() for t in layer.kv_cache)
    layer.conv1d.weight = layer.conv1d.weight.double()
    for kind, forced in (("prefill", "cpu_chunk"), ("decode", "cpu_recurrent")):
        environment("KDA_IMPL", forced)
        with pytest.warns(RuntimeWarning, match=rf"{name}, as ours declined: {forced} was forced but float64 runs on"):
            run(
                layer, server, step_of(kind, [1], [3]) if kind == "prefill" else step_of(kind, [1, 2, 3], [1] * 3), wide
            )
        assert called.pop() is layer
    assert torch.equal(before[0].double(), tails_of(layer, server[1]))
    assert torch.equal(before[1].double(), layer.kv_cache[1])


def test_an_import_that_failed_at_first_is_plugged_at_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    module, missing = MODULES["KimiK3DeltaAttention"], "vllm.model_executor.layers.linear"
    with vllm():
        kda.vllm.plug()
        monkeypatch.setitem(sys.modules, missing, None)  # as a package that is not there
        with pytest.raises(ModuleNotFoundError, match=missing):
            importlib.import_module(module)
        monkeypatch.delitem(sys.modules, missing)
        loader = importlib.util.find_spec(module).loader  # type: ignore[union-attr]
        assert loader.get_source(module), "others may look for a module without importing it"  # type: ignore
        layer = layer_of("KimiK3DeltaAttention", Sizes(), False)
        assert type(layer).__module__ == "kda.plugs.vllm_layer"
        own = sys.modules[module]
        assert own.__loader__ is own.__spec__.loader and "kda" not in type(own.__loader__).__module__  # type: ignore


def test_a_module_that_lost_a_name_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its functions, and whatever else of vLLM."""
    with vllm():
        k3 = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        monkeypatch.delattr(k3, "fused_recurrent_kda_packed_decode")
        own = importlib.import_module(MODULES["KimiGatedDeltaNetAttention"])
        monkeypatch.delattr(own, "get_forward_context")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert kda.vllm.plug().state == "plugged"
        assert [str(w.message) for w in told] == [
            f"kda: {k3.__name__} is left as it is: AttributeError: module '{k3.__name__}' has no attribute "
            "'fused_recurrent_kda_packed_decode'",
            f"kda: {own.__name__} is left as it is: AttributeError: module '{own.__name__}' has no attribute "
            "'get_forward_context'",
        ]
        assert not hasattr(k3.fused_recurrent_kda, "of_kda")
        assert type(layer_of("KimiGatedDeltaNetAttention", Sizes(), False)).__module__ == own.__name__


@pytest.mark.parametrize("asked", [None, "", "0", "yes"])
def test_nothing_changes_unless_asked(asked: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm")
    with vllm(asked=asked), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plug = kda.vllm.plug()
        got = ascii(asked) if asked else "nothing"
        assert plug.state == "switched off"
        assert plug.reasons == (f"KDA_VLLM: expected 1 to run vLLM's KDA on kda, got {got}",)
        assert len(told) == (asked == "yes"), "a server that never asked is told nothing"
        module = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        assert not hasattr(module.fused_recurrent_kda, "of_kda")
        assert type(layer_of(KIMI[0], Sizes(), False)).__module__ == MODULES[KIMI[0]]
    assert caplog.messages == []


def test_one_line_of_vllms_log_says_that_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm")
    with vllm():
        for _ in range(2):
            kda.vllm.plug()
    assert caplog.messages == [f"kda {kda.__version__} is on: KDA layers run on its kernels (KDA_VLLM=1)"]
    assert caplog.records[0].name.startswith("vllm."), "whose lines vLLM prints"


def test_plugging_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM plugs before it forks its workers, and CUDA does not survive that."""
    asked: list[str] = []
    with vllm() as _, monkeypatch.context() as patch:
        patch.setattr(kda.vllm, "built_with_cuda", kda.call.library.built_with_cuda)
        real = kda.call.library.library()

        class Watched:
            def __getattr__(self, name: str) -> Any:
                asked.append(name)
                return getattr(real, name)

        patch.setattr(kda.call.library, "library", Watched)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a build without CUDA
            kda.vllm.plug()
    assert asked == ["implementation"], "info() would ask the driver for its devices"


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with vllm(version="0.34.0"), pytest.warns(RuntimeWarning, match=r"vLLM: expected version 0.33.0, got 0.34.0"):
        assert kda.vllm.plug().state == "refused"
    with vllm(cuda=False), pytest.warns(RuntimeWarning, match="libkda: expected a build with CUDA, got one without"):
        assert kda.vllm.plug().state == "refused"
    with vllm():
        moved = {
            "KimiK3DeltaAttention._forward": "@eager_break_during_capture (self, mixed_qkv, g1, beta, core_attn_out)"
        }
        monkeypatch.setitem(kda.vllm.EXPECTED, MODULES["KimiK3DeltaAttention"], moved)
        wanted = (
            r"KimiK3DeltaAttention._forward: expected @eager\w+ \(self, mixed_qkv, g1, beta, .*, got @eager\w+ \(self"
        )
        with pytest.warns(RuntimeWarning, match=wanted):
            assert kda.vllm.plug().state == "refused"
        module = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        assert not hasattr(module.fused_recurrent_kda, "of_kda")


def test_a_plug_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise ImportError("kda: _binding.so was not found")

    with (
        vllm(),
        pytest.warns(RuntimeWarning, match="vLLM 0.33.0: refused: ImportError: kda: _binding.so was not found"),
    ):
        monkeypatch.setattr(kda.vllm, "built_with_cuda", broken)
        assert kda.vllm.plug().state == "refused"

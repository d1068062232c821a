"""``kda.sglang``, driven by SGLang's own dispatcher and attention backend. Points 1 to 8 are those of its contract for
prefill; tests/gpu captures the eighth."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kda
import kda.sglang
from sglang_server import Layer, Server, dispatcher, options, sglang
from support import budget, kda_oracle, rel_rmse

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32
SLOTS = 8


@pytest.fixture
def _sglang() -> Iterator[None]:
    with sglang(), warnings.catch_warnings():
        warnings.simplefilter("error")  # among them those of a call that ours declined
        yield


def pool_for(layer: Layer, dtype: torch.dtype = F32, slots: int = SLOTS) -> Tensor:
    return torch.randn(slots, layer.HV, layer.V, layer.K).to(dtype)


def expected(layer: Layer, inputs: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    return kda_oracle(**layer.problem(*inputs), initial_state=state[None].double())


def part(inputs: Any, begin: int, end: int) -> Any:
    mixed, a, b = inputs
    return mixed[begin:end], a[:, begin:end], b[:, begin:end]


def check_state(wanted: Tensor, got: Tensor) -> None:
    assert rel_rmse(wanted[0], got) < budget("final_state", BF16)


def check_requests(
    layer: Layer, slots: list[int], lengths: list[int], inputs: Any, before: Tensor, pool: Tensor, o: Tensor
) -> None:  # fmt: skip
    begin = 0
    for slot, length in zip(slots, lengths, strict=True):
        wanted, state = expected(layer, part(inputs, begin, begin + length), before[slot])
        assert rel_rmse(wanted, o[:, begin : begin + length]) < budget("o", BF16)
        check_state(state, pool[slot])
        begin += length


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("pool_dtype", [F32, BF16])
def test_extend_and_decode_in_the_pool(bound: float | None, pool_dtype: torch.dtype) -> None:
    layer = Layer(lower_bound=bound)
    pool = pool_for(layer, pool_dtype)
    server, before = Server(layer, pool), pool.clone()
    slots, lengths = [5, 2, 7], [70, 1, 33]
    inputs = layer.inputs(sum(lengths))
    o = server.extend(slots, lengths, inputs)
    check_requests(layer, slots, lengths, inputs, before, pool, o)
    assert torch.equal(pool[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])

    before, batch = pool.clone(), [2, 7, -1, 5]
    inputs = layer.inputs(len(batch))
    o = server.decode(batch, inputs)
    assert o.shape == (1, 4, layer.HV, layer.V) and not o[:, 2].any()
    for row, slot in enumerate(batch):
        if slot >= 0:
            check_requests(layer, [slot], [1], part(inputs, row, row + 1), before, pool, o[:, row : row + 1])


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize("wide", [False, True])
def test_decode_of_apart_tensors(wide: bool) -> None:
    """SGLang's other call of decode, for kernels that take q, k and v apart: K != V, and packed requests."""
    layer = Layer(V=24)
    pool = pool_for(layer)
    before, kernels = pool.clone(), dispatcher()
    mixed, a, b = inputs = layer.inputs(6)
    q, k, v = (
        x.unflatten(-1, (-1, s))[None]
        for x, s in zip(mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1), (16, 16, 24), strict=True)
    )
    slots, lengths = ([4, 1], [2, 4]) if wide else ([3, 1, 6, 0, 7, 2], [1] * 6)
    common = {
        "A_log": layer.A_log, "dt_bias": layer.dt_bias, "ssm_states": pool,
        "cache_indices": torch.tensor(slots, dtype=torch.int32),
    }  # fmt: skip
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    o = kernels.decode(q, k, v, a, b, query_start_loc=cu, lower_bound=None, **common)
    check_requests(layer, slots, lengths, inputs, before, pool, o)
    if not wide:
        pool.copy_(before)
        heads = {"num_v_heads": layer.HV, "head_v_dim": layer.V, "scale": layer.K**-0.5}
        packed = kernels.packed_decode(mixed, a[0], b[0], **common, **heads)
        assert torch.equal(packed, o)


# ---- the contract of prefill ----


@pytest.mark.usefixtures("_sglang")
def test_1_states_after_completed_chunks() -> None:
    """Of 130 tokens, the one kept is after 128. Of 128 and of 192, it is the last."""
    layer = Layer()
    pool = pool_for(layer)
    server, before, lengths = Server(layer, pool), pool.clone(), [130, 128, 192]
    inputs = layer.inputs(sum(lengths))
    server.extend([1, 2, 3], lengths, inputs, track=[(130, 5), (128, 6), (129, 7)])
    for begin, end, slot, to in ((0, 128, 1, 5), (130, 258, 2, 6), (258, 258 + 128, 3, 7)):
        state = expected(layer, part(inputs, begin, end), before[slot])[1]
        check_state(state, pool[to])


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_2_states_are_kept_where_wanted(dtype: torch.dtype) -> None:
    layer = Layer()
    pool = pool_for(layer, dtype)
    server, before, lengths = Server(layer, pool), pool.clone(), [70, 140, 65]
    inputs = layer.inputs(sum(lengths))
    o = server.extend([1, 2, 3], lengths, inputs, track=[None, (140, 6), None])
    check_requests(layer, [1, 2, 3], lengths, inputs, before, pool, o)
    state = expected(layer, part(inputs, 70, 70 + 128), before[2])[1]
    check_state(state, pool[6])
    assert torch.equal(pool[[0, 4, 5, 7]], before[[0, 4, 5, 7]])


@pytest.mark.usefixtures("_sglang")
def test_3_slots_may_lie_apart() -> None:
    """One buffer holds the states of all layers of a slot."""
    layer = Layer()
    envelope = torch.randn(SLOTS, 3, layer.HV, layer.V, layer.K)
    before = envelope.clone()
    server, lengths = Server(layer, envelope[:, 1]), [66, 20]
    inputs = layer.inputs(86)
    o = server.extend([6, 0], lengths, inputs, track=[(66, 4), None])
    check_requests(layer, [6, 0], lengths, inputs, before[:, 1], envelope[:, 1], o)
    assert torch.equal(envelope[:, ::2], before[:, ::2])


@pytest.mark.usefixtures("_sglang")
def test_4_and_5_raw_inputs_as_they_lie() -> None:
    """Logits of beta are a slice of a wider projection, queries and keys have any norm, and none is written."""
    layer = Layer()
    pool = pool_for(layer)
    server, before = Server(layer, pool), pool.clone()
    mixed, a, b = layer.inputs(80)
    mixed[:, : 2 * layer.q_dim] *= 30
    assert b.stride(1) == 3 * layer.HV
    copies = [x.clone() for x in (mixed, a, b)]
    o = server.extend([3], [80], (mixed, a, b))
    check_requests(layer, [3], [80], (mixed, a, b), before, pool, o)
    assert all(torch.equal(x, y) for x, y in zip(copies, (mixed, a, b), strict=True))


@pytest.mark.usefixtures("_sglang")
def test_6_short_residuals_after_a_prefix() -> None:
    """A text in two parts has the states of the whole text; parts as short as a token, and all in one batch."""
    layer = Layer()
    residuals = [1, 2, 15, 16, 17, 63]
    pool = pool_for(layer)
    server, before, slots = Server(layer, pool), pool.clone(), [1, 2, 3, 4, 5, 6]
    heads, tails = [layer.inputs(64) for _ in slots], [layer.inputs(n) for n in residuals]

    def packed(parts: list[Any]) -> Any:
        return torch.cat([x for x, _, _ in parts]), *(torch.cat([p[i] for p in parts], 1) for i in (1, 2))

    server.extend(slots, [64] * 6, packed(heads))
    o = server.extend(slots, residuals, packed(tails), prefix=[64] * 6)
    begin = 0
    for i, n in enumerate(residuals):
        wanted, state = expected(layer, packed([heads[i], tails[i]]), before[slots[i]])
        assert rel_rmse(wanted[:, 64:], o[:, begin : begin + n]) < budget("o", BF16)
        check_state(state, pool[slots[i]])
        begin += n


@pytest.mark.usefixtures("_sglang")
def test_7_states_of_every_chunk_on_activations_of_a_model() -> None:
    """Activations of a layer of Kimi-Linear's form, behind its convolution, on repeating text: correlated keys, and
    channels that hardly decay beside others that do."""
    layer = Layer(H=2, HV=2, K=32, V=32)
    layer.A_log.copy_(torch.tensor([-6.0, 1.0]).view(1, 1, 2, 1))
    text = torch.randn(40, 64)[torch.randint(0, 40, (320,))]
    width = layer.q_dim + layer.k_dim + layer.v_dim
    mixed = kda.causal_conv1d(text[None] @ torch.randn(64, width) / 8, torch.randn(width, 4) / 2, activation="silu")
    mixed = (mixed[0] if isinstance(mixed, tuple) else mixed)[0].to(BF16)
    inputs = (mixed, *((text @ torch.randn(64, n) / 8).to(BF16)[None] for n in (layer.HV * layer.K, layer.HV)))
    for chunks in range(1, 6):
        pool = pool_for(layer)
        server, before = Server(layer, pool), pool.clone()
        end = 64 * chunks + (1 if chunks < 5 else 0)  # at 320 it is the last state
        server.extend([2], [320], inputs, track=[(end, 5)])
        state = expected(layer, part(inputs, 0, 64 * chunks), before[2])[1]
        check_state(state, pool[5])


@pytest.mark.usefixtures("_sglang")
def test_8_on_the_tables_of_a_prefill_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang captures: no lengths on the host, sequences and tokens up to the size of the graph. The same tables,
    filled again, serve the next batch."""
    graph = importlib.import_module("sglang.srt.layers.attention.linear.kda_prefill_graph")
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    layer = Layer(lower_bound=-5.0)
    pool, kernels = pool_for(layer), dispatcher()
    meta = graph.KDAPrefillGraphMetadata.allocate(
        num_tokens=256, max_seqs_cap=4, track=True, cache_index_dtype=torch.int32, device=torch.device("cpu")
    )
    for lengths, slots, ends, kept in (
        ([130, 20, 64], [1, 2, 3], [130, -1, 64], [(0, 128, 5), (2, 64, 6)]),
        ([20, 200], [4, 1], [-1, 65], [(1, 64, 7)]),
    ):
        before, inputs = pool.clone(), layer.inputs(256)
        dst = [next((to for row, _, to in kept if row == i), 0) for i in range(len(lengths))]
        rows = graph.build_track_rows(
            track_mask=[end > 0 for end in ends], track_seq_lens=ends, extend_seq_lens=lengths,
            extend_prefix_lens=[0] * len(lengths), state_chunk_size=64, cache_chunk_size=64, conv_len=3,
            dst=torch.tensor(dst),
        )  # fmt: skip
        meta.fill(
            extend_seq_lens=lengths, cache_indices=torch.tensor(slots), track_rows=rows,
            extend_prefix_lens=torch.zeros(len(lengths)),
        )  # fmt: skip
        o = graph.kda_extend_in_graph(
            layer=layer, meta=meta, conv_pool=torch.zeros(SLOTS, 3, 1), ssm_states=pool, kernel_dispatcher=kernels,
            mixed_qkv=inputs[0], a=inputs[1], b=inputs[2],
        )  # fmt: skip
        check_requests(layer, slots, lengths, inputs, before, pool, o)
        assert not o[:, sum(lengths) :].any()
        for row, tokens, to in kept:
            begin = sum(lengths[:row])
            check_state(expected(layer, part(inputs, begin, begin + tokens), before[slots[row]])[1], pool[to])


# ---- drafts ----


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("pool_dtype", [F32, BF16])
def test_verify_chains(bound: float | None, pool_dtype: torch.dtype) -> None:
    """The pool stays, and the state after each draft is a snapshot: what SGLang commits from."""
    layer, T = Layer(lower_bound=bound), 3
    pool = pool_for(layer, pool_dtype)
    server, before, slots = Server(layer, pool, steps=4), pool.clone(), [6, 1, -1]
    inputs = layer.inputs(len(slots) * T)
    o = server.verify(slots, T, inputs)
    assert torch.equal(pool, before) and not o[:, 2 * T :].any()
    for row, slot in enumerate(slots[:2]):
        for t in range(T):
            here = part(inputs, row * T, row * T + t + 1)
            wanted, state = expected(layer, here, before[slot])
            assert rel_rmse(wanted[:, -1:], o[:, row * T + t][:, None]) < budget("o", BF16)
            check_state(state, server.snapshots[row, t])
    assert not server.snapshots[2:].any() and not server.snapshots[:, T:].any()


@pytest.mark.usefixtures("_sglang")
def test_verify_trees() -> None:
    layer, T = Layer(lower_bound=-5.0), 6
    pool = pool_for(layer)
    server, before, slots = Server(layer, pool, steps=8), pool.clone(), [6, -1, 1]
    parents = torch.tensor([[7, 0, 0, 1, 1, 3], [0, 0, 0, 0, 0, 0], [-1, 0, 1, 1, 0, 4]])  # that of the first is free
    inputs = layer.inputs(len(slots) * T)
    o = server.verify(slots, T, inputs, parents)
    assert torch.equal(pool, before) and not o[:, T : 2 * T].any()
    for row, slot in ((0, 6), (2, 1)):
        for t in range(T):
            path = [t]
            while path[0]:
                path.insert(0, int(parents[row, path[0]]))
            tokens = [row * T + i for i in path]
            here = (inputs[0][tokens], inputs[1][:, tokens], inputs[2][:, tokens])
            wanted, state = expected(layer, here, before[slot])
            assert rel_rmse(wanted[:, -1:], o[:, row * T + t][:, None]) < budget("o", BF16)
            check_state(state, server.snapshots[row, t])


# ---- choices ----


def test_only_what_is_chosen() -> None:
    with sglang(options("triton", decode="kda", verify="triton")):
        kernels = dispatcher("kda", "triton", "triton")
        own = type(kernels.triton_kernel)
        assert type(kernels.extend_kernel) is own and type(kernels.verify_kernel) is own
        assert type(kernels.decode_kernel).__name__ == "KDAKernel" and isinstance(kernels.decode_kernel, own)
        assert kernels.supports_packed_decode_safe_gate
    with sglang(options("triton", verify="kda")):
        kernels = dispatcher("triton", "triton", "kda")
        assert kernels.decode_kernel is kernels.extend_kernel is kernels.triton_kernel
        assert type(kernels.verify_kernel).__name__ == "KDAKernel"
        assert not kernels.supports_packed_decode_safe_gate
    with sglang(options("somebody's")), pytest.raises(ValueError, match="Unsupported KDA decode backend"):
        dispatcher("somebody's", "triton", "triton")


def own_kernels(kernels: Any) -> bool:
    return kernels.decode_kernel is kernels.extend_kernel is kernels.verify_kernel is kernels.triton_kernel


def test_a_gpu_that_we_cannot_serve_leaves_sglang_its_kernels() -> None:
    reason = "kda needs compute capability 8.0 or newer"
    with sglang(why_not=reason), pytest.warns(RuntimeWarning, match=f"SGLang's own kernels run: {reason}"):
        assert own_kernels(dispatcher())


def test_a_broken_library_leaves_sglang_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("kda: libgomp.so.1 was not found")

    with sglang(), pytest.warns(RuntimeWarning, match="own kernels run: ImportError: kda: libgomp.so.1 was not found"):
        monkeypatch.setattr(kda.sglang, "_why_not", broken)
        assert own_kernels(dispatcher())


def test_a_server_that_did_not_choose_us_starts_whatever_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    with sglang(options("triton")):
        kernels = dispatcher("triton", "triton", "triton")
        backend = importlib.import_module("sglang.srt.layers.attention.linear.utils").LinearAttnKernelBackend
        monkeypatch.delattr(backend, "is_custom")
        with pytest.warns(RuntimeWarning, match="own kernels run: AttributeError: .*is_custom"):
            assert own_kernels(type(kernels)(*[backend("triton")] * 3))


def test_what_no_kernel_takes_runs_sglangs_own(environment: Callable[[str, str | None], None]) -> None:
    called: list[str] = []
    with sglang(called=called):
        layer, kernels = Layer(), dispatcher()
        mixed, a, b = layer.inputs(2, torch.float64)
        call: dict[str, Any] = {
            "A_log": layer.A_log, "dt_bias": layer.dt_bias, "ssm_states": pool_for(layer).double(),
            "cache_indices": torch.tensor([0, 1], dtype=torch.int32), "num_v_heads": layer.HV, "head_v_dim": layer.V,
            "scale": 1.0, "lower_bound": None,
        }  # fmt: skip
        kernels.packed_decode(mixed, a[0], b[0], **call)
        assert called == []
        environment("KDA_IMPL", "cpu_recurrent")
        wanted = r"SGLang's own kernel runs for packed_decode, as ours declined: cpu_recurrent was forced but float64"
        before = call["ssm_states"].clone()
        with pytest.warns(RuntimeWarning, match=wanted):
            kernels.packed_decode(mixed, a[0], b[0], **call)
    assert called == ["packed_decode"] and torch.equal(before, call["ssm_states"])


@pytest.mark.usefixtures("_sglang")
def test_plugged_once() -> None:
    from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES as CHOICES
    from sglang.srt.plugins.hook_registry import HookRegistry

    first = kda.sglang.plug()
    dispatcher()
    assert kda.sglang.plug() is first and CHOICES.count("kda") == 1
    assert [len(hooks) for hooks in HookRegistry._hooks.values()] == [1]


def test_what_is_declined_runs_sglangs_own() -> None:
    called: list[str] = []
    with sglang(called=called):
        layer = Layer()
        pool, kernels = pool_for(layer), dispatcher()
        mixed, a, b = layer.inputs(2)
        common: dict[str, Any] = {
            "A_log": layer.A_log, "dt_bias": layer.dt_bias, "ssm_states": pool,
            "cache_indices": torch.tensor([0, 1], dtype=torch.int32), "lower_bound": None,
        }  # fmt: skip
        heads = {"num_v_heads": layer.HV, "head_v_dim": layer.V, "scale": 1.0}
        ring = {f"replayssm_{n}": torch.zeros(1) for n in ("d", "k", "g", "write_pos")}
        with pytest.warns(RuntimeWarning, match=r"packed_decode, as ours declined: replayssm_write_pos: expected None"):
            kernels.packed_decode(mixed, a[0], b[0], **common, **heads, **ring)
        q, k, v = (x.unflatten(-1, (-1, 16))[None] for x in mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1))
        drafts = {
            "query_start_loc": torch.tensor([0, 1, 2]), "cache_steps": 1, "retrieve_parent_token": None,
            "intermediate_state_indices": torch.arange(2), "intermediate_states_buffer": None,
        }  # fmt: skip
        gate = common.pop("A_log"), common.pop("dt_bias")
        refused: list[tuple[str, dict[str, Any]]] = [
            ("cache_ring: expected False", {"cache_ring": True}),
            ("buffer: expected a buffer", {}),
            ("fused_accept_state_indices: expected no such", {"fused_accept_state_indices": 1}),
        ]
        for wanted, more in refused:
            with pytest.warns(RuntimeWarning, match=wanted):
                assert kernels.target_verify(*gate, q, k, v, a, b, **common, **drafts, **more) == "SGLang's update"
        half = {"A_log": layer.A_log, "dt_bias": layer.dt_bias[:-1], "beta_is_raw": True}
        with pytest.warns(RuntimeWarning, match=r"extend, as ours declined: dt_bias: expected shape"):
            o = kernels.extend(q, k, v, a.unflatten(-1, (-1, 16)), b, **common | half,
                               query_start_loc=torch.tensor([0, 1, 2]))  # fmt: skip
        assert o == "SGLang's chunk_kda"
        with warnings.catch_warnings():  # the second time in silence
            warnings.simplefilter("error")
            kernels.extend(q, k, v, a.unflatten(-1, (-1, 16)), b, **common | half,
                           query_start_loc=torch.tensor([0, 1, 2]))  # fmt: skip
    assert called == ["replayssm_decode", "update", "update", "update", "chunk_kda", "chunk_kda"]


def test_errors_of_a_kernel_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with sglang():
        layer = Layer()
        kernels = dispatcher()
        import kda.plugs.sglang_kernel as ours

        def broken(*args: Any, **given: Any) -> None:
            raise RuntimeError("kda: a launch failed")

        monkeypatch.setattr(ours, "prefill", broken)
        with pytest.raises(RuntimeError, match="kda: a launch failed"):
            Server(layer, pool_for(layer)).extend([1], [5], layer.inputs(5))
        assert kernels is not None


def test_a_change_in_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = "sglang.srt.plugins.hook_registry"
    name, module = "KDAKernelDispatcher.__init__", "sglang.srt.layers.attention.linear.kda_backend"
    with sglang():
        monkeypatch.setitem(kda.sglang.IN_FILES[module], name, "(self, decode_backend, prefill_backend)")
        wanted = r"__init__: expected \(self, decode_backend, prefill_backend\), got \(self, decode_backend, prefill_b"
        with pytest.warns(RuntimeWarning, match=wanted):
            assert kda.sglang.plug().state == "refused"
        from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES as CHOICES

        assert "kda" not in CHOICES
    monkeypatch.undo()
    with sglang():
        monkeypatch.setattr(importlib.import_module(hooks).HookRegistry, "apply_hooks", lambda again: None)
        with pytest.warns(RuntimeWarning, match=r"apply_hooks: expected \(\), got \(again\)"):
            assert kda.sglang.plug().state == "refused"


def test_plugging_imports_no_kernels() -> None:
    import sys

    with sglang():
        assert kda.sglang.plug().state == "plugged"
        assert not [name for name in sys.modules if name.startswith(("sglang.srt.layers", "sglang.kernels"))]

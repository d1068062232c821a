"""torch.compile of what test_compile.py does not have: FLA's decode, intermediate states, sizes of workspaces, counts
and lengths that no example tells, and backward in a graph of its own (compiled autograd)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

import kda
import kda.operators
from layer_model import make as make_layer
from layer_model import relative, tokens
from serving_calls import CALLS
from support import Tensor, make, same_bits
from training_calls import TRAINING, leaves_of, loss_of


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def tensors_in(x: Any) -> list[Tensor]:
    return [t for t in tree_flatten(x)[0] if isinstance(t, Tensor)]


def bits_equal(a: Any, b: Any) -> bool:
    """Records of drafts begin as NaN."""
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return all(same_bits(x.nan_to_num(-7.0), y.nan_to_num(-7.0)) for x, y in pairs)


# ---- one graph ----


@pytest.mark.parametrize("name", CALLS)
def test_functions_without_gradients(name: str) -> None:
    """What they return and what they write."""
    torch.manual_seed(0)
    function, keywords = CALLS[name]()
    torch.manual_seed(0)
    _, again = CALLS[name]()
    with torch.no_grad():
        expected, got = function(**keywords), compiled(function)(**again)
    assert bits_equal((expected, keywords), (got, again))


SLOTS = torch.tensor([4, -1, 5])


@pytest.mark.parametrize(
    "more",
    [
        {"ssm_state_indices": SLOTS},
        {"ssm_state_indices": SLOTS, "inplace_final_state": False, "output_final_state": True},
        {"ssm_state_indices": torch.stack([SLOTS, SLOTS - 3], 1), "num_accepted_tokens": torch.tensor([2, 1, 1])},
        {"ssm_state_indices": None, "inplace_final_state": False, "output_final_state": True},
    ],
    ids=["slots", "copied", "a slot a token", "rows"],
)
def test_flas_decode(more: dict[str, Any]) -> None:
    p = make(3, 1, 1, 2, 16, 24, state=False).having(state_v_first=None)
    pool = torch.randn(3 if more["ssm_state_indices"] is None else 6, 2, 16, 24)
    given, again = pool.clone(), pool.clone()
    expected = kda.fused_recurrent_kda_fwd(**p.keywords, initial_state=given, **more)
    got = compiled(kda.fused_recurrent_kda_fwd)(**p.keywords, initial_state=again, **more)
    assert bits_equal((expected, given), (got, again))


def test_slots_beyond_the_pool_are_padding_in_a_graph() -> None:
    """Where numbers are not checked, as on a GPU. An eager call on the CPU refuses them."""
    p = make(3, 1, 1, 2, 16, 24, state=False).having(state_v_first=None)
    more = {"initial_state": torch.randn(6, 2, 16, 24), "inplace_final_state": False, "output_final_state": True}
    o, state = compiled(kda.fused_recurrent_kda_fwd)(
        **p.keywords, **more, ssm_state_indices=torch.tensor([4, 6, 5])
    )  # fmt: skip
    expected = kda.fused_recurrent_kda_fwd(**p.keywords, **more, ssm_state_indices=SLOTS)
    assert same_bits(o, expected[0]) and not o[1].any()
    assert same_bits(state[[0, 2]], expected[1][[0, 2]])
    with pytest.raises(ValueError, match=r"^ssm_state_indices: expected slots below 6, got 6"):
        kda.fused_recurrent_kda_fwd(**p.keywords, **more, ssm_state_indices=torch.tensor([4, 6, 5]))


@pytest.mark.parametrize("lengths", [None, [65, 0, 70]])
def test_intermediate_states(lengths: list[int] | None) -> None:
    p = make(2, 135, 1, 2, 16, 24, dtype=torch.bfloat16, lengths=lengths)
    more = {"return_intermediate_states": True, "output_final_state": True, "use_graph": True}
    with torch.inference_mode():
        expected = kda.chunk_kda(**p.keywords, **more)
        got = compiled(kda.chunk_kda)(**p.keywords, **more)
        with FlopCounterMode(display=False):
            seen = kda.chunk_kda(**p.keywords, **more)
    chunks = [2, 1, 3] if lengths is None else [1, 3]  # of the packed ones, as many as have tokens
    assert expected[2].shape[1] == (3 if lengths is None else 5)
    for found in (got, seen):
        assert found[2].shape == expected[2].shape and found[2].dtype == torch.bfloat16
        kept = sum(chunks[1:]) if lengths else 3
        assert same_bits(found[2][:, :kept], expected[2][:, :kept])
        assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


def test_intermediate_states_have_no_gradients_in_a_graph() -> None:
    """Where a graph is made, nobody tells inference mode from others. The operator refuses what would lose them."""
    p = make(1, 70, state=False)
    fast = compiled(kda.chunk_kda)
    with torch.no_grad():
        assert fast(**p.keywords, return_intermediate_states=True)[2].shape[1] == 2
    p.tensors["v"].requires_grad_()
    with pytest.raises(Exception, match=r"v: expected torch\.no_grad"):
        fast(**p.keywords, return_intermediate_states=True)


def test_intermediate_states_of_no_data() -> None:
    p = make(2, 135, 1, 2, 16, 24)
    meta = {n: x.to("meta") for n, x in p.tensors.items()}
    with torch.inference_mode():
        expected = kda.chunk_kda(**p.keywords, return_intermediate_states=True)
        got = kda.chunk_kda(**meta, **p.options, return_intermediate_states=True)
    assert [x.shape for x in tensors_in(got)] == [x.shape for x in tensors_in(expected)]


@pytest.mark.parametrize("more", [{}, {"num_threads": 1}, {"impl": "cpu_recurrent"}, {"update_state": False}])
def test_sizes_of_workspaces(more: dict[str, Any]) -> None:
    """The number is that of the machine that runs the graph, so memory can be made by it."""
    p = make(2, 150, 2, 2, 32, 40, v_first=True)
    p = p.having(initial_state=None)
    state = torch.zeros(2, 4, 40, 32)

    def memory(**call: Any) -> tuple[Tensor, Any]:
        size = kda.workspace_size(**call, **more)
        return torch.zeros(size + 1, dtype=torch.uint8), size

    expected = kda.workspace_size(**p.keywords, state=state, **more)
    got, size = compiled(memory)(**p.keywords, state=state)
    assert got.shape == (expected + 1,) and size == expected
    assert expected > 0 or more.get("impl") == "cpu_recurrent"


# ---- numbers that change ----


def _pool(**changes: Any) -> dict[str, Any]:
    p = make(2, 70, 1, 2, 8, 12, gate="softplus", v_first=True)
    slots = torch.tensor([3, 5], dtype=torch.int32)
    return {
        **p.having(initial_state=None).keywords,
        "state": torch.ones(6, 2, 12, 8),
        "state_indices": slots,
        **changes,
    }


def _checkpoints() -> dict[str, Any]:
    slots = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    return _pool(checkpoints=torch.zeros(6, 2, 12, 8), checkpoint_slots=slots)


def _few() -> dict[str, Any]:
    kw = _pool()
    return kw | {n: kw[n][:, :1] for n in ("q", "k", "v", "g", "beta")}


def _drafts() -> dict[str, Any]:
    p = make(2, 3, 1, 2, 8, 12, gate="softplus", v_first=True)
    records = kda.new_records(2, 14, 1, 2, 8, 12, ring=True)
    state = p.tensors["initial_state"].clone()
    rest = p.having(initial_state=None).keywords
    return {**rest, "state": state, "records": records, "accept_len": torch.zeros(2, dtype=torch.int32)}


def _rows() -> dict[str, Any]:
    slots = torch.tensor([3, 5], dtype=torch.int32)
    return {
        "x": torch.randn(2, 3, 8),
        "state": torch.randn(6, 8, 3),
        "weight": torch.randn(8, 4),
        "state_indices": slots,
    }


def _head_first() -> dict[str, Any]:
    p = make(1, 70, 1, 1, 8, 8, state=False)
    return {n: p.tensors[n].transpose(1, 2).contiguous() for n in ("q", "k", "v", "g", "beta")}


COUNTS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], str, tuple[int, ...]]] = {
    "checkpoint_every": (kda.prefill, _checkpoints, "checkpoint_every", (32, 48, 64, 32)),
    "first_valid_slot of prefill": (kda.prefill, _pool, "first_valid_slot", (2, 3, 4, 6)),
    "first_valid_slot of decode": (kda.decode, _few, "first_valid_slot", (2, 3, 4, 6)),
    "first_valid_slot of the convolution": (kda.causal_conv1d_update, _rows, "first_valid_slot", (2, 3, 4, 6)),
    "max_tokens": (kda.flush_verify_kvbuffer, _drafts, "max_tokens", (3, 4, 5, 7)),
    "num_threads": (kda.prefill, _pool, "num_threads", (2, 3, 4, 5)),
    "num_threads of prefill_f32": (kda.prefill_f32, _head_first, "num_threads", (2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_no_constants_of_a_graph(name: str) -> None:
    """The second number shows that it changes; from then on one graph serves all."""
    function, make_keywords, count, numbers = COUNTS[name]
    fast = compiled(function)
    for i, number in enumerate(numbers):
        torch.manual_seed(0)
        keywords = make_keywords()
        torch.manual_seed(0)
        again = make_keywords()
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=i > 1):
            got = fast(**again, **{count: number})
            expected = function(**keywords, **{count: number})
        assert bits_equal((expected, keywords), (got, again))


def test_lengths_of_intermediate_states_are_no_constants() -> None:
    fast = compiled(kda.chunk_kda)
    with torch.inference_mode():
        for i, T in enumerate((70, 129, 200, 65, 300)):
            p = make(1, T, 1, 2, 8, 12, state=False)
            for n in ("q", "k", "v", "g", "beta"):
                torch._dynamo.mark_dynamic(p.tensors[n], 1)
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                got = fast(**p.keywords, return_intermediate_states=True)
            assert bits_equal(kda.chunk_kda(**p.keywords, return_intermediate_states=True), got)


# ---- lengths that no example tells ----

LAYERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in parts": {"fuse_projections": False},
    "token by token": {"mode": "fused_recurrent"},
    "a width of 1": {"conv_size": 1},
}


@pytest.mark.parametrize("dims", [(1,), (0,), (0, 1)], ids=["T", "B", "both"])
@pytest.mark.parametrize("config", LAYERS)
def test_unbacked_sizes_of_the_layer(config: str, dims: tuple[int, ...]) -> None:
    layer, x = make_layer(**LAYERS[config]), tokens(3, 70, 48)
    for dim in dims:
        torch._dynamo.decorators.mark_unbacked(x, dim)
    fast = compiled(lambda x: layer(x)[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for B, T in ((3, 70), (1, 1) if len(dims) == 2 else (3, 1) if dims == (1,) else (1, 70)):
            y = x if (B, T) == (3, 70) else tokens(B, T, 48)
            for dim in dims:
                torch._dynamo.decorators.mark_unbacked(y, dim)
            assert relative(layer(y)[0], fast(y)) < 1e-6


def unbacked(x: Tensor, *dims: int) -> Tensor:
    """A copy of x with sizes that no example tells."""
    x = x.clone()
    for dim in dims:
        torch._dynamo.decorators.mark_unbacked(x, dim)
    return x


@pytest.mark.parametrize("T", [1, 20])
def test_unbacked_sizes_with_a_cache(T: int) -> None:
    layer, x = make_layer(), tokens(2, T, 48)
    caches = [layer.new_cache(2) for _ in range(2)]
    for kept in (caches[1].conv, caches[1].state):
        torch._dynamo.decorators.mark_unbacked(kept, 0)
    with torch.no_grad():
        expected = layer(x, cache=caches[0])[0]
        got = compiled(lambda x: layer(x, cache=caches[1])[0])(unbacked(x, 0, 1))
    assert relative(expected, got) < 1e-6 and relative(caches[0].state, caches[1].state) < 1e-6


def test_unbacked_lengths_with_a_mask() -> None:
    layer, x, mask = make_layer(), tokens(2, 70, 48), torch.ones(2, 70, dtype=torch.int64)
    mask[1, :30] = 0
    got = compiled(lambda x, mask: layer(x, attention_mask=mask)[0])(unbacked(x, 0, 1), mask)
    assert relative(layer(x, attention_mask=mask)[0], got) < 1e-6


def _causal_conv1d() -> Any:
    weight = torch.randn(12, 4)
    return lambda x, cu: kda.causal_conv1d(x, weight, cu_seqlens=cu)[0], tokens(1, 70, 12)


def _whole_layer() -> Any:
    layer = make_layer()
    return lambda x, cu: layer(x, cu_seqlens=cu)[0], tokens(1, 70, 48)


def _of_rows(function: Callable[..., Any], state: str) -> Any:
    p, h0 = make(1, 70, 1, 1, 8, 8, state=False), torch.randn(3, 1, 8, 8)
    g, beta = p.tensors["g"], p.tensors["beta"]

    def call(x: Tensor, cu: Tensor, h0: Tensor) -> Any:
        q = x.unflatten(2, (1, 8))
        given = h0.clone()  # some write to it
        return function(q, q, q, g.expand_as(q), beta.expand(q.shape[:3]), cu_seqlens=cu, **{state: given}), given

    return call, tokens(1, 70, 8), h0


PACKED: dict[str, Callable[[], Any]] = {
    "chunk_kda": lambda: _of_rows(kda.chunk_kda, "initial_state"),
    "fused_recurrent_kda": lambda: _of_rows(kda.fused_recurrent_kda, "initial_state"),
    "prefill": lambda: _of_rows(kda.prefill, "state"),
    "decode": lambda: _of_rows(kda.decode, "state"),
    "causal_conv1d": _causal_conv1d,
    "layer": _whole_layer,
}


@pytest.mark.parametrize("name", PACKED)
def test_unbacked_numbers_of_tokens_and_sequences(name: str) -> None:
    function, x, *states = PACKED[name]()
    cu = torch.tensor([0, 5, 50, 70])
    with torch.no_grad():
        expected = function(x, cu, *states)
        got = compiled(function)(unbacked(x, 1), unbacked(cu, 0), *(unbacked(h0, 0) for h0 in states))
    assert bits_equal(expected, got)


@pytest.mark.parametrize("name", ["fused_recurrent_kda_fwd", "decode", "prefill", "flush_verify_kvbuffer"])
def test_unbacked_requests(name: str) -> None:
    torch.manual_seed(0)
    function, keywords = CALLS[name]()
    torch.manual_seed(0)
    _, again = CALLS[name]()
    for x in again.values():  # N requests in every operand that has them in front
        if isinstance(x, Tensor) and x.shape[0] == again["q"].shape[0]:
            torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch.no_grad():
        assert bits_equal((function(**keywords), keywords), (compiled(function)(**again), again))


# ---- backward in a graph of its own ----


def gradients(loss: Callable[[], Tensor], leaves: list[Tensor], how: str) -> list[Any]:
    for x in leaves:
        x.grad = None
    if how == "under a mode":  # the operators' own formulas
        with FlopCounterMode(display=False):
            y = loss()
    else:
        y = loss()
    if how == "eager":
        y.backward()  # type: ignore[no-untyped-call]
    else:
        with compiled_autograd._enable(compiled), torch.autocast("cpu", enabled=how == "under autocast"):  # type: ignore[arg-type]
            y.backward()  # type: ignore[no-untyped-call]
    return [x.grad for x in leaves]


@pytest.mark.parametrize("how", ["compiled", "under a mode"])
@pytest.mark.parametrize("name", TRAINING)
def test_compiled_backward(name: str, how: str) -> None:
    function, keywords = TRAINING[name]()
    leaves = [x.requires_grad_() for x in leaves_of(keywords)]

    def loss() -> Tensor:
        return loss_of(function(**keywords))

    expected, got = gradients(loss, leaves, "eager"), gradients(loss, leaves, how)
    assert max(relative(a, b) for a, b in zip(expected, got, strict=True)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled", "under a mode", "under autocast"])
@pytest.mark.parametrize("config", ["whole", "in parts"])
def test_compiled_backward_of_the_layer(config: str, how: str) -> None:
    layer, x = make_layer(**LAYERS[config]), tokens(2, 70, 48).requires_grad_()
    leaves = [x, *layer.parameters()]
    expected = gradients(lambda: loss_of(layer(x)[0]), leaves, "eager")
    got = gradients(lambda: loss_of(layer(x)[0]), leaves, how)
    bound = 0.02 if (config, how) == ("in parts", "under autocast") else 1e-5  # torch's own maps follow autocast
    assert max(relative(a, b) for a, b in zip(expected, got, strict=True)) < bound

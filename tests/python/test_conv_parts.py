"""kda.causal_conv1d of x in up to three arrays: the bits of one array, gradients, compiled, in place, in the layer, and
refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kda
from kda.call import library as _lib
from kda.nn import KimiDeltaAttention
from test_conv import OPCHECKS, Tensor, compiled, problem

SIZES = (3, 2, 5)


def split(x: Tensor, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Each in memory of its own, with other strides."""
    return [part.repeat(1, 1, 1 + i)[..., : part.shape[2]] for i, part in enumerate(x.split(sizes, 2))]


@pytest.mark.parametrize("sizes", [(10,), (1, 9), SIZES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("impl", [None, "reference"])
def test_bits_of_one_tensor(sizes: tuple[int, ...], dtype: torch.dtype, kind: Any, impl: str | None) -> None:
    p = problem(dtype=dtype)
    results: list[list[Tensor]] = []
    for parts in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in p.items()}
        x: Any = kind(t.detach().requires_grad_() for t in split(p["x"], sizes)) if parts else leaves["x"]
        y, last = kda.causal_conv1d(**{**leaves, "x": x}, output_final_state=True, impl=impl)
        torch.manual_seed(0)
        torch.autograd.backward([y, last], [torch.randn_like(y), torch.randn_like(last)])
        dx = torch.cat([t.grad for t in x], 2) if parts else leaves["x"].grad
        results.append([y, last, dx, *(leaves[n].grad for n in ("weight", "bias", "initial_state"))])  # type: ignore
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_packed_sequences_and_positional() -> None:
    p = problem(B=1, T=12)
    cu = torch.tensor([0, 3, 3, 9])
    state = torch.randn(3, 10, 3)
    want = kda.causal_conv1d(p["x"], p["weight"], p["bias"], state, None, True, cu)
    got = kda.causal_conv1d(split(p["x"]), p["weight"], p["bias"], state, None, True, cu)
    q, k, v = split(p["x"])
    named = kda.causal_conv1d(q, p["weight"], p["bias"], state, None, True, cu, x1=k, x2=v)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, named, strict=True))
    assert not got[0][:, 9:].any()


def test_some_gradients() -> None:
    weight = torch.randn(10, 4)
    q, k, v = split(torch.randn(2, 7, 10))
    v.requires_grad_()
    kda.causal_conv1d((q, k, v), weight)[0].square().sum().backward()
    whole = torch.cat([q, k, v.detach()], 2).requires_grad_()
    kda.causal_conv1d(whole, weight)[0].square().sum().backward()
    assert whole.grad is not None and torch.equal(v.grad, whole.grad[..., 5:]) and q.grad is None  # type: ignore
    weight.requires_grad_()
    kda.causal_conv1d((q, k), weight[:5])[0].sum().backward()
    assert weight.grad is not None and bool(weight.grad[:5].any())
    x = [t.detach().requires_grad_() for t in (q, k)]
    kda.causal_conv1d(x, weight[:5], output_final_state=True)[1].sum().backward()  # y has no gradient
    assert x[1].grad is not None and torch.equal(x[1].grad[0, :, 0], torch.tensor([0.0, 0, 0, 0, 1, 1, 1]))


def test_gradcheck_and_second_derivatives() -> None:
    p = {name: x.requires_grad_() for name, x in problem(D=4, T=5, dtype=torch.float64).items()}
    x = [t.detach().contiguous().requires_grad_() for t in p["x"].split([1, 2, 1], 2)]

    def both(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        return kda.causal_conv1d((q, k, v), weight, bias, state, output_final_state=True)

    inputs = (*x, p["weight"], p["bias"], p["initial_state"])
    assert torch.autograd.gradcheck(both, inputs)
    dx = torch.autograd.grad(both(*inputs)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        dx[1].sum().backward()


def test_numpy() -> None:
    p = problem()
    y, last = kda.causal_conv1d(**p, output_final_state=True)
    arrays = {name: x.numpy() for name, x in p.items()}
    x = [t.numpy() for t in split(p["x"])]
    x[1].flags.writeable = False  # goes through a view
    got, end = kda.causal_conv1d(tuple(x), arrays["weight"], arrays["bias"], arrays["initial_state"], "silu", True)
    assert isinstance(got, np.ndarray) and np.array_equal(got, y.numpy()) and np.array_equal(end, last.numpy())
    state = arrays["initial_state"].copy()
    got = kda.causal_conv1d_update(x, state, arrays["weight"], arrays["bias"])
    assert np.array_equal(got, y.numpy()) and np.array_equal(state, last.numpy())


def test_update_over_a_pool() -> None:
    p = problem(B=2, T=9)
    y, last = kda.causal_conv1d(**p, output_final_state=True)
    slots = torch.tensor([3, 1])
    pool = torch.full((5, 10, 3), float("nan"))
    pool[slots] = p["initial_state"]
    pieces = []
    for x in p["x"].split([1, 4, 0, 1, 3], 1):
        out = torch.empty(2, x.shape[1], 10)
        y_of = kda.causal_conv1d_update(x=split(x), state=pool, weight=p["weight"], bias=p["bias"], state_indices=slots,
                                        out=out)  # fmt: skip
        assert y_of is out
        pieces.append(out)
    assert torch.equal(torch.cat(pieces, 1), y)
    assert torch.equal(pool[slots], last) and bool(pool[[0, 2, 4]].isnan().all())


def test_checkpoints() -> None:
    p = problem(B=1, T=40)
    slots = torch.tensor([[1, 0]])
    results = []
    for x in (p["x"], split(p["x"])):
        state, kept = p["initial_state"].clone(), torch.zeros(2, 10, 3)
        y = kda.causal_conv1d_update(
            x, state, p["weight"], checkpoints=kept, checkpoint_slots=slots, checkpoint_every=16
        )
        results.append((y, state, kept))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and bool(results[0][2].any())


# ---- under torch.compile ----


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("final_state", [True, False])
def test_operators_are_proper(count: int, final_state: bool) -> None:
    p = problem(D=10 if count == 3 else 5)
    x, *more = [t.contiguous().requires_grad_() for t in split(p["x"], SIZES[:count])]
    x2 = more[1] if count == 3 else None
    others = [p[name].requires_grad_() for name in ("weight", "bias", "initial_state")]
    call = (x, *others, None, True, final_state, None, more[0], x2)
    torch.library.opcheck(torch.ops.kda.conv.default, call, test_utils=OPCHECKS)
    plain = [t.detach() for t in (x, *others)]
    dy, d_last = torch.randn_like(p["x"]), torch.randn_like(others[2]).detach() if final_state else None
    parts = (more[0].detach(), None if x2 is None else x2.detach())
    for wanted in ([True] * 4, [False, True, True, False]):
        arguments = (*plain, None, True, dy, d_last, wanted, *parts)
        torch.library.opcheck(torch.ops.kda.conv_backward.default, arguments, test_utils=OPCHECKS)


def test_update_is_a_proper_operator() -> None:
    p = problem()
    q, k, v = (t.contiguous() for t in split(p["x"]))
    call = (q, p["weight"], p["bias"], None, p["initial_state"], None, None, 0, torch.zeros_like(p["x"]), True, None, 0)
    for parts in ((k, v), ()):  # graphs from before there were parts have none
        if not parts:
            call = (p["x"], *call[1:])
        kept = (None, True, None, None, None, 0)
        torch.library.opcheck(torch.ops.kda.conv_update.default, (*call, *kept, *parts), test_utils=OPCHECKS)


def test_compiled_equals_eager() -> None:
    p = problem()

    def train(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        y, last = kda.causal_conv1d((q, k, v), weight, bias, state, output_final_state=True)
        return y * 2, last

    results = []
    for function in (train, compiled(train)):
        leaves = [x.clone().requires_grad_() for x in (*split(p["x"]), p["weight"], p["bias"], p["initial_state"])]
        y, last = function(*leaves)
        (y.sum() + last.square().sum()).backward()
        results.append([y, last, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def serve(parts: list[Tensor], state: Tensor) -> Tensor:
        y: Tensor = kda.causal_conv1d_update(parts, state, p["weight"])
        return y + 1

    states = [p["initial_state"].clone() for _ in range(2)]
    outputs = [f(split(p["x"]), s) for f, s in zip((serve, compiled(serve)), states, strict=True)]
    assert torch.equal(*outputs) and torch.equal(*states)


def test_operations_are_counted() -> None:
    p = problem()
    counts = []
    for x in (p["x"].clone().requires_grad_(), [t.requires_grad_() for t in split(p["x"])]):
        with FlopCounterMode(display=False) as counter:
            kda.causal_conv1d(x, p["weight"])[0].sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# ---- in the layer ----


def calls_of(monkeypatch: pytest.MonkeyPatch, function: Any) -> list[int]:
    """Runs it, and returns how many operands each call of kda_conv has."""
    found: list[int] = []
    library = _lib.library()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def conv(self, *tensors: Any, **operands: Any) -> Any:
            found.append(len(tensors) + len(operands))
            return library.conv(*tensors, **operands)

    for module in ("convolution", "autograd"):
        monkeypatch.setattr(f"kda.{module}.library", lambda: Counting())
    function()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_single_projections_share_a_launch(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 9, 32)
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        layer = KimiDeltaAttention(32, head_dim=8, num_heads=2, conv_bias=bias, fuse_projections=fused)
        leaf = x.clone().requires_grad_()
        calls = calls_of(monkeypatch, lambda layer=layer, leaf=leaf: layer(leaf)[0].square().sum().backward())
        assert fused or len(calls) == 1
        cache = layer.new_cache(2)
        with torch.no_grad():
            calls = calls_of(monkeypatch, lambda layer=layer, cache=cache: layer(x[:, :6], past_key_values=cache))
            assert fused or len(calls) == 1
            o = layer(x[:, 6:], past_key_values=cache)[0]
        grads = [p.grad for p in layer.parameters()]
        results.append([o, cache.conv, leaf.grad, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_hook_keeps_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, head_dim=8, num_heads=2, fuse_projections=False)
    x, seen = torch.randn(2, 9, 32), []
    want = layer(x)[0]
    hook = layer.k_conv1d.register_forward_hook(lambda *_: seen.append(1))
    assert len(calls_of(monkeypatch, lambda: torch.testing.assert_close(layer(x)[0], want))) == 3 and seen
    hook.remove()


def test_projections_of_other_dtypes() -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, head_dim=8, num_heads=2, fuse_projections=False)
    x = torch.randn(2, 9, 32)
    rows = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x).bfloat16()
    got = layer._convolve(rows)
    for conv, row, y in zip((layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), rows, got, strict=True):
        assert torch.equal(y.flatten(2), conv(row)) and y.dtype == row.dtype


# ---- refusals ----

REFUSALS: dict[str, tuple[Any, str]] = {
    "none": ((), "x: expected up to three arrays, got 0"),
    "four": ([torch.zeros(2, 7, 1)] * 4, "x: expected up to three arrays, got 4"),
    "a number": ((torch.zeros(2, 7, 5), 3), "x1: expected an array, got 3"),
    "None first": ((None, torch.zeros(2, 7, 5)), "x: expected an array, got None"),
    "None between": ((torch.zeros(2, 7, 5), None, torch.zeros(2, 7, 5)), "x2: expected x1 with it, got none"),
    "tokens": ((torch.zeros(2, 7, 5), torch.zeros(2, 6, 5)), r"x1: expected shape \[2,7,5\] \(B and T of x\)"),
    "dtype": ((torch.zeros(2, 7, 5), torch.zeros(2, 7, 5).half()), "x1: expected float32, got float16"),
    "rank": ((torch.zeros(2, 7, 5), torch.zeros(2, 7)), "x1: expected 3 dimensions"),
    "too few": ((torch.zeros(2, 7, 5), torch.zeros(2, 7, 4)), r"weight: expected shape \[9,4\]"),
    "negated": ((torch.zeros(2, 7, 5), torch._neg_view(torch.zeros(2, 7, 5))), "x1: expected memory as"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    x, sentence = REFUSALS[case]
    p = problem()
    with pytest.raises(ValueError, match=sentence):
        kda.causal_conv1d(x, p["weight"])
    with pytest.raises(ValueError, match=sentence):
        kda.causal_conv1d_update(x, p["initial_state"], p["weight"])


def test_more_refusals() -> None:
    p = problem()
    q, k, v = split(p["x"])
    with pytest.raises(ValueError, match="x1: expected none with a tuple or list as x, got one"):
        kda.causal_conv1d((q,), p["weight"], x1=k, x2=v)
    with pytest.raises(ValueError, match="x1: expected a torch tensor like x, got ndarray"):
        kda.causal_conv1d((q, k.numpy()), p["weight"][:5].requires_grad_())
    with pytest.raises(ValueError, match="x2: expected x1 with it, got none"):
        kda.causal_conv1d(q, p["weight"], x2=v)
    with pytest.raises(ValueError, match=r"x1: .*gradients"):
        kda.causal_conv1d_update((q, k.requires_grad_(), v), p["initial_state"], p["weight"])
    sentence = "out: expected memory of its own, got memory that overlaps x1"
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        kda.causal_conv1d_update((q, p["x"][..., :2], v), p["initial_state"], p["weight"], out=p["x"])

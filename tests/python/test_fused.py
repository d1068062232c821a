"""kda.fused_decode, and norm= of the serving functions: the bits of the functions one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kda
import kda.operators
from drafting import drafts, records_for
from fused_calls import STATES, Call, apart, call, fresh
from support import same_bits

Tensor = torch.Tensor
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def same_as_apart(p: Call) -> None:
    one, three = fresh(p), fresh(p)
    assert same_bits(kda.fused_decode(**one), apart(three))
    for name in STATES:
        assert same_bits(one[name], three[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_bits_of_its_parts(dtype: torch.dtype, T: int, packed: bool) -> None:
    for pool, v_first in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
        p = call(T=T, dtype=dtype, pool=pool, v_first=v_first, packed=packed)
        same_as_apart(p)
        same_as_apart(p | {"lower_bound": -5.0, "activation": "silu", "eps": 1e-3, "scale": 0.25})
        same_as_apart(p | {"lower_bound": -2.0, "A_log": None, "dt_bias": None, "allow_neg_eigval": True})


LARGE: dict[str, Any] = {"H": 4, "K": 128, "V": 128, "dtype": torch.bfloat16}
CALLS: dict[str, Call] = {
    "one": {"N": 1},
    "eight": {"N": 8},
    "many": {"N": 130, "HV": 8},
    "many_64": {"N": 130, "K": 64, "V": 64, "HV": 8},
    "pool_bf16": {"N": 8, "pool": torch.bfloat16},
    "K_first": {"N": 8, "v_first": False},
    "K_first_bf16": {"N": 8, "v_first": False, "pool": torch.bfloat16},
    "tokens_3": {"N": 5, "T": 3},
    "tokens_7": {"N": 3, "T": 7},
    "f32": {"N": 5, "dtype": torch.float32},
    "f16": {"N": 5, "dtype": torch.float16},
    "odd": {"N": 5, "K": 61, "V": 37, "H": 1, "HV": 3},
    "W_2": {"N": 5, "W": 2},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", CALLS)
def test_bits_of_its_parts_for_each_kernel(name: str) -> None:
    p = call(**LARGE | CALLS[name])
    same_as_apart(p)
    if name == "eight":
        same_as_apart(p | {"lower_bound": -5.0})


def test_sizes() -> None:
    for sizes in ({"K": 1, "V": 1}, {"K": 256, "V": 256}, {"K": 7, "V": 200, "H": 1}, {"W": 2}, {"W": 3}, {"N": 1}):
        same_as_apart(call(**sizes))
    same_as_apart(call(H=4) | {"conv_bias": None, "norm_weight": None})
    same_as_apart(call() | {"gate": torch.zeros(4, 1, 4, 40), "activation": "swish"})


def test_slots_of_its_own_for_the_convolution() -> None:
    p = call()
    same_as_apart(p | {"conv_indices": torch.tensor([0, 4, -1, 2])})
    rows = p["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)  # as engines keep them: [slots, W-1, D]
    one = fresh(p) | {"conv_state": rows}
    three = fresh(p)
    assert same_bits(kda.fused_decode(**one), apart(three)) and same_bits(rows.contiguous(), three["conv_state"])


def test_without_a_gate() -> None:
    p = call()
    o = kda.fused_decode(**fresh(p) | {"gate": None})
    want = kda.fused_decode(**fresh(p) | {"gate": torch.full_like(p["gate"], 100.0)})  # whose sigmoid is 1
    assert same_bits(o, want)


@pytest.mark.parametrize("first", [0, 1])
def test_padding(first: int) -> None:
    """Slots below the first valid one, of which there may be several, and gates that hold anything."""
    p = call() | {"first_valid_slot": first, "eps": 0.0}
    p["state_indices"][[1, 2]] = first - 1
    want = kda.fused_decode(**fresh(p))
    p["gate"][1:3] = torch.nan
    p["x"][1:3] = torch.inf
    got = fresh(p)
    o = kda.fused_decode(**got)
    assert not o[1:3].any() and same_bits(o, want)
    for name in STATES:
        assert [same_bits(a, b) for a, b in zip(got[name], p[name], strict=True)].count(False) == 2


@pytest.mark.cuda
def test_padding_at_several_places() -> None:
    p = call(8, **LARGE) | {"first_valid_slot": 1, "eps": 0.0}
    p["state_indices"][:] = torch.tensor([3, 0, 5, 0, 7, -1, 2, 9])
    want = kda.fused_decode(**fresh(p))
    padded = torch.tensor([1, 3, 5])
    p["gate"][padded] = torch.nan
    p["x"][padded] = torch.inf
    got = fresh(p)
    o = kda.fused_decode(**got)
    assert not o[padded].any() and same_bits(o, want)
    for name in STATES:
        changed = [i for i, (a, b) in enumerate(zip(got[name], p[name], strict=True)) if not same_bits(a, b)]
        assert changed == [2, 3, 5, 7, 9], name


def test_in_a_given_output() -> None:
    p = call(dtype=torch.bfloat16)
    out = torch.empty_like(p["gate"], dtype=torch.float32)
    assert kda.fused_decode(**fresh(p), out=out) is out
    assert out.dtype == torch.float32 and same_bits(out.bfloat16()[2], kda.fused_decode(**fresh(p))[2])


def test_numpy_arrays() -> None:
    p = call()
    as_numpy = {n: x.numpy().copy() if isinstance(x, Tensor) else x for n, x in p.items()}
    read_only = as_numpy["x"]
    read_only.flags.writeable = False
    o, want = kda.fused_decode(**as_numpy), kda.fused_decode(**(torches := fresh(p)))
    assert type(o) is np.ndarray and same_bits(torch.from_numpy(o), want)
    for name in STATES:
        assert same_bits(torch.from_numpy(as_numpy[name]), torches[name])


@pytest.mark.cuda
def test_compiled() -> None:
    for T in (1, 2):
        p = call(8, T, **LARGE)
        got, want = fresh(p), fresh(p)
        compiled = torch.compile(lambda **kw: kda.fused_decode(**kw), fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(**got), kda.fused_decode(**want))
        for name in STATES:
            assert same_bits(got[name], want[name])


def apart_norm(function: Any, kw: Call, norm: kda.Norm) -> Tensor:
    o = function(**kw)
    return kda.norm_gate(o, *norm, out=o)  # type: ignore[no-any-return]


def clones(kw: Call) -> Call:
    def clone(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.clone()
        return type(x)(*map(clone, x)) if hasattr(x, "_fields") else x

    return {name: clone(x) for name, x in kw.items()}


def functions() -> dict[str, tuple[Any, Call]]:
    p, h0 = drafts(3)
    first, second = (records_for(p, 6) for _ in range(2))
    kda.verify_kvbuffer(**p.keywords, state=h0, records=first)
    flush = {"records": second, "last": first, "accept_len": torch.tensor([2, 0, 1][: h0.shape[0]], dtype=torch.int32)}
    return {
        "prefill": (kda.prefill, p.keywords | {"state": h0}),
        "decode": (kda.decode, p.keywords | {"state": h0}),
        "decode_mtp": (kda.decode_mtp, p.keywords | {"state": h0}),
        "verify_kvbuffer": (kda.verify_kvbuffer, p.keywords | {"state": h0, "records": second}),
        "flush_verify_kvbuffer": (kda.flush_verify_kvbuffer, p.keywords | {"state": h0, **flush}),
    }


@pytest.mark.parametrize("name", functions())
def test_norm_of(name: str) -> None:
    function, kw = functions()[name]
    shape = kw["v"].shape
    for norm in (
        kda.Norm(torch.randn(shape)),
        kda.Norm(torch.randn(shape).bfloat16(), torch.randn(shape[3]), 1e-3, "silu"),
        kda.Norm(None, torch.randn(shape[3])),
    ):
        want = apart_norm(function, clones(kw), norm)
        assert same_bits(function(**clones(kw), norm=norm), want)
        assert not same_bits(function(**clones(kw)), want)
        torch._dynamo.reset()
        compiled = torch.compile(lambda f=function, n=norm, **k: f(**k, norm=n), fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(**clones(kw)), want)
        if norm.gate is not None and norm.gate.dtype == torch.float32:
            numpy = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in clones(kw).items()}
            numpy = {n: type(x)(*(y if y is None else y.numpy() for y in x)) if hasattr(x, "_fields") else x
                     for n, x in numpy.items()}  # fmt: skip
            o = function(**numpy, norm=norm._replace(gate=norm.gate.numpy()))
            assert same_bits(torch.from_numpy(o), want)
    for wrong, sentence in (
        ("sigmoid", "norm: expected kda.Norm, got str"),
        (kda.Norm(torch.randn(shape)[..., :1]), r"norm\.gate: expected shape"),
        (kda.Norm(3), r"norm\.gate: expected (an array|a tensor), got"),
        (kda.Norm(torch.randn(shape), activation="relu"), r"norm\.activation: expected 'sigmoid', 'silu' or 'swish'"),
        (kda.Norm(torch.randn(shape), eps=-1.0), r"norm\.eps: expected a number >= 0"),
        (kda.Norm(torch.randn(shape), eps=None), r"norm\.eps: expected a number"),  # type: ignore[arg-type]
        (kda.Norm(torch.randn(shape, requires_grad=True)), r"norm\.gate: expected torch\.no_grad"),
    ):
        with pytest.raises(ValueError, match=sentence):
            function(**clones(kw), norm=wrong)


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [[1, 200, 0, 70], [40] * 12])
def test_prefill_with_a_norm(lengths: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    T = sum(lengths) + 5
    q, k, v, g, gate = (torch.randn(1, T, 4, 128, generator=random).bfloat16() for _ in range(5))
    beta, cu = torch.rand(1, T, 4, generator=random).bfloat16(), torch.tensor([0, *lengths]).cumsum(0)
    slots = torch.arange(len(lengths)) - 1
    kw = {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": beta, "cu_seqlens": cu, "state_indices": slots}
    state = torch.randn(len(lengths), 4, 128, 128)
    norm = kda.Norm(gate, activation="silu")
    o = kda.prefill(**kw, state=state.clone(), use_qk_l2norm_in_kernel=True)
    want = kda.norm_gate(o, *norm, out=o)
    assert same_bits(kda.prefill(**kw, state=state.clone(), use_qk_l2norm_in_kernel=True, norm=norm), want)
    norm.gate[:, : lengths[0]] = torch.nan  # of padding
    assert torch.equal(kda.prefill(**kw, state=state.clone(), use_qk_l2norm_in_kernel=True, norm=norm), want)


def test_out_state_indices_with_a_norm() -> None:
    function, kw = functions()["decode"]
    pool = torch.cat([kw["state"], torch.zeros_like(kw["state"])])
    slots = torch.arange(len(kw["state"]), dtype=torch.int32)
    norm = kda.Norm(torch.randn(kw["v"].shape))
    more = {"state_indices": slots, "out_state_indices": slots + len(slots)}
    one, two = pool.clone(), pool.clone()
    want = apart_norm(function, kw | more | {"state": two}, norm)
    assert same_bits(function(**kw | more | {"state": one}, norm=norm), want) and same_bits(one, two)


def test_explain_and_workspace_take_a_norm() -> None:
    for name, (_, kw) in functions().items():
        op = {"prefill": "forward", "decode_mtp": "decode"}.get(name, name.removesuffix("_kvbuffer"))
        assert "* cpu_" in kda.explain(**kw, op=op, norm=kda.Norm(kw["v"]))
        double = kda.Norm(kw["v"].double())
        assert "* reference" in kda.explain(**kw, op=op, norm=double)
    kw = functions()["prefill"][1]
    assert kda.workspace_size(**kw, norm=kda.Norm(kw["v"])) == kda.workspace_size(**kw)


REFUSED: list[tuple[Call, str]] = [
    ({"x": None}, "x: expected an array, got None"),
    ({"x": torch.zeros(4, 1, 9)}, "x: expected D = 2 H K"),
    ({"x": torch.zeros(4, 9)}, "x: expected 3 dimensions"),
    ({"conv_weight": torch.zeros(256, 5)}, r"conv_weight: expected shape \[D,W\] with W in 2..4"),
    ({"conv_bias": torch.zeros(3)}, "conv_bias: expected shape"),
    ({"conv_state": torch.zeros(7, 256, 2)}, "conv_state: expected shape"),
    ({"conv_state": None}, "conv_state: expected an array, got None"),
    ({"conv_indices": torch.tensor([0, 1, 2, 9])}, "conv_indices: expected slots below 7, got 9"),
    ({"conv_indices": torch.tensor([0, 0, 2, 1])}, "conv_indices: expected every live slot once"),
    ({"state_indices": torch.tensor([0, 0, 2, 1])}, "state_indices: expected every live slot once"),
    ({"state": None}, "state: expected an array, got None"),
    ({"state": torch.zeros(7, 4, 40)}, "state: expected 4 dimensions"),
    ({"state": torch.zeros(7, 4, 40, 8)}, "state: expected shape"),
    ({"g": None}, "g: expected an array, got None"),
    ({"gate": torch.zeros(4, 1, 4, 8)}, r"gate: expected shape \[4,1,4,40\] like out"),
    ({"gate": torch.zeros(4, 1, 4, 40).int()}, "gate: expected float"),
    ({"gate": 3}, "gate: expected (an array|a tensor)"),
    ({"norm_weight": torch.zeros(3)}, r"norm_weight: expected shape \[40\]"),
    ({"eps": -1.0}, "eps: expected a number >= 0"),
    ({"eps": "small"}, "eps: expected a number, got 'small'"),
    ({"activation": "relu"}, "activation: expected 'sigmoid', 'silu' or 'swish'"),
    ({"A_log": None}, "A_log: expected a tensor"),
    ({"dt_bias": torch.zeros(5)}, "dt_bias: expected shape"),
    ({"lower_bound": 1.0}, "lower_bound: expected a finite number < 0"),
    ({"use_qk_l2norm_in_kernel": 2}, "use_qk_l2norm_in_kernel: expected True or False"),
    ({"first_valid_slot": -1}, "first_valid_slot: expected >= 0"),
    ({"out": torch.zeros(4, 1, 4, 8)}, "x: expected D = 2 H K"),
    ({"impl": "nobody"}, "impl: expected one of"),
]


@pytest.mark.parametrize("wrong, sentence", REFUSED)
def test_refusals(wrong: Call, sentence: str) -> None:
    p = fresh(call())
    with pytest.raises(ValueError, match=f"^({sentence})"):
        kda.fused_decode(**p | wrong)
    for name in STATES:
        assert same_bits(p[name], call()[name])


def test_registered_operators() -> None:
    p = call()
    options = (1, 1, True, 0, 0.0, 0.0)
    arguments = (
        None, None, None, p["g"], p["beta"], p["A_log"], p["dt_bias"].view(4, 24), None, *options, p["state"],
        p["state_indices"], None, 0, torch.empty_like(p["gate"]), None, 1, p["x"], p["conv_weight"], p["conv_bias"],
        p["conv_state"], p["state_indices"], None, None, None, True, p["gate"], p["norm_weight"], 1e-5, 1, True,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.kda.decode_mtp.default, arguments, test_utils=OPCHECKS)

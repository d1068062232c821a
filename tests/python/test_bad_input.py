"""Any input gives a right answer, or a ValueError, NotImplementedError or TypeError that names the argument, with
nothing written. Tests every kind of bad argument one by one, and two at a time at random."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kda
from support import Problem, Tensor, assert_close, make, on_cpu, oracle
from support import gate as gate_oracle

REFUSALS = (ValueError, NotImplementedError, TypeError)
SERVING, TRAINING = ("prefill", "decode"), ("chunk_kda", "fused_recurrent_kda")
NAMES = {*"qkvg", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state", "state", "state_indices", "out"}
NAMES |= {"has_initial_state", "workspace", "checkpoints", "checkpoint_slots", "lower_bound", "scale"}


def base(name: str) -> dict[str, Any]:
    """A valid call of each function."""
    p = make(H=1, G=2, K=4, V=6, gate="softplus", beta="sigmoid", v_first=True, lengths=[3, 0, 66], tail=1, scale=0.5)
    kw = p.keywords
    if name == "fused_kda_gate":
        return {n: kw[n] for n in ("g", "A_log", "dt_bias")}
    if name in SERVING:
        kw["state"] = kw.pop("initial_state")
        kw["state_indices"] = torch.tensor([2, 0, 1], dtype=torch.int32)
        kw["has_initial_state"] = torch.tensor([True, True, False])
        kw["out"] = torch.full_like(kw["v"], 7.0)
        kw["num_threads"] = 1
    return kw


def bits(x: Any) -> bytes:
    if isinstance(x, np.ndarray):
        return x.tobytes()
    if not isinstance(x, Tensor) or x.is_meta or x.layout != torch.strided or x.is_nested:
        return b""
    return x.detach().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def right_answer(name: str, kw: dict[str, Any], state: Any, o: Any, final_state: Any) -> None:
    """Compares with the oracle on the same odd arguments; if the oracle cannot handle them, neither should the
    library."""

    def double(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(x)
        assert not isinstance(x, Tensor) or not x.is_complex(), "the imaginary part cannot have been used"
        return x.detach().resolve_neg().to_dense().double() if isinstance(x, Tensor) and x.is_floating_point() else x

    kw = {n: double(x) for n, x in kw.items()}
    if name == "fused_kda_gate":
        expected = gate_oracle(kw["g"], kw["A_log"], kw["dt_bias"], kw.get("lower_bound"))
        assert torch.allclose(expected, double(o), rtol=1e-5)
        return
    options = {
        n: kw.pop(n, None) for n in ("out", "num_threads", "impl", "state_indices", "has_initial_state", "state")
    }
    if name in SERVING and options["state"] is not None:
        indices, has = options["state_indices"], options["has_initial_state"]
        h0 = double(state) if indices is None else double(state)[indices.long()]
        kw["initial_state"] = h0 if has is None else torch.where(has.view(-1, 1, 1, 1), h0, 0.0)
    p = Problem({}, {}).having(**kw)
    if "A_log" not in p.tensors and "lower_bound" not in p.options:
        p = p.having(use_gate_in_kernel=None, dt_bias=None)
    expected_o, expected_state, _ = oracle(p)
    o = torch.from_numpy(o) if isinstance(o, np.ndarray) else o
    got = {"o": o.detach()} | ({"final_state": final_state.detach()} if isinstance(final_state, Tensor) else {})
    assert_close({"o": expected_o, "final_state": expected_state}, got, slack=1 if o.dtype == torch.float32 else 2)


def sentence(e: Exception, names: set[str]) -> None:
    """Checks that the message names one of these arguments, what was expected and what came. For a legal call that no
    implementation takes, it must give the reasons."""
    if not isinstance(e, NotImplementedError):
        assert re.match(rf"({'|'.join(names)})(\[\d+\])?: expected [^,].*, got .", str(e)), f"not about {names}: {e!r}"


def attempt(name: str, kw: dict[str, Any], changed: dict[str, str]) -> None:
    """Makes one call. ``changed``: argument -> kind of change."""
    written = [x for x in (kw.get("state"), kw.get("out"), kw.get("checkpoints")) if isinstance(x, Tensor)]
    before, state = [bits(x) for x in written], kw.get("state")
    state = (
        state.detach().clone()
        if isinstance(state, Tensor)
        else state.copy()
        if isinstance(state, np.ndarray)
        else state
    )
    more = {"output_final_state": True} if name in TRAINING else {}
    try:
        result = getattr(kda, name)(**kw, **more)
    except REFUSALS as e:
        assert [bits(x) for x in written] == before, f"something was written before: {e}"
        # If two sizes (or dtypes of q and k) do not fit, the library cannot know which one is wrong.
        anyone = set(changed.values()) & SIZES or "q" in changed
        sentence(e, NAMES if anyone else set(changed))
        return
    o, final_state = result if name in TRAINING else (result, None)
    right_answer(name, kw, state, o, final_state)


# ---- one bad tensor ----

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "one_dimension_less": lambda x: x[0],
    "one_dimension_more": lambda x: x[None],
    "no_dimensions": lambda x: torch.ones((), dtype=x.dtype),
    "six_dimensions": lambda x: x.reshape(*(1,) * (6 - x.ndim), *x.shape),
    "longer": lambda x: torch.cat([x, x], 0),
    "wider": lambda x: torch.cat([x, x], -1),
    "shorter": lambda x: x[..., :-1],
    "empty": lambda x: x[:0],
    "bool": lambda x: x.bool(),
    "uint8": lambda x: x.to(torch.uint8),
    "int32": lambda x: x.to(torch.int32),
    "int64": lambda x: x.to(torch.int64),
    "float16": lambda x: x.to(torch.float16),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float64": lambda x: x.to(torch.float64),
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "negated_view": lambda x: torch._neg_view(x) if x.is_floating_point() else x,
    "imaginary_part": lambda x: torch.complex(x, x).conj().imag if x.dtype == torch.float32 else x,
    "requires_grad": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "expanded": lambda x: x[:, :1].expand_as(x) if x.ndim > 1 else x[:1].expand_as(x),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "misaligned": lambda x: misaligned(x),
    "numpy": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "string": lambda x: "tensor",
    "number": lambda x: 1.0,
    "object": lambda x: object(),
    "none": lambda x: None,
}
SIZES = {"one_dimension_less", "one_dimension_more", "no_dimensions", "longer", "wider", "shorter", "empty", "none"}
SIZES |= {"six_dimensions"}


def misaligned(x: Tensor) -> np.ndarray:
    """torch cannot make such an array, others can."""
    memory = np.zeros(x.numel() * x.element_size() + 1, np.uint8)[1:]
    array = memory.view(x.numpy().dtype).reshape(x.shape)
    array[...] = x.numpy()
    return array


FUNCTIONS = (*TRAINING, *SERVING, "fused_kda_gate")
MARKS = dict.fromkeys(SERVING, pytest.mark.cuda)
ONE_BY_ONE = [
    pytest.param(f, n, c, marks=MARKS.get(f, ()))
    for f in FUNCTIONS
    for n, x in base(f).items()
    if isinstance(x, Tensor)
    for c in CHANGES
]


def unsettled(argument: str, change: str) -> bool:
    """Cases that the CPU refuses and a device does not detect: with several requests in one slot any may be the last
    to write, and in a pool without slots all are padding."""
    shared = change == "expanded" and argument.endswith("indices")
    return (shared or (argument, change) == ("state", "empty")) and not on_cpu()


@pytest.mark.parametrize(("name", "argument", "change"), ONE_BY_ONE)
def test_one_bad_tensor(name: str, argument: str, change: str) -> None:
    kw = base(name)
    try:
        kw[argument] = CHANGES[change](kw[argument])
    except (RuntimeError, NotImplementedError, TypeError):
        pytest.skip("torch cannot make one")
    if unsettled(argument, change):
        pytest.skip("nobody knows what comes")
    attempt(name, kw, {argument: change})


class OnlyDLPack:
    """Enough of an array if nothing has to be reshaped or made like it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


STRANGE: dict[str, Callable[[Tensor], Any]] = {
    "only_dlpack": OnlyDLPack,
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "python_objects": lambda x: x.numpy().astype(object),
    "read_only": lambda x: np.broadcast_to(x.numpy(), x.shape),
    "big_endian": lambda x: x.numpy().astype(x.numpy().dtype.newbyteorder(">")),
    "class": lambda x: torch.Tensor,
    "function": lambda x: lambda: x,
    "dict": lambda x: {},
}


MAY_WORK = {"only_dlpack", "read_only", "big_endian"}
ARRAYS = ("q", "v", "g", "A_log", "dt_bias", "cu_seqlens", "state", "out")


@pytest.mark.filterwarnings("ignore")  # prototypes of torch
@pytest.mark.parametrize("change", STRANGE)
@pytest.mark.parametrize(("name", "argument"), [(f, n) for f in FUNCTIONS for n in ARRAYS if n in base(f)])
def test_strange_array(name: str, argument: str, change: str) -> None:
    kw = base(name)
    kw[argument] = STRANGE[change](kw[argument])
    try:
        getattr(kda, name)(**kw)
    except REFUSALS as e:
        sentence(e, {argument})
    else:
        assert change in MAY_WORK


@pytest.mark.parametrize("name", ["fused_recurrent_kda", *SERVING, "fused_kda_gate"])
def test_a_negated_view_among_numpy_arrays(name: str) -> None:
    arrays = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in base(name).items()}
    for argument in ("g", "A_log", "dt_bias"):
        kw = {**arrays, argument: torch._neg_view(torch.from_numpy(arrays[argument]))}
        with pytest.raises(ValueError, match=f"^{argument}: expected .*negated"):
            getattr(kda, name)(**kw)


def test_errors_of_the_machine_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError("no more"), RuntimeError("CUDA error: an illegal memory access")):

        def fails(*_: Any, error: Exception = error, **operands: Any) -> None:
            raise error

        monkeypatch.setattr(kda.call.library.library(), "decode", fails)
        with pytest.raises(type(error)) as e:
            kda.decode(**base("decode"))
        assert e.value is error


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_refused_call_keeps_nothing_alive(name: str) -> None:
    gc.disable()
    try:
        for bad in (torch.ones(3), [1.0]):
            kw = {**base(name), "A_log": bad}
            g = weakref.ref(kw["g"])
            with contextlib.suppress(ValueError):
                getattr(kda, name)(**kw)
            del kw
            assert g() is None
    finally:
        gc.enable()


# ---- one bad option ----

OPTIONS: dict[str, list[Any]] = {
    "scale": [0, 0.0, math.nan, math.inf, -math.inf, 1e40, 1e-50, "x", [1.0], torch.tensor([1.0, 2.0])],
    "lower_bound": [0.0, 1.0, math.nan, -math.inf, -1e-50, "x", [1.0]],
    "use_qk_l2norm_in_kernel": ["x", torch.tensor([1.0, 2.0])],
    "use_gate_in_kernel": [np.ones(2)],
    "use_beta_sigmoid_in_kernel": [torch.tensor([1.0, 2.0])],
    "allow_neg_eigval": [torch.tensor([1.0, 2.0])],
    "state_v_first": [torch.tensor([1.0, 2.0])],
    "output_final_state": [torch.tensor([1.0, 2.0])],
    "impl": ["nobody", 3, ..., "reference,cpu_chunk"],
    "num_threads": [-1, "x", 1.5, None, -(2**40), -(2**63), 2**63, 2**70],
    "first_valid_slot": [-1, "x", 1.5, None, 2**31, 2**32, -(2**40)],
    "checkpoint_every": [0, -64, 63, 65, "x", None, 2**32 + 64],
    "output_dtype": ["float32", torch.int32, torch.complex64, torch.bits8, np.float32],
    "cu_seqlens": [
        torch.tensor(x, dtype=torch.int32) for x in ([1, 3, 3, 69], [0, 3, 2, 69], [0, 3, 3, 71], [0, -1, 3, 69], [])
    ]
    + [torch.tensor([0, 3, 3, 2**40]), torch.tensor([0, 3, 3, 2**32]), [0, 3, 3, 69], "x", torch.zeros(2, 2).int()],
    "state_indices": [
        torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 3], [2, 0, 2], [0, 1], [2, 0, 2**31 - 1], [[2, 0, 1]])
    ]
    + [[2, 0, 1], "x", torch.tensor([2.0, 0.0, 1.0])],
    "checkpoint_slots": [
        torch.tensor(x, dtype=torch.int32) for x in ([[0], [1], [3]], [[0], [0], [1]], [0, 1, 2], [[0, 1, 2]])
    ]
    + [None, "x", torch.zeros(3, 1)],
}
ONE_OPTION = [
    pytest.param(f, n, x, id=f"{f}-{n}-{str(x).replace('tensor', '')[:40]}", marks=MARKS.get(f, ()))
    for f in FUNCTIONS
    for n, values in OPTIONS.items()
    for x in values
    if n in inspect.signature(getattr(kda, f)).parameters
]


@pytest.mark.parametrize(("name", "option", "value"), ONE_OPTION)
def test_one_bad_option(name: str, option: str, value: Any) -> None:
    kw = base(name)
    if option.startswith("checkpoint"):
        kw["checkpoints"] = torch.full_like(kw["state"], 7.0)
        kw["checkpoint_slots"] = torch.arange(3, dtype=torch.int32).view(3, 1)
    kw[option] = value
    written = [x for x in (kw.get("state"), kw.get("out"), kw.get("checkpoints")) if isinstance(x, Tensor)]
    before = [bits(x) for x in written]
    with pytest.raises(REFUSALS) as e:
        getattr(kda, name)(**kw)
    assert [bits(x) for x in written] == before
    sentence(e.value, {option})


@torch.inference_mode()
@pytest.mark.parametrize("offsets", OPTIONS["cu_seqlens"][:7])
def test_intermediate_states_of_impossible_sequences(offsets: Tensor) -> None:
    """The number of states follows from these offsets."""
    kw = base("chunk_kda")
    for more in ({"cu_seqlens": offsets}, {"cu_seqlens_cpu": offsets}):
        try:
            kda.chunk_kda(**{**kw, **more}, return_intermediate_states=True)
        except ValueError as e:
            sentence(e, set(more))
        else:
            assert "cu_seqlens_cpu" in more, "which only has to make room for enough"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_and_missing_arguments(name: str) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        getattr(kda, name)(**base(name), no_such_argument=1)
    kw = base(name)
    del kw["g"]
    with pytest.raises(TypeError, match="g"):
        getattr(kda, name)(**kw)


# ---- memory that overlaps ----

OVERLAPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "out_is_v": lambda kw: {"out": kw["v"]},
    "out_in_state": lambda kw: {
        "state": (m := torch.ones(2000))[:144].view(3, 2, 6, 4),
        "out": m[100:940].view(1, 70, 2, 6),
    },
    "out_shifted_into_v": lambda kw: {"v": (m := torch.ones(1, 71, 2, 6))[:, 1:], "out": m[:, :-1]},
    "out_expanded": lambda kw: {"out": torch.zeros(1, 1, 2, 6).expand(1, 70, 2, 6)},
    "out_rows_overlap": lambda kw: {"out": torch.zeros(1000).as_strided((1, 70, 2, 6), (840, 5, 6, 1))},
    "state_expanded": lambda kw: {"state": torch.zeros(1, 2, 6, 4).expand(3, 2, 6, 4)},
    "slots_overlap": lambda kw: {"state": torch.zeros(1000).as_strided((3, 2, 6, 4), (47, 24, 4, 1))},
    "state_is_an_input": lambda kw: {"state": kw["g"].view(-1)[:144].view(3, 2, 6, 4)},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("case", OVERLAPS)
def test_overlapping_memory(name: str, case: str) -> None:
    kw = base(name)
    kw.update(OVERLAPS[case](kw))
    before = {n: bits(x) for n, x in kw.items()}
    with pytest.raises(ValueError, match=r"^(out|state): .*(overlap|apart)"):
        getattr(kda, name)(**kw)
    assert {n: bits(x) for n, x in kw.items()} == before


@pytest.mark.cuda
def test_checkpoints_in_the_inputs() -> None:
    kw = base("prefill")
    slots = torch.arange(3, dtype=torch.int32).view(3, 1)
    for checkpoints in (kw["out"].view(-1)[:144].view(3, 2, 6, 4), torch.zeros(1, 2, 6, 4).expand(3, 2, 6, 4)):
        with pytest.raises(ValueError, match="checkpoints"):
            kda.prefill(**kw, checkpoints=checkpoints, checkpoint_slots=slots)


# ---- two at a time ----


@settings(max_examples=800)
@given(st.data())
def test_two_bad_arguments(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FUNCTIONS), "function")
    kw, changed = base(name), {}
    for argument in data.draw(st.lists(st.sampled_from([n for n in kw if isinstance(kw[n], Tensor)]), max_size=2)):
        change = data.draw(st.sampled_from(sorted(CHANGES)), argument)
        try:
            kw[argument] = CHANGES[change](kw[argument])
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, IndexError, ValueError):
            continue  # changes something that was already changed
        changed[argument] = change if argument not in changed else "longer"
    if data.draw(st.booleans()):
        option = data.draw(st.sampled_from(["scale", "cu_seqlens"] if name != "fused_kda_gate" else ["lower_bound"]))
        kw[option] = data.draw(st.sampled_from(OPTIONS[option]))
        changed[option] = "longer"
    attempt(name, kw, changed)

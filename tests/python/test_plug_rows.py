"""What the adapters of serving engines share: decode of tokens in rows, and calls that are left to the engine."""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kda
from kda import vllm
from kda.plugs import declined, sglang_kernel, vllm_functions
from kda.plugs.declined import Declined, or_own
from kda.plugs.rows import decode_rows

Tensor = torch.Tensor
H, HV, K, V, SLOTS = 2, 4, 32, 24, 9
D = 2 * H * K + HV * V


class Step:
    """Tokens of N requests in joint rows, of which q, k and v are parts; and the same call with views."""

    def __init__(
        self, N: int = 3, T: int = 1, more: int = 0, dtype: torch.dtype = torch.bfloat16, H: int = H, HV: int = HV,
        K: int = K,
    ) -> None:  # fmt: skip
        self.N, self.T, self.H, self.HV, self.K, rows = N, T, H, HV, K, N * T + more
        D = 2 * H * K + HV * V
        self.mixed = torch.randn(rows, D + 8).to(dtype)[:, :D]
        self.q, self.k, self.v = self.parts(self.mixed)
        self.g, self.beta = torch.randn(rows, HV, K).to(dtype), torch.randn(rows, 2 * HV).to(dtype)[:, HV:]
        self.out = torch.full((rows, HV, V), 7.0).to(dtype)
        self.A_log, self.dt_bias = torch.randn(HV), torch.randn(HV, K)
        self.pool, self.slots = torch.randn(SLOTS, HV, V, K), torch.tensor([4, -1, 2, 8, 0, 1])

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (self.H, self.K), (self.HV, V)
        q, k, v = mixed.split([self.H * self.K, self.H * self.K, self.HV * V], -1)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)

    def options(self, bound: float | None = None) -> dict[str, Any]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": bound, "scale": 0.3}

    def expected(self, pool: Tensor, bound: float | None = None, **more: Any) -> Tensor:
        """Outputs ``[N, T, HV, V]``."""
        tokens = self.N * self.T
        views = (x[:tokens].unflatten(0, (self.N, self.T)) for x in (self.q, self.k, self.v, self.g, self.beta))
        o: Tensor = kda.decode_mtp(
            *views, pool, state_indices=self.slots[: self.N], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, **self.options(bound), **more,
        )  # fmt: skip
        return o

    def run(self, **changed: Any) -> Any:
        """decode_rows, with some of its arguments changed."""
        given: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "beta": self.beta, "out": self.out}
        sizes = {"state": self.pool, "N": self.N, "T": self.T, "state_indices": self.slots}
        return decode_rows(**{**given, **sizes, **self.options(), **changed})


JOINT = {"k": None, "v": None}
FORMS: dict[str, Any] = {  # of a step's tokens: other dimensions for the same rows
    "rows": lambda s: {},
    "joint": lambda s: {"q": s.mixed, **JOINT},
    "joint_of_a_batch": lambda s: {"q": s.mixed[:, None], **JOINT},
    "one_row": lambda s: {name: getattr(s, name)[None] for name in ("q", "k", "v", "g", "beta", "out")},
    "a_row_each": lambda s: {name: getattr(s, name)[:, None] for name in ("q", "k", "v", "g", "beta", "out")},
    "flat": lambda s: {"v": s.v.flatten(1), "g": s.g.flatten(1)[None], "out": s.out.view(1, -1, s.HV * V)},
    "parameters": lambda s: {"A_log": s.A_log.view(1, 1, s.HV, 1), "dt_bias": s.dt_bias.flatten()},
    "parameter_rows": lambda s: {"dt_bias": torch.cat([s.dt_bias, s.dt_bias], 1)[:, : s.K]},
}


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(form: str, T: int, more: int) -> None:
    """The bits of ``kda.decode_mtp`` with views, and rows behind the tokens stay as they were."""
    step = Step(T=T, more=more)
    pool = step.pool.clone()
    wanted = step.expected(pool)
    step.run(**FORMS[form](step))
    assert torch.equal(step.out[: 3 * T].view_as(wanted), wanted)
    assert torch.equal(step.pool, pool) and (step.out[3 * T :] == 7).all()


@pytest.mark.parametrize("sizes", [(1, 1, K), (1, 4, K), (2, 4, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("N", "T"), [(1, 1), (1, 4), (4, 1), (3, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_of_one(form: str, N: int, T: int, sizes: tuple[int, int, int]) -> None:
    """One head, one channel, one request, one token: dimensions of 1 fit in several places, and their strides mean
    nothing."""
    H, HV, K = sizes
    step = Step(N, T, dtype=torch.float32, H=H, HV=HV, K=K)
    pool = step.pool.clone()
    wanted = step.expected(pool, bound=-4.0)
    step.run(**FORMS[form](step), lower_bound=-4.0)
    assert torch.equal(step.out.view_as(wanted), wanted) and torch.equal(step.pool, pool)


@pytest.mark.parametrize("T", [1, 2])
def test_output_is_made(T: int) -> None:
    step = Step(T=T)
    wanted = step.expected(step.pool.clone())
    for tokens in ({"q": step.mixed, **JOINT}, {"q": step.q[None], "k": step.k[None], "v": step.v[None]}):
        made = step.run(**tokens, state=step.pool.clone(), out=None)
        assert made.shape == (1, 3 * T, HV, V) and made.dtype == torch.bfloat16 and made.is_contiguous()
        assert torch.equal(made.view_as(wanted), wanted)


@pytest.mark.parametrize("wider", [False, True])
def test_snapshots_in_rows(wider: bool) -> None:
    """A buffer ``[rows, S, HV, V, K]`` whose rows may lie apart, and slots that count states."""
    step, S = Step(T=2), 5
    buffer = torch.full((4, S, HV, V, K), 7.0)
    kept, pool = buffer[:, :2] if wider else torch.full((4, 2, HV, V, K), 7.0), step.pool.clone()
    steps = S if wider else 2
    slots = torch.tensor([[3 * steps, 3 * steps + 1], [-1, -1], [0, 1], [9, 9]], dtype=torch.int32)
    flat = torch.full((4 * steps, HV, V, K), 7.0)
    wanted = step.expected(pool, update_state=False, snapshots=flat, snapshot_slots=slots[:3])
    step.run(update_state=False, snapshots=kept, snapshot_slots=slots)
    assert torch.equal(step.out.view_as(wanted), wanted) and torch.equal(step.pool, pool)
    assert torch.equal(kept, flat.view(4, steps, HV, V, K)[:, :2])
    assert (buffer[:, 2:] == 7).all()


@pytest.mark.parametrize("more", [0, 2])
def test_convolution_and_norm(more: int) -> None:
    """The bits of ``kda.decode_mtp`` with both, from vLLM's shapes: a weight ``[D, 1, W]``, flat gates of the norm."""
    step = Step(more=more)
    weight, bias, tails = torch.randn(D, 1, 4), torch.randn(D), torch.randn(SLOTS, 3, D)
    z, scales, slots = torch.randn(3 + more, HV * V), torch.randn(V), step.slots
    same, pool = tails.clone(), step.pool.clone()
    wanted = kda.decode_mtp(
        None, None, None, step.g[:3, None], step.beta[:3, None], pool, state_indices=slots[:3],
        conv=kda.Conv(step.mixed[:3, None], weight[:, 0], bias, same.transpose(1, 2), slots[:3]),
        norm=kda.Norm(z[:3].view(3, 1, HV, V), scales, 1e-6, "silu"), use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **step.options(),
    )  # fmt: skip
    step.run(
        q=None, **JOINT, out=step.out, conv=kda.Conv(step.mixed, weight, bias, tails.transpose(1, 2), slots),
        norm=kda.Norm(z, scales, 1e-6, "silu"),
    )  # fmt: skip
    assert torch.equal(step.out[:3].view_as(wanted), wanted) and (step.out[3:] == 7).all()
    assert torch.equal(step.pool, pool) and torch.equal(tails, same)


def test_slots_of_snapshots_in_the_pool() -> None:
    """vLLM's form: ``state_indices [N, S]``, and a start from what an earlier round left."""
    step = Step(T=2)
    slots = torch.tensor([[4, 3], [0, 0], [2, 6], [9, 9]], dtype=torch.int32)
    accepted, pool = torch.tensor([2, 1, 1, 9]), step.pool.clone()
    step.slots = slots[:3, 0]
    common: dict[str, Any] = {"update_state": False, "first_valid_slot": 1}
    wanted = step.expected(pool, snapshots=pool, snapshot_slots=slots[:3], accepted=accepted[:3], **common)
    step.run(state_indices=slots, snapshots=step.pool, snapshot_slots=slots, accepted=accepted, **common)
    assert torch.equal(step.out.view_as(wanted), wanted) and torch.equal(step.pool, pool)


def odd_snapshots() -> dict[str, Any]:
    state = HV * V * K
    apart = torch.zeros(6 * state).as_strided((2, 2, HV, V, K), (2 * state + 1, state, V * K, K, 1))
    return {"snapshots": apart, "snapshot_slots": torch.zeros(3, 1, dtype=torch.int32)}


WRONG: dict[str, Any] = {  # a change of the call, and what the sentence says
    "rows": (lambda s: {"N": 4}, r"q: expected 4 rows of tokens, got \[3, 2, 32\]"),
    "gaps": (lambda s: {"g": torch.randn(2, 4, HV, K)[:, :3]}, "g: expected rows that lie equally far apart"),
    "heads": (lambda s: {"v": s.v[:, :3]}, r"v: expected rows of 4 heads of 24, got \[3, 3, 24\]"),
    "flat": (lambda s: {"g": s.g.flatten(1)[:, 1:]}, r"g: expected rows of 4 heads of 32, got \[3, 127\]"),
    "flat_keys": (lambda s: {"q": s.q.flatten(1)}, r"q: expected rows of 3 heads of 32, got \[3, 64\]"),
    "beta": (lambda s: {"beta": s.beta[:, 1:]}, r"beta: expected rows of 4, got \[3, 3\]"),
    "joint": (lambda s: {"q": s.mixed[:, 1:], **JOINT}, r"q: expected rows of 2 \* H \* 32 \+ 96, got \[3, 223\]"),
    "no_keys": (lambda s: {"q": s.mixed[:, : HV * V], **JOINT}, r"q: expected rows of 2 \* H \* 32 \+ 96"),
    "key_alone": (lambda s: {"k": None}, "k: expected"),
    "no_state": (lambda s: {"state": None, "out": None}, "state: expected a pool of states, got None"),
    "state": (lambda s: {"state": s.pool[0]}, r"state: expected a pool of states, got \[4, 24, 32\]"),
    "dt_bias": (lambda s: {"dt_bias": s.dt_bias[1:]}, "dt_bias: expected"),
    "turned": (lambda s: {"dt_bias": s.dt_bias.T.contiguous()}, r"dt_bias: expected shape \[4,32\]"),
    "slots": (lambda s: {"state_indices": s.slots[:2]}, "state_indices: expected"),
    "columns": (lambda s: {"state_indices": s.slots[:, None]}, "state_indices: expected 1 dimension"),
    "scalars": (lambda s: {"beta": s.beta[0]}, r"beta: expected rows of 4, got \[4\]"),
    "steps": (lambda s: {"T": -1}, "T: expected a size, got -1"),
    "text": (lambda s: {"N": "3"}, "N: expected an integer, got '3'"),
    "snapshots": (lambda s: odd_snapshots(), "snapshots: expected rows that lie apart by a multiple of a state"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    """In a sentence, before anything is written."""
    step = Step()
    before = step.pool.clone()
    change, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        step.run(**change(step))
    assert torch.equal(step.pool, before) and (step.out == 7).all()


def test_lost_gradients_and_traces() -> None:
    step = Step()
    with pytest.raises(ValueError, match="requires gradients"):
        step.run(v=step.v.float().requires_grad_())
    kept = {"snapshot_slots": torch.zeros(3, 1, dtype=torch.int32), "update_state": False}
    with pytest.raises(ValueError, match="requires gradients"):
        step.run(snapshots=torch.zeros(3, 1, HV, V, K, requires_grad=True), **kept)
    with pytest.raises(ValueError, match="negated view"):
        step.run(snapshots=torch._neg_view(torch.zeros(3, 1, HV, V, K)), **kept)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Declined, match="under a mode"):
        step.run()


def test_tokens_in_several_rows_are_declined() -> None:
    """Engines pass all tokens in one."""
    step, cu = Step(), torch.tensor([0, 1, 2, 3])
    q, k, v, g, beta = (x[None].expand(2, *x.shape) for x in (step.q, step.k, step.v, step.g, step.beta))
    common: dict[str, Any] = {"A_log": step.A_log, "dt_bias": step.dt_bias}
    theirs: dict[str, Any] = {"ssm_states": step.pool, "cache_indices": step.slots, "query_start_loc": cu}
    with pytest.raises(Declined, match="v: expected all tokens in one row, got 2 rows"):
        sglang_kernel._decode(None, q, k, v, g, beta, **common, **theirs)
    with pytest.raises(Declined, match="q: expected all tokens in one row, got 2 rows"):
        vllm_functions.fused_recurrent_kda(
            q, k, v, g, beta, **common, lower_bound=None, initial_state=step.pool, cu_seqlens=cu,
            ssm_state_indices=step.slots,
        )  # fmt: skip


def test_heads_other_than_those_of_the_pool_are_declined() -> None:
    step = Step()
    call = functools.partial(
        sglang_kernel._packed_decode, None, step.mixed, step.g, step.beta, ssm_states=step.pool,
        cache_indices=step.slots, **step.options(),
    )  # fmt: skip
    before = step.pool.clone()
    with pytest.raises(Declined, match=r"ssm_states: expected \[slots, 2, 24, K\], got \[9, 4, 24, 32\]"):
        call(num_v_heads=2, head_v_dim=V)
    assert torch.equal(step.pool, before)
    assert call(num_v_heads=HV, head_v_dim=V).shape == (1, 3, HV, V)


# ---- calls that are left to the engine ----


@pytest.fixture
def _untold() -> Iterator[None]:
    """Warnings that were given are given again."""
    kept = set(declined._told)
    declined._told.clear()
    yield
    declined._told.clear()
    declined._told.update(kept)


def theirs(x: Any, y: Any, z: Any = 5, *, mode: Any = None, **more: Any) -> Any:
    return ("theirs", x, y, z, mode, more)


def ours(x: Any, y: Any, z: Any = 5, *, mode: Any = None) -> Any:
    if mode == "refuse":
        raise Declined("mode: expected another")
    if mode == "fail":
        raise RuntimeError("a kernel failed")
    return ("ours", x, y, z, mode)


@pytest.mark.usefixtures("_untold")
def test_own_function_where_ours_declines() -> None:
    call = or_own("Engine", ours, theirs)
    assert call.__name__ == "theirs" and call(1, 2) == ("ours", 1, 2, 5, None)
    assert call(1, y=2, z=3, mode=4) == ("ours", 1, 2, 3, 4)
    wanted = "Engine's own kernel runs for theirs, as ours declined: mode: expected"
    with pytest.warns(RuntimeWarning, match=wanted) as told:
        assert call(1, y=2, mode="refuse") == ("theirs", 1, 2, 5, "refuse", {})
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        assert call(1, 2, 9, mode="refuse") == ("theirs", 1, 2, 9, "refuse", {})
    with pytest.warns(RuntimeWarning, match="new: expected no such argument"):
        assert call(1, 2, new=3) == ("theirs", 1, 2, 5, None, {"new": 3})
    with pytest.raises(RuntimeError, match="a kernel failed"):
        call(1, 2, mode="fail")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        call(1)


@pytest.mark.usefixtures("_untold")
def test_own_method_without_parameters_that_nobody_gave() -> None:
    """An engine's kernel need not know parameters that are at their defaults."""

    class Own:
        def verify(self, x: Any) -> Any:
            return (self, x)

    def verify(kernel: Any, x: Any, *, ring: bool = False) -> Any:
        raise Declined("x: expected another")

    kernel_class = type("Kernel", (Own,), {"verify": or_own("Engine", verify, Own.verify)})
    kernel = kernel_class()
    with pytest.warns(RuntimeWarning, match="x: expected another"):
        assert kernel.verify(3) == (kernel, 3)


@pytest.mark.usefixtures("_untold")
def test_a_declined_call_keeps_nothing() -> None:
    """Its tensors are freed at once, not by the next search for circles."""

    class Large: ...

    def refuse(x: Any) -> Any:
        raise Declined("x: expected another")

    call, x = or_own("Engine", refuse, lambda x: None), Large()
    kept = weakref.ref(x)
    gc.disable()
    try:
        with pytest.warns(RuntimeWarning):
            call(x)
        del x
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("file", [name for name in vllm.EXPECTED if "ops.third_party.kda" in name])
def test_parameters_are_those_of_the_engine(file: str) -> None:
    """``or_own`` passes all of them on, with our defaults."""
    table = vllm_functions.GLM if "glm5next" in file else vllm_functions.K3
    for name, theirs in vllm.EXPECTED[file].items():
        parameters = inspect.signature(table[name]).parameters.values()
        ours = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)
        assert theirs is not None and theirs.removesuffix(", **kwargs)").strip("()") == ours

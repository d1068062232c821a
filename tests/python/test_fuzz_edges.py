"""Calls at the edges: shapes, strides, numbers at the ends of their range. The expected results are float64
formulations written here.

Each test is one seed. KDA_FUZZ_SEEDS=2000 runs more of them, and ``-k 'forward and 17]'`` repeats one. Some seeds move
with the day, which is their first five digits: KDA_FUZZ_DAY=20785 repeats those of that day.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import kda
from support import kernels_of, on_cpu

Tensor = torch.Tensor
DAY = int(os.environ.get("KDA_FUZZ_DAY", time.time() // 86400))  # since 1970
SEEDS = [*range(int(os.environ.get("KDA_FUZZ_SEEDS", 40))), *range(DAY * 1000, DAY * 1000 + 10)]
LENGTHS = (0, 1, 2, 15, 63, 64, 65, 130)
SIZES = (1, 3, 7, 16, 17, 33, 60, 64, 128)
HEADS = ((1, 1), (1, 3), (2, 2), (2, 4))
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
MAGNITUDES = (1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30)
OF_F16 = (1e-3, 1e2)  # float16 holds no others
MOST = torch.finfo(torch.float32).max

# docs/numerics.md: relative RMS errors. On a CPU, where nothing is rounded to 16 bits, a fiftieth of these.
GATES = {"o": 5e-3, "final_state": 5e-3, "q": 6e-3, "k": 6e-3, "v": 8e-3, "initial_state": 8e-3, "g": 1e-2} | {
    "beta": 1e-2,
    "A_log": 8e-3,
    "dt_bias": 8e-3,
}


class Source:
    """Random choices and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one_of(self, values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def tensor(self, x: Any, dtype: torch.dtype) -> Tensor:
        """A tensor that is dense, a slice of a wider buffer, or has its second and third dimension swapped in
        memory."""
        t = torch.tensor(np.asarray(x, np.float32)).to(dtype)
        if t.ndim >= 3 and self.chance(0.3):
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if t.ndim >= 2 and self.chance(0.3):
            wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
            wide[..., : t.shape[-1]] = t
            return wide[..., : t.shape[-1]]
        return t

    def uniform(self, *shape: int, most: float = 1.0) -> Any:
        return self.rng.uniform(-most, most, shape)

    def magnitude(self, dtype: torch.dtype) -> float:
        return float(self.one_of(OF_F16 if dtype == torch.float16 else MAGNITUDES))

    def any_float(self, *shape: int) -> Any:
        """Any float32 numbers whose sums are float32, too."""
        x = self.rng.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(0), np.clip(x, -MOST / 2, MOST / 2))

    def offsets(self, T: int) -> list[int] | None:
        """Offsets of sequences packed into one row, with empty ones and a tail after the last."""
        if self.chance(0.6):
            return None
        return [0, *sorted(int(x) for x in self.rng.integers(0, T + 1, self.rng.integers(1, 4)))]


# ---- formulations ----


def product_of_softplus(A_log: Tensor, z: Tensor) -> Tensor:
    """``exp(A_log) softplus(z)``, even if one of the two is beyond float64."""
    far = z < -30
    softplus = torch.logaddexp(z.masked_fill(far, 0), z.new_zeros(()))
    return (A_log + torch.where(far, z, softplus.log())).clamp(max=600).exp()


def gate(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    z = x if dt_bias is None else x + dt_bias.reshape(x.shape[-2:])
    A = x.new_zeros(1, 1) if A_log is None else A_log.reshape(-1, 1)
    if lower_bound is None:
        return -product_of_softplus(A, z)
    return lower_bound * (A.clamp(-700, 700).exp() * z).sigmoid()


def normalised(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: ``[T, HV, ...]`` and its state ``[HV, K, V]``."""
    o = []
    for t in range(len(q)):
        S = g[t].exp().unsqueeze(-1) * S
        u = beta[t].unsqueeze(-1) * (v[t] - (S * k[t].unsqueeze(-1)).sum(1))
        S = S + k[t].unsqueeze(-1) * u.unsqueeze(1)
        o.append((S * q[t].unsqueeze(-1)).sum(1))
    return torch.stack(o) if o else v[:0], S


def expected(tensors: dict[str, Tensor], options: dict[str, Any], states: Tensor) -> tuple[Tensor, Tensor]:
    """o and the final states, K-first, from float64 tensors."""
    q, k, v, g, beta = (tensors[n] for n in ("q", "k", "v", "g", "beta"))
    if options["use_qk_l2norm_in_kernel"]:
        q, k = normalised(q), normalised(k)
    if options["use_gate_in_kernel"]:
        g = gate(g, tensors.get("A_log"), tensors.get("dt_bias"), options["lower_bound"])
    if options["use_beta_sigmoid_in_kernel"]:
        beta = beta.sigmoid() * (2 if options["allow_neg_eigval"] else 1)
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q * options["scale"], k))
    if options.get("cu_seqlens") is None:
        spans = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        spans = [(0, a, b) for a, b in pairwise(options["cu_seqlens"].tolist())]
    o, finals = torch.zeros_like(v), []
    rows = []
    for n, (b, first, end) in enumerate(spans):
        y, S = recurrence(*(x[b, first:end] for x in (q, k, v, g, beta)), states[n])
        rows.append((b, first, end, y))
        finals.append(S)
    for b, first, end, y in rows:
        o = o.index_put((o.new_tensor(b).long(), torch.arange(first, end, device=o.device)), y)
    return o, torch.stack(finals) if finals else states


# ---- comparing ----


def assert_near(name: str, ref: Tensor, got: Tensor, budget: float, floor: float | Tensor, what: str) -> None:
    """Asserts an error within `budget` of the RMS, or `floor`. Numbers beyond the dtype count as infinite. Where
    float64 is not finite, any number that is not finite is right. Where `floor` reaches beyond the dtype, any is."""
    assert got.shape == ref.shape, f"{what} {name}: shape {list(got.shape)}, expected {list(ref.shape)}"
    if got.numel() == 0:
        return
    most, x = torch.finfo(got.dtype).max, got.double()
    beyond = ref.abs() > most * 1.01
    compared = ref.isfinite() & (ref.abs() < most * 0.99)
    strange = (compared & ~x.isfinite()) | (~ref.isfinite() & x.isfinite())
    strange |= beyond & x.isfinite()
    known = 8 * torch.as_tensor(floor) < most
    compared, strange = compared & known, strange & known
    if strange.any():
        pytest.fail(f"{what} {name}: expected {ref[strange][0]}, got {x[strange][0]} ({int(strange.sum())} such)")
    store = torch.finfo(got.dtype).eps * ref.abs() + (1e-7 if got.dtype == torch.float16 else 0)
    error = torch.where(compared, ((x - ref).abs() - store).clamp(min=0), 0)
    rms, off = (torch.where(compared, y, 0).square().mean().sqrt() for y in (ref, error))
    if isinstance(floor, Tensor):
        floor = float(torch.where(compared, floor, 0).square().mean().sqrt())
    assert off <= budget * rms + floor, f"{what} {name}: off by {off:.3g} of {rms:.3g}"


def budget_of(name: str, dtypes: set[torch.dtype]) -> float:
    return GATES[name] / (50 if on_cpu() and dtypes == {torch.float32} else 1)


# ---- calls ----


def gates(source: Source, shape: tuple[int, ...], backward: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """g, A_log, dt_bias and the options for them."""
    HV, K = shape[-2:]
    form = source.one_of(("log", "softplus", "bound"))
    dtype, edge = source.one_of(DTYPES), source.chance(0.7)
    options = {"use_gate_in_kernel": form != "log", "lower_bound": -5.0 if form == "bound" else None}
    if form == "log":
        g = -np.abs(source.uniform(*shape, most=source.one_of((1e-30, 0.1, 3, 100, 1e30)) if edge else 1))
        if edge and source.chance(0.5):
            g[source.rng.random(shape) < 0.1] = -np.inf
        return {"g": source.tensor(g, torch.float32 if dtype == torch.float16 else dtype)}, options
    x, A_log, dt_bias = source.uniform(*shape, most=4), source.uniform(HV), source.uniform(HV, K)
    way = source.rng.integers(3) if edge else -1
    if way == 0:  # one factor beyond float32, the product in the middle
        A_log = source.uniform(HV, most=110)
        x = -A_log.reshape(-1, 1) + x if form == "softplus" else np.clip(x * np.exp(-A_log.reshape(-1, 1)), -1e37, 1e37)
        dt_bias *= 1e-3 if form == "softplus" else 0
        dtype = torch.float32
    elif way == 1 and not backward:
        A_log, dt_bias, x = source.any_float(HV), source.any_float(HV, K), x
    elif way == 1:
        A_log = source.uniform(HV, most=60)
    elif way == 2:
        x = x * (1e4 if dtype == torch.float16 else 1e30)
    tensors = {"g": source.tensor(x, dtype), "A_log": source.tensor(A_log, torch.float32)}
    if source.chance(0.5) or way == 0:
        tensors["dt_bias"] = source.tensor(np.asarray(dt_bias).reshape(-1), torch.float32)
    return tensors, options


class Call:
    """Tensors and options of a forward or a decode; no intermediate number exceeds float32."""

    def __init__(self, source: Source, lengths: tuple[int, ...], backward: bool = False) -> None:
        T = source.one_of(lengths)
        cu = source.offsets(T)
        B = 1 if cu else source.one_of((1, 1, 2))
        H, HV = source.one_of(HEADS)
        K, V = source.one_of(SIZES), source.one_of(SIZES)
        dtype, norm, logits = source.one_of(DTYPES), source.chance(0.6) and K > 1, source.chance(0.5)
        self.sequences, self.HV, self.K, self.V = len(cu) - 1 if cu else B, HV, K, V
        big, self.largest = source.one_of(("q", "v", "k", "nothing")), 1.0

        def scaled(name: str, *shape: int, most: float = 1.0) -> Tensor:
            factor = source.magnitude(dtype) if name == big else 1.0
            if name == "k" and not norm:
                factor = min(factor, 1.0)  # otherwise it would grow with every token
            self.largest *= max(1.0, factor) if name == "v" or not norm else 1.0
            return source.tensor(source.uniform(*shape, most=most * factor), dtype)

        self.tensors = {
            "q": scaled("q", B, T, H, K),
            "k": scaled("k", B, T, H, K, most=K**-0.5),
            "v": scaled("v", B, T, HV, V),
            "beta": source.tensor(
                source.any_float(B, T, HV)
                if logits and source.chance(0.3) and not backward
                else source.uniform(B, T, HV),
                torch.float32,
            ),
        }
        more, self.options = gates(source, (B, T, HV, K), backward)
        self.tensors |= more
        self.options |= {
            "use_qk_l2norm_in_kernel": norm,
            "use_beta_sigmoid_in_kernel": logits,
            "allow_neg_eigval": logits and source.chance(0.5),
            "scale": float(source.one_of((1.0, 0.125, -2.0))),
        }
        if cu:
            self.options["cu_seqlens"] = torch.tensor(cu, dtype=source.one_of((torch.int32, torch.int64)))
        if not backward and source.chance(0.2) and min(T, self.sequences, B) > 0:
            self.tensors["v"][source.rng.integers(B), source.rng.integers(T), source.rng.integers(HV), 0] = float(
                source.one_of((np.nan, np.inf, -np.inf))
            )

    def doubles(self) -> dict[str, Tensor]:
        return {n: x.double() for n, x in self.tensors.items()}

    @property
    def floor(self) -> float:
        """What underflows, times what it is multiplied by."""
        return 1e-35 * self.largest

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {x.dtype for x in self.tensors.values()}


def left_of_sums(c: Call, h0: Tensor, factor: float) -> dict[str, Tensor]:
    """How far off gradients of gates may be: they are small differences of large sums, whatever the decay."""
    t, opt = c.doubles(), c.options
    q, k = (1.0 if opt["use_qk_l2norm_in_kernel"] else float(t[n].abs().max()) for n in ("q", "k"))
    beta = 2.0 if opt["use_beta_sigmoid_in_kernel"] else float(t["beta"].abs().max())
    state = float(h0.abs().max()) + beta * k * float(t["v"].abs().max())
    least = 8e-6 * state * factor * (1 + abs(opt["scale"]) * q)
    if not opt["use_gate_in_kernel"]:
        return {"g": torch.full_like(t["g"], least)}
    x, bias = t["g"].requires_grad_(), t.get("dt_bias")
    (slope,) = torch.autograd.grad(gate(x, t["A_log"], bias, opt["lower_bound"]).sum(), x)
    z = x.detach() if bias is None else x.detach() + bias.reshape(x.shape[-2:])
    of_g = least * slope.abs()
    of_A_log = (of_g * z.abs().clamp(min=1)).sum((0, 1, 3))
    return {"g": of_g, "A_log": of_A_log, "dt_bias": of_g.sum((0, 1)).reshape(-1)}


def some_kernel(source: Source, op: str) -> str | None:
    """The library's choice, or the implementation that takes any call."""
    return source.one_of((None, kernels_of(op, "cpu" if on_cpu() else "cuda")[-1]))


@pytest.mark.cuda
@pytest.mark.parametrize("seed", SEEDS)
def test_forward(seed: int) -> None:
    source = Source(seed)
    c = Call(source, LENGTHS)
    impl, h0 = some_kernel(source, "forward"), None
    if source.chance(0.5):
        h0 = torch.tensor(source.uniform(c.sequences, c.HV, c.K, c.V), dtype=torch.float32)
    states = torch.zeros(c.sequences, c.HV, c.K, c.V).double() if h0 is None else h0.double()
    ref = expected(c.doubles(), c.options, states)
    got = kda.chunk_kda(**c.tensors, **c.options, initial_state=h0, output_final_state=True, impl=impl)
    for name, r, x in zip(("o", "final_state"), ref, got, strict=True):
        assert_near(name, r, x, budget_of(name, c.dtypes), c.floor, f"seed {seed}, {impl}")


@pytest.mark.parametrize("seed", SEEDS)
def test_backward(seed: int) -> None:
    source = Source(10000 + seed)
    c = Call(source, LENGTHS[1:], backward=True)
    h0 = torch.tensor(source.uniform(c.sequences, c.HV, c.K, c.V), dtype=torch.float32)
    inputs = c.tensors | {"initial_state": h0}
    dtype = c.tensors["v"].dtype
    factor = 1.0 if c.largest > 1e10 or dtype == torch.float16 else float(source.one_of((1e-20, 1.0, 1e8)))

    def run(function: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        o, final_state = function(leaves)
        d_o, d_state = (factor * torch.cos(torch.arange(x.numel()) * 0.7).reshape(x.shape) for x in (o, final_state))
        seeds = (d_o.to(dtype).to(o), d_state.to(torch.float32).to(final_state))
        d = torch.autograd.grad((o, final_state), list(leaves.values()), seeds, materialize_grads=True)
        return dict(zip(leaves, d, strict=True))

    ref = run(lambda x: expected(x, c.options, x["initial_state"]), {n: x.double() for n, x in inputs.items()})
    got = run(lambda x: kda.chunk_kda(**x, **c.options, output_final_state=True), inputs)
    left, least = left_of_sums(c, h0, factor), c.floor * max(1.0, factor)
    for name, x in got.items():
        assert_near(f"d{name}", ref[name], x, budget_of(name, c.dtypes), least + left.get(name, 0.0), f"seed {seed}")


@pytest.mark.cuda
@pytest.mark.parametrize("seed", SEEDS)
def test_decode(seed: int) -> None:
    source = Source(20000 + seed)
    c = Call(source, (0, 1, 1, 2, 5))
    slots = c.sequences + 2
    pool = torch.tensor(source.uniform(slots, c.HV, c.V, c.K), dtype=torch.float32)
    order = source.rng.permutation(slots)[: c.sequences]
    live = source.rng.random(c.sequences) < 0.85
    indices = torch.tensor(np.where(live, order, -1), dtype=torch.int32)
    before = pool.double()
    o, states = expected(c.doubles(), c.options, before[torch.tensor(order).long()].transpose(2, 3))
    after = before.clone()
    cu = c.options["cu_seqlens"].tolist() if "cu_seqlens" in c.options else None
    for n in range(c.sequences):
        if live[n]:
            after[order[n]] = states[n].transpose(0, 1) if states[n].ndim == 2 else states[n].transpose(1, 2)
        else:
            (o[n] if cu is None else o[0, cu[n] : cu[n + 1]]).zero_()
    impl = some_kernel(source, "decode")
    got = kda.decode(**c.tensors, **c.options, state=pool, state_indices=indices, impl=impl)
    assert_near("o", o, got, budget_of("o", c.dtypes), c.floor, f"seed {seed}, {impl}")
    assert_near("final_state", after, pool, budget_of("final_state", c.dtypes), c.floor, f"seed {seed}, {impl}")


@pytest.mark.cuda
@pytest.mark.parametrize("seed", SEEDS)
def test_gate(seed: int) -> None:
    """Each number separately, over the whole range of float32."""
    source = Source(30000 + seed)
    HV, K = source.one_of((1, 3)), source.one_of(SIZES)
    shape = (source.one_of((0, 1, 5, 40)), HV, K)
    bound = source.one_of((None, -5.0))
    if source.chance(0.5):
        x, A_log, dt_bias = source.any_float(*shape), source.any_float(HV), source.any_float(HV, K)
    else:
        A_log = source.uniform(HV, most=110)
        x, dt_bias = source.uniform(*shape, most=110), source.uniform(HV, K, most=110)
    given = [source.tensor(y, torch.float32) for y in (x, A_log, np.reshape(dt_bias, -1))]
    X, A, b = (y.double() for y in given)
    ref = gate(X, A, b, bound)
    got = kda.fused_kda_gate(*given, lower_bound=bound).double()
    # float32 has A_log and exp's argument to their last bits, and the argument of a sigmoid as well.
    z, rate = X + b.reshape(HV, K), A.reshape(-1, 1).abs().clamp(max=1e3)
    inside = (A.reshape(-1, 1).clamp(-700, 700).exp() * z).abs().clamp(max=110) if bound else z.abs().clamp(max=1e3)
    # What underflows is multiplied by exp(A_log), unless that is large.
    underflow = 2.4e-38 * A.reshape(-1, 1).clamp(-700, 17 if on_cpu() else 65).exp()
    tolerance = 2.0**-22 * (2 + rate) * (2 + inside) * ref.abs() + 1e-37 + underflow
    known = ref.isfinite() & (ref.abs() < MOST)
    wrong = known & ~((got - ref).abs() <= tolerance)
    wrong |= ~known & ~ref.isnan() & got.isfinite() & (got.abs() < MOST * 0.99)
    if wrong.any():
        i = tuple(int(n) for n in wrong.nonzero()[0])
        pytest.fail(f"seed {seed}: x {X[i]}, A_log {A[i[1]]}, bias {b.reshape(HV, K)[i[1:]]}: {ref[i]}, got {got[i]}")


@pytest.mark.cuda
@pytest.mark.parametrize("seed", SEEDS)
def test_convolution(seed: int) -> None:
    source = Source(40000 + seed)
    T, D, W = source.one_of(LENGTHS), source.one_of(SIZES), source.one_of((2, 3, 4))
    cu = source.offsets(T)
    B = 1 if cu else source.one_of((1, 2))
    N, dtype = len(cu) - 1 if cu else B, source.one_of(DTYPES)
    factor = source.magnitude(dtype) if source.chance(0.6) else 1.0
    silu, of_weight = source.chance(0.5), 1 / factor if dtype != torch.float16 and source.chance(0.5) else 1.0
    x = source.tensor(source.uniform(B, T, D, most=factor), dtype)
    weight = source.tensor(source.uniform(D, W, most=of_weight), torch.float32)
    state = source.tensor(source.uniform(N, D, W - 1, most=factor), torch.float32)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    y, finals = torch.zeros_like(x).double(), state.double().clone()
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, a, b) for a, b in pairwise(cu)]
    for n, (b, first, end) in enumerate(spans):
        rows = torch.cat([state[n].double().T, x[b, first:end].double()])
        for t in range(first, end):
            y[b, t] = (rows[t - first : t - first + W] * weight.double().T).sum(0)
        finals[n] = rows[len(rows) - W + 1 :].T
    if silu:
        y = y * y.sigmoid()
    activation = "silu" if silu else None
    got, final = kda.causal_conv1d(x, weight, None, state, activation, output_final_state=True, cu_seqlens=offsets)
    floor = 1e-36 * max(1.0, factor, of_weight)
    assert_near("y", y, got, 1e-5, floor, f"seed {seed}")
    assert_near("final_state", finals, final, 1e-6, 1e-37, f"seed {seed}")

"""Data recipes, the gates of docs/numerics.md, and an oracle that shares no code with the library: the token
recurrence in float64 PyTorch, with autograd's gradients."""

from __future__ import annotations

import doctest
import inspect
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kda
from kda.call.library import built_with_cuda

Tensor = torch.Tensor
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def cpu_implementations(op: str) -> list[str]:
    return [name for name in kda.implementations(op) if not name.startswith("cuda")]


def explained(lines: list[str]) -> list[str]:
    """The implementations in an explanation. Without CUDA in the library it tells of those on CUDA as well, which
    ``kda.implementations`` then leaves out: so does this."""
    names = [line[2:].split(":")[0] for line in lines]
    return names if built_with_cuda() else [name for name in names if not name.startswith("cuda_")]


DECODING = ("decode", "verify", "flush", "flush_verify")


def kernels_of(op: str, device: str) -> list[str]:
    """Implementations except for the oracle, in the library's order. The last one takes any call."""
    names = [name for name in kda.implementations(op) if name != "reference"]
    return [name for name in names if name.startswith("cuda") == (device == "cuda")]


def general_kernels(device: str) -> str:
    """For KDA_IMPL: of each operator of decoding the implementation that takes any call."""
    return ",".join(names[-1] for op in DECODING if (names := kernels_of(op, device)))


def implementations_here(op: str) -> list[str]:
    """Implementations that take any call (in float32 and 16 bits) with the tensors that tests make."""
    return cpu_implementations(op) if on_cpu() else kernels_of(op, "cuda")[-1:]


def take_operators(patch: pytest.MonkeyPatch) -> None:
    """Sends calls to the registered operators, as in a trace."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kda.") and hasattr(module, "compiling"):
            patch.setattr(module, "compiling", lambda: True)


class _Finder(doctest.DocTestFinder):
    """Also finds the examples of decorated functions."""

    def _from_module(self, module: Any, object: Any) -> bool:
        plain = inspect.unwrap(object) if inspect.isfunction(object) else object
        return super()._from_module(module, plain)  # type: ignore[misc,no-any-return]


def run_examples(module: ModuleType) -> doctest.TestResults:
    """Runs the examples in docstrings."""
    runner = doctest.DocTestRunner()
    for test in _Finder().find(module, module.__name__):
        runner.run(test)
    return runner.summarize(verbose=False)


def on_cpu() -> bool:
    """Do tests make their tensors on the CPU?"""
    return torch.get_default_device().type == "cpu"


def far_memory(elements: int) -> Tensor:
    """float32 zeros: on the CPU only address space, because pages that are never touched take no memory."""
    try:
        if not on_cpu():
            return torch.zeros(elements)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return torch.frombuffer(mmap.mmap(-1, 4 * elements, flags=flags), dtype=torch.float32)
    except (OSError, ValueError, MemoryError, torch.OutOfMemoryError) as e:
        pytest.skip(f"no {4 * elements >> 30} GiB here: {e}")


# ---- problems ----


@dataclass(frozen=True)
class Problem:
    """One call of chunk_kda or fused_recurrent_kda: ``f(**problem.keywords)``."""

    tensors: dict[str, Tensor]  # q, k, v, g, beta and, if present, A_log, dt_bias, initial_state
    options: dict[str, Any]

    @property
    def keywords(self) -> dict[str, Any]:
        return {**self.tensors, **self.options}

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences into which cu_seqlens divides the row; empty without it."""
        cu = self.options.get("cu_seqlens")
        return [] if cu is None else (cu[1:] - cu[:-1]).tolist()

    @property
    def sequences(self) -> int:
        return len(self.lengths) if "cu_seqlens" in self.options else self.tensors["q"].shape[0]

    def having(self, **changes: Any) -> Problem:
        """A copy with other tensors or options; None removes one."""
        tensors = {**self.tensors, **{n: x for n, x in changes.items() if n in (*GRADIENTS,)}}
        options = {**self.options, **{n: x for n, x in changes.items() if n not in GRADIENTS}}
        return replace(
            self,
            tensors={n: x for n, x in tensors.items() if x is not None},
            options={n: x for n, x in options.items() if x is not None},
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        return replace(self, tensors={n: change(x) for n, x in self.tensors.items()})


def make(
    B: int = 1,
    T: int = 100,
    H: int = 2,
    G: int = 1,
    K: int = 16,
    V: int = 24,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str = "log",
    beta: str = "activated",
    l2norm: bool = True,
    scale: float | None = None,
    state: bool = True,
    v_first: bool = False,
    lengths: list[int] | None = None,
    tail: int = 0,
    decay: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Normal q, k, v; decays, or raw inputs of the gates "softplus" and "lower_bound". ``lengths`` packs sequences
    into one row, ``tail`` adds rows after them."""
    random = torch.Generator().manual_seed(seed)
    if lengths is not None:
        B, T = 1, sum(lengths) + tail

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    HV, N = G * H, B if lengths is None else len(lengths)
    q, k, v = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V)
    if not l2norm:  # |k| <= 1 keeps the recurrence from growing
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    raw, logits = randn(B, T, HV, K), randn(B, T, HV)
    A_log, dt_bias = (1 + 15 * torch.rand(HV, generator=random)).log() - 1.5, randn(HV * K)
    h0 = randn(N, HV, V, K) if v_first else randn(N, HV, K, V)
    tensors = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "g": F.logsigmoid(raw) / decay if gate == "log" else raw.to(dtype),
        "beta": logits.sigmoid() if beta == "activated" else logits.to(dtype),
    }
    if gate != "log":
        tensors |= {"A_log": A_log, "dt_bias": dt_bias}
    if state:
        tensors["initial_state"] = h0
    options: dict[str, Any] = {"state_v_first": v_first, "use_qk_l2norm_in_kernel": l2norm}
    if scale is not None:
        options["scale"] = scale
    if gate != "log":
        options["use_gate_in_kernel"] = True
    if gate == "lower_bound":
        options["lower_bound"] = -5.0
    if beta != "activated":
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": beta == "2sigmoid"}
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return Problem(tensors, options)


def uniform(p: Problem) -> Problem:
    """(i) with rand: all products are positive, so errors do not average out."""
    random = torch.Generator().manual_seed(1)
    return p.having(**{n: torch.rand(p.tensors[n].shape, generator=random).to(p.tensors[n].dtype) for n in "qkv"})


def half_masked(p: Problem) -> Problem:
    """(i) half of the gates 0: some channels never decay, next to others that do."""
    keep = torch.rand(p.tensors["g"].shape, generator=torch.Generator().manual_seed(2)) < 0.5
    return p.having(g=p.tensors["g"] * keep)


def saturated(p: Problem, bound: float = -5.0) -> Problem:
    """(iii) every gate at the bound: a chunk spans 2^461."""
    return p.having(g=torch.full_like(p.tensors["g"], bound))


def identical_keys(p: Problem, beta: float = 0.97) -> Problem:
    """(iv) no decay and the same key at every token: the worst triangular system."""
    k = p.tensors["k"]
    return p.having(
        k=k[:, :1].expand_as(k).contiguous(),
        g=torch.zeros_like(p.tensors["g"]),
        beta=torch.full_like(p.tensors["beta"], beta),
    )


def wild(p: Problem) -> Problem:
    """(v) gates of -3000 and -inf next to 0."""
    g, random = p.tensors["g"].clone(), torch.rand(p.tensors["g"].shape, generator=torch.Generator().manual_seed(3))
    g[random < 0.45] = 0
    g[random < 0.2] = -3000
    g[random < 0.1] = -math.inf
    return p.having(g=g)


def with_zeros(p: Problem) -> Problem:
    """(vi) beta = 0 and zero rows of q and k."""
    q, k, beta = (p.tensors[n].clone() for n in ("q", "k", "beta"))
    q[:, ::5], k[:, 1::5], beta[:, 2::5] = 0, 0, 0
    return p.having(q=q, k=k, beta=beta)


# ---- the oracle ----


def gate(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    z = x if dt_bias is None else x + dt_bias.reshape(x.shape[-2:])
    a = torch.ones(1, 1, dtype=x.dtype) if A_log is None else A_log.exp().reshape(-1, 1)
    return -a * torch.logaddexp(z, torch.zeros_like(z)) if lower_bound is None else lower_bound * (a * z).sigmoid()


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Sequences of equal length -> (o, states): states[t] is K-first, before token t; states[T] is the last."""
    o, states = [], [S]
    for t in range(q.shape[1]):
        S = g[:, t, :, :, None].exp() * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        states.append(S)
    return torch.stack(o, 1) if o else v[:, :0], states


def oracle(p: Problem) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """(o, final_state, states of every row or sequence), from tensors of any dtype, computed in that dtype."""
    t, opt = p.tensors, p.options
    q, k, v, g, beta = (t[n] for n in ("q", "k", "v", "g", "beta"))
    G, K, v_first = v.shape[2] // q.shape[2], q.shape[3], opt.get("state_v_first", False)
    if opt.get("use_qk_l2norm_in_kernel"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if opt.get("use_gate_in_kernel"):
        g = gate(g, t.get("A_log"), t.get("dt_bias"), opt.get("lower_bound"))
    if opt.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if opt.get("allow_neg_eigval") else 1)
    q = q * opt.get("scale", K**-0.5)
    q, k = q.repeat_interleave(G, 2), k.repeat_interleave(G, 2)
    h0 = t.get("initial_state")
    if h0 is None:
        h0 = v.new_zeros(p.sequences, v.shape[2], K, v.shape[3])
    elif v_first:
        h0 = h0.transpose(-1, -2)

    if "cu_seqlens" not in opt:
        o, states = recurrence(q, k, v, g, beta, h0)
        final, per_sequence = states[-1], [[s[b : b + 1] for s in states] for b in range(q.shape[0])]
    else:
        cu = opt["cu_seqlens"].tolist()
        parts = [
            recurrence(*(x[:, a:b] for x in (q, k, v, g, beta)), h0[n : n + 1]) for n, (a, b) in enumerate(pairwise(cu))
        ]
        o = torch.cat([o for o, _ in parts] + [torch.zeros_like(v[:, cu[-1] :])], 1)
        final = torch.cat([s[-1] for _, s in parts]) if parts else h0
        per_sequence = [s for _, s in parts]
    return o, final.transpose(-1, -2) if v_first else final, per_sequence


def kda_oracle(**keywords: Any) -> tuple[Tensor, Tensor]:
    """The oracle with the signature of the functions under test."""
    p = Problem({}, {}).having(**{n: x for n, x in keywords.items() if n != "output_final_state"})
    return oracle(p)[:2]


# ---- running and comparing ----


def cotangents(p: Problem, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Gradients of o (rounded to the dtype of o) and of the final state."""
    random, v, K = torch.Generator().manual_seed(seed), p.tensors["v"], p.tensors["q"].shape[3]
    shape = (v.shape[3], K) if p.options.get("state_v_first") else (K, v.shape[3])
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    d_state = torch.randn(p.sequences, v.shape[2], *shape, generator=random)
    return torch.randn(v.shape, generator=random).to(v.dtype), d_state.to(wide)


def run(
    function: Callable[..., tuple[Any, ...]],
    p: Problem,
    backward: bool = True,
    grads: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> dict[str, Tensor]:
    """{"o", "final_state", and "dq", ... for every tensor of the problem}."""
    leaves = {n: x.detach().clone().requires_grad_(backward) for n, x in p.tensors.items()}
    o, final_state = function(**leaves, **p.options, output_final_state=True, **more)
    results = {"o": o.detach(), "final_state": final_state.detach()}
    if backward:
        d_o, d_state = cotangents(p) if grads is None else grads
        # Without any tokens, the oracle's results depend on nothing.
        pairs = [(x, d.to(x)) for x, d in ((o, d_o), (final_state, d_state)) if x.requires_grad]
        outputs, seeds = zip(*pairs, strict=True) if pairs else ((), ())
        d = torch.autograd.grad(outputs, list(leaves.values()), seeds, allow_unused=True, materialize_grads=True)
        results |= {f"d{n}": x for n, x in zip(leaves, d, strict=True)}
    return results


def reference(p: Problem, backward: bool = True) -> dict[str, Tensor]:
    """What ``run`` should return, in float64, from the same rounded inputs."""
    return run(kda_oracle, p.map(Tensor.double), backward, cotangents(p))


def rel_rmse(reference: Tensor, x: Tensor) -> float:
    reference, x = reference.double(), x.double()
    return float((reference - x).square().mean().sqrt() / (reference.square().mean().sqrt() + 1e-8))


# Relative RMS errors allowed. bfloat16: docs/numerics.md. float32: on a CPU no intermediate result is rounded to 16
# bits; gradients of the gate are small differences of large sums.
BUDGETS = {
    "o": (0.005, 1e-5),
    "final_state": (0.005, 1e-5),
    "dq": (0.006, 1e-5),
    "dk": (0.006, 1e-5),
    "dv": (0.008, 1e-5),
    "dinitial_state": (0.008, 1e-5),
    "dg": (0.010, 1e-4),
    "dbeta": (0.010, 2e-5),
    "dA_log": (0.008, 1e-4),
    "ddt_bias": (0.008, 1e-4),
}


def budget(name: str, dtype: torch.dtype) -> float:
    rounded, wide = BUDGETS[name]
    return {torch.bfloat16: rounded, torch.float16: rounded / 5, torch.float32: wide, torch.float64: 1e-10}[dtype]


def rounded(name: str, dtype: torch.dtype) -> float:
    """The factor by which the budget of a result grows if operands of products have 16 bits: then a float32 result is
    held to the budget of bfloat16, too. (float16 has no bounds that gradients could keep.)"""
    return BUDGETS[name][0] / budget(name, dtype)


def on_tensor_cores(p: Problem) -> bool:
    """Does backward multiply 16-bit operands?"""
    q = p.tensors["q"]
    return (
        not on_cpu()
        and q.dtype in (torch.bfloat16, torch.float16)
        and {q.shape[3], p.tensors["v"].shape[3]} <= {64, 128}
    )


def assert_close(
    expected: dict[str, Tensor],
    got: dict[str, Tensor],
    slack: float | dict[str, float] = 1.0,
    what: str = "",
    rows: bool = False,
) -> None:
    """Asserts that RMS errors are within the budget of each result, and that no single element is far off (the
    max-norm gate). That is relative to the usual size in the whole result, or with ``rows`` in its row. (Few tokens
    after a large state have gradients unlike those of other tokens.)"""
    problems = []
    for name, x in got.items():
        factor = slack.get(name, 1.0) if isinstance(slack, dict) else slack
        ref, allowed = expected[name].double(), factor * budget(name, x.dtype)
        assert x.shape == ref.shape, f"{what} {name}: shape {list(x.shape)}, expected {list(ref.shape)}"
        if x.numel() == 0:
            continue
        if not torch.equal(x.isfinite(), ref.isfinite()):
            problems.append(f"{name}: {int((~x.isfinite()).sum())} elements are not finite")
            continue
        error, tiny = (ref - x.double()).abs(), 1e-4 * allowed
        usual = ref.square().mean().sqrt()
        if rows:
            usual = torch.maximum(usual, ref.square().mean(-1, keepdim=True).sqrt())
        far = error > 8 * allowed * (usual + ref.abs()) + tiny
        if (rel_rmse(ref, x) > allowed and error.max() > tiny) or far.any():
            found = f"{rel_rmse(ref, x):.2e} (budget {allowed:.1e}), {int(far.sum())} outliers"
            problems.append(f"{name}: relative RMS error {found}")
    assert not problems, f"{what}: " + "; ".join(problems)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """torch.equal, but NaNs equal each other."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )

"""A decode step in one call with CUDA tensors: kda.fused_decode, and norm= behind the other functions. The bits of the
functions one after another, in graphs, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from places import DEVICE, HERE, captured, only_cuda, without_synchronisation
from support import Tensor, same_bits

Call = dict[str, Any]
STATES = ("conv_state", "state")


def call(
    N: int, T: int = 1, H: int = 4, HV: int = 4, K: int = 128, V: int = 128, W: int = 4,
    dtype: torch.dtype = torch.bfloat16, pool: torch.dtype = torch.float32, v_first: bool = True, bounded: bool = False,
) -> Call:  # fmt: skip
    random = torch.Generator().manual_seed(N + T)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    D = 2 * H * K + HV * V
    slots = torch.randperm(N + 3, generator=random)[:N].int()
    if N > 1:
        slots[N // 2] = -1
    p = {
        "x": normal(N, T, D), "conv_weight": normal(D, W) / 2, "conv_bias": normal(D),
        "conv_state": normal(N + 3, D, W - 1), "g": normal(N, T, HV, K), "beta": normal(N, T, HV),
        "A_log": normal(HV, dtype=torch.float32), "dt_bias": normal(HV, K, dtype=torch.float32),
        "state": normal(N + 3, HV, *((V, K) if v_first else (K, V)), dtype=pool), "gate": normal(N, T, HV, V),
        "norm_weight": normal(V), "state_indices": slots, "state_v_first": v_first,
    }  # fmt: skip
    return HERE(p) | ({"lower_bound": -5.0} if bounded else {})


def fresh(p: Call) -> Call:
    return p | {name: p[name].clone() for name in STATES}


def apart(p: Call) -> Tensor:
    y = kda.causal_conv1d_update(
        p["x"], p["conv_state"], p["conv_weight"], p["conv_bias"], state_indices=p["state_indices"]
    )
    (HV, K), V = p["g"].shape[2:], p["gate"].shape[3]
    keys = (y.shape[2] - HV * V) // 2
    q, k, v = (t.unflatten(2, (-1, s)) for t, s in zip(y.split([keys, keys, HV * V], 2), (K, K, V), strict=True))
    o = kda.decode(
        q, k, v, p["g"], p["beta"], p["state"], state_indices=p["state_indices"], A_log=p["A_log"],
        dt_bias=p["dt_bias"], lower_bound=p.get("lower_bound"), use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, state_v_first=p["state_v_first"],
    )  # fmt: skip
    return kda.norm_gate(o, p["gate"], p["norm_weight"], out=o)  # type: ignore[no-any-return]


CALLS: dict[str, Call] = {
    "one": {"N": 1},
    "eight": {"N": 8},
    "bounded": {"N": 8, "bounded": True},
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


@pytest.mark.parametrize("name", CALLS)
def test_bits_of_its_parts(name: str) -> None:
    p = call(**CALLS[name])
    one, three = fresh(p), fresh(p)
    assert same_bits(kda.fused_decode(**one), apart(three))
    for state in STATES:
        assert same_bits(one[state], three[state]), state


def test_padding() -> None:
    p = call(8) | {"first_valid_slot": 1, "eps": 0.0}
    p["state_indices"][:] = torch.tensor([3, 0, 5, 0, 7, -1, 2, 9])
    want = kda.fused_decode(**fresh(p))
    padded = torch.tensor([1, 3, 5], device=DEVICE)
    p["gate"][padded] = torch.nan
    p["x"][padded] = torch.inf
    got = fresh(p)
    o = kda.fused_decode(**got)
    assert not o[padded].any() and same_bits(o, want)
    for name in STATES:
        changed = [i for i, (a, b) in enumerate(zip(got[name], p[name], strict=True)) if not same_bits(a, b)]
        assert changed == [2, 3, 5, 7, 9], name


@only_cuda
def test_in_a_graph() -> None:
    """20 steps, each of which starts early and depends on the one before."""
    for N in (1, 8, 130):
        p = call(N)
        out = torch.empty_like(p["gate"])
        memory = {name: p[name].clone() for name in (*STATES, "g")}

        def step(p: Call = p, out: Tensor = out) -> None:
            for _ in range(20):
                kda.fused_decode(**p, out=out)
                p["g"].copy_(out)

        step()
        want = [x.clone() for x in (out, *(p[name] for name in STATES))]
        graph = captured(step)
        for _ in range(5):
            for name, x in memory.items():
                p[name].copy_(x)
            out.fill_(torch.nan)
            graph.replay()
            assert all(same_bits(a, b) for a, b in zip((out, *(p[n] for n in STATES)), want, strict=True))


@only_cuda
def test_does_not_wait() -> None:
    p = fresh(call(8))
    kda.fused_decode(**p)
    with without_synchronisation():
        kda.fused_decode(**p)


def test_compiled() -> None:
    p = call(8)
    one, two = fresh(p), fresh(p)
    compiled = torch.compile(lambda **kw: kda.fused_decode(**kw), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(**one), kda.fused_decode(**two))
    for name in STATES:
        assert same_bits(one[name], two[name])


@pytest.mark.parametrize("lengths", [[1, 200, 0, 70], [40] * 12])
def test_prefill_with_a_norm(lengths: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    T = sum(lengths) + 5
    q, k, v, g, gate = (torch.randn(1, T, 4, 128, generator=random).bfloat16() for _ in range(5))
    beta, cu = torch.rand(1, T, 4, generator=random).bfloat16(), torch.tensor([0, *lengths]).cumsum(0)
    slots = torch.arange(len(lengths)) - 1
    kw = HERE({"q": q, "k": k, "v": v, "g": -g.abs(), "beta": beta, "cu_seqlens": cu, "state_indices": slots})
    state = torch.randn(len(lengths), 4, 128, 128, device=DEVICE)
    norm = kda.Norm(HERE(gate), activation="silu")
    o = kda.prefill(**kw, state=state.clone(), use_qk_l2norm_in_kernel=True)
    want = kda.norm_gate(o, *norm, out=o)
    assert same_bits(kda.prefill(**kw, state=state.clone(), use_qk_l2norm_in_kernel=True, norm=norm), want)
    norm.gate[:, : lengths[0]] = torch.nan  # of padding
    assert torch.equal(kda.prefill(**kw, state=state.clone(), use_qk_l2norm_in_kernel=True, norm=norm), want)

"""Calls of kda.fused_decode, and the same by three calls."""

from __future__ import annotations

from typing import Any

import torch

import kda

Tensor = torch.Tensor
Call = dict[str, Any]
STATES = ("conv_state", "state")


def call(
    N: int = 4, T: int = 1, H: int = 2, HV: int = 4, K: int = 24, V: int = 40, W: int = 4,
    dtype: torch.dtype = torch.float32, pool: torch.dtype = torch.float32, v_first: bool = True, packed: bool = False,
    seed: int = 0,
) -> Call:  # fmt: skip
    """Keywords of kda.fused_decode, over pools with three slots more than requests. One request is padding."""
    random = torch.Generator().manual_seed(N * T + W + seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    slots = torch.randperm(N + 3, generator=random)[:N].int()
    if N > 1:
        slots[N // 2] = -1
    D, rows = 2 * H * K + HV * V, (1, N * T) if packed else (N, T)
    cu = torch.arange(0, N * T + 1, T, dtype=torch.int32) if packed else None
    return {
        "x": normal(*rows, D), "conv_weight": normal(D, W) / 2, "conv_bias": normal(D),
        "conv_state": normal(N + 3, D, W - 1), "g": normal(*rows, HV, K), "beta": normal(*rows, HV),
        "A_log": normal(HV, dtype=torch.float32), "dt_bias": normal(HV * K, dtype=torch.float32),
        "state": normal(N + 3, HV, *((V, K) if v_first else (K, V)), dtype=pool),
        "gate": normal(*rows, HV, V), "norm_weight": normal(V), "state_v_first": v_first, "cu_seqlens": cu,
        "state_indices": slots,
    }  # fmt: skip


def fresh(p: Call) -> Call:
    return p | {name: p[name].clone() for name in STATES}


def apart(p: Call) -> Tensor:
    """The same by three calls. Padding is zeroed, whatever its gate is."""
    slots, cu = p["state_indices"], p["cu_seqlens"]
    conv_slots = slots if p.get("conv_indices") is None else p["conv_indices"]
    y = kda.causal_conv1d_update(
        p["x"], p["conv_state"], p["conv_weight"], p["conv_bias"], state_indices=conv_slots, cu_seqlens=cu
    )
    HV, K = p["g"].shape[2:]
    V = p["gate"].shape[3]
    H = (y.shape[2] - HV * V) // (2 * K)
    q, k, v = (t.unflatten(2, (-1, s)) for t, s in zip(y.split([H * K, H * K, HV * V], 2), (K, K, V), strict=True))
    o = kda.decode(
        q, k, v, p["g"], p["beta"], p["state"], state_indices=slots, cu_seqlens=cu, A_log=p["A_log"],
        dt_bias=p["dt_bias"], lower_bound=p.get("lower_bound"), scale=p.get("scale"), use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=p.get("allow_neg_eigval", False), state_v_first=p["state_v_first"],
    )  # fmt: skip
    more = {name: p[name] for name in ("eps", "activation") if name in p}
    return kda.norm_gate(o, p["gate"], p["norm_weight"], out=o, **more)  # type: ignore[no-any-return]

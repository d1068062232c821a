"""The stages put together, for tests on any device: a forward, and the backward of what it saved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda import stages


def forward(x: tuple[Tensor, ...], h0: Any, scale: float, how: dict[str, Any], packed: dict[str, Any]) -> Any:
    """(o, final_state), and what backward needs."""
    q, k, v, g, beta = x
    G = stages.cumsum(g, **packed)
    w, u, _, kg, Aqk, Akk_inv = stages.chunk_intra(q, k, v, G, beta, scale, **packed)
    h, v_new, hT = stages.delta_h(kg, w, u, G, h0, True, **how, **packed)
    return stages.fwd_o(q, v_new, G, Aqk, h, scale, **how, **packed), hT, (G, Aqk, Akk_inv, h, v_new)


def backward(
    x: tuple[Tensor, ...], saved: Any, d_o: Tensor, d_state: Tensor, scale: float, how: dict[str, Any], packed: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and the initial state."""
    q, k, v, g, beta = x
    G, Aqk, Akk_inv, h, v_new = saved
    w, _, qG, kg = stages.recompute_w_u(k, v, beta, Akk_inv, G, q, **packed)
    dAqk, dv_local = stages.bwd_local(v_new, d_o, Aqk, scale, **packed)
    dh, dh0, dv_new = stages.bwd_delta_h(qG, kg, w, G, d_o, dv_local, d_state, scale, **how, **packed)
    dq, dk, dv, dbeta, dG, dAkk = stages.bwd_wy_dqkg(
        q, k, v, v_new, G, beta, Akk_inv, h, d_o, dh, dv_new, scale, **how, **packed
    )
    stages.bwd_intra(q, k, G, beta, dAqk, dAkk, dq, dk, dbeta, dG, **packed)
    dg = stages.cumsum_backward(dG, g, **packed)
    B, T, H, K = q.shape
    shape = (B, T, H, dq.shape[2] // H, K)
    return dq.reshape(shape).sum(3), dk.reshape(shape).sum(3), dv, dg, dbeta, dh0

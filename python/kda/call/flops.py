"""Counts what the operators compute, for ``torch.utils.flop_counter`` and the benches: matrix products and the
convolution, two operations a multiply-add, as PyTorch counts its own. Elementwise work (gates, norms) does not
count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def forward_flop(K: int, V: int) -> int:
    """The chunked forward per token and value head, at two a multiply-add: three products with the state (kG S, qG S,
    kg^T v_new); four among the C = 64 tokens of a chunk (two scores, the solve, Aqk v_new), of whose 16-token blocks
    a triangle of 10 in 16 is computed; and the diagonal blocks of the solve."""
    return 6 * K * V + 160 * (K + V) + 2048


def recurrent_flop(K: int, V: int) -> int:
    """The token recurrence: three products with the state (S^T k, k u^T, S^T q)."""
    return 6 * K * V


def again_flop(K: int, V: int) -> int:
    """The forward again without its outputs, for a backward that was given no intermediate values."""
    return 4 * K * V + 160 * K + 80 * V + 2048


def backward_flop(K: int, V: int) -> int:
    """Six products with states, eight in the chunk."""
    return 12 * K * V + 320 * (K + V)


def training_flop(K: int, V: int) -> int:
    """Forward, the forward again, and backward."""
    return forward_flop(K, V) + again_flop(K, V) + backward_flop(K, V)


def map_flop(K: int, columns: int) -> int:
    """The forward's recurrence without outputs, on a state of K columns for M and V each for b and d."""
    return 4 * K * columns + 160 * K + 80 * columns + 2048


def segment_map_flop(K: int, V: int) -> int:
    """M and b."""
    return map_flop(K, K + V)


def segment_d_flop(K: int, V: int) -> int:
    return map_flop(K, V)


def bwd_wy_dqkg_flop(K: int, V: int) -> int:
    """Three products with states, and two in the chunk."""
    return 6 * K * V + 160 * V


def prefill_f32_flop(K: int, V: int) -> int:
    """Forward, and two more solves for w and u."""
    return forward_flop(K, V) + 80 * (K + V)


# ---- formulas of operators: they get shapes in place of tensors, by the names of the schemas ----


def _per_token(q: Any, v: Any, flop: Callable[[int, int], int]) -> int:
    B, T, HV, V = v
    return int(B * T * HV * flop(q[3], V))


def _forward(q: Any, v: Any, recurrent: bool, **_: Any) -> int:
    return _per_token(q, v, recurrent_flop if recurrent else forward_flop)


def _backward(q: Any, v: Any, Akk: Any, **_: Any) -> int:
    everything_kept = Akk is not None  # v_new and the scores; otherwise a few states, or nothing
    again = 0 if everything_kept else _per_token(q, v, again_flop)
    return again + _per_token(q, v, backward_flop)


def _prefill(g: Any, out: Any, **_: Any) -> int:
    return _per_token(g, out, forward_flop)


def _decode(g: Any, out: Any, **_: Any) -> int:  # a flush of drafts depends on numbers, so it does not count
    return _per_token(g, out, recurrent_flop)


def _segment_map(q: Any, v: Any, d_o: Any, want_M: bool, want_b: bool, **_: Any) -> int:
    (B, T, HV, V), K = v, q[3]
    columns = K * bool(want_M) + V * bool(want_b) + V * (d_o is not None)
    return int(B * T * HV * map_flop(K, columns))


def _segment_merge(M: Any, b: Any, **_: Any) -> int:
    P, HV, K, _K = M
    return int(2 * P * HV * K * (b[2] * b[3]))


def _conv(x: Any, weight: Any, **_: Any) -> int:
    B, T, _D = x  # D is that of weight: x may be one of three
    return int(2 * B * T * weight[0] * weight[1])


def _conv_backward(x: Any, weight: Any, wanted: Any, **_: Any) -> int:
    return _conv(x, weight) * (bool(wanted[0]) + bool(wanted[1]))


def _joint_linear(x: Any, weights: Any) -> int:
    return int(2 * x[0] * x[1] * sum(w[0] for w in weights))


def _joint_linear_backward(x: Any, weights: Any, dy: Any, wanted: Any) -> int:
    rows = [w[0] for w in weights]
    return int(2 * x[0] * x[1] * (wanted[0] * sum(rows) + sum(n for n, w in zip(rows, wanted[1:], strict=True) if w)))


@functools.cache
def formulas() -> dict[Any, Any]:
    """The formulas by operator. Afterwards every new ``FlopCounterMode`` knows them."""
    import torch
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    def by_name(operator: Any, formula: Any) -> Callable[..., int]:
        names = [a.name for a in operator.default._schema.arguments]
        return lambda *values, out_shape, **options: formula(**dict(zip(names, values, strict=False)), **options)

    ours = {
        "forward": _forward,
        "backward": _backward,
        "prefill": _prefill,
        "decode": _decode,
        "decode_mtp": _decode,
        "verify": _decode,
        "flush_verify": _decode,
        "segment_map": _segment_map,
        "segment_merge": _segment_merge,
        "conv": _conv,
        "conv_backward": _conv_backward,
        "conv_update": _conv,
        "joint_linear": _joint_linear,
        "joint_linear_backward": _joint_linear_backward,
    }
    operators = {getattr(torch.ops.kda, name): formula for name, formula in ours.items()}
    for operator, formula in operators.items():
        register: Any = register_flop_formula(operator)
        register(by_name(operator, formula))
    return {operator: flop_registry[operator] for operator in operators}

"""Helpers of the speculation tests: calls with drafts, the records they need, and plain decode of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kda
from support import Problem, Tensor, assert_close, make, same_bits

NAN = float("nan")
REQUESTS = 3
SIZES = {"H": 1, "G": 2, "K": 20, "V": 36, "gate": "softplus", "beta": "sigmoid", "v_first": True}


def drafts(T: int, N: int = REQUESTS, seed: int = 0, **changes: Any) -> tuple[Problem, Tensor]:
    """A call with T tokens per request, without states, and the states."""
    p = make(B=N, T=T, seed=seed, **{**SIZES, **changes})
    return p.having(initial_state=None), p.tensors["initial_state"]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def alike(m: int, N: int = REQUESTS) -> Tensor:
    return torch.full((N,), m, dtype=torch.int32)


def tokens(p: Problem, *which: Any) -> Problem:
    """The call for some of the rows and tokens."""
    return p.having(**{n: p.tensors[n][which] for n in ("q", "k", "v", "g", "beta")})


def random_trees(N: int, T: int, seed: int = 0) -> Tensor:
    """Every token follows a random earlier one, or the committed text."""
    rng = np.random.default_rng(seed)
    return torch.tensor([[int(rng.integers(-1, t)) if t else -1 for t in range(T)] for _ in range(N)]).int()


def decoded(p: Problem, h0: Tensor, parents: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Plain decode of one token a call, in float32: outputs, and the states before all tokens and after each. A token
    continues from the state of its parent."""
    p, states, o = p.map(Tensor.float), [h0.float()], []
    for t in range(p.tensors["q"].shape[1]):
        before = [t - 1] * len(h0) if parents is None else parents[:, t].clamp(-1).tolist()
        state = torch.stack([states[b + 1][n] for n, b in enumerate(before)])
        o.append(kda.decode(**tokens(p, slice(None), slice(t, t + 1)).keywords, state=state))
        states.append(state)
    return torch.cat(o, 1), states


def records_for(p: Problem, entries: int, slots: int = REQUESTS, fill: float = NAN, **more: Any) -> kda.Records:
    (H, K), (HV, V) = p.tensors["q"].shape[2:], p.tensors["v"].shape[2:]
    records = kda.new_records(slots, entries, H, HV, K, V, **more)
    for x in records[:3]:
        x.fill_(fill)
    return records


def same_records(a: kda.Records, b: kda.Records) -> bool:
    return all(same_bits(x, y) for x, y in zip(given(a), given(b), strict=True))


def given(records: kda.Records) -> list[Any]:
    return [x for x in records if x is not None]


def layout(p: Problem) -> dict[str, Any]:
    return {"state_v_first": p.options["state_v_first"]}


def near(o: Tensor, expected: Tensor, state: Tensor | None = None, expected_state: Tensor | None = None) -> None:
    """Asserts that float32 agrees to 1e-5, and bfloat16 outputs to 0.003."""
    assert_close({"o": expected}, {"o": o}, slack=0.6 if o.dtype == torch.bfloat16 else 1)
    if state is not None and expected_state is not None:
        assert_close({"final_state": expected_state}, {"final_state": state})


# ---- a convolution before the recurrence ----


def convolved(p: Problem, W: int, bias: bool, seed: int = 0) -> tuple[Problem, kda.Conv]:
    """The call with raw rows instead of q, k, v, over a pool with one slot more than requests, in another order."""
    (H, K), (HV, V), random = p.tensors["q"].shape[2:], p.tensors["v"].shape[2:], torch.Generator().manual_seed(seed)
    (N, T), D, dtype = p.tensors["q"].shape[:2], 2 * H * K + HV * V, p.tensors["q"].dtype
    weight, b = torch.randn(D, W, generator=random), torch.randn(D, generator=random) if bias else None
    x, pool = (torch.randn(shape, generator=random).to(dtype) for shape in ((N, T, D), (N + 1, D, W - 1)))
    state = pool.transpose(1, 2).contiguous().transpose(1, 2)  # rows of channels: any strides
    return p.having(q=None, k=None, v=None), kda.Conv(x, weight, b, state, torch.arange(N, 0, -1).int())


def rolled(conv: kda.Conv, m: int) -> Tensor:
    """The convolution's pool after m tokens of every request."""
    state = conv.state.clone()
    kda.causal_conv1d_update(conv.x[:, :m], state, conv.weight, conv.bias, state_indices=conv.indices)
    return state


def separate(p: Problem, conv: kda.Conv, like: Problem) -> Problem:
    """The call without the fused convolution: with the operator kda.causal_conv1d_update before it."""
    y = kda.causal_conv1d_update(conv.x, conv.state.clone(), conv.weight, conv.bias, state_indices=conv.indices)
    sizes = [like.tensors[n].shape[2] * like.tensors[n].shape[3] for n in "qkv"]
    parts = y.split(sizes, 2)
    return p.having(**{n: x.unflatten(2, like.tensors[n].shape[2:]) for n, x in zip("qkv", parts, strict=True)})


def raw(p: Problem) -> dict[str, Any]:
    return {"q": None, "k": None, "v": None, **p.keywords}

"""One small call of every function without gradients, for tests of what autograd is told about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import calls
import kda
from drafting import REQUESTS, alike, drafts, int32, records_for
from kda.call.shared import STAGES
from support import Tensor

Call = tuple[Callable[..., Any], dict[str, Any]]


def _pooled() -> dict[str, Any]:
    p, h0 = drafts(2)
    return p.keywords | {"state": torch.cat([h0, h0[:1]]), "state_indices": int32(3, 0, 1)}


def _prefill() -> Call:
    kw = _pooled()
    kw |= {"checkpoints": kw["state"].clone(), "checkpoint_slots": int32(0, 1, 2).view(REQUESTS, 1)}
    for name in ("q", "k", "v", "g", "beta"):
        kw[name] = kw[name].repeat(1, 40, *(1,) * (kw[name].ndim - 2))
    return kda.prefill, kw | {"out": torch.full_like(kw["v"], 7.0)}


def _decode() -> Call:
    kw = _pooled()
    return kda.decode, kw | {"out": torch.full_like(kw["v"], 7.0)}


def _fla() -> Call:
    kw = _pooled()
    slots = torch.stack([kw.pop("state_indices"), int32(2, 4, 5)], 1)
    pool = torch.cat([kw.pop("state")] * 2)
    more = {"initial_state": pool, "ssm_state_indices": slots, "num_accepted_tokens": int32(2, 1, 1)}
    return kda.fused_recurrent_kda_fwd, kw | more | {"out": torch.full_like(kw["v"], 7.0)}


def _conv(kw: dict[str, Any]) -> kda.Conv:
    N = kw["q"].shape[0]
    rows = torch.cat([kw[n].flatten(2) for n in ("q", "k", "v")], -1)
    kw |= {"q": None, "k": None, "v": None}
    return kda.Conv(rows, torch.randn(rows.shape[2], 4), torch.randn(rows.shape[2]), torch.randn(N, rows.shape[2], 3))


def _decode_mtp() -> Call:
    kw = _pooled()
    snapshots = kw["state"].new_full((REQUESTS, 2, *kw["state"].shape[1:]), 7.0)
    out = torch.full_like(kw["v"], 7.0)
    return kda.decode_mtp, kw | {"conv": _conv(kw), "snapshots": snapshots, "out": out}


def _normed() -> Call:
    function, kw = _decode()
    return function, kw | {"norm": kda.Norm(torch.randn(kw["v"].shape), torch.randn(kw["v"].shape[3]))}


def _fused() -> Call:
    kw = _pooled()
    (B, T, HV, V), K = kw["v"].shape, kw["q"].shape[3]
    conv = _conv(kw)
    inputs = {n: kw[n] for n in ("g", "beta", "state", "state_indices")}
    inputs |= {"conv_state": conv.state.new_zeros(4, conv.x.shape[2], 3)}
    gates = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV, K), "gate": torch.randn(B, T, HV, V)}
    more = {"x": conv.x, "conv_weight": conv.weight, "conv_bias": conv.bias, "norm_weight": torch.randn(V)}
    return kda.fused_decode, inputs | gates | more | {"out": torch.full((B, T, HV, V), 7.0)}


def _verify() -> Call:
    p, h0 = drafts(3)
    return kda.verify_kvbuffer, p.keywords | {"state": h0, "records": records_for(p, 3), "out": p.tensors["v"] * 0 + 7}


def _flush() -> Call:
    p, h0 = drafts(3)
    records = records_for(p, 3)
    kda.verify_kvbuffer(**p.keywords, state=h0, records=records)
    rolled = {"conv_x": torch.randn(REQUESTS, 3, 6), "conv_state": torch.randn(REQUESTS, 6, 3)}
    options = {"state_v_first": True, **rolled}
    return kda.flush_kvbuffer, {"state": h0, "records": records, "accept_len": alike(2), **options}


def _flush_all() -> Call:
    _, kw = _flush()
    records = kda.Records(*(x if x is None else x[None] for x in kw["records"]))
    kw = {n: kw[n] for n in ("accept_len", "state_v_first")} | {"state": kw["state"][None], "records": records}
    return kda.flush_kvbuffer_all_layers, kw


def _flush_verify(ring: bool) -> Call:
    p, h0 = drafts(3)
    first, second = (records_for(p, 6, ring=ring) for _ in range(2))
    kda.verify_kvbuffer(**p.keywords, state=h0, records=first)
    rounds = {"records": first} if ring else {"records": second, "last": first}
    kw = p.keywords | {"state": h0, "accept_len": alike(2), "out": p.tensors["v"] * 0 + 7, **rounds}
    if ring:  # full: the flush writes the state, and the cursors move
        first.ring_count.fill_(1)
    return kda.flush_verify_kvbuffer, kw


CALLS: dict[str, Callable[[], Call]] = {
    "prefill": _prefill,
    "decode": _decode,
    "fused_recurrent_kda_fwd": _fla,
    "decode, norm": _normed,
    "fused_decode": _fused,
    "decode_mtp": _decode_mtp,
    "verify_kvbuffer": _verify,
    "flush_kvbuffer": _flush,
    "flush_kvbuffer_all_layers": _flush_all,
    "flush_verify_kvbuffer": lambda: _flush_verify(ring=False),
    "flush_verify_kvbuffer, ring": lambda: _flush_verify(ring=True),
} | {
    name: lambda name=name: (calls.function(name), calls.BASES[name]())  # type: ignore[misc]
    for name in ("causal_conv1d_update", "norm_gate", "segment_map", "segment_merge", "prefill_f32", *STAGES)
}
# calls.BASES have their tensors on the CPU, except for the convolution.
ON_CUDA = tuple(name for name in CALLS if name == "causal_conv1d_update" or name not in calls.BASES)


def tensors(keywords: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """All tensors, by the names that error messages give them."""
    for name, x in keywords.items():
        if isinstance(x, Tensor):
            yield name, x
        elif hasattr(x, "_asdict"):
            yield from ((f"{name}.{field}", y) for field, y in x._asdict().items() if isinstance(y, Tensor))

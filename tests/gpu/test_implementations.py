"""Each implementation of decode, verify, flush and flush_verify by name, for every number of tokens and of accepted
ones: it gives the numbers of the float64 oracle, or says why it does not take the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from places import DEVICE, LARGE, ORACLE, Place, close
from rounds import flush, flush_verify, records_of, two, verify
from support import DECODING, Problem, Tensor, kernels_of

TILED: dict[str, dict[str, Any]] = {
    "large": LARGE,
    "bf16": {"K": 64, "V": 128, "dtype": torch.bfloat16, "gate": "log"},
    "grouped": {"K": 128, "V": 64, "G": 4, "gate": "lower_bound"},
}
SHAPES = {**TILED, "any": {}, "k_first": {**LARGE, "v_first": False}}


def takes(op: str, name: str, shape: str, T: int) -> bool:
    few = {"cuda_decode_sweep": 1, "cuda_drafts_recurrent": 4}
    return name == kernels_of(op, DEVICE.type)[-1] or (shape in TILED and few.get(name, T) >= T)


def results(place: Place, op: str, p: Problem, following: Problem, h0: Tensor, last: kda.Records) -> dict[str, Tensor]:
    """Request n accepts n tokens of the ``last`` round."""
    N, T = p.tensors["g"].shape[:2]
    m, pool, new, last = torch.arange(N).int(), place(h0), records_of(place, p, T, slots=N), place(last)
    if op == "flush":
        flush(place, p, pool, last, m)
        return {"state": pool}
    if op == "decode":
        return {"o": kda.decode(**place.call(p), state=pool), "state": pool}
    o = verify(place, p, pool, new) if op == "verify" else flush_verify(place, following, pool, new, m, last)
    return {"o": o, "state": pool, **dict(zip("uka", new[:3], strict=True))}


@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("op", DECODING)
def test_by_name(op: str, T: int) -> None:
    for shape, sizes in SHAPES.items():
        p, following, h0 = two(T, N=T + 1, **sizes)
        exact = records_of(ORACLE, p, T, slots=T + 1)
        verify(ORACLE, p, ORACLE(h0), exact)
        call = p, following, h0, kda.Records(*(None if x is None else x.float() for x in exact))
        expected = results(ORACLE, op, *call)
        for name in kernels_of(op, DEVICE.type):
            here = Place(DEVICE, impl=name)
            if takes(op, name, shape, T):
                for n, x in results(here, op, *call).items():
                    close(expected[n], x, f"{name} {shape} {n}")
            else:
                with pytest.raises(NotImplementedError, match=rf"^{name} was forced but (has|needs|takes) \S+ "):
                    results(here, op, *call)


@pytest.mark.parametrize("op", DECODING)
def test_tensors_elsewhere(op: str) -> None:
    """The CPU's kernels take no tensors of a device, and the device's none of the CPU."""
    p, following, h0 = two(1)
    for name in kernels_of(op, "cpu" if DEVICE.type == "cuda" else "cuda"):
        with pytest.raises(NotImplementedError, match=rf"^{name} was forced but runs on (the CPU|CUDA tensors) only"):
            results(Place(DEVICE, impl=name), op, p, following, h0, records_of(ORACLE, p, 1))

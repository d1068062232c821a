"""fused_recurrent_kda_fwd as a drop-in for FLA's: slots of states for every token or request, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from support import Problem, Tensor, assert_close, make, oracle, same_bits


def one_by_one(p: Problem, n: int, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Request n from a K-first state in float64: outputs, and the states after each token."""
    o, _, states = oracle(p.map(lambda x: x[n : n + 1].double()).having(initial_state=state[None].double()))
    return o[0], [s[0] for s in states[0][1:]]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accepted", [None, [1, 3, 2]])
def test_a_slot_for_every_token(accepted: list[int] | None, dtype: torch.dtype) -> None:
    p = make(3, 3, 1, 2, 16, 24, state=False).having(state_v_first=None)
    pool = torch.randn(12, 2, 16, 24).to(dtype)
    slots = torch.tensor([[4, 0, 7], [2, 11, 3], [-1, -1, -1]])
    count = None if accepted is None else torch.tensor(accepted)
    expected, given, out = pool.double(), pool.clone(), torch.full_like(p.tensors["v"], 7.0)
    more = {"ssm_state_indices": slots, "num_accepted_tokens": count, "out": out}
    o, state = kda.fused_recurrent_kda_fwd(**p.keywords, initial_state=given, **more)
    assert o is out and state is given
    for n in range(2):
        start = slots[n, 0 if accepted is None else accepted[n] - 1]
        want, states = one_by_one(p, n, pool[start])
        assert_close({"o": want}, {"o": o[n]})
        for slot, s in zip(slots[n], states, strict=True):
            expected[slot] = s
    assert not o[2].any()
    assert_close({"final_state": expected}, {"final_state": state})


@pytest.mark.cuda
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_slot_for_every_request(in_place: bool, packed: bool) -> None:
    p = make(3, 1, 1, 2, 16, 24, state=False).having(state_v_first=None)
    pool, slots = torch.randn(6, 2, 16, 24), torch.tensor([4, 0, 5])
    expected = [one_by_one(p, n, pool[slot]) for n, slot in enumerate(slots)]
    if packed:
        p = p.map(lambda x: x.transpose(0, 1).contiguous()).having(cu_seqlens=torch.arange(4))
    given = pool.clone()
    more = {"inplace_final_state": in_place, "output_final_state": not in_place}
    o, state = kda.fused_recurrent_kda_fwd(**p.keywords, initial_state=given, ssm_state_indices=slots, **more)
    assert_close({"o": torch.cat([x for x, _ in expected])}, {"o": o.flatten(0, 1)})
    states = torch.stack([s[0] for _, s in expected])
    assert_close({"final_state": states}, {"final_state": state[slots] if in_place else state})
    assert state is given if in_place else same_bits(given, pool)
    untouched = torch.tensor([1, 2, 3])
    assert same_bits(given[untouched], pool[untouched])


@pytest.mark.cuda
@pytest.mark.parametrize("state", ["in place", "kept", "none"])
@pytest.mark.parametrize("v_first", [False, True])
def test_rows_without_slots(state: str, v_first: bool) -> None:
    p = make(2, 5, 1, 2, 16, 24, gate="softplus", beta="sigmoid", v_first=v_first, state=state != "none")
    expected = kda.fused_recurrent_kda(**p.keywords, output_final_state=True)
    given = p.tensors.get("initial_state")
    before = None if given is None else given.clone()
    more = {"inplace_final_state": state == "in place", "output_final_state": True}
    o, final = kda.fused_recurrent_kda_fwd(**p.keywords, **more)
    assert_close({"o": expected[0], "final_state": expected[1]}, {"o": o, "final_state": final})
    if before is not None:
        assert (final is given) == (state == "in place") and same_bits(given, before) == (state == "kept")
    more["output_final_state"] = False
    assert kda.fused_recurrent_kda_fwd(**p.keywords, **more)[1] is (given if state == "in place" else None)


def test_what_fused_recurrent_kda_fwd_refuses() -> None:
    p = make(2, 2, 1, 1, 4, 6)
    pool = p.tensors["initial_state"]
    slots, many = torch.tensor([0, 1]), torch.tensor([[0, 1], [1, 0]])

    def refused(sentence: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=sentence):
            kda.fused_recurrent_kda_fwd(**{**p.keywords, **more})

    refused("^initial_state: expected a tensor with inplace_final_state=True, got None", initial_state=None)
    refused("^ssm_state_indices: expected .N, S., a slot for every token", ssm_state_indices=slots)
    refused("^ssm_state_indices: expected a tensor of integers", ssm_state_indices=slots.float())
    refused("^ssm_state_indices: ", ssm_state_indices=many[:, :1])
    refused("^ssm_state_indices: ", ssm_state_indices=many + 1)
    refused("^inplace_final_state: expected True", ssm_state_indices=many, inplace_final_state=False)
    refused("^num_accepted_tokens: expected None without ssm_state_indices", num_accepted_tokens=slots)
    refused("^initial_state: expected shape", initial_state=pool[..., :3])
    refused("^q: expected a torch tensor", q=p.tensors["q"].numpy())
    refused("^out: ", out=torch.zeros(1))
    one = {n: p.tensors[n][:, :1] for n in ("q", "k", "v", "g", "beta")} | {"inplace_final_state": False}
    refused("^ssm_state_indices: expected slots below 2, got 2", **one, ssm_state_indices=slots + 1)
    with pytest.raises(TypeError, match="no_such_option"):
        kda.fused_recurrent_kda_fwd(**p.keywords, no_such_option=1)

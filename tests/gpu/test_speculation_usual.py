"""The most common call, bfloat16 chains without a ring or a convolution, has specialised kernels. They give the
numbers of the float64 oracle, and the bits of the same call in a form that other kernels take. The same holds for
such chains on a ring, and with a convolution before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from drafting import NAN, convolved, int32, raw, separate, tokens
from places import DEVICE, HERE, LARGE, ORACLE, POOLS, Place, all_same, close, matches
from rounds import flush, flush_verify, records_of, two, verify
from support import Problem, Tensor, same_bits

pytestmark = pytest.mark.usefixtures("kernels")
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"K": 64, "V": 64},
    "alone": {"K": 64, "V": 128, "G": 1, "H": 3, "gate": "lower_bound"},
    "grouped": {"K": 128, "V": 64, "G": 4},
    "large": LARGE,
}


def usual(T: int, N: int, **sizes: Any) -> tuple[Problem, Problem, Tensor]:
    return two(T, N=N, dtype=torch.bfloat16, **sizes)


def served(
    place: Place, p: Problem, following: Problem, h0: Tensor, m: Tensor, slots: list[int] | None = None,
    lost: int | None = None, gap: int = 0, ring: bool = False, chain: bool = False, flags: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Verify, flush, and in one call the same flush and a verify of the next drafts. Returns outputs of all rows,
    then the kept data of rows with a slot. ``lost``: a row without records; ``gap``: elements between rows of the
    states; ``ring``: a ring with nothing committed; ``chain``: pass a chain as parents."""
    N, T, K = *p.tensors["g"].shape[:2], h0.shape[-1]
    homes = list(range(N)) if slots is None else slots
    live = [n for n in range(N) if homes[n] >= 0]
    named = [homes[n] for n in live]
    size = N if slots is None else max(slots) + 2
    memory = torch.full((size, *h0.shape[1:-1], K + gap), NAN, dtype=h0.dtype)
    memory[..., :K][named] = h0[live]
    at = {} if slots is None else {"state_indices": int32(*slots)}
    trees = {"parents": torch.arange(-1, T - 1).int().expand(N, T).contiguous()} if chain else {}
    last = {f"last_{n}": x for n, x in trees.items()}

    def kept(entries: int, ring: bool = False) -> kda.Records:
        new = records_of(place, p, entries, slots=size, ring=ring)
        indices = None if slots is None else place(int32(*(-1 if n == lost else s for n, s in enumerate(slots))))
        return new._replace(indices=indices)

    a, b, pool, fused = kept(2 * T if ring else T, ring), kept(T), place(memory), place(memory)
    o = verify(place, p, pool[..., :K], a, **trees, **at, **({"has_initial_state": torch.ones(N) > 0} if flags else {}))
    flush(place, p, pool[..., :K], a, m, **trees, **at)
    plain = a._replace(ring_first=None, ring_count=None)
    o_next = flush_verify(place, following, fused[..., :K], b, m, plain, **trees, **last, **at)
    assert same_bits(pool, fused), "one call, or two"
    nobodys = [s for s in range(size) if s not in named]
    assert all(x[nobodys].isnan().all() for x in (pool, *a[:3], *b[:3]))
    assert pool[..., K:].isnan().all() and a.u[:, T:].isnan().all()
    padding = [n for n in range(N) if homes[n] < 0]
    assert not o[padding].any() and not o_next[padding].any()
    records = {f"{n}{i}": x[named, :T] for i, r in enumerate((a, b)) for n, x in zip("uka", r[:3], strict=True)}
    return {"o": o, "o_next": o_next, "state": pool[named, ..., :K], **records}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 6, 8])
def test_numbers_and_bits(T: int, shape: str, pool: torch.dtype) -> None:
    """Row n accepts n tokens, if there are as many; two of the rows are padding."""
    N = T + 4
    p, following, h0 = usual(T, N, **SHAPES[shape])
    m, h0 = torch.arange(N).clamp(max=T).int(), h0.to(pool)
    slots = [(5 * n + 1) % 17 if n not in (1, N - 1) else -1 - n for n in range(N)]

    def numbers(place: Place, lost: int | None = None) -> dict[str, Tensor]:
        got = served(place, p, following, h0, m, slots, lost)
        # A written state is rounded, sometimes to the other neighbour, and then a round that begins there differs.
        return {n: x for n, x in got.items() if pool == torch.float32 or n not in ("o_next", "u1")}

    matches(numbers)
    matches(numbers, 2)
    expected = served(HERE, p, following, h0, m)
    assert all_same(served(HERE, p, following, h0, m, slots), padded(expected, slots))
    wide = [x.having(**{n: x.tensors[n].float() for n in ("g", "beta")}) for x in (p, following)]
    assert all_same(served(HERE, *wide, h0, m), expected), "gates in float32"
    options: list[dict[str, bool | int]] = [{"gap": 8}, {"ring": True}, {"flags": True}]
    for option in [*options, {"chain": True}] if T > 4 else options:  # a tree of few drafts has another kernel
        assert all_same(served(HERE, p, following, h0, m, **option), expected), option
    assert same_bits(verify(HERE, p, HERE(h0), None), expected["o"]), "outputs only"


def padded(got: dict[str, Tensor], slots: list[int]) -> dict[str, Tensor]:
    """The result of ``served`` when rows without a slot are padding."""
    live = torch.tensor(slots, device=DEVICE) >= 0
    return {n: x.where(live[:, None, None, None], 0) if n in ("o", "o_next") else x[live] for n, x in got.items()}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_channel", [False, True])  # or channels side by side
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T", [2, 5, 6, 8])
def test_convolution_in_front(T: int, bias: bool, by_channel: bool, shape: str, pool: torch.dtype) -> None:
    """Everything in bfloat16: the bits of the operator before the call, and of the same call in a form that other
    kernels take."""
    N = 210 if T == 6 else 5  # with so many rows, blocks have all columns of a head
    p, _, h0 = usual(T, N, **SHAPES[shape])
    rows, given = convolved(p, 4, bias)
    entries = given.state.contiguous() if by_channel else given.state
    weights = [x if x is None else HERE(x.bfloat16()) for x in (given.weight, given.bias)]
    conv = kda.Conv(HERE(given.x), *weights, HERE(entries), HERE(given.indices))
    raw_call, state = raw(HERE(rows)), HERE(h0.to(pool))

    def verified(call: dict[str, Any], conv: kda.Conv | None = None) -> dict[str, Tensor]:
        records = records_of(HERE, p, T, slots=N)
        o = kda.verify_kvbuffer(**call, state=state, records=records, conv=conv)
        assert same_bits(kda.verify_kvbuffer(**call, state=state, conv=conv), o), "outputs only"
        return {"o": o, **dict(zip("uka", records[:3], strict=True))}

    expected = verified(separate(HERE(rows), conv, HERE(p)).keywords)
    assert all(x.isfinite().all() for x in expected.values())
    assert all_same(verified(raw_call, conv), expected)
    assert all_same(verified(raw_call, conv._replace(weight=conv.weight.float())), expected), "weights in float32"
    wide = {n: raw_call[n].float() for n in ("g", "beta")}
    assert all_same(verified(raw_call | wide, conv), expected), "gates in float32"


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("sizes", [LARGE, {"K": 64, "V": 64, "gate": "lower_bound"}, {"K": 64, "V": 128}])
@pytest.mark.parametrize("T", [1, 2, 4, 8])
def test_company_changes_no_bit(T: int, sizes: dict[str, Any], pool: torch.dtype) -> None:
    """For few rows, for some, and for so many that blocks have all columns of a head."""
    N = 840 if T in (1, 4) else 320
    p, following, h0 = usual(T, N, **sizes)
    m, h0 = torch.arange(N).int() % (T + 1), h0.to(pool)
    whole = served(HERE, p, following, h0, m)
    wide = [x.having(**{n: x.tensors[n].float() for n in ("g", "beta")}) for x in (p, following)]
    assert all_same(served(HERE, *wide, h0, m), whole), "gates in float32"
    for rows in ([7], [319, 0, 2], list(range(100, 170))):
        part = served(HERE, tokens(p, rows), tokens(following, rows), h0[rows], m[rows])
        assert all_same(part, {n: x[rows] for n, x in whole.items()}), rows


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("sizes", [LARGE, {"K": 64, "V": 64}])
@pytest.mark.parametrize(("T", "fewer"), [(4, (1, 2, 3)), (16, (5, 8, 9))])
def test_later_drafts_change_nothing(
    T: int, fewer: tuple[int, ...], sizes: dict[str, Any], pool: torch.dtype
) -> None:  # fmt: skip
    """They are not on a token's path; but calls of up to four drafts have their own kernels."""
    p, _, h0 = usual(T, 3, **sizes)
    records = records_of(HERE, p, T)
    o = verify(HERE, p, HERE(h0.to(pool)), records)
    for t in fewer:
        first = tokens(p, slice(None), slice(t))
        part = records_of(HERE, first, t)
        assert same_bits(verify(HERE, first, HERE(h0.to(pool)), part), o[:, :t])
        assert all_same(part[:3], [x[:, :t] for x in records[:3]]), t


def around_rings(
    place: Place, calls: list[Problem], start: Tensor, slots: list[int], rows: list[int], wide: bool = False
) -> dict[str, Tensor]:
    """Some rounds of these rows on rings that begin anywhere, until states have been written; row n accepts at most n
    drafts. ``wide``: gates in float32."""
    T, size = calls[0].tensors["g"].shape[1], len(start)
    mine = [tokens(p, rows) for p in calls]
    if wide:
        mine = [p.having(g=p.tensors["g"].float()) for p in mine]
    at, ring = place(int32(*(slots[n] for n in rows))), records_of(place, calls[0], 3 * T + 2, slots=size, ring=True)
    assert ring.ring_first is not None and ring.ring_count is not None
    ring.ring_first.copy_(place(torch.arange(size).int() % (3 * T + 2)))
    memory, got = place(start), {}
    for turn in range(7):
        m = torch.tensor(rows).int() % (T + 1) if turn else torch.zeros(len(rows)).int()
        o = flush_verify(place, mine[turn % 2], memory, ring._replace(indices=at), m, state_indices=at)
        got[f"o{turn}"] = o
    cursors = {"ring_first": ring.ring_first, "ring_count": ring.ring_count}
    return {**got, "state": memory, "u": ring.u, "k": ring.k, "alpha": ring.alpha, **cursors}


def in_slots(h0: Tensor, slots: list[int], size: int, pool: torch.dtype) -> Tensor:
    """A pool with these states, and NaN elsewhere."""
    start = torch.full((size, *h0.shape[1:]), NAN, dtype=pool)
    live = [n for n, slot in enumerate(slots) if slot >= 0]
    start[[slots[n] for n in live]] = h0[live].to(pool)
    return start


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 2, 4, 6])
def test_rings(T: int, shape: str, pool: torch.dtype) -> None:
    """Cursors are the oracle's, so states are written in the same rounds. One row is padding."""
    N = T + 3
    (*calls, h0), slots = usual(T, N, **SHAPES[shape]), [(5 * n + 2) % 13 if n != 1 else -1 for n in range(N)]
    start, every = in_slots(h0, slots, 13, pool), list(range(N))
    expected = around_rings(HERE, calls, start, slots, every)
    oracle = around_rings(ORACLE, calls, start, slots, every)
    if pool == torch.float32:  # a state rounded to the other neighbour changes the rounds that start there
        for name, x in expected.items():
            if "ring" not in name:
                close(oracle[name], x, name)
    assert all(torch.equal(oracle[n], expected[n].cpu()) for n in ("ring_first", "ring_count"))
    most = max((n for n in every if slots[n] >= 0), key=lambda n: n % (T + 1))
    for got in (oracle, expected):
        assert not same_bits(got["state"][slots[most]].cpu(), start[slots[most]]), "no state was written"
    assert all_same(around_rings(HERE, calls, start, slots, every, wide=True), expected), "gates in float32"


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("sizes", [LARGE, {"K": 64, "V": 64, "gate": "lower_bound"}, {"K": 64, "V": 128}])
@pytest.mark.parametrize("T", [1, 4, 8])
def test_company_on_rings_changes_no_bit(T: int, sizes: dict[str, Any], pool: torch.dtype) -> None:
    """For few rows, for some, and for so many that blocks have all columns of a head."""
    N = 320
    (*calls, h0), slots = usual(T, N, **sizes), [(7 * n + 3) % 331 if n != 1 else -1 for n in range(N)]
    start = in_slots(h0, slots, 331, pool)
    whole = around_rings(HERE, calls, start, slots, list(range(N)))
    assert all_same(around_rings(HERE, calls, start, slots, list(range(N)), wide=True), whole), "gates in float32"
    for rows in ([7], [319, 0, 2], list(range(100, 150)), list(range(100, 170))):
        part, homes = around_rings(HERE, calls, start, slots, rows), [slots[n] for n in rows]
        assert all(same_bits(part[f"o{turn}"], whole[f"o{turn}"][rows]) for turn in range(7)), rows
        kept = ("state", "u", "k", "alpha", "ring_first", "ring_count")
        assert all(same_bits(part[name][homes], whole[name][homes]) for name in kept), rows

"""The memory of small calls, and functions that call with it: the operators of operators.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import kda
from drafting import drafts, random_trees, records_for
from kda import stages
from places import DEVICE
from support import Problem, Tensor, cotangents, make

Memory = dict[str, Any]  # tensors by name, and options; a record's tensors are "records.u", ..
TOKENWISE = ("q", "k", "v", "g", "beta")
# On a GPU so many requests that calls on two streams meet.
N, POOL, STEPS = (32, 40, 20) if DEVICE.type == "cuda" else (6, 9, 2)


def calls(function: Callable[..., Any], **options: Any) -> Callable[[Memory], Sequence[Tensor]]:
    """A call with the memory as keywords, and its results."""

    def run(m: Memory) -> Sequence[Tensor]:
        results = function(**m, **options)
        return [results] if isinstance(results, Tensor) else [x for x in results if x is not None]

    return run


def differentiated(
    function: Callable[..., Any], given: Sequence[str], **options: Any
) -> Callable[[Memory], Sequence[Tensor]]:
    """Results, and gradients of the named inputs. ``given``: names of the results' gradients."""

    def run(m: Memory) -> Sequence[Tensor]:
        rest = {n: x for n, x in m.items() if n not in given}
        leaves = {
            n: x.detach().requires_grad_() for n, x in rest.items() if isinstance(x, Tensor) and x.is_floating_point()
        }
        results = function(**{**rest, **leaves}, **options)
        results = [results] if isinstance(results, Tensor) else [x for x in results if x is not None]
        gradients = torch.autograd.grad(results, list(leaves.values()), [m[n] for n in given])
        return [*(x.detach() for x in results), *gradients]

    return run


# ---- prompts and training ----


def prompts(index: torch.dtype = torch.int64, **sizes: Any) -> Callable[[int], Memory]:
    """Packed prompts on a pool, with checkpoints."""

    def memory(seed: int) -> Memory:
        given = {"H": 1, "G": 2, "K": 64, "V": 64, "gate": "softplus", "beta": "sigmoid", "v_first": True, **sizes}
        p = make(lengths=[200, 0, 64, 3, 100], tail=33, seed=seed, **given)
        pool = make(8, 0, seed=seed, **given).tensors["initial_state"]
        slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).int().view(5, 4)
        return {
            **p.having(initial_state=None).keywords, "cu_seqlens": p.options["cu_seqlens"].to(index), "state": pool,
            "state_indices": torch.tensor([4, -1, 0, 7, 2]).int(), "out": torch.zeros_like(p.tensors["v"]),
            "has_initial_state": torch.tensor([True, True, False, True, True]), "checkpoint_slots": slots,
            "checkpoints": torch.zeros(20, *pool.shape[1:]),
        }  # fmt: skip

    return memory


def texts(backward: bool, lengths: list[int] | None = None, **sizes: Any) -> Callable[[int], Memory]:
    def memory(seed: int) -> Memory:
        p = make(2, 130, lengths=lengths, tail=10, seed=seed, gate="softplus", beta="sigmoid", **sizes)
        return {**p.keywords, **(dict(zip(("d_o", "d_state"), cotangents(p), strict=True)) if backward else {})}

    return memory


# ---- decode and drafts ----


def requests(T: int, impl: str | None = None, **sizes: Any) -> Callable[[int], Memory]:
    """Requests on a pool, some of which are padding or new."""

    def memory(seed: int) -> Memory:
        (p, _), (_, pool) = (drafts(t, N=n, seed=seed, **sizes) for t, n in ((T, N), (1, POOL)))
        random = torch.Generator().manual_seed(seed)
        slots = torch.randperm(POOL, generator=random)[:N].int()
        slots[1] = -1
        return {
            **p.keywords, "state": pool, "state_indices": slots, "out": torch.zeros_like(p.tensors["v"]),
            "has_initial_state": torch.rand(N, generator=random) < 0.8, "impl": impl if DEVICE.type == "cuda" else None,
        }  # fmt: skip

    return memory


def with_snapshots(seed: int) -> Memory:
    m = requests(3, K=64, V=64)(seed)
    del m["has_initial_state"]
    random = torch.Generator().manual_seed(seed)
    kept = torch.randn(N, 3, *m["state"].shape[1:], generator=random)
    return m | {"snapshots": kept, "accepted": torch.randint(1, 4, (N,), generator=random).int()}


def with_slots_of_snapshots(seed: int) -> Memory:
    m, random = requests(4, K=64, V=64, dtype=torch.bfloat16)(seed), torch.Generator().manual_seed(seed)
    slots = torch.randperm(4 * N, generator=random)
    return m | {
        "snapshots": torch.randn(4 * N + 4, *m["state"].shape[1:], generator=random),
        "snapshot_slots": slots.where(slots % 5 > 0, -1).int().view(N, 4),
    }


def recorded(m: Memory, p: Problem, name: str, entries: int, seed: int, **more: Any) -> Memory:
    """The memory of a call together with records that hold something."""
    records, random = records_for(p, entries, slots=POOL, fill=0.0, **more), torch.Generator().manual_seed(seed)
    for x in records[:3]:
        x.uniform_(0, 0.5, generator=random)
    return m | {f"{name}.{n}": x for n, x in records._asdict().items() if x is not None}


def records(m: Memory, name: str) -> kda.Records:
    given = {n.split(".")[1]: x for n, x in m.items() if n.startswith(f"{name}.")}
    return kda.Records(**given, indices=m["state_indices"])


def verifying(seed: int, T: int = 4, **sizes: Any) -> Memory:
    m = requests(T, **sizes)(seed) | {"parents": random_trees(N, T, seed)}
    return recorded(m, drafts(T, N=N, **sizes)[0], "records", T, seed)


def flushing(seed: int, T: int = 4, layers: int | None = None, **sizes: Any) -> Memory:
    m = requests(T, **sizes)(seed)
    more = {} if layers is None else {"layers": layers}
    m["state"] = m["state"] if layers is None else torch.stack([m["state"] + i for i in range(layers)])
    m = {n: m[n] for n in ("state", "state_indices")} | {"parents": random_trees(N, T, seed)}
    m["accept_len"] = torch.randint(T + 1, (N,), generator=torch.Generator().manual_seed(seed)).int()
    return recorded(m, drafts(T, N=N, **sizes)[0], "records", T, seed, **more)


def both(seed: int, T: int = 4, ring: bool = False, **sizes: Any) -> Memory:
    """Of flush_verify, with two buffers or a ring."""
    m, p = requests(T, **sizes)(seed), drafts(T, N=N, **sizes)[0]
    del m["has_initial_state"]
    m["accept_len"] = torch.randint(T + 1, (N,), generator=torch.Generator().manual_seed(seed)).int()
    if ring:
        return recorded(m, p, "records", 3 * T, seed, ring=True)
    m["last_parents"] = random_trees(N, T, seed)
    return recorded(recorded(m, p, "records", T, seed), p, "last", T, seed + 1)


def rounds(seed: int, T: int = 4, **sizes: Any) -> Memory:
    m, p = requests(T, **sizes)(seed), drafts(T, N=N, **sizes)[0]
    del m["has_initial_state"]
    m |= {"parents": random_trees(N, T, seed), "ring_pool": m["state"].clone()}
    m["accept_len"] = torch.randint(T + 1, (N,), generator=torch.Generator().manual_seed(seed)).int()
    for name in "ab":
        m = recorded(m, p, name, T, seed)
    return recorded(m, p, "ring", 3 * T, seed, ring=True)


def one_of_each(m: Memory) -> Sequence[Tensor]:
    """Verify, flush, flush_verify with two buffers, and a step of a ring, each from what the one before has written."""
    inputs = {n: x for n, x in m.items() if "." not in n and n not in ("parents", "accept_len", "ring_pool", "out")}
    (a, b, ring), trees, lengths = (records(m, n) for n in ("a", "b", "ring")), m["parents"], m["accept_len"]
    o = [kda.verify_kvbuffer(**inputs, records=a, parents=trees)]
    kda.flush_kvbuffer(m["state"], a, lengths, state_indices=m["state_indices"], parents=trees)
    o.append(kda.flush_verify_kvbuffer(**inputs, records=b, accept_len=lengths, last=a, last_parents=trees))
    inputs["state"] = m["ring_pool"]
    return [*o, kda.flush_verify_kvbuffer(**inputs, records=ring, accept_len=lengths)]


def with_records(function: Callable[..., Any]) -> Callable[[Memory], Sequence[Tensor]]:
    def run(m: Memory) -> Sequence[Tensor]:
        plain = {n: x for n, x in m.items() if "." not in n}
        plain |= {name: records(m, name) for name in ("records", "last") if f"{name}.u" in m}
        o = function(**plain)
        return [] if o is None else [o]

    return run


# ---- what stands around ----


def convolved(T: int, parts: int = 0, dtype: torch.dtype = torch.bfloat16) -> Callable[[int], Memory]:
    def memory(seed: int) -> Memory:
        random = torch.Generator().manual_seed(seed)
        x, weight, bias, pool = (
            torch.randn(s, generator=random).to(dtype) for s in ((N, T, 384), (384, 4), (384,), (POOL, 384, 3))
        )
        slots = torch.randperm(POOL, generator=random)[:N].int()
        slots[1] = -1
        rows = dict(zip(("x", "y", "z"), x.split((64, 128, 192), 2), strict=True)) if parts else {"x": x}
        return {
            **{n: t.contiguous() for n, t in rows.items()}, "weight": weight, "bias": bias, "state": pool,
            "state_indices": slots, "has_initial_state": torch.rand(N, generator=random) < 0.8,
            "out": torch.zeros_like(x),
        }  # fmt: skip

    return memory


def convolved_and_packed(seed: int) -> Memory:
    m, lengths = convolved(1)(seed), [3, 0, 1, 2, 14, 4, *[1] * (N - 6)]
    x = torch.randn(1, sum(lengths) + 3, 384, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return m | {"x": x, "out": torch.zeros_like(x), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}


def in_parts(m: Memory) -> Sequence[Tensor]:
    rest = {n: x for n, x in m.items() if n not in "xyz"}
    return [kda.causal_conv1d_update([m[n] for n in "xyz"], **rest)]


def texts_of_a_convolution(lengths: list[int] | None = None) -> Callable[[int], Memory]:
    def memory(seed: int) -> Memory:
        random, B = torch.Generator().manual_seed(seed), 3 if lengths is None else 1
        T, rows = (100, 3) if lengths is None else (sum(lengths) + 3, len(lengths))
        shapes = {"x": (B, T, 200), "weight": (200, 4), "bias": (200,), "initial_state": (rows, 200, 3)}
        m = {n: torch.randn(s, generator=random) for n, s in {**shapes, "dy": (B, T, 200)}.items()}
        m["d_state"] = torch.randn(rows, 200, 3, generator=random)
        return m if lengths is None else m | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}

    return memory


def normed(*shape: int, gradients: bool = False) -> Callable[[int], Memory]:
    def memory(seed: int) -> Memory:
        random = torch.Generator().manual_seed(seed)
        x, gate, dy = (torch.randn(shape, generator=random).bfloat16() for _ in range(3))
        weight = (0.5 + torch.rand(shape[-1], generator=random)).bfloat16()
        return {"x": x, "gate": gate, "weight": weight, **({"dy": dy} if gradients else {"out": torch.zeros_like(x)})}

    return memory


def gated(seed: int) -> Memory:
    random = torch.Generator().manual_seed(seed)
    shapes = {"g": (2, 100, 4, 128), "A_log": (4,), "dt_bias": (4 * 128,), "dy": (2, 100, 4, 128)}
    return {n: torch.randn(s, generator=random) for n, s in shapes.items()}


def without(run: Callable[[Memory], Sequence[Tensor]], *names: str) -> Callable[[Memory], Sequence[Tensor]]:
    return lambda m: run({n: x for n, x in m.items() if n not in names})


def mapped(**sizes: Any) -> Callable[[int], Memory]:
    def memory(seed: int) -> Memory:
        p = make(1, H=2, G=2, lengths=[100, 0, 250], tail=50, l2norm=True, v_first=True, state=False, seed=seed,
                 **sizes)  # fmt: skip
        return {**p.keywords, "d_o": cotangents(p)[0]}

    return memory


def map_and_merge(m: Memory) -> Sequence[Tensor]:
    M, b, d = kda.segment_map(**m, want="Mbd")
    return M, b, d, kda.segment_merge(M, b), kda.segment_merge(M, d, reverse=True)


def merged(seed: int) -> Memory:
    random = torch.Generator().manual_seed(seed)
    shapes = {"M": (7, 3, 64, 64), "b": (7, 3, 128, 64), "h0": (3, 128, 64)}
    return {n: torch.randn(s, generator=random) / 8 for n, s in shapes.items()}


def staged(**sizes: Any) -> Callable[[int], Memory]:
    def memory(seed: int) -> Memory:
        p = make(lengths=[65, 0, 9, 64, 30 * N], tail=30, H=2, K=128, V=128, l2norm=False, state=False, seed=seed,
                 **{"G": 2, **sizes})  # fmt: skip
        return {n: x for n, x in p.keywords.items() if n in (*TOKENWISE, "cu_seqlens")} | {"d_o": cotangents(p)[0]}

    return memory


def through_stages(m: Memory, backward: bool = False) -> Sequence[Tensor]:
    """All stages. States before chunks are not returned: rows behind the last chunk are nobody's."""
    (q, k, v, g, beta), cu, scale = (m[n] for n in TOKENWISE), {"cu_seqlens": m["cu_seqlens"]}, 0.1
    G = stages.cumsum(g, **cu)
    w, u, qG, kg, Aqk, J = stages.chunk_intra(q, k, v, G, beta, scale, **cu)
    h, v_new, last = stages.delta_h(kg, w, u, G, None, True, **cu)
    o = stages.fwd_o(q, v_new, G, Aqk, h, scale, **cu)
    if not backward:
        return w, u, qG, kg, Aqk, J, v_new, last, o
    w, _, qG, kg = stages.recompute_w_u(k, v, beta, J, G, q, **cu)
    dAqk, dv_local = stages.bwd_local(v_new, m["d_o"], Aqk, scale, **cu)
    dh, _, dv_new = stages.bwd_delta_h(qG, kg, w, G, m["d_o"], dv_local, None, scale, **cu)
    dq, dk, dv, dbeta, dG, dJ = stages.bwd_wy_dqkg(q, k, v, v_new, G, beta, J, h, m["d_o"], dh, dv_new, scale, **cu)
    dq, dk, dbeta, dG = stages.bwd_intra(q, k, G, beta, dAqk, dJ, dq, dk, dbeta, dG, **cu)
    return dq, dk, dv, dbeta, stages.cumsum_backward(dG, g, **cu)


def heads_first(seed: int) -> Memory:
    p = make(2, 130, 1, 3, 64, 64, v_first=True, l2norm=False, seed=seed)
    x = {n: p.tensors[n].transpose(1, 2).contiguous() for n in TOKENWISE}
    w, u = torch.zeros(2, 3, 3, 64, 64), torch.zeros(2, 3, 3, 64, 64)
    state = p.tensors["initial_state"]
    return x | {"w": w, "u": u, "o": torch.zeros_like(x["v"]), "initial_state": state, "final_state": state.clone()}


def decode_and_norm(seed: int) -> Memory:
    m = requests(1, dtype=torch.bfloat16, H=4, G=1, K=128, V=128)(seed)
    return m | {"gate": normed(*m["v"].shape)(seed)["gate"], "y": torch.zeros_like(m["v"])}


def norm_behind_decode(m: Memory) -> Sequence[Tensor]:
    """The norm begins before decode has ended, and the next step depends on it."""
    rest = {n: x for n, x in m.items() if n not in ("gate", "y")}
    for _ in range(STEPS):
        kda.decode(**rest)
        kda.norm_gate(m["out"], m["gate"], out=m["y"])
        m["v"].copy_(m["y"])
    return [m["y"]]


def prompt_and_steps(m: Memory) -> Sequence[Tensor]:
    """Prefill and decode in turn, in place on one pool: a launch begins while the one before it ends."""
    token = {n: x[:, :1] if n in TOKENWISE else x for n, x in m.items() if n != "out"}
    return [op(**call) for _ in range(5) for op, call in ((kda.prefill, m), (kda.decode, token))]

"""kda.fla inside FLA's real dispatch: what FLA's functions return with our backend, beside what they return without
it. A call through FLA also has the bits of a call of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fla_calls import Tensor, both, compare, fla

import kda
import kda.fla
from support import make, reference, rel_rmse, run, same_bits

PACKED = {"lengths": [5, 64, 0, 37, 1]}
CASES: dict[str, dict[str, Any]] = {
    "decays": {"T": 70},
    "softplus": {"T": 70, "gate": "softplus", "beta": "logits"},
    "bounded_2sigmoid": {"T": 66, "gate": "lower_bound", "beta": "2sigmoid"},
    "scaled_without_norm": {"T": 33, "l2norm": False, "scale": 0.3},
    "groups": {"B": 2, "T": 40, "G": 2, "gate": "softplus"},
    "v_first": {"T": 70, "v_first": True, "gate": "lower_bound"},
    "no_state": {"T": 70, "state": False, "gate": "softplus"},
    "packed": {**PACKED, "gate": "lower_bound", "v_first": True},
    "packed_no_state": {**PACKED, "state": False},
}


@pytest.mark.parametrize("name", CASES)
def test_chunk_kda(name: str) -> None:
    """Outputs and gradients: as FLA's own, as the oracle's, and bit for bit as ours."""
    p = make(**{"K": 16, "V": 16, **CASES[name]})
    ours, theirs = both(lambda: run(fla("ops.kda.chunk_kda"), p), "chunk_kda")
    compare(ours, theirs, 2e-5)
    true = reference(p)
    assert all(rel_rmse(true[n], x) < 1e-5 for n, x in ours.items())
    direct = run(kda.chunk_kda, p)
    assert all(same_bits(direct[n], x) for n, x in ours.items())


def test_bounded_with_safe_gate() -> None:
    """Triton's interpreter lacks what FLA's kernel of this case calls, so only the oracle can tell."""
    p = make(T=70, K=16, V=16, gate="lower_bound")
    kda.fla.report(reset=True)
    ours, true = run(fla("ops.kda.chunk_kda"), p, safe_gate=True), reference(p)
    assert kda.fla.report().taken["chunk_kda"] == {"cpu float32": 1}
    assert all(rel_rmse(true[n], x) < 1e-5 for n, x in ours.items())


def test_no_state_goes_in_or_out() -> None:
    """Then the layout of states says nothing, and the faster one is taken."""
    p = make(T=70, K=16, V=16, state=False)

    def call() -> dict[str, Tensor]:
        q = p.tensors["q"].clone().requires_grad_()
        o, state = fla("ops.kda.chunk_kda")(**{**p.keywords, "q": q})
        assert state is None
        return {"o": o.detach(), "dq": torch.autograd.grad(o.square().sum(), q)[0]}

    compare(*both(call, "chunk_kda"), 2e-5)


def test_parameters_that_fla_ignores() -> None:
    """Without ``use_gate_in_kernel``; and keywords that nobody knows."""
    p = make(T=20, K=16, V=16)
    more = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(32), "lower_bound": -5.0, "head_first": False}
    ours, theirs = both(lambda: run(fla("ops.kda.chunk_kda"), p, backward=False, **more), "chunk_kda")
    compare(ours, theirs, 1e-5)


def test_old_name_of_the_layout() -> None:
    """FLA takes it among other keywords, with a warning."""
    p = make(T=20, K=16, V=16, v_first=True)
    del p.options["state_v_first"]
    old = {"transpose_state_layout": True}

    def call() -> dict[str, Tensor]:
        with pytest.warns(match="transpose_state_layout"):
            return run(fla("ops.kda.chunk_kda"), p, backward=False, **old)

    compare(*both(call, "chunk_kda"), 1e-5)


def test_positional_arguments() -> None:
    x = make(T=20, K=16, V=16, state=False).tensors
    given = [x[name] for name in ("q", "k", "v", "g", "beta")]
    o, state = fla("ops.kda.chunk_kda")(*given, 0.3, None, True)
    expected = kda.chunk_kda(*given, scale=0.3, output_final_state=True)
    assert same_bits(o, expected[0])
    assert same_bits(state, expected[1])


@pytest.mark.parametrize("packed", [False, True])
def test_intermediate_states(packed: bool) -> None:
    sizes: dict[str, Any] = PACKED if packed else {"T": 130}
    p = make(K=16, V=16, **sizes).having(return_intermediate_states=True, output_final_state=True)

    def call() -> dict[str, Tensor]:
        with torch.inference_mode():
            o, state, h = fla("ops.kda.chunk_kda")(**p.keywords)
        return {"o": o, "state": state, "h": h}

    ours, theirs = both(call, "chunk_kda")
    rows = min(x["h"].shape[1] for x in (ours, theirs))
    for x in (ours, theirs):
        x["h"] = x["h"][:, :rows]
    compare(ours, theirs, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_fused_recurrent_kda(name: str) -> None:
    p = make(**{"K": 16, "V": 16, **CASES[name]})
    function = fla("ops.kda.fused_recurrent_kda")
    compare(*both(lambda: run(function, p, backward=False), "fused_recurrent_kda_fwd"), 1e-5)


def test_recurrence_has_no_gradients() -> None:
    p = make(T=5, K=16, V=16).map(lambda x: x.requires_grad_())
    ours, theirs = both(lambda: fla("ops.kda.fused_recurrent_kda")(**p.keywords)[0], "fused_recurrent_kda_fwd")
    assert ours.requires_grad is theirs.requires_grad is False


@pytest.mark.parametrize("accepted", [None, [1, 3, 2]])
@pytest.mark.parametrize("v_first", [False, True])
def test_recurrence_in_place(accepted: list[int] | None, v_first: bool) -> None:
    """A pool of states, with a slot for every token of a draft."""
    drafts = 1 if accepted is None else 3
    p = make(B=3, T=drafts, K=16, V=16, gate="lower_bound", v_first=v_first, state=False)
    slots = torch.tensor([[4, 1, 7], [0, 3, 8], [6, 2, 5]])
    more = {"ssm_state_indices": slots[:, 0] if accepted is None else slots}
    if accepted is not None:
        more["num_accepted_tokens"] = torch.tensor(accepted)

    def call() -> dict[str, Tensor]:
        pool = torch.randn(9, 2, 16, 16, generator=torch.Generator().manual_seed(1))
        given = {**p.keywords, **more, "out": torch.empty_like(p.tensors["v"])}
        o, state = fla("ops.kda.fused_recurrent.fused_recurrent_kda_fwd")(**given, initial_state=pool)
        assert state is pool
        assert o is given["out"]
        return {"o": o, "pool": pool}

    compare(*both(call, "fused_recurrent_kda_fwd"), 1e-5)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gate(bound: float | None, bias: bool) -> None:
    random = torch.Generator().manual_seed(0)

    def call() -> dict[str, Tensor]:
        random.manual_seed(0)
        x, A_log, dt_bias = (torch.randn(*n, generator=random) for n in ((2, 40, 3, 16), (3,), (48,)))
        leaves = {"g": x, "A_log": A_log} | ({"dt_bias": dt_bias} if bias else {})
        y = fla("ops.kda.gate.fused_kda_gate")(**{n: t.requires_grad_() for n, t in leaves.items()}, lower_bound=bound)
        gradients = torch.autograd.grad(y, list(leaves.values()), torch.randn(y.shape, generator=random))
        return {"y": y.detach()} | dict(zip(leaves, gradients, strict=True))

    compare(*both(call, "fused_kda_gate"), 1e-5)


def test_gradient_of_the_gate_alone() -> None:
    """As FLA's backward of chunk_kda calls it."""
    x, dy, A_log, dt_bias = torch.randn(1, 40, 3, 16), torch.randn(1, 40, 3, 16), torch.randn(3), torch.randn(48)

    def call() -> dict[str, Tensor]:
        found = fla("ops.kda.gate.kda_gate_bwd")(g=x, A_log=A_log, dt_bias=dt_bias, dyg=dy)
        return dict(zip(("g", "A_log", "dt_bias"), found, strict=True))

    compare(*both(call, "kda_gate_bwd"), 1e-5)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "silu_bias": {"activation": "silu", "bias": True},
    "narrow": {"W": 2, "activation": "swish"},
    "state": {"activation": "silu", "state": True},
    "short": {"T": 2, "state": True},
    "packed": {"B": 1, "lengths": [3, 0, 40, 1], "activation": "silu"},
    "packed_state": {"B": 1, "lengths": [3, 0, 40, 1], "state": True, "bias": True},
}


def convolution(
    B: int = 2, T: int = 40, W: int = 4, D: int = 32, bias: bool = False, state: bool = False,
    lengths: list[int] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    if lengths is not None:
        T = sum(lengths)
        more["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    N = B if lengths is None else len(lengths)
    given = {"x": torch.randn(B, T, D), "weight": torch.randn(D, W)}
    given |= {"bias": torch.randn(D)} if bias else {}
    return given | ({"initial_state": torch.randn(N, D, W)} if state else {}) | more


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("final", [False, True])
def test_convolution(name: str, final: bool) -> None:
    """With its gradients, which are those of y alone where the final state goes out."""
    given = convolution(**CONVOLUTIONS[name])
    leaves = {n: given[n] for n in ("x", "weight", "bias", "initial_state") if n in given}
    function = fla("modules.causal_conv1d.causal_conv1d")

    def call() -> dict[str, Tensor]:
        inputs = {n: x.clone().requires_grad_(not final) for n, x in leaves.items()}
        y, last = function(**{**given, **inputs}, output_final_state=final)
        if final:
            return {"y": y, "last": last}
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        gradients = torch.autograd.grad(y, list(inputs.values()), dy)
        return {"y": y.detach()} | dict(zip(inputs, gradients, strict=True))

    takes = ["causal_conv1d_fwd"] if final else ["causal_conv1d_fwd", "causal_conv1d_bwd"]
    ours, theirs = both(call, *takes)
    compare(ours, theirs, 1e-5)


@pytest.mark.parametrize("shape", [(5, 32), (1, 5, 32), (5, 1, 32)], ids=str)
def test_convolution_of_one_token(shape: tuple[int, ...]) -> None:
    x, weight, cache = torch.randn(shape), torch.randn(32, 4), torch.randn(5, 32, 4)

    def call() -> dict[str, Tensor]:
        held = cache.clone()
        y, same = fla("modules.causal_conv1d.ops.causal_conv1d_update")(
            x=x, cache=held, weight=weight, activation="silu"
        )
        assert same.data_ptr() == held.data_ptr()
        return {"y": y, "cache": held}

    compare(*both(call, "causal_conv1d_update"), 1e-6)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_norm_with_a_gate(activation: str, prenorm: bool) -> None:
    given = {"x": torch.randn(2, 30, 3, 16), "g": torch.randn(2, 30, 3, 16), "weight": torch.randn(16)}
    function = fla("modules.norm.fused_norm_gate.rms_norm_gated")

    def call() -> dict[str, Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
        y = function(**leaves, bias=None, activation=activation, prenorm=prenorm, eps=1e-5)
        outputs = y if prenorm else (y,)
        seeds = [torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(outputs)]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
        return {f"y{i}": t.detach() for i, t in enumerate(outputs)} | dict(zip(leaves, gradients, strict=True))

    compare(*both(call, "layer_norm_gated_fwd", "layer_norm_gated_bwd"), 1e-5)


def test_backward_of_our_norm_is_ours_after_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's would read what only its own forward keeps."""
    x, g, weight = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16), torch.randn(16)
    function = fla("modules.norm.fused_norm_gate.rms_norm_gated")
    first, second = (function(x, g, weight, None, "sigmoid").sum() for _ in range(2))
    (expected,) = torch.autograd.grad(first, x)
    monkeypatch.setenv("FLA_KDA_LIB", "0")
    (got,) = torch.autograd.grad(second, x)
    assert same_bits(expected, got)


def stage_inputs(K: int) -> dict[str, Any]:
    """What FLA's forward would pass, made by our stages."""
    from kda import stages

    p = make(T=70, K=K, V=K, l2norm=False, state=False)
    x = {n: p.tensors[n] for n in ("q", "k", "v", "beta")}
    G = stages.cumsum(p.tensors["g"])
    w, u, qG, kg, Aqk, Akk_inv = stages.chunk_intra(x["q"], x["k"], x["v"], G, x["beta"])
    h, v_new, _ = stages.delta_h(kg, w, u, G)
    d_o = torch.randn(x["v"].shape)
    _, dv = stages.bwd_local(v_new, d_o, Aqk, K**-0.5)
    dh, _, dv_new = stages.bwd_delta_h(qG, kg, w, G, d_o, dv)
    states = {n: t.view(1, -1, *t.shape[1:]) for n, t in (("h", h), ("dh", dh))}
    return {**x, "v_new": v_new, "g": G, "A": Akk_inv, **states, "do": d_o, "dv": dv_new, "scale": K**-0.5}


def test_stage_of_backward() -> None:
    given = stage_inputs(16)

    def call() -> dict[str, Tensor]:
        found = fla("ops.kda.chunk_bwd.chunk_kda_bwd_wy_dqkg_fused")(**given, chunk_size=64)
        return dict(zip(("dq", "dk", "dv", "db", "dg", "dA"), found, strict=True))

    compare(*both(call, "chunk_kda_bwd_wy_dqkg_fused"), 1e-5)

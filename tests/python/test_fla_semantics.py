"""chunk_kda, fused_recurrent_kda and fused_kda_gate as drop-ins for fla.ops.kda: signatures, shapes, modes, errors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from support import Tensor, assert_close, make, oracle, reference, run, same_bits

both = pytest.mark.parametrize("function", [kda.chunk_kda, kda.fused_recurrent_kda], ids=lambda f: f.__name__)

FLAGS = dict.fromkeys(
    ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), False
)
# Names, order and defaults that engines and training code rely on; ... means "no default".
SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {
    kda.chunk_kda: {
        **dict.fromkeys(("q", "k", "v", "g", "beta"), ...),
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        **FLAGS,
        "safe_gate": False,
        "lower_bound": None,
        "disable_recompute": False,
        "return_intermediate_states": False,
        "state_v_first": False,
        "cu_seqlens": None,
        "cu_seqlens_cpu": None,
        "cp_context": None,
        "use_graph": False,
        "max_num_seqs": None,
    },
    kda.fused_recurrent_kda: {
        **dict.fromkeys(("q", "k", "v", "g", "beta"), ...),
        "A_log": None,
        "dt_bias": None,
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        **FLAGS,
        "lower_bound": None,
        "state_v_first": False,
        "cu_seqlens": None,
    },
    kda.fused_recurrent_kda_fwd: {
        **dict.fromkeys(("q", "k", "v", "g", "beta"), ...),
        "A_log": None,
        "dt_bias": None,
        "initial_state": None,
        "scale": None,
        "output_final_state": False,
        "inplace_final_state": True,
        "state_v_first": False,
        "cu_seqlens": None,
        "ssm_state_indices": None,
        "num_accepted_tokens": None,
        **FLAGS,
        "lower_bound": None,
        "out": None,
    },
    kda.fused_kda_gate: {"g": ..., "A_log": ..., "dt_bias": None, "lower_bound": None, "output_dtype": torch.float32},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == list(SIGNATURES[function])
    for p in positional:
        default = SIGNATURES[function][p.name]
        if default is ... or p.name == "output_dtype":  # A_log may have a default; None is float32 without torch
            continue
        assert p.default == default, p.name
    own = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(p.default is None for p in own), "what FLA does not have must be optional"


@pytest.mark.cuda
@both
def test_fla_keywords_in_kwargs(function: Callable[..., Any]) -> None:
    p = make(1, 70, gate="softplus")
    expected = run(function, p, backward=False)
    if function is kda.chunk_kda:  # A_log and dt_bias come through **kwargs in FLA, with cached metadata
        got = run(function, p, backward=False, chunk_indices=torch.zeros(2, 2), chunk_size=64, cu_seqlens_cpu=None)
        assert same_bits(expected["o"], got["o"])
    with pytest.raises(TypeError, match="no_such_option"):
        run(function, p, no_such_option=1)


@pytest.mark.cuda
def test_chunk_size() -> None:
    p = make(1, 70)
    expected = run(kda.chunk_kda, p)
    for size in (32, 64):
        got = run(kda.chunk_kda, p, chunk_size=size)
        assert all(same_bits(expected[n], got[n]) for n in expected), size
    for wrong in (16, 0, 128, -64, 64.0, None, "64"):
        with pytest.raises(
            ValueError, match=r"^chunk_size: expected 32 or 64 \(`chunk_size` must be either 32 or 64\)"
        ):
            kda.chunk_kda(**p.keywords, chunk_size=wrong)
    with (
        torch.inference_mode(),
        pytest.raises(NotImplementedError, match=r"^chunk_size: expected 64 with return_inter"),
    ):
        kda.chunk_kda(**p.keywords, chunk_size=32, return_intermediate_states=True)


@pytest.mark.cuda
@both
@pytest.mark.parametrize("lengths", [None, [3, 0, 66, 0]])
def test_graphs(function: Callable[..., Any], lengths: list[int] | None) -> None:
    """use_graph affects only the number of intermediate states."""
    p = make(1, 69, lengths=lengths)
    expected = run(function, p, backward=False)
    for sequences in (None, 4):
        got = run(function, p, backward=False, use_graph=True, max_num_seqs=sequences)
        assert all(same_bits(expected[n], got[n]) for n in expected)
    if function is kda.chunk_kda and lengths:
        with pytest.raises(ValueError, match=r"^max_num_seqs: expected 4 as in cu_seqlens, got 3"):
            kda.chunk_kda(**p.keywords, use_graph=True, max_num_seqs=3)
        with torch.inference_mode():
            few = kda.chunk_kda(**p.keywords, return_intermediate_states=True)[2]
            all_of = kda.chunk_kda(**p.keywords, return_intermediate_states=True, use_graph=True)[2]
        assert few.shape[1] == 3 and all_of.shape[1] == 2 + 4 - 1 and same_bits(few, all_of[:, :3])


@pytest.mark.cuda
def test_contradictory_offsets_on_the_cpu() -> None:
    p = make(1, 69, lengths=[3, 66])
    cu = p.options["cu_seqlens"].cpu()
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected shape \[3\] like cu_seqlens, got \[2\]"):
        kda.chunk_kda(**p.keywords, cu_seqlens_cpu=cu[1:])
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected None without cu_seqlens"):
        kda.chunk_kda(**make(1, 69).keywords, cu_seqlens_cpu=cu)
    kda.chunk_kda(**p.keywords, cu_seqlens_cpu=cu.int())
    if p.options["cu_seqlens"].device.type == "cpu":
        with pytest.raises(
            ValueError, match=r"^cu_seqlens_cpu: expected \[0, 3, 69\] like cu_seqlens, got \[0, 4, 69\]"
        ):
            kda.chunk_kda(**p.keywords, cu_seqlens_cpu=torch.tensor([0, 4, 69]))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["A_log", "dt_bias", "lower_bound"])
def test_parameters_of_a_gate_that_is_not_there(name: str) -> None:
    """FLA ignores them. So does kda, but with a warning at the caller's line."""
    p = make(1, 3, H=1, K=4, V=6, state=False, v_first=True)
    value: Any = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1, 4), "lower_bound": -5.0}[name]
    rows = p.keywords
    calls: list[Callable[..., Any]] = [kda.chunk_kda, kda.fused_recurrent_kda, kda.prefill, kda.decode, kda.decode_mtp]
    calls += [kda.segment_map] if p.tensors["q"].device.type == "cpu" else []
    for function in calls:
        with pytest.warns(UserWarning, match=f"^{name}: expected use_gate_in_kernel=True with it") as caught:
            result = function(**rows, **{name: value})
        assert caught[0].filename == __file__ and len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = function(**rows)
        first, second = (x[0] if isinstance(x, tuple) else x for x in (result, expected))
        assert same_bits(first, second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # lower_bound is the promise of safe_gate
        kda.chunk_kda(**rows, safe_gate=True, lower_bound=-5.0)


@pytest.mark.cuda
@both
def test_results_without_final_state(function: Callable[..., Any]) -> None:
    p = make(2, 70)
    with_state, without = function(**p.keywords, output_final_state=True), function(**p.keywords)
    assert isinstance(without, tuple) and len(without) == 2 and without[1] is None
    assert same_bits(with_state[0], without[0])
    assert with_state[1].dtype == torch.float32 and list(with_state[1].shape) == [2, 2, 16, 24]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_results(function: Callable[..., Any], dtype: torch.dtype) -> None:
    p = make(1, 20, dtype=dtype, gate="softplus", beta="sigmoid")
    results = run(function, p.having(initial_state=p.tensors["initial_state"].to(torch.bfloat16)))
    assert results.pop("dinitial_state").dtype == torch.bfloat16
    wide = {"final_state", "dA_log", "ddt_bias"}
    assert {n: x.dtype for n, x in results.items()} == {n: torch.float32 if n in wide else dtype for n in results}


@both
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_dt_bias_and_A_log_shapes(function: Callable[..., Any], lower_bound: float | None) -> None:
    p = make(1, 70, 2, 2, gate="softplus").having(lower_bound=lower_bound)
    flat = run(function, p)
    other = run(function, p.having(dt_bias=p.tensors["dt_bias"].view(4, 16), A_log=p.tensors["A_log"].view(1, 1, 4, 1)))
    assert list(flat["ddt_bias"].shape) == [64] and list(other["ddt_bias"].shape) == [4, 16]
    assert list(other["dA_log"].shape) == [1, 1, 4, 1]
    for name in flat:
        assert same_bits(flat[name], other[name].reshape(flat[name].shape)), name


@both
def test_bfloat16_parameters(function: Callable[..., Any]) -> None:
    """A model cast with .bfloat16() casts A_log and dt_bias, too, and FLA reads them."""
    p = make(1, 70, gate="softplus")
    p = p.having(**{n: p.tensors[n].bfloat16() for n in ("A_log", "dt_bias")})
    got = run(function, p)
    assert got["dA_log"].dtype == got["ddt_bias"].dtype == torch.bfloat16
    assert_close(reference(p), got)


def test_bfloat16_parameters_of_the_gate() -> None:
    g, A_log, bias = torch.randn(5, 2, 4), torch.randn(2).bfloat16(), torch.randn(8).bfloat16()
    assert same_bits(kda.fused_kda_gate(g, A_log, bias), kda.fused_kda_gate(g, A_log.float(), bias.float()))


@pytest.mark.cuda
@both
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_parameters_are_ignored_without_the_gate(function: Callable[..., Any], lower_bound: float | None) -> None:
    p = make(1, 70)
    more = {"A_log": torch.randn(2), "dt_bias": torch.randn(32), "lower_bound": lower_bound}
    assert same_bits(function(**p.keywords)[0], function(**p.keywords, **more)[0])


@pytest.mark.cuda
@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_dtypes(function: Callable[..., Any], dtype: torch.dtype) -> None:
    p = make(lengths=[3, 0, 64, 17], tail=5)
    q = p.having(cu_seqlens=p.options["cu_seqlens"].to(dtype))
    a, b = run(function, p), run(function, q)
    assert all(same_bits(a[n], b[n]) for n in a)
    assert not any(a[n][:, 84:].any() for n in {"o", "dq"} & a.keys())


@both
def test_negative_eigenvalues_need_logits(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        function(**make(1, 5).keywords, allow_neg_eigval=True)


@pytest.mark.cuda
@both
def test_the_softplus_gate_needs_A_log(function: Callable[..., Any]) -> None:
    p = make(1, 5).having(use_gate_in_kernel=True)
    with pytest.raises(ValueError, match="A_log"):
        function(**p.keywords)
    assert function(**p.having(lower_bound=-5.0).keywords)[0].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [None, 0.0, 1.0, -5.1])
def test_safe_gate_checks_its_promise(bad: float | None) -> None:
    p = make(1, 5, gate="lower_bound")
    with pytest.raises(ValueError, match="lower_bound"):
        kda.chunk_kda(**p.having(lower_bound=bad).keywords, safe_gate=True)
    assert same_bits(kda.chunk_kda(**p.keywords)[0], kda.chunk_kda(**p.keywords, safe_gate=True)[0])


@both
def test_wrong_sizes_name_the_argument(function: Callable[..., Any]) -> None:
    sizes: dict[str, tuple[int, ...]] = {
        "k": (1, 20, 2, 15),
        "v": (1, 20, 3, 24),
        "g": (1, 20, 2, 16),
        "beta": (1, 20, 2),
        "initial_state": (1, 4, 16, 24),
        "A_log": (3,),
        "dt_bias": (63,),
    }
    for name, shape in sizes.items():
        p = make(1, 20, 2, 2, gate="softplus" if name in ("A_log", "dt_bias") else "log", lengths=[7, 13])
        with pytest.raises(ValueError, match=f"^{name}: "):
            function(**p.having(**{name: torch.randn(shape)}).keywords)
    for p in (make(lengths=[7, 13]).having(cu_seqlens=torch.tensor([0, 7, 21])), make(2, 5, lengths=None)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            function(**p.having(cu_seqlens=p.options.get("cu_seqlens", torch.tensor([0, 5]))).keywords)


def test_contexts_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cp_context: expected a kda\.cp\.Context, got object"):
        kda.chunk_kda(**make(1, 5, state=False).keywords, cp_context=object())


@pytest.mark.cuda
@both
def test_transpose_state_layout_is_deprecated(function: Callable[..., Any]) -> None:
    p = make(1, 20, state=False).having(state_v_first=None)
    with pytest.warns(DeprecationWarning, match="state_v_first") as caught:
        old = function(**p.keywords, transpose_state_layout=True, output_final_state=True)
    assert caught[0].filename == __file__, "the warning must point at the caller"
    new = function(**p.keywords, state_v_first=True, output_final_state=True)
    assert same_bits(old[0], new[0]) and same_bits(old[1], new[1])


@both
def test_transpose_state_layout_and_state_v_first_exclude_each_other(function: Callable[..., Any]) -> None:
    p = make(1, 5, state=False).having(state_v_first=True)
    with pytest.raises(ValueError, match="state_v_first"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(**p.keywords, transpose_state_layout=True)


# ---- intermediate states ----


@pytest.mark.cuda
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_cpu", [False, True])
@pytest.mark.parametrize("lengths", [None, [130, 0, 1, 64, 65]])
def test_intermediate_states(v_first: bool, dtype: torch.dtype, with_cpu: bool, lengths: list[int] | None) -> None:
    p = make(2, 150, 1, 2, 16, 24, dtype=dtype, v_first=v_first, lengths=lengths)
    cu = {"cu_seqlens_cpu": p.options["cu_seqlens"].clone()} if with_cpu and lengths else {}
    with torch.inference_mode():
        o, final_state, h = kda.chunk_kda(**p.keywords, **cu, return_intermediate_states=True, output_final_state=True)
        _, none, _ = kda.chunk_kda(**p.keywords, **cu, return_intermediate_states=True)
    assert none is None
    chunks = [(s, t) for s in oracle(p.map(Tensor.double))[2] for t in range(0, len(s) - 1, 64)]
    expected = torch.cat([s[t] for s, t in chunks])
    expected = expected.transpose(-1, -2) if v_first else expected
    rows = 1 if lengths else 2
    assert list(h.shape) == [rows, len(chunks) // rows, *expected.shape[1:]] and h.dtype == dtype
    assert_close({"final_state": expected}, {"final_state": h.flatten(0, 1)})
    assert_close(reference(p, False), {"o": o, "final_state": final_state})


def test_intermediate_states_only_in_inference_mode() -> None:
    p = make(1, 5)
    with pytest.raises(ValueError, match="inference_mode"), torch.no_grad():
        kda.chunk_kda(**p.keywords, return_intermediate_states=True)
    with torch.inference_mode(), pytest.raises(ValueError, match="disable_recompute"):
        kda.chunk_kda(**p.keywords, return_intermediate_states=True, disable_recompute=True)


# ---- the gate alone ----


def test_gate_shapes_and_dtypes() -> None:
    x, A_log, bias = torch.randn(3, 2, 5, 2, 4, dtype=torch.bfloat16), torch.randn(2), torch.randn(8)
    g = kda.fused_kda_gate(x, A_log, bias)
    assert g.shape == x.shape and g.dtype == torch.float32
    assert same_bits(g, kda.fused_kda_gate(x, A_log, bias.view(2, 4)))
    assert same_bits(g.bfloat16(), kda.fused_kda_gate(x, A_log, bias, output_dtype=torch.bfloat16))
    assert same_bits(g[0, 0], kda.fused_kda_gate(x[0, 0], A_log, bias))
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert same_bits(g, kda.fused_kda_gate(turned, A_log, bias))
    plain = kda.fused_kda_gate(x, lower_bound=-3.0)
    assert torch.allclose(plain, -3 * x.float().sigmoid(), rtol=1e-6)
    for bad in (0.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="lower_bound"):
            kda.fused_kda_gate(x, A_log, lower_bound=bad)
    with pytest.raises(ValueError, match="A_log"):
        kda.fused_kda_gate(x)

"""Functions without gradients refuse tensors that require them, because their outputs would train nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kda
from serving_calls import CALLS, ON_CUDA, tensors
from support import Tensor, make
from test_written_tensors import form  # noqa: F401

DIFFERENTIABLE = r"\(for gradients there is kda\.(chunk_kda|fused_recurrent_kda|causal_conv1d|fused_kda_gate|norm_gate)"
REFUSED = rf"expected torch\.no_grad\(\) or a tensor without requires_grad {DIFFERENTIABLE}.*\), got one"


def floating(keywords: dict[str, Any]) -> dict[str, Tensor]:
    return {n: x for n, x in tensors(keywords) if x.is_floating_point()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.cuda if n in ON_CUDA else ()) for n in CALLS])
def test_every_tensor_of_every_call(name: str, form: str) -> None:  # noqa: F811
    function, keywords = CALLS[name]()
    for argument in floating(keywords):
        function, keywords = CALLS[name]()
        given = floating(keywords)
        given[argument].requires_grad_()
        before = {n: x.detach().clone() for n, x in given.items()}
        shown = argument if form == "eager" else r"\w+"
        with pytest.raises(ValueError, match=f"^{shown}: {REFUSED}"):
            function(**keywords)
        assert all(torch.equal(x, before[n]) or x.isnan().any() for n, x in given.items()), "nothing was written"
        with torch.no_grad():
            function(**keywords)


def test_parameters_of_the_gate() -> None:
    """When q, k, v do not require gradients, and for every shape that is accepted."""
    p = make(1, 1, 2, 1, 8, 8, gate="softplus", state=False)
    for name in ("A_log", "dt_bias"):
        parameter = torch.nn.Parameter(p.tensors[name].clone())
        with pytest.raises(ValueError, match=f"^{name}: {REFUSED}"):
            kda.decode(**p.having(**{name: parameter, "state_v_first": True}).keywords)


def test_arrays_beside_tensors() -> None:
    """NumPy rows with torch weights: outputs are arrays, which have no history either."""
    p = make(1, 3, state=False, gate="softplus")
    numpy = {n: x.numpy() for n, x in p.tensors.items()}
    with pytest.raises(ValueError, match=r"^A_log: .*kda\.fused_recurrent_kda of torch tensors alone"):
        kda.fused_recurrent_kda(**p.options, **numpy | {"A_log": p.tensors["A_log"].requires_grad_()})
    with pytest.raises(ValueError, match=r"^A_log: .*kda\.fused_kda_gate of torch tensors alone"):
        kda.fused_kda_gate(numpy["g"], p.tensors["A_log"])
    weight = torch.ones(16, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"^weight: .*kda\.causal_conv1d of torch tensors alone"):
        kda.causal_conv1d(numpy["q"][:, :, 0], weight)


@pytest.mark.parametrize("function", [kda.decode, kda.prefill], ids=lambda f: f.__name__)
def test_compiled(function: Callable[..., Any]) -> None:
    p = make(1, 2, v_first=True, state=False)
    leaves = {n: x.requires_grad_() for n, x in p.tensors.items()}
    run = torch.compile(lambda kw: function(**kw), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"q: {REFUSED}"):
        run({**leaves, **p.options})
    torch._dynamo.reset()
    with torch.no_grad():
        assert not run({**leaves, **p.options}).requires_grad


def test_graphs_made_below_python() -> None:
    """Traces of the operator itself, as exporters make them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    M, b = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 6, 4, requires_grad=True)
    with pytest.raises(ValueError, match=f"^b: {REFUSED}"):
        make_fx(lambda M, b: torch.ops.kda.segment_merge(M, b, None, False, True, None, 0))(M, b)

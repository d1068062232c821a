"""The gate alone, from its raw input to the decay."""

from __future__ import annotations

from typing import Any

from .call.arrays import check_views, is_torch, new_like, torch, without_views
from .call.dispatch import dispatched
from .call.eager import check_serving
from .call.inputs import dense_last, gate_parameters, single
from .call.library import library
from .call.options import GATE_LOWER_BOUND, gate_form
from .call.retry import retry
from .call.tracing import compiling


def fused_kda_gate(
    g: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: float | None = None,
    output_dtype: Any = None,
    *,
    impl: str | None = None,
) -> Any:
    """The gate activation, with autograd for torch tensors. Signature and semantics of FLA's ``fused_kda_gate``.

    Args:
        g: ``[..., HV, K]`` raw gate input, floating point.
        A_log: ``[HV]`` float32; may be None with ``lower_bound``.
        dt_bias: ``[HV, K]`` or ``[HV * K]`` float32, or None.
        lower_bound: None for ``-exp(A_log) * softplus(g + dt_bias)``, else a negative number for
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        output_dtype: float32 by default.
        impl: force an implementation, see :func:`implementations`.

    Returns:
        The natural-log decay, ``[..., HV, K]``.

    >>> import kda, numpy as np
    >>> kda.fused_kda_gate(np.zeros((1, 1, 2), np.float32), lower_bound=-4.0).tolist()
    [[[-2.0, -2.0]]]
    """
    try:
        if len(g.shape) < 2 or 0 in g.shape[-2:]:
            raise ValueError(f"g: expected shape [..., HV, K] with HV and K >= 1, got {list(g.shape)}")
        HV, K = g.shape[-2:]
        form = gate_form(A_log, lower_bound)
        if not compiling():
            check_views(g, A_log, dt_bias)
        A_log, dt_bias = gate_parameters(A_log, dt_bias, g, g)
        bound = lower_bound if form == GATE_LOWER_BOUND else 0.0
        if not is_torch(g):
            check_serving("kda.fused_kda_gate of torch tensors alone", (A_log, dt_bias))
            x = g.reshape(-1, HV, K)
            blame = f"g: expected a torch or NumPy array, got {type(g).__name__}"
            if output_dtype is not None:
                blame = f"output_dtype: expected one that NumPy has, got {output_dtype}"
            y = new_like(x, tuple(x.shape), "float32" if output_dtype is None else output_dtype, blame)
            library().gate(x=x, A_log=A_log, dt_bias=dt_bias, g=y, gate_form=form, lower_bound=bound, impl=impl)
            return without_views(y.reshape(g.shape))
        dtype = torch.float32 if output_dtype is None else output_dtype
        x, A_log, dt_bias = dense_last(g.reshape(-1, HV, K)), dense_last(single(A_log)), dense_last(single(dt_bias))
        if dispatched():
            from .operators.gate import gate

            return gate(x, A_log, dt_bias, form, bound, dtype, impl).view(g.shape)
        from .call.derivatives import apply
        from .functions import GateFunction

        return apply(GateFunction, x, A_log, dt_bias, form, bound, dtype, impl).view(g.shape)
    except Exception as error:
        if compiling():
            raise
        return retry(fused_kda_gate, error, locals())

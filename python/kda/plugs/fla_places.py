"""What the plug relies on in FLA: where its functions are, under which registry, and how they are called. The
signatures are in the form of :func:`kda.plugs.engines.signature`."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One of FLA's functions."""

    path: str  # module and name
    registry: str | None  # the name it is dispatched under; None if by the function itself
    signature: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


# What is called or overridden of FLA's dispatch.
MACHINERY: dict[str, str | None] = {
    "fla.backends.register": "(entry_point, *, backend=None, verifier=None, env_var=None)",
    "fla.backends.BaseBackend.verify": "(self, function_name, *args, **kwargs)",
    "fla.backends.BaseBackend.get_implementation": "(self, function_name)",
    "fla.backends.BaseBackend.is_enabled": "(self)",
    "fla.backends._DISPATCH_DISABLED": None,
}

_FLAGS = (
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, "
)
_GATE = "(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=...)"
_PACKED = (
    "activation=None, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False)"
)

PLACES = (
    Place(
        "fla.ops.kda.chunk.chunk_kda",
        None,
        "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, " + _FLAGS + "safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs)",
    ),
    Place(
        "fla.ops.kda.chunk_bwd.chunk_kda_bwd_wy_dqkg_fused",
        "kda",
        "(q, k, v, v_new, g, beta, A, h, do, dh, dv, scale=None, state_v_first=False, cu_seqlens=None, chunk_size=64, "
        "chunk_indices=None, chunk_offsets=None, use_graph=False)",
    ),
    Place(
        "fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd",
        "kda",
        "(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, output_final_state=False, "
        "inplace_final_state=True, state_v_first=False, cu_seqlens=None, ssm_state_indices=None, "
        "num_accepted_tokens=None, " + _FLAGS + "lower_bound=None, out=None, **kwargs)",
    ),
    Place("fla.ops.kda.gate.fused_kda_gate", "kda", _GATE),
    Place("fla.ops.kda.gate.kda_gate_fwd", "kda", _GATE),
    Place("fla.ops.kda.gate.kda_gate_bwd", "kda", "(g, A_log=None, dt_bias=None, dyg=None, lower_bound=None)"),
    Place(
        "fla.modules.causal_conv1d.ops.causal_conv1d_fwd",
        None,
        "(x, weight, bias, residual, initial_state=None, output_final_state=False, " + _PACKED,
    ),
    Place(
        "fla.modules.causal_conv1d.ops.causal_conv1d_bwd",
        None,
        "(x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, " + _PACKED,
    ),
    Place(
        "fla.modules.causal_conv1d.ops.causal_conv1d_update",
        None,
        "(x, cache, residual=None, weight=None, bias=None, activation=None)",
    ),
    Place(
        "fla.modules.norm.fused_norm_gate.layer_norm_gated_fwd",
        None,
        "(x, g, weight, bias, activation='swish', eps=1e-05, residual=None, out_dtype=None, residual_dtype=None, "
        "is_rms_norm=False)",
    ),
    Place(
        "fla.modules.norm.fused_norm_gate.layer_norm_gated_bwd",
        None,
        "(dy, x, g, weight, bias, activation='swish', eps=1e-05, mean=None, rstd=None, dresidual=None, "
        "has_residual=False, is_rms_norm=False, x_dtype=None, recompute_output=False)",
    ),
)

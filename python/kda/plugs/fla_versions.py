"""What the plug relies on in FLA, version by version: where its functions are, under which registry, and how they are
called. The signatures are in the form of :func:`kda.plugs.engines.signature`."""

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


class Version(NamedTuple):
    """``base`` is the module of ``BaseBackend``; ``machinery`` is what else is called or overridden there."""

    base: str
    machinery: dict[str, str | None]
    places: tuple[Place, ...]


# ---- signatures ----


_START = "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
_FLAGS = (
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, "
)
_MIDDLE = (
    "safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
    "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, "
)
_CHUNK_050 = (
    _START + "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, "
    "safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, cp_context=None, "
    "transpose_state_layout=False, **kwargs)"
)
_CHUNK_051 = _START + _FLAGS + _MIDDLE + "**kwargs)"
_CHUNK_06 = _START + _FLAGS + _MIDDLE + "use_graph=False, max_num_seqs=None, **kwargs)"
_RECURRENT = (
    "(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, output_final_state=False, "
    "inplace_final_state=True, state_v_first=False, cu_seqlens=None, ssm_state_indices=None, "
    "num_accepted_tokens=None, " + _FLAGS + "lower_bound=None, out=None, **kwargs)"
)
_WY_START = "(q, k, v, v_new, g, beta, A, h, do, dh, dv, scale=None, "
_WY_050 = _WY_START + "cu_seqlens=None, chunk_size=64, chunk_indices=None, transpose_state_layout=False)"
_WY_051 = _WY_START + "state_v_first=False, cu_seqlens=None, chunk_size=64, chunk_indices=None)"
_WY_06 = (
    _WY_START + "state_v_first=False, cu_seqlens=None, chunk_size=64, chunk_indices=None, chunk_offsets=None, "
    "use_graph=False)"
)
_GATE, _GATE_06 = (
    f"(g, A_log{default}, dt_bias=None, lower_bound=None, output_dtype=...)" for default in ("", "=None")
)
_GATE_BWD, _GATE_BWD_06 = (
    f"(g, A_log{default}, dt_bias=None, dyg=None, lower_bound=None)" for default in ("", "=None")
)
_PACKED = "activation=None, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, "
_CONV_051, _CONV_06 = (
    "(x, weight, bias, residual, initial_state=None, output_final_state=False, "
    f"{_PACKED}{size}=64, layout_fallback=False)"
    for size in ("BT", "chunk_size")
)
_CONV_BWD_051, _CONV_BWD_06 = (
    "(x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, "
    f"{_PACKED}{size}=64, layout_fallback=False)"
    for size in ("BT", "chunk_size")
)
_UPDATE = "(x, cache, residual=None, weight=None, bias=None, activation=None)"
_NORM = (
    "(x, g, weight, bias, activation='swish', eps=1e-05, residual=None, out_dtype=None, residual_dtype=None, "
    "is_rms_norm=False)"
)
_NORM_BWD = (
    "(dy, x, g, weight, bias, activation='swish', eps=1e-05, mean=None, rstd=None, dresidual=None, "
    "has_residual=False, is_rms_norm=False, x_dtype=None, recompute_output=False)"
)


# ---- places ----


def _ops(chunk: str, wy: str, registry: str | None) -> tuple[Place, ...]:
    return (
        Place("fla.ops.kda.chunk.chunk_kda", registry, chunk),
        Place("fla.ops.kda.chunk_bwd.chunk_kda_bwd_wy_dqkg_fused", "kda", wy),
    )


def _gates(gate: str, backward: str) -> tuple[Place, ...]:
    return (
        Place("fla.ops.kda.gate.fused_kda_gate", "kda", gate),
        Place("fla.ops.kda.gate.kda_gate_fwd", "kda", gate),
        Place("fla.ops.kda.gate.kda_gate_bwd", "kda", backward),
    )


def _convolution(module: str, registry: str | None, forward: str, backward: str) -> tuple[Place, ...]:
    return (
        Place(f"{module}.causal_conv1d_fwd", registry, forward),
        Place(f"{module}.causal_conv1d_bwd", registry, backward),
        Place(f"{module}.causal_conv1d_update", registry, _UPDATE),
    )


def _norm(module: str, registry: str | None) -> tuple[Place, ...]:
    return (
        Place(f"{module}.layer_norm_gated_fwd", registry, _NORM),
        Place(f"{module}.layer_norm_gated_bwd", registry, _NORM_BWD),
    )


_MACHINERY_05: dict[str, str | None] = {
    "fla.ops.backends.BaseBackend.verify": "(self, func_name, *args, **kwargs)",
    "fla.ops.backends.BaseBackend.can_use": "()",
    "fla.ops.backends.BackendRegistry.register": "(self, backend)",
    "fla.ops.backends._DISPATCH_DISABLED": None,
    "fla.ops.kda.backends.kda_registry": None,
}
_MODULES_05: dict[str, str | None] = {"fla.modules.backends.modules_registry": None}
_CONV_05 = _convolution("fla.modules.conv.triton.ops", "modules", _CONV_051, _CONV_BWD_051)

VERSIONS = {
    "0.6": Version(
        "fla.backends",
        {
            "fla.backends.register": "(entry_point, *, backend=None, verifier=None, env_var=None)",
            "fla.backends.BaseBackend.verify": "(self, function_name, *args, **kwargs)",
            "fla.backends.BaseBackend.get_implementation": "(self, function_name)",
            "fla.backends.BaseBackend.is_enabled": "(self)",
            "fla.backends._DISPATCH_DISABLED": None,
        },
        (
            *_ops(_CHUNK_06, _WY_06, None),
            Place("fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd", "kda", _RECURRENT),
            *_gates(_GATE_06, _GATE_BWD_06),
            *_convolution("fla.modules.causal_conv1d.ops", None, _CONV_06, _CONV_BWD_06),
            *_norm("fla.modules.norm.fused_norm_gate", None),
        ),
    ),
    "0.5.2": Version(
        "fla.ops.backends",
        _MACHINERY_05 | _MODULES_05,
        (
            *_ops(_CHUNK_051, _WY_051, "kda"),
            *_gates(_GATE, _GATE_BWD),
            *_CONV_05,
            *_norm("fla.modules.fused_norm_gate", "modules"),
        ),
    ),
    "0.5.1": Version("fla.ops.backends", _MACHINERY_05 | _MODULES_05, (*_ops(_CHUNK_051, _WY_051, "kda"), *_CONV_05)),
    "0.5.0": Version("fla.ops.backends", _MACHINERY_05, _ops(_CHUNK_050, _WY_050, "kda")),
}

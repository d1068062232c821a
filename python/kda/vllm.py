"""The adapter for vLLM: our functions in the place of its Triton kernels for KDA, and layers over its pool in place.

vLLM calls :func:`plug` in each of its processes, by the entry point ``kda`` in the group ``vllm.general_plugins``.
Nothing changes unless ``KDA_VLLM=1`` is in the environment: who installs libkda for something else has not asked.

- **Functions**: the modules that Kimi-K3, Kimi-Linear and GLM-5-next take their kernels from get ours instead.
- **Layers**: the layer of Kimi-K3 and that of Kimi-Linear become classes of ours, by vLLM's registry of layers. A
  prefill then reads and writes the pool in place, and a decode step is one call.

Those modules import whole models, so they are changed when vLLM imports them, not before. What moved in them is seen
in their files. Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ._version import __version__
from .call.library import built_with_cuda
from .plugs.engines import Plug, guard, once, plugged, refuse, resolve
from .plugs.imports import after_import, moved

ENGINE, SWITCH, VERSIONS = "vLLM", "KDA_VLLM", ("0.33.0",)

_K3 = "vllm.models.kimi_k3.nvidia"
_K3_OPS = f"{_K3}.ops.third_party.kda"
_GLM_OPS = "vllm.models.glm5next.nvidia.ops.third_party.kda"
_LINEAR = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
_LAYERS = "vllm.model_executor.custom_op"

_FORWARD = "@eager_break_during_capture (self, mixed_qkv, g1, g2, beta, core_attn_out)"
# Attributes that our layers read, all of which __init__ of vLLM's sets, and what they read of a step.
_READ = ("A_log", "conv1d", "dt_bias", "gate_lower_bound", "head_dim", "local_num_heads", "o_norm")
_STEP = (
    "has_initial_state",
    "non_spec_query_start_loc",
    "non_spec_state_indices_tensor",
    "num_actual_tokens",
    "num_prefills",
    "num_spec_decodes",
)
_LAYER: dict[str, str | None] = {
    **{f"self.{name}": None for name in _READ},
    **{f" m.{name}": None for name in _STEP},
}

# By file: what the adapter relies on, in the form of kda.plugs.imports.moved.
EXPECTED: dict[str, dict[str, str | None]] = {
    f"{_K3_OPS}.chunk": {
        "chunk_kda_with_fused_gate": "(q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, "
        "output_final_state=False, lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, "
        "**kwargs)"
    },
    f"{_K3_OPS}.fused_recurrent": {
        "fused_recurrent_kda": "(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, "
        "ssm_state_indices, num_accepted_tokens=None, out=None, fuse_gate=None)",
        "fused_recurrent_kda_packed_decode": "(mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, "
        "initial_state, state_indices, scale=None, out=None)",
    },
    f"{_GLM_OPS}.kernels": {
        "chunk_kda_with_fused_gate": "(q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, safe_gate=False, "
        "lower_bound=-5.0, **kwargs)",
        "fused_recurrent_kda": "(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, "
        "use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, out=None, "
        "sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, lower_bound=-5.0, **kwargs)",
    },
    f"{_K3}.kda": {"KimiK3DeltaAttention._forward": _FORWARD, **_LAYER},
    _LINEAR: {"KimiGatedDeltaNetAttention._forward": _FORWARD, **_LAYER},
    _LAYERS: {"PluggableLayer.register_oot": "@classmethod (cls, _decorated_layer_cls=None, name=None)"},
}


def plug() -> Plug:
    """Arranges that vLLM's KDA runs here, in this process, if ``KDA_VLLM`` is 1. May be called any number of times.

    Returns:
        What became of it. If vLLM is another version, or what the adapter relies on has moved, nothing is changed,
        and a warning says what moved. If it is plugged, a line of vLLM's log says so.
    """
    return once(ENGINE, _connect)


def _connect() -> Plug:
    switch = os.environ.get(SWITCH, "")
    if switch != "1":
        reason = f"{SWITCH}: expected 1 to run vLLM's KDA on kda, got {ascii(switch) if switch else 'nothing'}"
        return refuse(ENGINE, [reason], state="switched off", warn=switch not in ("", "0"))
    if reasons := guard(ENGINE, VERSIONS, {}) or moved("vllm", EXPECTED):
        return refuse(ENGINE, reasons)
    if not built_with_cuda():
        return refuse(ENGINE, ["libkda: expected a build with CUDA, got one without"])
    functions = {_K3_OPS: "K3", _GLM_OPS: "GLM"}
    layers = {f"{_K3}.kda": "KimiK3DeltaAttention", _LINEAR: "KimiGatedDeltaNetAttention"}
    for module, table in functions.items():
        after_import(module, _replacing(table))
    for module, name in layers.items():
        after_import(module, _registering(name))
    takes = [f"{file}.{name}" for file, names in EXPECTED.items() if file != _LAYERS for name in names if names[name]]
    # vLLM prints what loggers under its name say.
    logging.getLogger("vllm.kda").info("kda %s is on: KDA layers run on its kernels (%s=1)", __version__, SWITCH)
    return plugged(ENGINE, takes)


def _replacing(table: str) -> Callable[[ModuleType], None]:
    def act(module: ModuleType) -> None:
        from .plugs import vllm_functions
        from .plugs.declined import or_own

        found = {name: (ours, getattr(module, name)) for name, ours in getattr(vllm_functions, table).items()}
        new = {name: or_own(ENGINE, *both) for name, both in found.items() if not hasattr(both[1], "of_kda")}
        vars(module).update(new)  # all of them or, where something is missing, none

    return act


def _registering(name: str) -> Callable[[ModuleType], None]:
    def act(module: ModuleType) -> None:
        from .plugs.vllm_layer import layer_class

        own: Any = getattr(module, name)
        if name not in resolve(f"{_LAYERS}.op_registry_oot"):
            resolve(f"{_LAYERS}.PluggableLayer").register_oot(name=name)(layer_class(own))

    return act

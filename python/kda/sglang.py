"""The adapter for SGLang: ``kda`` as a choice of ``--linear-attn-backend``, and what runs when it is chosen.

SGLang calls :func:`plug` in each of its processes, by the entry point ``kda`` in the group ``sglang.srt.plugins``. That
adds the choice, and a hook around the constructor of SGLang's dispatcher. Nothing else changes: a phase (decode,
prefill, verify) runs here if the server's options name ``kda`` for it. ``kda.plugs.sglang_kernel`` says how.

Neither importing this module nor :func:`plug` imports SGLang's models and kernels: what moved in them is seen in their
files.
"""

from __future__ import annotations

import warnings
from typing import Any

from .plugs.declined import gpu_why_not
from .plugs.engines import Plug, guard, once, plugged, refuse, resolve, told
from .plugs.imports import after_import, moved

ENGINE, CHOICE, VERSIONS = "SGLang", "kda", ("0.5.23",)

_LINEAR = "sglang.srt.layers.attention.linear"
_BACKEND, _TRITON = f"{_LINEAR}.kda_backend", f"{_LINEAR}.kernels.kda_triton"
_HOOKS = "sglang.srt.plugins.hook_registry.HookRegistry"
_AROUND = "sglang.srt.plugins.hook_registry.HookType.AROUND"
_CHOICES = "sglang.srt.arg_groups.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES"
_CALL = (
    "(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None, **kwargs)"
)

# What the adapter imports at once, in the form of kda.plugs.engines.guard.
EXPECTED: dict[str, str | None] = {
    _CHOICES: None,
    f"{_HOOKS}.register": "(target, hook, hook_type=..., *, source=None)",
    f"{_HOOKS}.apply_hooks": "()",
    _AROUND: None,
}

# What it relies on in files that import most of SGLang, in the form of kda.plugs.imports.moved.
IN_FILES: dict[str, dict[str, str | None]] = {
    "sglang.srt.runtime_context": {"get_exec": "()"},
    f"{_LINEAR}.utils": {'CUSTOM = "custom"': None, 'TRITON = "triton"': None},
    f"{_LINEAR}.kernels.kernel_backend": {"uses_state_checkpoints": None, "supports_track_state_snapshot": None},
    _TRITON: {
        "supports_packed_decode": None,
        "supports_fused_chain_verify": None,
        "TritonKDAKernel.decode": _CALL,
        "TritonKDAKernel.packed_decode": "(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, "
        "cache_indices, num_v_heads, head_v_dim, lower_bound=None, **kwargs)",
        "TritonKDAKernel.extend": "(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, "
        "A_log=None, dt_bias=None, lower_bound=None, beta_is_raw=False, return_intermediate_states=False, **kwargs)",
        "TritonKDAKernel.target_verify": "(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, "
        "query_start_loc, intermediate_states_buffer, intermediate_state_indices, cache_steps, "
        "retrieve_parent_token, lower_bound=None, cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, "
        "replayssm_g=None, replayssm_beta=None, **kwargs)",
    },
    _BACKEND: {
        "KDAKernelDispatcher.__init__": "(self, decode_backend, prefill_backend, verify_backend)",
        "KDAKernelDispatcher.packed_decode": "(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, "
        "cache_indices, num_v_heads, head_v_dim, **kwargs)",
        "KDAKernelDispatcher.decode": _CALL,
        "KDAKernelDispatcher.extend": "(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, "
        "**kwargs)",
        "KDAKernelDispatcher.effective_extend_kernel": "(self, lower_bound, num_tokens, num_seqs=1)",
        "supports_packed_decode_safe_gate": None,
    },
}


def plug() -> Plug:
    """Adds the choice ``kda`` to SGLang in this process. May be called any number of times.

    Returns:
        What became of it. If SGLang is another version, or what the adapter relies on has moved, nothing is changed,
        a warning says what moved, and SGLang refuses the choice ``kda`` as it refuses any unknown name.
    """
    return once(ENGINE, _connect)


def _connect() -> Plug:
    if reasons := guard(ENGINE, VERSIONS, EXPECTED) or moved("sglang", IN_FILES):
        return refuse(ENGINE, reasons)
    choices = resolve(_CHOICES)
    if CHOICE not in choices:
        choices.append(CHOICE)
    after_import(_BACKEND, _hook)
    methods = (name for name in IN_FILES[_TRITON] if name.startswith("TritonKDAKernel."))
    return plugged(ENGINE, [f"{_TRITON}.{name}" for name in methods])


def _hook(module: Any) -> None:
    """Once SGLang has imported its backend, which a process without a model never does."""
    resolve(_HOOKS).register(f"{_BACKEND}.KDAKernelDispatcher.__init__", _build, resolve(_AROUND))
    resolve(_HOOKS).apply_hooks()


def _build(original: Any, dispatcher: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any) -> None:
    """Around ``KDAKernelDispatcher.__init__``, which refuses names that it does not know: builds it with SGLang's own
    kernels, then puts ours in the place of those of the phases that chose ``kda``. These stay SGLang's, and a warning
    says why, where ours cannot run."""
    given = {"decode": decode_backend, "prefill": prefill_backend, "verify": verify_backend}
    try:
        phases, own = _phases(**given), type(decode_backend).TRITON
    except Exception as error:  # with SGLang's options something has moved
        phases, own = set(), None
        _warn(told(error))
    original(dispatcher, *(own if phase in phases else backend for phase, backend in given.items()))
    if not phases:
        return
    try:
        reason = _why_not()
        kernel = None if reason else _kernel(dispatcher)
    except Exception as error:
        reason = told(error)
    if reason:
        _warn(reason)
        return
    if "decode" in phases:
        dispatcher.decode_kernel = kernel
        dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = True
    if "prefill" in phases:
        dispatcher.extend_kernel = kernel
    if "verify" in phases:
        dispatcher.verify_kernel = kernel


def _phases(**backends: Any) -> set[str]:
    """Those for which the server's options name ``kda``. SGLang keeps no unknown name: all become CUSTOM. Where nothing
    is named for verify, it follows decode, as it does for FlashInfer."""
    if not any(backend.is_custom() for backend in backends.values()):
        return set()
    options = resolve("sglang.srt.runtime_context.get_exec")().mamba
    decode = options.linear_attn_decode_backend or options.linear_attn_backend
    names = {
        "decode": decode,
        "prefill": options.linear_attn_prefill_backend or options.linear_attn_backend,
        "verify": options.linear_attn_verify_backend,
    }
    phases = {phase for phase, backend in backends.items() if backend.is_custom() and names[phase] == CHOICE}
    return phases | ({"verify"} if "decode" in phases and names["verify"] is None else set())


def _why_not() -> str | None:
    """Why our kernels cannot run on the GPU of this process, or None."""
    import torch

    return gpu_why_not(torch.cuda.current_device()) if torch.cuda.is_available() else None


def _kernel(dispatcher: Any) -> Any:
    from .plugs.sglang_kernel import kernel_class

    return kernel_class(type(dispatcher.triton_kernel))()


def _warn(reason: str) -> None:
    warnings.warn(f"kda: SGLang's own kernels run: {reason}", RuntimeWarning, stacklevel=4)

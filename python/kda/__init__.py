"""Kimi Delta Attention (KDA) on CPUs and NVIDIA GPUs.

Per sequence and value head, for every token, with a state ``S`` of shape ``[K, V]``::

    S = diag(exp(g)) @ S                  # decay
    u = beta * (v - S.T @ k)              # correction
    S = S + outer(k, u)
    o = scale * S.T @ q                   # reads the updated state

Training: :func:`chunk_kda`, :func:`fused_recurrent_kda` and :func:`fused_kda_gate` have the names, keywords and
semantics of ``fla.ops.kda``. So has :func:`fused_recurrent_kda_fwd`, which serving engines call. Serving:
:func:`prefill` and :func:`decode` update a pool of states in place. :class:`DraftBuffer`, and the functions that it
is built from, verify drafts (speculative tokens) from such a pool. ``kda.nn`` has the layer of Kimi-Linear,
``kda.cp`` context parallelism and ``kda.tp`` tensor parallelism over ``torch.distributed``, and ``kda.stages`` the
single steps of the chunked form. Importing this package is cheap: torch and the compiled library are loaded by the
first function that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._start import announce_when_imported, check_folder, wait_briefly

check_folder(__path__[0])

# Where each public name is defined. Modules are imported when one of their names is first asked for.
_HOMES = {
    "arguments": ("Conv", "Norm", "Records", "new_records"),
    "convolution": ("causal_conv1d", "causal_conv1d_update"),
    "draft_buffer": ("DraftBuffer",),
    "float32": ("prefill_f32",),
    "fused": ("fused_decode",),
    "gate": ("fused_kda_gate",),
    "information": ("explain", "implementations", "info", "use_batch_invariant"),
    "norm": ("norm_gate",),
    "recurrent": ("fused_recurrent_kda_fwd",),
    "segments": ("segment_map", "segment_merge"),
    "serving": ("decode", "prefill", "workspace_size"),
    "speculation": (
        "decode_mtp",
        "flush_kvbuffer",
        "flush_kvbuffer_all_layers",
        "flush_verify_kvbuffer",
        "verify_kvbuffer",
    ),
    "training": ("chunk_kda", "fused_recurrent_kda"),
}
_PARTS = ("cp", "nn", "stages", "tp")  # modules with names of their own
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)

if TYPE_CHECKING:  # the same for type checkers, which do not read a dict; a test compares them
    # isort: off
    from ._version import __version__ as __version__
    from .arguments import Conv as Conv, Norm as Norm, Records as Records, new_records as new_records
    from .convolution import causal_conv1d as causal_conv1d, causal_conv1d_update as causal_conv1d_update
    from .draft_buffer import DraftBuffer as DraftBuffer
    from .float32 import prefill_f32 as prefill_f32
    from .fused import fused_decode as fused_decode
    from .gate import fused_kda_gate as fused_kda_gate
    from .information import (
        explain as explain,
        implementations as implementations,
        info as info,
        use_batch_invariant as use_batch_invariant,
    )
    from .norm import norm_gate as norm_gate
    from .recurrent import fused_recurrent_kda_fwd as fused_recurrent_kda_fwd
    from .segments import segment_map as segment_map, segment_merge as segment_merge
    from .serving import decode as decode, prefill as prefill, workspace_size as workspace_size
    from .speculation import (
        decode_mtp as decode_mtp,
        flush_kvbuffer as flush_kvbuffer,
        flush_kvbuffer_all_layers as flush_kvbuffer_all_layers,
        flush_verify_kvbuffer as flush_verify_kvbuffer,
        verify_kvbuffer as verify_kvbuffer,
    )
    from .training import chunk_kda as chunk_kda, fused_recurrent_kda as fused_recurrent_kda


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        value = importlib.import_module(f".{name}", __name__)
    elif name == "__version__":
        value = importlib.import_module("._version", __name__).__version__
    elif name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", *_PARTS})


wait_briefly()  # before torch is imported, if it is not
announce_when_imported()

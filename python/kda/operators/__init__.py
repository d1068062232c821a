"""The kernels as registered torch operators, for torch.compile (``fullgraph=True``), export and vmap-free tracing.

Eager calls go straight to the binding: :func:`kda.decode` of one token (H = 1, K = V = 16) takes 5.8 us, its operator
20 by position and 45 under a mode (one core of a Xeon). Operators that write
raise the versions of what they write. Operators without gradients refuse inputs that require them, also when they are
traced. Operators of the namespace ``kda``, by module:

* ``training``: ``forward(...) -> (o, hT, h, v_new, Aqk, Akk)`` with autograd, and ``backward(...) -> gradients``,
  functional; what is not wanted comes back empty. ``forward_states(...) -> (o, hT, h)``, with the state before each
  chunk.
* ``serving``: ``prefill(..., state!, out!, checkpoints!) -> ()`` and ``decode(..., state!, out!) -> ()``, in place.
  ``prefill_workspace(...) -> bytes``.
* ``speculation``: ``decode_mtp``, ``verify``, ``flush`` and ``flush_verify``, in place.
* ``convolution``: ``conv(...) -> (y, final_state)`` with autograd, ``conv_backward(...) -> gradients``, and in place
  ``conv_update(..., state!, out!) -> ()``.
* ``gate``: ``gate(...) -> g`` with autograd, ``gate_backward(...) -> (dx, dA_log, d_dt_bias)``.
* ``norm``: ``norm_gate(...) -> y`` with autograd, ``norm_gate_backward``, and ``norm_gate_out(..., out!)``.
* ``layer``: ``joint_linear`` with autograd, ``joint_linear_backward``, and ``old_state``, which is refused where
  backward runs it again.
* ``stages``: ``stage_<name>``, and ``segment_map(...) -> (M, b, d)`` and ``segment_merge(...) -> states``, functional;
  what is not wanted is empty. ``prefill_f32``: the namespace ``kda_prefill``.

:class:`SeenByTorch` is a mode that sends eager calls to them. A call that failed on tensors without memory here goes
the same way (``call/dispatch.py``); no other call pays for it.

Importing this package registers all of them. ``_start`` imports it at the first look-up in ``torch.ops.kda``.
"""

from .. import _needs_torch  # noqa: F401

# isort: split
from ..call.dispatch import mode_that_sees
from . import convolution, gate, layer, norm, prefill_f32, serving, speculation, stages, training

SeenByTorch = mode_that_sees()

__all__ = [
    "SeenByTorch",
    "convolution",
    "gate",
    "layer",
    "norm",
    "prefill_f32",
    "serving",
    "speculation",
    "stages",
    "training",
]

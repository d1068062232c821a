"""What torch is doing around a call: compiling it, recording it, watching its operators, or transforming it.

torch has no public names for most of this. Its private names stand here (one more in kda.cp), and test_imports.py
lists them. Where a torch lacks one, kda does without what it was for, or says which torch it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

try:
    import torch
except ImportError:  # everything but autograd works without torch
    torch = None  # type: ignore[assignment]


def _of_torch(name: str, *instead: Any) -> Any:
    """What torch has under a dotted name, or what to use instead."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        if instead:
            return instead[0]
        wanted = f"expected a version from 2.10 on that has torch.{name} (pip install 'libkda[torch]')"
        raise ImportError(f"torch: {wanted}, got {torch.__version__}") from None


def _never(*_: Any) -> bool:
    return False


compiling: Any = _never if torch is None else torch.compiler.is_compiling
modes: Any = _never  # how many modes of torch's dispatcher are active
recording: Any = _never  # does torch.jit.trace record this call?
transforms_active: Any = _never  # is a transform of torch.func active?
profiling: Any = _never  # does torch's profiler run?
profiled: Any = nullcontext  # an entry in it
increment_version: Any = _never  # raises the versions of tensors
raw_stream: Any = _never  # the handle of torch's current stream, by the number of a device; 0 is CUDA's default one
if torch is not None:
    modes = _of_torch("_C._len_torch_dispatch_stack")
    # The public function is this one with a check in Python, which takes twice as long again.
    recording = _of_torch("_C._is_tracing", torch.jit.is_tracing)
    transforms_active = _of_torch("_C._are_functorch_transforms_active")
    # A backward pass has a number; -1 outside of any.
    backward_number = _of_torch("_C._current_graph_task_id")
    # The public function is this one with a check in Python, which takes as long again.
    increment_version = _of_torch("_C._increment_version", torch.autograd.graph.increment_version)
    # The dispatch keys behind autograd's.
    after_autograd = _of_torch("_C._after_autograd_keyset")
    # Has a tensor a transform's level, also one that has ended? Is it one of is_grads_batched?
    is_transformed = _of_torch("_C._functorch.is_functorch_wrapped_tensor", _never)
    is_batched = _of_torch("_C._functorch.is_legacy_batchedtensor", _never)
    _forward_ad = torch.autograd.forward_ad
    _innermost = _of_torch("_C._functorch.peek_interpreter_stack", None)
    # The hooks of all modules. Torch's function that looks for some counts those that were removed, if they had
    # asked for keywords.
    _forward_hooks = _of_torch("nn.modules.module._global_forward_hooks", None)
    _pre_hooks = _of_torch("nn.modules.module._global_forward_pre_hooks", None)
    _backward_hooks = _of_torch("nn.modules.module._global_backward_hooks", None)
    _backward_pre_hooks = _of_torch("nn.modules.module._global_backward_pre_hooks", None)
    _hooks_found = None not in (_forward_hooks, _pre_hooks, _backward_hooks, _backward_pre_hooks)
    # Is any kind of device under autocast? If nobody can tell, the kinds are asked one by one.
    any_autocast = _of_torch("_C._is_any_autocast_enabled", lambda: True)
    profiling = _of_torch("_C._autograd._profiler_enabled", _never)
    profiled = _of_torch("_C._profiler._RecordFunctionFast", nullcontext)
    # The public way makes an object of Python, which takes ten times as long. A torch without CUDA has only that.
    raw_stream = _of_torch("_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)


# They name the module that runs, for tables of FlopCounterMode and CommDebugMode. These modes may be around a forward
# alone, so they may not change what it saves.
_TRACKERS = {("torch.utils.module_tracker", "ModuleTracker")}
_TRACKERS |= {("torch.distributed.tensor.debug._comm_mode", "_CommModeModuleTracker")}


def any_global_hook() -> bool:
    """Is there a hook of all modules, other than of torch's counters? If nobody can tell, there may be."""
    if not (_forward_hooks or _pre_hooks or _backward_hooks or _backward_pre_hooks):
        return not _hooks_found
    hooks = [
        hook for kind in (_forward_hooks, _pre_hooks, _backward_hooks, _backward_pre_hooks) for hook in kind.values()
    ]
    owners = [type(getattr(hook, "__self__", None)) for hook in hooks]
    return not all((owner.__module__, owner.__name__) in _TRACKERS for owner in owners)


def transform_name() -> str:
    """Of the innermost transform: Grad, Vmap, Jvp, .."""
    return _innermost().key().name if _innermost is not None else ""


def mode_class() -> Any:
    """The class of modes of torch's dispatcher."""
    from torch.utils import _python_dispatch

    return _python_dispatch.TorchDispatchMode


def active_modes() -> list[Any]:
    from torch.utils import _python_dispatch

    return list(_python_dispatch._get_current_dispatch_mode_stack())


def makes_graph() -> bool:
    """Does torch write down what runs, in torch.compile, torch.jit.trace or make_fx?"""
    if compiling() or recording():
        return True
    return bool(modes()) and any(type(mode).__name__ == "ProxyTorchDispatchMode" for mode in active_modes())


def forward_mode() -> bool:
    """Are there tensors with derivatives of forward mode?"""
    return getattr(_forward_ad, "_current_level", -1) >= 0


def is_wrapper(x: Any) -> bool:
    """A fake tensor, or another whose class handles its operators; its data is elsewhere, or nowhere."""
    return bool(type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def is_readable(x: Any) -> bool:
    """May a tensor's values be read? On a GPU that would wait for it, what is being compiled has none, and a recording
    would keep those of its example."""
    return bool(x.is_cpu) and not compiling() and not recording() and not is_wrapper(x)


def is_true(condition: Any) -> bool:
    """A condition on sizes. In a graph it may be about sizes that no example tells (``mark_unbacked``); then False."""
    if not compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


_ONLY = "kda has derivatives for torch.autograd only"
_TRANSFORMS = {
    "Grad": (
        "torch.func.grad",
        f"expected torch.autograd.grad or backward() instead of it, of vjp and of jacrev ({_ONLY})",
    ),
    "Vmap": (
        "torch.vmap",
        "expected one call with the examples as rows of its batch dimension B: each row is a sequence of its own",
    ),
    "Jvp": ("torch.func.jvp", f"expected reverse mode, by torch.autograd.grad or backward() ({_ONLY})"),
}


def transform_refusal() -> NotImplementedError | None:
    """The error for a call inside one of torch.func's transforms, else None."""
    if not transforms_active():
        return None
    name, wanted = _TRANSFORMS.get(
        transform_name(), ("torch.func", "expected none of its transforms around this function")
    )
    return NotImplementedError(f"{name}: {wanted}, got a call inside of it")


def refuse_batched_gradients(gradients: Iterable[Any]) -> None:
    """Refuses ``is_grads_batched``, and ``torch.autograd.functional.jacobian(vectorize=True)``."""
    if not compiling() and any(x is not None and is_batched(x) for x in gradients):
        wanted = "expected False (vectorize=False for jacobians), and torch.autograd.grad once for each gradient"
        raise NotImplementedError(f"is_grads_batched: {wanted}, got True")


_frames: dict[int, list[tuple[Any, Any]]] = {}  # of each frame that is compiled: its graphs, and their first keys


def compiled_for_others(key: Any) -> bool:
    """For what runs while torch makes a graph of code that is for one key (the number of a layer): have graphs of the
    same frame begun with other keys, and may this one be left? ``fullgraph=True`` and export forbid that. A graph of a
    whole model has many keys, and begins with the same one every time."""
    context = _of_torch("_guards.CompileContext", None)
    translator = _of_torch("_dynamo.symbolic_convert.InstructionTranslator", None)
    graph = None if context is None or translator is None else context.current_compile_id()
    if graph is None or graph.frame_id is None:  # a graph of the backward has no frame
        return False
    tracing = translator.current_tx()
    if getattr(tracing, "one_graph", True) or getattr(tracing, "error_on_graph_break", True):
        return False
    graphs = _frames.setdefault(graph.frame_id, [])
    if all(other is not graph for other, _ in graphs):
        if graph.frame_compile_id == 0:  # the first one of its frame: after a reset, numbers begin again
            graphs.clear()
        graphs.append((graph, key))
    return len({first for _, first in graphs}) > 1

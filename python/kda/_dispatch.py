"""Finds calls that torch has to see. Eager calls go straight to the binding. The registered operators (see
``compiled``) take calls that are traced, calls under a mode of torch's dispatcher (``FakeTensorMode``,
``FlopCounterMode``, selective checkpointing), and calls with tensors that have no memory to read here. ``again``
looks for such tensors only after a call has failed, so other calls do not pay for the check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._arrays import is_torch, torch

compiling: Any = (lambda: False) if torch is None else torch.compiler.is_compiling
modes: Any = (lambda: 0) if torch is None else torch._C._len_torch_dispatch_stack


def dispatched() -> bool:
    if compiling():
        return True
    if modes():
        _tell_counters()
        return True
    return False


def _tell_counters() -> None:
    """A ``FlopCounterMode`` copies the formulas when it is made, which may be before ours are registered."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(registry := getattr(counter, "flop_registry", None), dict):
            from . import _flops

            for operator, formula in _flops.formulas().items():
                registry.setdefault(operator, formula)


# ---- tensors without memory ----


def tensors_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The torch tensors among the arguments, those in ``Conv`` and ``Records`` included."""
    found: dict[str, Any] = {}
    for name, x in arguments.items():
        fields: Iterable[tuple[str, Any]] = ((name, x),)
        if hasattr(x, "_fields"):
            fields = ((f"{name}.{field}", y) for field, y in zip(x._fields, x, strict=True))
        found |= {n: y for n, y in fields if is_torch(y)}
    return found


def is_wrapper(x: Any) -> bool:
    """A fake tensor, or another whose class handles its operators; its data is elsewhere, or nowhere."""
    return bool(type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def needs_dispatch(arguments: dict[str, Any]) -> bool:
    """Does a failed call have tensors that the binding cannot read but the operators accept? A call with some meta
    tensors and some others would compute nothing, so it is left to ``refusal``."""
    if torch is None or modes():
        return False
    tensors = tensors_of(arguments).values()
    return any(map(is_wrapper, tensors)) or (bool(tensors) and all(x.is_meta for x in tensors))


def through_operators(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Through(TorchDispatchMode):
        """Changes nothing; under any mode, calls go to the operators."""

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operator(*args, **(kwargs or {}))

    with Through():
        return function(**arguments)


# ---- transforms ----

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
    if torch is None or not torch._C._are_functorch_transforms_active():
        return None
    kind = torch._C._functorch.peek_interpreter_stack().key().name
    name, wanted = _TRANSFORMS.get(kind, ("torch.func", "expected none of its transforms around this function"))
    return NotImplementedError(f"{name}: {wanted}, got a call inside of it")


def refuse_batched_gradients(gradients: Iterable[Any]) -> None:
    """Refuses ``is_grads_batched``, and ``torch.autograd.functional.jacobian(vectorize=True)``."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients):
        wanted = "expected False (vectorize=False for jacobians), and torch.autograd.grad once for each gradient"
        raise NotImplementedError(f"is_grads_batched: {wanted}, got True")

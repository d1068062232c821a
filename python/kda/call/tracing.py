"""What torch is doing around a call: compiling it, watching its operators, or transforming it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

try:
    import torch
except ImportError:  # everything but autograd works without torch
    torch = None  # type: ignore[assignment]

compiling: Any = (lambda: False) if torch is None else torch.compiler.is_compiling
modes: Any = (lambda: 0) if torch is None else torch._C._len_torch_dispatch_stack


def is_wrapper(x: Any) -> bool:
    """A fake tensor, or another whose class handles its operators; its data is elsewhere, or nowhere."""
    return bool(type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


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

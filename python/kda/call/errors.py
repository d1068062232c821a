"""Error messages for what goes wrong before the library can report it, or what it reports with names of C. A public
function that fails asks here what to raise. Only then are its arguments examined one by one, so calls that succeed
pay nothing."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any, NamedTuple

from . import tracing
from .arrays import View, is_torch, torch
from .eager import LostGradients
from .tracing import is_wrapper, transform_refusal

_REQUIRED = {"q", "k", "v", "g", "beta"}
_ARRAYS = _REQUIRED | {
    "A_log",
    "dt_bias",
    "initial_state",
    "state",
    "has_initial_state",
    "cu_seqlens",
    "cu_seqlens_cpu",
}
_ARRAYS |= {"state_indices", "out_state_indices", "checkpoints", "checkpoint_slots", "checkpoint_offset"}
_ARRAYS |= {"out", "workspace", "snapshots", "snapshot_slots", "accepted", "accept_len", "parents", "last_parents"}
_ARRAYS |= {"last_conv_x", "conv_x", "conv_state", "conv_indices"}
_NUMBERS = {"scale", "lower_bound"}
_FLAGS = {"use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"}
_FLAGS |= {"safe_gate", "state_v_first", "output_final_state", "disable_recompute", "return_intermediate_states"}
_FLAGS |= {"update_state", "use_graph", "inplace_final_state"}


class Takes(NamedTuple):
    """What a function takes, by kind."""

    arrays: set[str]
    required: set[str]  # subset of arrays
    flags: set[str]
    numbers: set[str]
    names: dict[str, str]  # from C's names to Python's, where they differ
    leader: str | None  # an argument of functions with autograd: if it is a torch tensor, all arrays must be


def refusal(error: Exception, arguments: dict[str, Any], takes: Takes | None = None) -> Exception:
    """The exception to raise instead of ``error``, which may name no argument, or not by its name in Python.
    ``arguments`` are the ``locals()`` of the function that caught it; ``takes`` is passed for functions without q."""
    arguments.pop("error", None)  # the frame keeps this dict: with its own error in it, both would outlive their use
    arguments = {**arguments, **arguments.get("kwargs", {})}
    for name in ("records", "last", "conv"):  # tuples of arrays
        if hasattr(fields := arguments.pop(name, None), "_asdict"):
            arguments |= {f"{name}.{field}": x for field, x in fields._asdict().items()}
    norm: Any = arguments.get("norm")
    if hasattr(norm, "_asdict"):
        arguments |= {"norm.gate": norm.gate, "norm.weight": norm.weight}
    if (transform := transform_refusal()) is not None and _inside_transforms(arguments):
        return transform
    if isinstance(error, LostGradients):
        culprits = [name for name, x in arguments.items() if is_torch(x) and x.requires_grad]
        return ValueError(f"{culprits[0]}: {error}") if culprits else error
    takes = _takes(arguments) if takes is None else takes
    if of_library := hasattr(error, "__tvm_ffi_error__"):
        error.args = (_with_names_of_python(str(error), takes.names),)
    named = re.match(r"([\w.]+): expected", str(error))
    suspects = [named[1]] if named else [] if of_library else list(arguments)
    for name in suspects:
        if wrong := _what_is_wrong(name, arguments, takes):
            return ValueError(f"{name}: expected {wrong}")
        if named and is_torch(x := arguments.get(name)) and is_wrapper(x):
            wanted = "expected a tensor with memory here (docs/contract.md says which functions take others)"
            return ValueError(f"{name}: {wanted}, got a {type(x).__name__}")
    if isinstance(error, AttributeError) and error.name:
        for name in [n for n in arguments if n in takes.arrays or "." in n]:
            if arguments[name] is error.obj:
                return ValueError(f"{name}: expected an array with {error.name}, got {_short(error.obj)}")
    return error


def _inside_transforms(arguments: dict[str, Any]) -> bool:
    return any(tracing.is_transformed(x) for x in arguments.values() if is_torch(x))


def _takes(arguments: dict[str, Any]) -> Takes:
    """For functions with :func:`kda.prefill`'s names, and the gate."""
    required = _REQUIRED - {"q", "k", "v"} if "conv.x" in arguments else _REQUIRED
    state = "state" if "state" in arguments else "initial_state"
    names = {"h0": state, "hT": state, "o": "out", "h": "cu_seqlens_cpu"}
    if "q" not in arguments:
        names = {"x": "g", "g": "output_dtype"}
    leader = None if "state" in arguments else "q" if "q" in arguments else "g"
    return Takes(_ARRAYS, required, _FLAGS, _NUMBERS, names, leader)


def _with_names_of_python(text: str, names: dict[str, str]) -> str:
    text = re.sub(r"\b(exec\.|h0 or (?=hT))", "", text)

    def name(match: re.Match[str]) -> str:  # of an argument, or of a field: conv.x
        word = match[0]
        return names[word] if word in names else ".".join(names.get(part, part) for part in word.split("."))

    return re.sub(r"\w+(\.\w+)?", name, text)


def _what_is_wrong(name: str, arguments: dict[str, Any], takes: Takes) -> str | None:
    x, leader = arguments.get(name), takes.leader
    if isinstance(x, str) and not _works(str.encode, x):
        return f"text that UTF-8 can hold, got {x!a}"
    if x is None and name not in takes.required:
        return None
    torch_only = leader is not None and is_torch(arguments[leader])
    if name == "accept_len" and isinstance(x, int | list | tuple):  # stands for an array, see `counts`
        return None
    if name in takes.arrays or "." in name:
        wrong = _what_is_wrong_with_array(x)
        return wrong or (f"a torch tensor like {leader}, got {_short(x)}" if torch_only and not is_torch(x) else None)
    if name in takes.numbers and not isinstance(x, Real):
        return f"a number, got {_short(x)}"
    if name in takes.flags and not _works(bool, x):
        return f"True or False, got {_short(x)}"
    if name == "output_dtype" and torch_only and not _works(lambda d: _share(torch.empty(0, dtype=d, device="cpu")), x):
        return f"a dtype of torch that DLPack has, got {x!r}"
    return None


def _what_is_wrong_with_array(x: Any) -> str | None:
    if is_torch(x):
        if x.layout is not torch.strided or x.is_nested:
            return f"a dense tensor, got {'a nested one' if x.is_nested else x.layout}"
        if x.device.type not in ("cpu", "cuda"):
            return f"a tensor on cpu or cuda, got one on {x.device}"
        if x.is_neg():
            return "memory as it reads, got a negated view: call resolve_neg() first"
    elif not hasattr(x, "__dlpack__"):
        return f"an array, got {_short(x)}"
    try:
        _share(x)
    except Exception as e:
        return f"an array that DLPack can share, got {_short(x)}: {str(e).partition(chr(10))[0]}"
    return None


def _share(x: Any) -> Any:
    return torch.utils.dlpack.to_dlpack(x.detach()) if is_torch(x) else x.__dlpack__()


def _works(function: Any, x: Any) -> bool:
    try:
        function(x)
    except Exception:
        return False
    return True


def _short(x: Any) -> str:
    x = x.array if isinstance(x, View) else x
    return ascii(x) if x is None or isinstance(x, str | int | float) else type(x).__name__

"""Loads libkda and its binding once, when a function first needs them.

Importing ``tvm_ffi`` takes about 0.3 s, and it imports torch where torch is installed; ``import kda`` does neither.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ._stages import STAGES

_OPERATORS = (
    "forward",
    "backward",
    "decode",
    "verify",
    "flush",
    "flush_verify",
    "segment_map",
    "segment_merge",
    "gate",
    "gate_backward",
    "norm_gate",
    "norm_gate_backward",
    "conv",
    "conv_backward",
    "prefill_f32",
    *(f"stage_{stage}" for stage in STAGES),
)
_BINDING = "_binding.so"

# The wheel brings no OpenMP runtime. torch brings one with this name, and the loader reuses for both what is already
# loaded: a process has one runtime, whichever comes first.
_OPENMP = "libgomp.so"
_NO_OPENMP = (
    f"kda: {_OPENMP}.1, the OpenMP runtime of GCC, was not found. Debian and Ubuntu have it in the package libgomp1, "
    "Fedora in libgomp; torch brings one, too (pip install libkda[torch])"
)


def _directory() -> Path:
    """The folder of the libraries: ``KDA_LIBRARY_DIR`` (a build tree) if it is set, else the folder of this file (an
    installed wheel)."""
    import kda

    if chosen := os.environ.get("KDA_LIBRARY_DIR"):
        if not (Path(chosen) / _BINDING).is_file():
            got = "which holds none" if Path(chosen).is_dir() else "where there is no folder"
            raise ImportError(f"KDA_LIBRARY_DIR: expected a folder with {_BINDING}, got {chosen!a}, {got}")
        return Path(chosen)
    for folder in kda.__path__:
        if (Path(folder) / _BINDING).is_file():
            return Path(folder)
    raise ImportError(
        f"kda: {_BINDING} was not found in {list(kda.__path__)}; install the wheel or set KDA_LIBRARY_DIR"
    )


def library_file() -> Path:
    """The library file, for programs that link with it. The number in its name is that of the ABI."""
    from ._version import __version__

    return _directory() / f"libkda.so.{__version__.split('.')[0]}"


class Library:
    """The functions of the binding, as attributes: ``forward``, ``forward_workspace``, ``forward_explain``, ..."""

    def __init__(self) -> None:
        import tvm_ffi

        # Errors of these kinds become Python's exceptions of the same name.
        tvm_ffi.register_error("NotImplementedError", NotImplementedError)
        tvm_ffi.register_error("MemoryError", MemoryError)
        try:
            module = tvm_ffi.load_module(str(_directory() / _BINDING))
        except (OSError, RuntimeError) as error:
            if _OPENMP in str(error):
                raise ImportError(_NO_OPENMP) from error
            raise
        for op in _OPERATORS:
            for verb in ("", "_workspace", "_explain"):
                setattr(self, op + verb, module.get_function(f"kda_{op}{verb}"))
        self._module = module
        self.info = module.get_function("kda_info")
        self.implementation = module.get_function("kda_implementation")
        self.assume_gpu = module.get_function("kda_assume_gpu")
        self.use_batch_invariant = module.get_function("kda_use_batch_invariant")

    def current_name(self, op: str, name: str) -> str:
        """The name of the implementation that has or had this one; empty: there is none. Looked up when it is called,
        because builds to compare with may be older than the function."""
        return str(self._module.get_function("kda_current_name")(op, name))

    def __getattr__(self, name: str) -> Any:  # for type checkers: every attribute is set in __init__
        raise AttributeError(name)


class _Recorded:
    """The library under a torch profiler, which then lists calls as ``libkda::forward`` and the like. Eager calls
    pass no dispatcher that would record them; operators of ``torch.ops.kda`` have their own entry around this one."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(_library, name)
        if name not in _OPERATORS:
            return function

        def call(*arguments: Any) -> Any:
            with sys.modules["torch"]._C._profiler._RecordFunctionFast(f"libkda::{name}"):
                return function(*arguments)

        return call


_library: Library | None = None
_recorded: Any = _Recorded()


def _profiling() -> bool:  # torch's profiler; without torch it cannot be on
    return False


def library() -> Library:
    if _library is None:
        _load()
    return _recorded if _profiling() else _library  # type: ignore[return-value]


def _load() -> None:
    global _library, _profiling
    _library = Library()
    if (torch := sys.modules.get("torch")) is not None:  # tvm_ffi imports it where it is installed
        _profiling = torch._C._autograd._profiler_enabled

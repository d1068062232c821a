"""Loads libkda and its binding once, when a function first needs them.

Importing ``tvm_ffi`` takes about 0.3 s, and it imports torch where torch is installed; ``import kda`` does neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from .run import Operand, by_name

_BINDING = "_binding.so"
_ROWS = "_rows"  # decode_rows: decode of N requests with T tokens each, in rows

# The wheel brings no OpenMP runtime. torch brings one with this name, and the loader reuses for both what is already
# loaded: a process has one runtime, whichever comes first.
_OPENMP = "libgomp.so"
_NO_OPENMP = (
    f"kda: {_OPENMP}.1, the OpenMP runtime of GCC, was not found. Debian and Ubuntu have it in the package libgomp1, "
    "Fedora in libgomp; torch brings one, too (pip install libkda[torch])"
)


def library_directory() -> Path:
    """The folder of the libraries: ``KDA_LIBRARY_DIR`` (a build tree) if it is set, else the folder of the package (an
    installed wheel)."""
    package = sys.modules[__name__.partition(".")[0]]
    if chosen := os.environ.get("KDA_LIBRARY_DIR"):
        if not (Path(chosen) / _BINDING).is_file():
            got = "which holds none" if Path(chosen).is_dir() else "where there is no folder"
            raise ImportError(f"KDA_LIBRARY_DIR: expected a folder with {_BINDING}, got {chosen!a}, {got}")
        return Path(chosen)
    for folder in package.__path__:
        if (Path(folder) / _BINDING).is_file():
            return Path(folder)
    raise ImportError(
        f"kda: {_BINDING} was not found in {list(package.__path__)}; install the wheel or set KDA_LIBRARY_DIR"
    )


def library_file() -> Path:
    """The library file, for programs that link with it. The number in its name is that of the ABI."""
    from .._version import __version__

    return library_directory() / f"libkda.so.{__version__.split('.')[0]}"


@contextmanager
def _forkable() -> Iterator[None]:
    """For the import of ``tvm_ffi``, which asks torch whether there is a GPU. torch asks the driver, and a process that
    has asked it must not fork workers any more, as servers do behind their plug-ins. With this setting it asks NVML."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Library:
    """The functions of the binding, as attributes without ``kda_``: ``forward``, ``forward_workspace``, ``info``, ..
    Those of operators take their operands by name: see ``run``."""

    def __init__(self) -> None:
        with _forkable():
            import tvm_ffi

        # Errors of these kinds become Python's exceptions of the same name.
        tvm_ffi.register_error("NotImplementedError", NotImplementedError)
        tvm_ffi.register_error("MemoryError", MemoryError)
        try:
            module = tvm_ffi.load_module(str(library_directory() / _BINDING))
        except (OSError, RuntimeError) as error:
            if _OPENMP in str(error):
                raise ImportError(_NO_OPENMP) from error
            raise
        self._module = module

    @cached_property
    def operators(self) -> tuple[str, ...]:
        return tuple(self._module.get_function("kda_operators")().split())

    def operands(self, op: str) -> tuple[Operand, ...]:
        """The operands of an operator in the order in which the binding reads them."""
        return tuple(Operand.parse(line) for line in self._module.get_function("kda_operands")(op).splitlines())

    def __getattr__(self, name: str) -> Any:
        """Looked up when it is first called, because builds to compare with may be older than the function."""
        function: Any = self._module.get_function(f"kda_{name}")
        op = name.removesuffix("_workspace").removesuffix("_explain").removesuffix(_ROWS)
        if op in self.operators:
            function = by_name(name, function, self.operands(op), ("N", "T") if name.endswith(_ROWS) else ())
        setattr(self, name, function)
        return function


class _Recorded:
    """The library under a torch profiler, which then lists calls as ``libkda::forward`` and the like. Eager calls
    pass no dispatcher that would record them; operators of ``torch.ops.kda`` have their own entry around this one."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(_library, name)
        if name.removesuffix(_ROWS) not in _loaded().operators:
            return function

        def call(*tensors: Any, **operands: Any) -> Any:
            from .tracing import profiled

            with profiled(f"libkda::{name}"):
                return function(*tensors, **operands)

        return call


_library: Library | None = None
_recorded: Any = _Recorded()


def _profiling() -> bool:  # torch's profiler; without torch it cannot be on
    return False


def library() -> Library:
    if _library is None:
        _load()
    return _recorded if _profiling() else _library  # type: ignore[return-value]


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, the calls of this thread run kernels whose bits of a sequence do not depend on the rest of the call.
    Those of other threads keep to :func:`kda.use_batch_invariant`."""
    here = library().batch_invariant_here
    before = here(1)
    try:
        yield
    finally:
        here(before)


def built_with_cuda() -> bool:
    """Loads the library, and leaves CUDA alone: a process that has asked CUDA for anything must not be forked any more,
    and servers load plug-ins before they fork."""
    return str(library().implementation("forward", 0)).startswith("cuda")  # they come first


def _loaded() -> Library:
    if _library is None:
        _load()
    assert _library is not None
    return _library


class _Operators(Sequence[str]):
    """The operators' names, of which the binding has the list: it is loaded when somebody looks."""

    def __len__(self) -> int:
        return len(_loaded().operators)

    def __getitem__(self, i: Any) -> Any:
        return _loaded().operators[i]


OPERATORS: Sequence[str] = _Operators()


def _load() -> None:
    global _library, _profiling
    _library = Library()
    if sys.modules.get("torch") is not None:  # tvm_ffi imports it where it is installed
        from .tracing import profiling

        _profiling = profiling

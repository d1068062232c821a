"""What adapters for other projects (engines) have in common: the guard of signatures, and what became of each plug.

An adapter registers our functions in an engine, or puts them in the place of the engine's. Before it does, it calls
:func:`guard` with the versions that it was written for and the signatures that it relies on. If the guard returns
reasons, the adapter changes nothing: it calls :func:`refuse`, and the engine's own functions run. Otherwise it ends
with :func:`plugged`. Every adapter is a module with ``plug() -> Plug``, which may be called any number of times;
``ENGINES`` names it for ``python -m kda plugs``.

No engine is imported by this module before :func:`guard` is called.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Engine(NamedTuple):
    """Where an engine and its adapter are."""

    adapter: str  # our module
    package: str  # the engine's package
    distributions: tuple[str, ...]  # whose version is the engine's: the first that is installed


ENGINES = {
    "FLA": Engine("kda.fla", "fla", ("fla-core", "flash-linear-attention")),
    "SGLang": Engine("kda.sglang", "sglang", ("sglang",)),
    "vLLM": Engine("kda.vllm", "vllm", ("vllm",)),
}


@dataclass(frozen=True)
class Plug:
    """What became of one adapter in this process."""

    engine: str
    version: str | None  # of the engine, None if it is not installed
    state: str  # "plugged", "refused", "switched off" or "not installed"
    reasons: tuple[str, ...] = ()  # why it is not plugged
    takes: tuple[str, ...] = ()  # dotted names of the functions that are ours now

    def __str__(self) -> str:
        version = f" {self.version}" if self.version else ""
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{self.engine}{version}: {self.state}{why}"


_plugs: dict[str, Plug] = {}
_lock = threading.RLock()


# ---- what became of the adapters ----


def plugs() -> dict[str, Plug]:
    """By engine, those that were tried in this process."""
    with _lock:
        return dict(_plugs)


def once(engine: str, connect: Callable[[], Plug]) -> Plug:
    """Calls ``connect`` unless the engine is plugged already, and keeps its answer. One thread at a time. Whatever
    ``connect`` raises is a refusal: servers call plug-ins as they start, and start without us, too."""
    with _lock:
        if engine not in _plugs or _plugs[engine].state != "plugged":
            try:
                _plugs[engine] = connect()
            except RuntimeWarning:  # of a refusal, where a filter makes errors of warnings
                raise
            except Exception as error:
                _plugs[engine] = refuse(engine, [told(error)])
        return _plugs[engine]


def plugged(engine: str, takes: Sequence[str]) -> Plug:
    """For the end of an adapter's ``connect``: all went well."""
    return Plug(engine, installed(engine), "plugged", (), tuple(takes))


def refuse(engine: str, reasons: Sequence[str], *, state: str = "refused", warn: bool = True) -> Plug:
    """For an adapter's ``connect`` that changed nothing. Warns, as the engine's own functions will run instead."""
    plug = Plug(engine, installed(engine), state, tuple(reasons))
    if warn:
        warnings.warn(f"kda: {plug} ({engine}'s own functions run)", RuntimeWarning, stacklevel=4)
    return plug


def told(error: Exception) -> str:
    """An error in one line, with its kind, which some messages make no sense without."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ---- the guard ----


def installed(engine: str) -> str | None:
    """The version of an engine of ``ENGINES``, or None. Imports nothing. Files that no installer put there, as those
    that PYTHONPATH names, have the version that their ``__init__.py`` sets."""
    for distribution in ENGINES[engine].distributions:
        try:
            if version := importlib.metadata.version(distribution):  # None if its metadata has lost the line
                return version
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        found = importlib.util.find_spec(ENGINES[engine].package)
        if found is None:
            return None
        source = read(Path(found.origin)) if found.origin else ""
        return source_constant(source, "__version__") or "of unknown version"
    except (OSError, SyntaxError, ValueError):  # a file that nobody can read; a module that somebody made by hand
        return "of unknown version"


def read(file: Path) -> str:
    """The text of a file of Python, in UTF-8 or as its first lines say.

    Raises:
        OSError, SyntaxError, UnicodeDecodeError: it cannot be read, names no encoding, or is in another one.
    """
    return importlib.util.decode_source(file.read_bytes())


def guard(engine: str, versions: Sequence[str], expected: Mapping[str, str | None]) -> list[str]:
    """Why an adapter must not plug itself into the engine as it is installed; an empty list if it may.

    Args:
        engine: a key of ``ENGINES``.
        versions: what the adapter was written for. ``"0.6"`` stands for every version 0.6 and 0.6.x, ``"0.6.0"`` for
            0.6.0 alone (and what a packager adds to it, as 0.6.0+cu126).
        expected: what the adapter relies on, by dotted path: module, then attributes, as ``fla.ops.kda.chunk_kda``
            or ``fla.backends.BaseBackend.verify``. The value is the signature in the form of :func:`signature`, or
            None if the thing need only be there. Its modules are imported.

    Returns:
        One sentence for each thing that is missing or has another signature, naming both; one for all that fail
        alike. If the engine is not installed, or in another version, that is the only sentence and nothing is imported.
    """
    version = installed(engine)
    if version is None:
        names = " or ".join(ENGINES[engine].distributions)
        return [f"{engine}: expected an installed package {names}, got none"]
    if not any(same_version(version, written_for) for written_for in versions):
        return [f"{engine}: expected version {' or '.join(versions)}, got {version}"]
    moved: dict[str, list[str]] = {}  # an import that fails is the reason for many paths
    for path, wanted in expected.items():
        if difference := _difference(path, wanted):
            moved.setdefault(difference, []).append(path)
    return [f"{_and_others(paths)}: {difference}" for difference, paths in moved.items()]


def _and_others(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def same_version(version: str, written_for: str) -> bool:
    """Is a version one that the adapter was written for; see :func:`guard`."""
    version = version.split("+")[0]
    return version == written_for or version.startswith(written_for + ".")


def _difference(path: str, wanted: str | None) -> str | None:
    try:
        found = resolve(path)
    except Exception as error:  # an engine's import may fail in any way: a missing package, another CUDA
        return f"expected to find it, got {told(error)}"
    if wanted is None:
        return None
    try:
        got = signature(found)
    except (TypeError, ValueError):
        return f"expected {wanted}, got {type(found).__name__}, which has no signature"
    return None if got == wanted else f"expected {wanted}, got {got}"


def resolve(path: str) -> Any:
    """The object of a dotted path. Imports the longest part of it that is a module.

    Raises:
        ImportError, AttributeError: there is no such module or attribute; whatever the import raises.
    """
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The path itself goes on with an attribute. What a module of it needs and lacks is an error.
            if count > 1 and error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def signature(function: Any) -> str:
    """The parameters as one string, without annotations, which nobody calls by: ``(q, k, *, scale=None, **kwargs)``.
    Decorated functions have that of the function inside. A default that is not a number, text, bool or None is
    ``...``.

    Raises:
        TypeError, ValueError: it has none, as some functions written in C.
    """
    empty = inspect.Parameter.empty
    listed = inspect.signature(function).parameters.values()
    return _written([(p.name, p.kind, None if p.default is empty else _default(p.default)) for p in listed])


def source_signature(source: str, name: str) -> str | None:
    """What :func:`signature` says of a function, from the source of its module, which may not be importable here. Its
    decorators stand in front, as ``@cached (x)``: nobody knows what they make of the function.

    Args:
        source: text of a Python file.
        name: a function at its top, or ``Class.method``.

    Returns:
        The signature, that of the last definition if there are several; None if the file has no such function.
    """
    scope: Sequence[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for wanted in classes:
        scope = [node for c in scope if isinstance(c, ast.ClassDef) and c.name == wanted for node in c.body]
    functions = [f for f in scope if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and f.name == function]
    if not functions:
        return None
    decorators = [f"@{ast.unparse(decorator)}" for decorator in functions[-1].decorator_list]
    return " ".join([*decorators, _written(_parameters(functions[-1].args))])


def source_constant(source: str, name: str) -> str | None:
    """The text that a file of Python sets a name at its top to, None if to no constant text."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            return value if isinstance(value, str) else None
    return None


_Parameters = list[tuple[str, Any, str | None]]  # name, kind, default


def _parameters(arguments: ast.arguments) -> _Parameters:
    kinds = inspect.Parameter
    positional: list[tuple[ast.arg, Any]] = [(a, kinds.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a, kinds.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    found: _Parameters = [
        (a.arg, kind, _source_default(value)) for (a, kind), value in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        found.append((arguments.vararg.arg, kinds.VAR_POSITIONAL, None))
    for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((a.arg, kinds.KEYWORD_ONLY, _source_default(value)))
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, kinds.VAR_KEYWORD, None))
    return found


def _source_default(value: ast.expr | None) -> str | None:
    if value is None:
        return None
    try:
        return _default(ast.literal_eval(value))
    except ValueError:
        return "..."


def _default(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else "..."


def _written(parameters: _Parameters) -> str:
    kinds = inspect.Parameter
    words: list[str] = []
    star = False  # a '*' or '*args' has been written
    for i, (name, kind, default) in enumerate(parameters):
        if kind == kinds.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        mark = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(kind, "")
        words.append(mark + name + ("" if default is None else f"={default}"))
        last_positional = i + 1 == len(parameters) or parameters[i + 1][1] != kinds.POSITIONAL_ONLY
        if kind == kinds.POSITIONAL_ONLY and last_positional:
            words.append("/")
    return f"({', '.join(words)})"

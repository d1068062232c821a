"""The guard of signatures, on packages made here: what moved is named, and nothing else is touched."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kda.cli import main
from kda.plugs import declined, imports
from kda.plugs import engines as _plugs

SOURCE = '''
__version__ = "2.1.0"
LIMIT = object()

def plain(q, k, scale: float | None = None, *, layout="nt", size=-1, **kwargs): ...
def positional(a, b, /, c, *rest, d=LIMIT, e): ...
def keywords(*, a: "int" = 1, b=(1, 2)): ...
async def waits(x=True): ...

class Kernel:
    """Has two methods of one name."""
    def decode(self, q): ...
    def decode(self, q, *, mask=None): ...
    limit = 3
'''
SIGNATURES = {
    "plain": "(q, k, scale=None, *, layout='nt', size=-1, **kwargs)",
    "positional": "(a, b, /, c, *rest, d=..., e)",
    "keywords": "(*, a=1, b=...)",
    "waits": "(x=True)",
    "Kernel.decode": "(self, q, *, mask=None)",
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package 'engine_of_tests' that nobody has installed, and an empty record."""
    package = tmp_path / "engine_of_tests"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    (package / "ops" / "__init__.py").write_text("")
    (package / "ops" / "broken.py").write_text("import a_package_that_is_not_there\n")
    (package / "ops" / "raises.py").write_text("raise OSError('no CUDA')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = _plugs.Engine("kda.engine_of_tests", "engine_of_tests", ("engine-of-tests",))
    monkeypatch.setattr(_plugs, "ENGINES", {"Engine": made})
    monkeypatch.setattr(_plugs, "_plugs", {})
    yield package
    for name in [name for name in sys.modules if name.startswith("engine_of_tests")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_source_and_of_the_object_agree(name: str, engine: Path) -> None:
    assert _plugs.source_signature(SOURCE, name) == SIGNATURES[name]
    assert _plugs.signature(_plugs.resolve(f"engine_of_tests.{name}")) == SIGNATURES[name]


def test_source_without_the_function() -> None:
    assert _plugs.source_signature(SOURCE, "absent") is None
    assert _plugs.source_signature(SOURCE, "Absent.decode") is None


def test_signature_is_that_inside_a_decorator(engine: Path) -> None:
    import functools

    def inner(a: int, b: int = 2) -> None: ...

    @functools.wraps(inner)
    def outer(*args: object, **kwargs: object) -> None: ...

    assert _plugs.signature(outer) == "(a, b=2)"
    assert list(inspect.signature(outer).parameters) == ["a", "b"]


def test_the_guard_has_nothing_to_say(engine: Path) -> None:
    expected: dict[str, str | None] = {f"engine_of_tests.{name}": text for name, text in SIGNATURES.items()}
    expected |= {"engine_of_tests.Kernel.limit": None, "engine_of_tests.ops": None}
    assert _plugs.guard("Engine", ["2.1"], expected) == []


@pytest.mark.parametrize(
    ("path", "wanted", "words"),
    [
        ("engine_of_tests.plain", "(q, k)", ["expected (q, k)", "got (q, k, scale=None"]),
        ("engine_of_tests.gone", "()", ["engine_of_tests.gone", "AttributeError"]),
        ("engine_of_tests.ops.gone.f", None, ["engine_of_tests.ops.gone.f", "AttributeError"]),
        ("engine_of_tests.ops.broken.f", None, ["engine_of_tests.ops.broken.f", "a_package_that_is_not_there"]),
        ("engine_of_tests.ops.raises.f", None, ["OSError", "no CUDA"]),
        ("engine_of_tests.Kernel.limit", "()", ["int, which has no signature"]),
        ("another_engine_of_tests.f", None, ["another_engine_of_tests"]),
    ],
)
def test_the_guard_names_what_moved(path: str, wanted: str | None, words: list[str], engine: Path) -> None:
    reasons = _plugs.guard("Engine", ["2.1"], {path: wanted, "engine_of_tests.waits": "(x=True)"})
    assert len(reasons) == 1
    assert all(word in reasons[0] for word in [path, *words]), reasons


@pytest.mark.parametrize(
    ("version", "written_for", "fits"),
    [
        ("2.1.0", "2.1", True),
        ("2.1", "2.1", True),
        ("2.1.0+cu126", "2.1.0", True),
        ("2.1.1", "2.1.0", False),
        ("2.10.0", "2.1", False),
        ("2.0.9", "2.1", False),
        ("3.2.1", "2.1", False),
    ],
)
def test_versions(version: str, written_for: str, fits: bool, engine: Path) -> None:
    (engine / "__init__.py").write_text(f'__version__ = "{version}"\n')
    reasons = _plugs.guard("Engine", [written_for], {})
    assert reasons == ([] if fits else [f"Engine: expected version {written_for}, got {version}"])


def test_another_version_is_not_imported(engine: Path) -> None:
    (engine / "__init__.py").write_text('__version__ = "3.0"\nraise AssertionError("imported")\n')
    assert len(_plugs.guard("Engine", ["2.1", "2.2"], {"engine_of_tests.plain": None})) == 1
    assert "engine_of_tests" not in sys.modules


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plugs, "ENGINES", {"Engine": _plugs.Engine("kda.none", "none_of_tests", ("none-of-tests",))})
    assert _plugs.installed("Engine") is None
    reasons = _plugs.guard("Engine", ["2.1"], {"none_of_tests.f": None})
    assert reasons == ["Engine: expected an installed package none-of-tests, got none"]


UNREADABLE = {
    "not Python": (b"def decode(self, q:\n", "SyntaxError"),
    "not UTF-8": (b"\n\n\n# caf\xe9\ndef decode(q): ...\n", "UnicodeDecodeError"),
    "not UTF-8 from its first line": (b"# caf\xe9\ndef decode(q): ...\n", "SyntaxError: invalid or missing encoding"),
    "no encoding of ours": (b"# coding: of-tests\ndef decode(q): ...\n", "SyntaxError: unknown encoding"),
    "a folder": (None, "IsADirectoryError"),
}


@pytest.mark.parametrize(("content", "error"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_nobody_can_read_is_named(content: bytes | None, error: str, engine: Path) -> None:
    file = engine / "ops" / "kernel.py"
    file.mkdir() if content is None else file.write_bytes(content)
    (reason,) = imports.moved("engine_of_tests", {"engine_of_tests.ops.kernel": {"decode": "(q)", "word": None}})
    assert reason.startswith(f"engine_of_tests.ops.kernel: expected a file of Python, got {error}")
    assert "\n" not in reason


def test_a_file_in_an_encoding_that_it_names(engine: Path) -> None:
    (engine / "ops" / "kernel.py").write_bytes(b"# coding: latin-1\ndef decode(q): 'caf\xe9'\n")
    assert imports.moved("engine_of_tests", {"engine_of_tests.ops.kernel": {"decode": "(q)", "caf\xe9": None}}) == []


def test_a_decorator_is_part_of_a_signature(engine: Path) -> None:
    """Its file does not say what the decorator makes of the function."""
    source = "class A:\n    @other.cached(2)\n    @staticmethod\n    def f(x): ...\n    def g(x): ...\n"
    assert _plugs.source_signature(source, "A.f") == "@other.cached(2) @staticmethod (x)"
    assert _plugs.source_signature(source, "A.g") == "(x)"


@pytest.mark.parametrize("content", [content for content, _ in UNREADABLE.values() if content])
def test_the_version_of_a_package_that_nobody_can_read(content: bytes, engine: Path) -> None:
    (engine / "__init__.py").write_bytes(content)
    assert _plugs.installed("Engine") == "of unknown version"
    assert _plugs.guard("Engine", ["2.1"], {}) == ["Engine: expected version 2.1, got of unknown version"]


def test_the_version_of_a_module_made_by_hand(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests of others put in the place of an engine: it has no spec."""
    monkeypatch.setitem(sys.modules, "engine_of_tests", types.ModuleType("engine_of_tests"))
    assert _plugs.installed("Engine") == "of unknown version"


def test_metadata_without_a_version(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: None)
    assert _plugs.installed("Engine") == "2.1.0"


def test_whatever_a_plug_raises_is_a_refusal(engine: Path) -> None:
    def connect() -> _plugs.Plug:
        raise KeyError("moved\naway")

    with pytest.warns(RuntimeWarning, match=r"kda: Engine 2.1.0: refused: KeyError: 'moved\\naway'"):
        assert _plugs.once("Engine", connect).state == "refused"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="refused: this moved"):
            _plugs.once("Engine", lambda: _plugs.refuse("Engine", ["this moved"]))


# ---- what is done after an import ----


@pytest.fixture
def seen(engine: Path) -> Iterator[list[str]]:
    """What was done to the module ``engine_of_tests.ops.late``, by its attribute ``state``."""
    done: list[str] = []
    before = list(sys.meta_path), dict(imports._finder.waiting)
    (engine / "ops" / "late.py").write_text("state = 'first'\n")
    imports.after_import("engine_of_tests.ops.late", lambda module: done.append(module.state))
    yield done
    sys.meta_path[:], imports._finder.waiting = before


def test_after_an_import(seen: list[str]) -> None:
    late = importlib.import_module("engine_of_tests.ops.late")
    assert seen == ["first"]
    assert late.__loader__ is late.__spec__.loader and type(late.__loader__).__name__ == "SourceFileLoader"
    importlib.reload(late)
    assert seen == ["first"] * 2


def test_after_an_import_that_failed_at_first(seen: list[str], engine: Path) -> None:
    (engine / "ops" / "late.py").write_text("raise OSError('no CUDA yet')\n")
    with pytest.raises(OSError, match="no CUDA yet"):
        importlib.import_module("engine_of_tests.ops.late")
    (engine / "ops" / "late.py").write_text("state = 'at the second time'\n")
    importlib.invalidate_caches()
    importlib.import_module("engine_of_tests.ops.late")
    assert seen == ["at the second time"]


def test_after_somebody_has_only_looked(seen: list[str]) -> None:
    for _ in range(2):
        spec = importlib.util.find_spec("engine_of_tests.ops.late")
        assert spec is not None and spec.loader is not None
        assert spec.loader.get_source(spec.name) == "state = 'first'\n"  # type: ignore[attr-defined]
    assert importlib.import_module("engine_of_tests.ops.late").state == "first" and seen == ["first"]


def test_finders_that_ask_all_others(seen: list[str]) -> None:
    """As another package's may that does what ours does."""

    class Asks:
        def __init__(self) -> None:
            self.asking = False

        def find_spec(self, name: str, path: object, target: object = None) -> object:
            if self.asking or name != "engine_of_tests.ops.late":
                return None
            self.asking = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asking = False

    sys.meta_path.insert(0, Asks())  # type: ignore[arg-type]
    importlib.import_module("engine_of_tests.ops.late")
    assert seen == ["first"]


# ---- a call that is left to the engine ----


def test_sentences_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in them differ from call to call, and a server runs for months."""
    monkeypatch.setattr(declined, "_told", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(1000):
            declined.tell("Engine", "decode", ValueError(f"q: got {i}"))
    assert len(told) == len(declined._told) == 200


def test_an_object_in_the_place_of_a_function() -> None:
    """As some decorators make, without a name."""

    class Cached:
        def __call__(self, q: int) -> str:
            return f"the engine's {q}"

    def ours(q: int) -> str:
        raise NotImplementedError("no implementation takes this call")

    call = declined.or_own("Engine", ours, Cached())
    with pytest.warns(RuntimeWarning, match="Engine's own kernel runs for Cached, as ours declined: no implementation"):
        assert call(3) == "the engine's 3"


def test_what_the_library_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **given: empty(*shape, **given))  # as if it were one
    declined.gpu_why_not.cache_clear()
    wanted = "kda runs on CUDA tensors only" if declined.built_with_cuda() else "kda was built without CUDA"
    assert declined.gpu_why_not(0) == wanted
    declined.gpu_why_not.cache_clear()


def test_once_keeps_what_is_plugged_and_tries_the_rest_again(engine: Path) -> None:
    calls = []

    def connect() -> _plugs.Plug:
        calls.append(1)
        return _plugs.plugged("Engine", ["f"]) if len(calls) > 1 else _plugs.refuse("Engine", ["why"], warn=False)

    states = [_plugs.once("Engine", connect).state for _ in range(4)]
    assert (states, len(calls)) == (["refused", "plugged", "plugged", "plugged"], 2)
    assert str(_plugs.plugs()["Engine"]) == "Engine 2.1.0: plugged"


def test_a_refusal_is_loud(engine: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"kda: Engine 2.1.0: refused: this; that \(Engine's own functions run\)"):
        _plugs.refuse("Engine", ["this", "that"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plugs.refuse("Engine", ["this"], state="switched off", warn=False)


def test_one_sentence_for_all_that_fail_alike(engine: Path) -> None:
    paths = {f"engine_of_tests.ops.broken.{name}": None for name in "fgh"}
    (reason,) = _plugs.guard("Engine", ["2.1"], {**paths, "engine_of_tests.waits": "(x=True)"})
    assert reason.startswith("engine_of_tests.ops.broken.f and 2 more: expected to find it, got ModuleNotFoundError")


# ---- without FLA, as in the environment of these tests ----

without_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="FLA is installed")


@without_fla
def test_import_without_fla() -> None:
    """A warning, and everything else works."""
    import kda

    with pytest.warns(RuntimeWarning, match="FLA: not installed: FLA: expected an installed package fla-core or"):
        import kda.fla
    assert kda.fla.plug().state == "not installed"
    assert str(kda.fla.report()).startswith("FLA: not installed")
    assert kda.info()["version"] == kda.__version__


@without_fla
def test_the_command_without_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugs"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "FLA: not installed"
    assert main(["plugs", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["engine"], first["version"], first["state"]) == ("FLA", None, "not installed")


def test_the_command_tells_of_a_refusal(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = types.ModuleType("kda.engine_of_tests")
    adapter.plug = lambda: _plugs.refuse("Engine", ["this moved"])  # type: ignore[attr-defined]
    sys.modules[adapter.__name__] = adapter
    try:
        assert main(["plugs"]) == 1
    finally:
        del sys.modules[adapter.__name__]
    assert capsys.readouterr().out.splitlines() == ["Engine 2.1.0: refused", "  this moved"]

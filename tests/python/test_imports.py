"""The structure of python/kda, read from its files: imports without a circle on at most eight floors, one home for each
public name, short files, and few private names of torch.

How floors are counted: a module stands one floor above the highest module that it imports. Imports inside functions
count. Those for types alone (``if TYPE_CHECKING``) add no floor, but make no circle either, since a reader has to know
these types. The package itself only says where names are, and a package's ``__init__`` stands above its modules, so
importing a module does not count as importing these. The command line, ``kda.cli``, is a program on top of the library
and is counted by itself.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import kda

ROOT = Path(kda.__file__).parent
FLOORS, LINES = 8, 500
LONGER = {"kda.nn": 600}  # one class, which is read in one place


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from statements(child)


def imported(module: str, types: bool = False) -> set[str]:
    """Our modules that a module imports, with ``types`` those for type checkers, too."""
    found: set[str] = set()
    for node in ast.walk(tree(module)) if types else statements(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                inside = module.split(".") + ["__init__"] * (FILES[module].name == "__init__.py")
                source = ".".join([*inside[: len(inside) - node.level], *filter(None, [source])])
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in FILES else source for a in node.names}
    return {name for name in found if name in FILES and name != module}


def graph(cli: bool, types: bool = False) -> dict[str, set[str]]:
    """The imports among the modules of the command line, or among all others; without the package itself."""
    own = {m for m in FILES if m.startswith("kda.cli") == cli and m not in ("kda", "kda.__main__")}
    return {module: imported(module, types) & own for module in own}


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each module, from 1 on. A circle raises an error that names it."""
    known: dict[str, int] = {}

    def floor(module: str, above: tuple[str, ...]) -> int:
        if module in above:
            raise AssertionError(f"a circle: {' -> '.join([*above[above.index(module) :], module])}")
        if module not in known:
            known[module] = 1 + max((floor(m, (*above, module)) for m in sorted(imports[module])), default=0)
        return known[module]

    for module in sorted(imports):
        floor(module, ())
    return known


def test_a_circle_is_found() -> None:
    with pytest.raises(AssertionError, match="a circle: b -> c -> b"):
        floors({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize("cli", [False, True])
def test_imports_have_no_circle_and_few_floors(cli: bool) -> None:
    found = floors(graph(cli))
    assert len(found) > (8 if cli else 20) and max(found.values()) > (2 if cli else 4), "all modules were read"
    too_high = {module: floor for module, floor in found.items() if floor > FLOORS}
    assert not too_high


def test_types_make_no_circle() -> None:
    imports = graph(cli=False, types=True)
    assert "kda.cp._context" in imports["kda.cp._exchange"] - imported("kda.cp._exchange"), "those for types count"
    floors(imports)


def test_the_library_imports_neither_the_package_nor_the_command_line() -> None:
    for module in FILES:
        if not module.startswith(("kda.cli", "kda.__main__")):
            assert not {m for m in imported(module) if m == "kda" or m.startswith("kda.cli")}, module


def test_call_imports_no_job() -> None:
    for module in FILES:
        if module.startswith("kda.call"):
            assert all(m.startswith(("kda.call", "kda._version")) for m in imported(module)), module


def test_operators_are_below_jobs() -> None:
    jobs = {f"kda.{module}" for module in kda._HOMES} - {"kda.arguments"}
    for module in FILES:
        if module.startswith("kda.operators"):
            assert not imported(module) & jobs, module


def test_files_are_short() -> None:
    lines = {module: len(file.read_text().splitlines()) for module, file in FILES.items()}
    assert {module: n for module, n in lines.items() if n > LONGER.get(module, LINES)} == {}


def test_every_public_name_has_one_home() -> None:
    """``kda._HOMES`` says where. A name that is defined there is defined in no other public module."""
    defined: dict[str, list[str]] = {}
    for module in (f"kda.{name}" for name in kda._HOMES):
        for node in tree(module).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.setdefault(node.name, []).append(module)
    assert {name: defined[name] for name in kda.__all__} == {
        name: [f"kda.{module}"] for module, names in kda._HOMES.items() for name in names
    }


def test_type_checkers_see_the_same_names() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for block in (node for node in tree("kda").body if isinstance(node, ast.If)):
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        assert all(alias.name == alias.asname for node in imports for alias in node.names), "others export nothing"
        found |= {str(node.module): tuple(alias.name for alias in node.names) for node in imports}
    assert found == {"_version": ("__version__",), **kda._HOMES}


# ---- private names of torch ----

# A torch may drop or change these at any time. Look for a public name before you add one.
PRIVATE = {
    "kda.cp._agree": {"_get_process_group_store"},
    "kda.call.tracing": {
        "_C._after_autograd_keyset",
        "_C._are_functorch_transforms_active",
        "_C._autograd._profiler_enabled",
        "_C._cuda_getCurrentRawStream",
        "_C._current_graph_task_id",
        "_C._increment_version",
        "_C._is_any_autocast_enabled",
        "_C._is_tracing",
        "_C._functorch.is_functorch_wrapped_tensor",
        "_C._functorch.is_legacy_batchedtensor",
        "_C._functorch.peek_interpreter_stack",
        "_C._len_torch_dispatch_stack",
        "_C._profiler._RecordFunctionFast",
        "_current_level",
        "_dynamo.symbolic_convert.InstructionTranslator",
        "_get_current_dispatch_mode_stack",
        "_guards.CompileContext",
        "_python_dispatch",
        "nn.modules.module._global_backward_hooks",
        "nn.modules.module._global_backward_pre_hooks",
        "nn.modules.module._global_forward_hooks",
        "nn.modules.module._global_forward_pre_hooks",
    },
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(parsed: ast.Module) -> Iterator[str]:
    """Private names of torch: imported ones, attributes of what is imported, and texts from which names are read."""
    own: set[str] = set()  # names in this file for things of torch
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            modules = [a for a in node.names if a.name.split(".")[0] == "torch"]
            own |= {(a.asname or "torch") for a in modules}
            yield from (a.name for a in modules if is_private(a.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            own |= {a.asname or a.name for a in node.names}
            yield from (a.name for a in node.names if is_private(f"{node.module}.{a.name}"))
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute):
            root, _, name = ast.unparse(node).partition(".")
            if root in own and is_private(node.attr):
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("_of_torch", "getattr", "hasattr"):
            of_torch = ast.unparse(node.func) == "_of_torch" or ast.unparse(node.args[0]) in own | {"_forward_ad"}
            names = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (name for name in names if of_torch and is_private(name))


def test_private_names_are_found() -> None:
    code = """
import torch._ops, torch.library as l
from torch.nn.modules.module import _hooks
from torch._C import x
torch._C._functorch.y(), l._z, getattr(torch, "_w"), torch.__version__, self._own
"""
    assert set(private_names(ast.parse(code))) == {"torch._ops", "_hooks", "x", "_C._functorch", "_C", "_z", "_w"}


def test_private_names_of_torch_are_these() -> None:
    found = {module: set(private_names(tree(module))) for module in FILES}
    assert {module: names for module, names in found.items() if names} == PRIVATE

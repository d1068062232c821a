"""Finds calls in Python sources whose arguments can only be told apart by counting, and those that make a tensor of a
dtype or on a device that the process sets (``torch.set_default_dtype``, ``torch.set_default_device``)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MOST_BY_POSITION = 8


def _elements(arguments: list[ast.expr]) -> list[ast.expr]:
    """The arguments, with those of spread displays, ``*(a, b)``, one by one."""
    found: list[ast.expr] = []
    for x in arguments:
        shown = isinstance(x, ast.Starred) and isinstance(x.value, ast.Tuple | ast.List)
        found += _elements(x.value.elts) if shown else [x]  # type: ignore[attr-defined]
    return found


def _is_slice(x: ast.expr) -> bool:
    """``*a[2:]``, but not of a shape."""
    if not (isinstance(x, ast.Starred) and isinstance(x.value, ast.Subscript) and isinstance(x.value.slice, ast.Slice)):
        return False
    return not (isinstance(x.value.value, ast.Attribute) and x.value.value.attr == "shape")


def _long_tuples(function: ast.AST) -> dict[str, int]:
    """The variables of a function that a long tuple is assigned to, and the number of its elements."""
    return {
        target.id: len(elements)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name) and len(elements := _elements(node.value.elts)) > MOST_BY_POSITION
    }


def _reason(call: ast.Call, long_tuples: dict[str, int]) -> str | None:
    arguments = _elements(call.args)
    if len(arguments) > MOST_BY_POSITION:
        return f"{len(arguments)} arguments by position, at most {MOST_BY_POSITION}: give them by name"
    for x in arguments:
        if _is_slice(x):
            return f"a slice is spread, {ast.unparse(x)}: give its elements by name"
        if isinstance(x, ast.Starred) and isinstance(x.value, ast.Name) and x.value.id in long_tuples:
            count = long_tuples[x.value.id]
            return f"a tuple of {count} elements is spread, at most {MOST_BY_POSITION}: give them by name"
    return None


def calls_by_position(text: str) -> Iterator[tuple[int, str, str]]:
    """The line of each such call, the function that is called, and what is wrong."""
    tree = ast.parse(text)
    inside: dict[ast.Call, dict[str, int]] = {}
    for scope in ast.walk(tree):  # outer functions come first, so the innermost one stays
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            long_tuples = _long_tuples(scope)
            inside |= {node: long_tuples for node in ast.walk(scope) if isinstance(node, ast.Call)}
    for call, long_tuples in inside.items():
        if reason := _reason(call, long_tuples):
            yield call.lineno, ast.unparse(call.func), reason


# Functions of torch that make a tensor from nothing, or from numbers of Python.
FACTORIES = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def calls_by_defaults(text: str) -> Iterator[tuple[int, str, str]]:
    """The line of each such call, the function that is called, and what it does not say."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        of = call.func.value
        module = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
        given = {x.arg for x in call.keywords}
        missing = [name for name in ("dtype", "device") if not {name, None} & given]  # None: **more
        if module == "torch" and call.func.attr in FACTORIES and missing:
            yield call.lineno, ast.unparse(call.func), " and ".join(missing)

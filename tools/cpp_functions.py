"""Functions of C++ and CUDA sources, as clang-format leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterator

NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"\(.*?\)\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:[^\n\\]|\\.)*",
    re.S | re.M,
)
TYPE = re.compile(r"\b(?:class|struct|union|enum|namespace|extern)\b")
TYPE_NAME = re.compile(r"\b(?:class|struct|union)\s+(?:__\w+__\s+)*(\w+)")
# With parentheses other than those of the function's parameters.
SPECIFIER = re.compile(r"\b(?:__launch_bounds__|__cluster_dims__|alignas|requires|noexcept|explicit|decltype)\s*\(")
TEMPLATE = re.compile(r"^\s*template\s*<")
ACCESS = re.compile(r"\b(?:public|private|protected):")
FUNCTION_NAME = re.compile(r"(\w+)\s*=\s*\[|(operator\s*[^\s(\w]+|operator\s*\(\s*\)|~?\w+)\s*\(")


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def without(head: str, opening: re.Pattern[str], brackets: str) -> str:
    """Removes each bracket that `opening` finds, and everything up to the closing one."""
    while match := opening.search(head):
        depth, end = 1, match.end()
        while depth and end < len(head):
            depth += (head[end] == brackets[0]) - (head[end] == brackets[1])
            end += 1
        head = head[: match.start()] + head[end:]
    return head


def functions(text: str) -> Iterator[tuple[int, int, str]]:
    """First line, number of lines and name of each function with a body, from the beginning of its declaration to its
    last brace. Lambdas belong to their function. Understands C++ as formatted by clang-format."""
    code = ACCESS.sub(blank, NOT_CODE.sub(blank, text))
    scopes: list[tuple[str, int, str]] = []  # kind; offset and name of its declaration
    start = 0  # of the current declaration
    for match in re.finditer(r"[{};]", code):
        at = match.start()
        if scopes and scopes[-1][0] != "scope":  # in a body or a list: only its end matters
            if match[0] == "{":
                scopes.append(("inner", at, ""))
            elif match[0] == "}":
                kind, begin, name = scopes.pop()
                if kind == "function":
                    yield code.count("\n", 0, begin) + 1, code.count("\n", begin, at) + 1, name
                    start = at + 1
        elif match[0] == "{":
            head = code[start:at]
            begin = start + len(head) - len(head.lstrip())
            head = without(without(head, TEMPLATE, "<>"), SPECIFIER, "()")
            if TYPE.search(head.split("(")[0]) and "(" not in head.split(":")[0]:
                owner = TYPE_NAME.search(head)
                scopes.append(("scope", begin, owner[1] if owner else ""))
                start = at + 1
            elif "(" not in head or re.search(r"\)\s*:[^:].*\w\s*$|[=(,]\s*$", head, re.S):
                scopes.append(("list", begin, ""))  # x{0}, f({0}), a table, a constructor's member{0}
            else:
                found = FUNCTION_NAME.search(head)
                name = "".join(f"{owner}::" for _, _, owner in scopes if owner)
                scopes.append(("function", begin, name + (re.sub(r"\s", "", found[1] or found[2]) if found else "?")))
        else:
            if match[0] == "}" and scopes:
                scopes.pop()
            start = at + 1

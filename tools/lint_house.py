#!/usr/bin/env python3
"""Checks rules of the house that formatters do not know: sentences, line lengths, references, long functions and calls.

    tools/lint_house.py               # file:line and the reason, one per line; fails if there is any
    tools/lint_house.py --averages    # first prints the mean words per sentence of each page

- pages: no sentence above 35 words; a kernel's page has at most 20 words a sentence on average
- pages and sources: no line above 120 columns
- pages and sources: every reference exists: links and their anchors, sections (math.md 4), pages, files
- sources: no file above 500 lines, except for those in LONG_FILES
- src/cuda: no function above 120 lines, except for those in LONG_FUNCTIONS
- python/kda: no call with more than eight arguments by position, or with a slice of a tuple, except for LONG_CALLS
- python/kda: no `# fmt: skip`, as the formatter has the last word (the command line is still to follow)
- python/kda: no tensor is made without its dtype and device: the defaults of a process belong to its owner
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from cpp_functions import NOT_CODE, functions
from markdown_pages import CODE, DEFINITION, ROW, Lines, Page, average, sentences, without_targets, words
from python_calls import calls_by_defaults, calls_by_position

ROOT = Path(__file__).resolve().parents[1]

MOST_WORDS = 35  # in a sentence
MOST_WORDS_ON_AVERAGE = 20  # in a sentence of a kernel's page
MOST_COLUMNS = 120
MOST_LINES = 120  # in a function
MOST_LINES_OF_A_FILE = 500

FOLDERS = ("docs", "src", "include", "python", "tests", "tools", "examples", "bench", "cmake")
PAGES = ("README.md", "HACKING.md", "CHANGELOG.md", "docs/**/*.md")
READMES = tuple(f"{folder}/**/README.md" for folder in ("tests", "tools", "examples", "bench"))
SOURCES = ("src", "include", "python", "tests", "tools", "examples", "bench")
CPP = (".h", ".c", ".cc", ".cu")
SUFFIXES = (*CPP, ".py", ".sh", ".txt", ".cmake", "")
GENERATED = ("tools/requirements.txt", "tools/requirements-local.txt", "tools/nvcc.txt", "tools/disassembler.txt")
OWN_TEST = "tests/python/test_lint_house.py"  # its texts contain broken references on purpose

# Reasons for longer files and functions. An entry must leave the list when it is not needed any more.
LONG_FILES = {
    "python/kda/nn.py": "one class, which is read in one place",
    "include/kda/kda.h": "one header is all that a caller includes, and most of it says what each operator computes",
}
LONG_FUNCTIONS = {
    "src/cuda/drafts/recurrent_kernel.h: recurrent_kernel": "as a class of steps it waits for hints: up to 6 % slower",
}

LONG_CALLS: dict[str, str] = {}  # the same for calls: file and name of the function


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


# ---- sentences ----


def check_sentences(path: str, page: Page) -> Iterator[Finding]:
    for text in page.texts:
        for number, sentence in sentences(text):
            if (count := words(sentence)) > MOST_WORDS:
                begin = " ".join(sentence.split()[:6])
                yield Finding(path, number, f"a sentence of {count} words, at most {MOST_WORDS}: {begin} ..")
    if path.startswith("docs/kernels/") and (mean := average(page)) > MOST_WORDS_ON_AVERAGE:
        yield Finding(path, 1, f"{mean:.1f} words a sentence on average, at most {MOST_WORDS_ON_AVERAGE}")


# ---- lines ----


def may_be_long(path: str, page: Page, number: int, line: str) -> bool:
    """Output that a command has printed must be shown as it is, so it may be long. (Commands can be broken.) A table
    row cannot be broken. Only the rows of docs/experiments have six cells of text, so only these may be long. And the
    definition of a link ends where its address ends."""
    is_row = path.startswith("docs/experiments/") and ROW.match(line) is not None
    return number in page.output or is_row or DEFINITION.match(line) is not None


PRAGMA = re.compile(r"\s+# (?:type: ignore|noqa|fmt: skip)\S*$")  # as for ruff


def check_columns(path: str, text: str, page: Page | None = None) -> Iterator[Finding]:
    for number, given in enumerate(text.splitlines(), 1):
        line = PRAGMA.sub("", given)
        if len(line) > MOST_COLUMNS and not (page and may_be_long(path, page, number, line)):
            yield Finding(path, number, f"{len(line)} columns, at most {MOST_COLUMNS}")


# ---- references ----

ADDRESS = re.compile(r"https?://\S+")
ALONE = r"(?<![\w./<>{}*$\"\\-])"  # not the end of a longer name or pattern
PAGE_NAME = re.compile(ALONE + r"(?:\.\./)*([A-Za-z_][\w./-]*\.md)\b(#[\w-]+)?")
FILE_NAME = re.compile(ALONE + r"((?:[\w-]+/)*[\w-]+\.(?:cc|cu|h|py))\b")
FOLDER_NAME = re.compile(rf"((?:{'|'.join(FOLDERS)})/[\w./-]*[\w-])/?")
IN_A_FILE = re.compile(r"(?<=\.\w{1})::?[\w:.~\[\]-]+$|(?<=\.\w{2})::?[\w:.~\[\]-]+$")  # x.h:function, x.py::test
FOREIGN = re.compile(r"fla/.*|(?:.*/)?(?:\w+_)?x\.\w+")  # other projects' files, and placeholder names
NUMBER = r"(?:\d+(?:\.\d+)?|[A-Z]\d+)"
NUMBERS = rf"{NUMBER}(?:(?:,\s+|\s+and\s+|\s+to\s+|\.\.){NUMBER}(?![\w.]*\w))*"
SECTIONS = re.compile(rf"([A-Za-z_][\w/-]*\.md)\s+(?://\s*|#\s*)?({NUMBERS})\b")  # math.md 4.4, B1


def is_ours(path: Path) -> bool:
    """Not what tools leave behind."""
    return not any(part.startswith(".") or part == "__pycache__" for part in path.parts)


@dataclass
class Tree:
    """The names of all files, and the pages that references lead to."""

    root: Path
    files: frozenset[str]

    @classmethod
    def at(cls, root: Path) -> Tree:
        below = [p for folder in FOLDERS for p in (root / folder).rglob("*") if is_ours(p.relative_to(root))]
        files = (p for p in [*root.iterdir(), *below] if p.is_file())
        return cls(root, frozenset(p.relative_to(root).as_posix() for p in files))

    @cached_property
    def endings(self) -> frozenset[str]:
        """The ends of all paths: kda.h, kda/kda.h, .."""
        parts = (PurePosixPath(f).parts for f in self.files)
        return frozenset("/".join(p[i:]) for p in parts for i in range(len(p)))

    def has(self, name: str, folder: PurePosixPath) -> bool:
        """True for a path in the tree, a path next to the file that names it, or the end of a path."""
        return name in self.endings or (self.root / name).exists() or (self.root / folder / name).exists()

    def page(self, path: str) -> Page:
        return Page((self.root / path).read_text())

    def pages_named(self, name: str) -> list[Page]:
        return [self.page(f) for f in self.files if f"/{f}".endswith(f"/{name}")]


def resolved(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def check_links(path: str, page: Page, tree: Tree) -> Iterator[Finding]:
    for number, target in page.links():
        name, _, anchor = target.partition("#")
        file = resolved(PurePosixPath(path).parent / name) if name else path
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        if target.startswith("["):
            yield Finding(path, number, f"a link to {target}, which no line defines")
        elif not (tree.root / file).exists():
            yield Finding(path, number, f"a link to {target}, which does not exist")
        elif anchor and not file.endswith(".md"):
            yield Finding(path, number, f"a link to {target}: name the function, lines move")
        elif anchor and anchor not in (page if file == path else tree.page(file)).anchors:
            yield Finding(path, number, f"a link to {target}: the page has no such heading")


def names_of_files(path: str, text: str) -> Iterator[tuple[int, str]]:
    """File names with their offsets. In a page they are in backticks. In C++ only comments are searched, because
    `at.h` is code. Elsewhere all text is searched, but a name needs a folder."""
    if path.endswith(".md"):
        for code in CODE.finditer(text):
            name = IN_A_FILE.sub("", code[2])
            if found := FILE_NAME.fullmatch(name) or FOLDER_NAME.fullmatch(name):
                yield code.start(), found[1]
    elif path.endswith(CPP):
        for comment in NOT_CODE.finditer(text):
            if comment[0].startswith(("//", "/*")):
                yield from ((comment.start() + m.start(), m[1]) for m in FILE_NAME.finditer(comment[0]))
    else:
        yield from ((m.start(), m[1]) for m in FILE_NAME.finditer(text) if "/" in m[1])


def check_names(path: str, lines: list[tuple[int, str]], tree: Tree) -> Iterator[Finding]:
    """Checks sections of pages (math.md 4), and names of pages and files, in the lines of a page or source."""
    whole = Lines([(number, ADDRESS.sub("", line)) for number, line in lines])
    folder = PurePosixPath(path).parent

    def finding(offset: int, reason: str) -> Finding:
        return Finding(path, whole.number(offset), reason)

    for match in SECTIONS.finditer(whole.text):
        pages = tree.pages_named(match[1])
        for section in re.findall(NUMBER, match[2]):
            if pages and not any(page.has_section(section) for page in pages):
                yield finding(match.start(), f"{match[1]} has no {section}")
    for match in PAGE_NAME.finditer(whole.text):
        name, anchor = match[1], (match[2] or "")[1:]
        if not tree.has(name, folder):
            yield finding(match.start(), f"{name} does not exist")
        elif anchor and not any(anchor in page.anchors for page in tree.pages_named(name)):
            yield finding(match.start(), f"{name} has no heading #{anchor}")
    for offset, name in names_of_files(path, whole.text):
        if not FOREIGN.fullmatch(name) and not tree.has(name, folder):
            yield finding(offset, f"{name} does not exist")


# ---- files and functions ----


def check_length(path: str, text: str, exceptions: dict[str, str]) -> Iterator[Finding]:
    """Removes the exception that it needs from the list, as check_functions() does."""
    if (count := text.count("\n")) > MOST_LINES_OF_A_FILE and not exceptions.pop(path, ""):
        yield Finding(path, 1, f"{count} lines, at most {MOST_LINES_OF_A_FILE}")


def check_functions(path: str, text: str, exceptions: dict[str, str]) -> Iterator[Finding]:
    for line, length, name in functions(text):
        if length > MOST_LINES and not exceptions.pop(f"{path}: {name}", ""):
            yield Finding(path, line, f"{name} has {length} lines, at most {MOST_LINES}")


def check_calls(path: str, text: str, exceptions: dict[str, str]) -> Iterator[Finding]:
    """Removes the exceptions that it needs from the list."""
    for line, name, reason in calls_by_position(text):
        if not exceptions.pop(f"{path}: {name}", ""):
            yield Finding(path, line, f"{name} gets {reason}")
    for number, given in enumerate(text.splitlines(), 1):
        if "# fmt:" in given and not path.startswith("python/kda/cli/"):
            yield Finding(path, number, "a line that the formatter must not touch")
    for line, name, missing in calls_by_defaults(text):
        yield Finding(path, line, f"{name} is given no {missing}, which then follow the defaults of the process")


# ---- the whole tree ----


def page_paths(root: Path) -> list[str]:
    return sorted({p.relative_to(root).as_posix() for pattern in (*PAGES, *READMES) for p in root.glob(pattern)})


def is_source(path: str) -> bool:
    return path.split("/")[0] in SOURCES and PurePosixPath(path).suffix in SUFFIXES and path not in GENERATED


def check_page(path: str, page: Page, tree: Tree) -> Iterator[Finding]:
    yield from check_sentences(path, page)
    yield from check_columns(path, page.text, page)
    yield from check_links(path, page, tree)
    shown = without_targets(DEFINITION.sub("", page.prose.text)).split("\n")
    yield from check_names(path, list(zip(page.prose.numbers, shown, strict=True)), tree)


def check_tree(root: Path, long: dict[str, str]) -> Iterator[Finding]:
    """long: the reasons for long files, functions and calls."""
    tree = Tree.at(root)
    exceptions = dict(long)
    for path in page_paths(root):
        yield from check_page(path, tree.page(path), tree)
    for path in filter(is_source, tree.files):
        text = (root / path).read_text()
        yield from check_columns(path, text)
        yield from check_length(path, text, exceptions)
        if path != OWN_TEST:
            yield from check_names(path, list(enumerate(text.splitlines(), 1)), tree)
        if path.startswith("src/cuda/") and path.endswith((".cu", ".h")):
            yield from check_functions(path, text, exceptions)
        if path.startswith("python/kda/") and path.endswith(".py"):
            yield from check_calls(path, text, exceptions)
    for name in exceptions:
        yield Finding("tools/lint_house.py", 1, f"{name} needs no exception")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--averages", action="store_true", help="print the mean words a sentence of each page")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree (default: this one)")
    options = parser.parse_args()
    if options.averages:
        for path in page_paths(options.root):
            print(f"{average(Page((options.root / path).read_text())):5.1f}  {path}")
    exceptions = LONG_FILES | LONG_FUNCTIONS | LONG_CALLS if options.root == ROOT else {}
    findings = sorted(check_tree(options.root, exceptions))
    for finding in findings:
        print(finding)
    if findings:
        sys.exit(f"{len(findings)} findings")


if __name__ == "__main__":
    main()

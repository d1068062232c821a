#!/usr/bin/env python3
"""Checks rules of the house that formatters do not know: sentences, line lengths, references, long functions.

    tools/lint_house.py               # file:line and the reason, one per line; fails if there is any
    tools/lint_house.py --averages    # first prints the mean words per sentence of each page

- pages: no sentence above 35 words; a kernel's page has at most 20 words a sentence on average
- pages and sources: no line above 120 columns
- pages and sources: every reference exists: links and their anchors, sections (math.md 4), pages, files
- src/cuda: no function above 120 lines, except for those in LONG_FUNCTIONS
"""

from __future__ import annotations

import argparse
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

MOST_WORDS = 35  # in a sentence
MOST_WORDS_ON_AVERAGE = 20  # in a sentence of a kernel's page
MOST_COLUMNS = 120
MOST_LINES = 120  # in a function

FOLDERS = ("docs", "src", "include", "python", "tests", "tools", "examples", "benchmarks", "cmake")
PAGES = ("README.md", "HACKING.md", "CHANGELOG.md", "docs/**/*.md")
READMES = tuple(f"{folder}/**/README.md" for folder in ("tests", "tools", "examples", "benchmarks"))
SOURCES = ("src", "include", "python", "tests", "tools")
CPP = (".h", ".c", ".cc", ".cu")
SUFFIXES = (*CPP, ".py", ".sh", ".txt", ".cmake", "")
GENERATED = ("tools/requirements.txt", "tools/requirements-local.txt", "tools/nvcc.txt")
OWN_TEST = "tests/python/test_lint_house.py"  # its texts contain broken references on purpose

# Reasons for longer functions. An entry must leave the list when its function is gone or short enough.
LONG_FUNCTIONS = {
    "src/cuda/decode/decode.cu: decode_kernel": "one straight sequence; its steps are lambdas over the same registers",
    "src/cuda/drafts/mma.cu: mma_kernel": "to be split: seven phases without names",
    "src/cuda/drafts/recurrent_kernel.h: recurrent_kernel": "to be split: requests, records, drafts, outputs",
    "src/cuda/stages/delta_h_kernel.h: scan_kernel": "to be split: two kernels, with and without outputs",
}


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class Lines:
    """Numbered lines as one text, with the line number for any offset."""

    def __init__(self, lines: list[tuple[int, str]]) -> None:
        self.text = "\n".join(line for _, line in lines)
        self.numbers = [number for number, _ in lines]
        self.begins = [0, *accumulate(len(line) + 1 for _, line in lines)][: len(lines)]

    def number(self, offset: int) -> int:
        return self.numbers[bisect_right(self.begins, offset) - 1]


# ---- pages ----

FENCE = re.compile(r"\s*(```+|~~~+)\s*(\w*)")
HEADING = re.compile(r" {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
RULE = re.compile(r"\s*([-*_=]\s*){3,}$")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
ROW = re.compile(r"\s*\|")
ROW_OF_DASHES = re.compile(r"[\s|:-]+$")
DEFINITION = re.compile(r"^ {0,3}\[([^\]\n]+)\]:[ \t]*(\S+)", re.M)
SHOWN = r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]"
LINK = re.compile(SHOWN + r"(?:\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)[^()]*\)|\[([^\]]*)\])")
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
FORMULA = re.compile(r"(?<![\w$])\$(?![\s$])[^$\n]+?(?<!\s)\$(?![\w$])")


@dataclass
class Text:
    """A paragraph, a list item, or a table cell."""

    lines: list[tuple[int, str]]
    is_cell: bool = False


@dataclass
class Page:
    """A Markdown page, as far as the rules need it."""

    text: str
    texts: list[Text] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)  # outside of code blocks and formulas
    output: set[int] = field(default_factory=set)  # numbers of lines that a command has printed

    def __post_init__(self) -> None:
        open_text: Text | None = None
        indent = 0  # of the current list item
        for number, line in self.lines_outside_of_blocks():
            depth = len(line) - len(line.lstrip())
            if open_text is None and depth == 0:
                indent = 0
            # After a blank line or a heading, indented by four more than the text around it: a code block.
            if open_text is None and depth >= indent + 4 and not ITEM.match(line[indent:]):
                continue
            if line.strip():
                self.lines.append((number, line))
            if not line.strip() or RULE.match(line) or DEFINITION.match(line):
                open_text = None
            elif heading := HEADING.match(line):
                self.headings.append(heading[1])
                open_text = None
            elif ROW.match(line):
                open_text = None
                if not ROW_OF_DASHES.match(line):
                    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
                    self.texts += [Text([(number, cell)], is_cell=True) for cell in cells]
            elif open_text is None or ITEM.match(line):
                item = ITEM.match(line)
                indent = len(item[0]) if item else indent
                open_text = Text([(number, line[indent:] if item else line)])
                self.texts.append(open_text)
            else:
                open_text.lines.append((number, line))

    def lines_outside_of_blocks(self) -> Iterator[tuple[int, str]]:
        """The numbered lines, with empty lines in place of fenced code, comments and formulas."""
        fence = language = ""
        end = ""  # of a comment or formula
        for number, line in enumerate(self.text.splitlines(), 1):
            inside = bool(fence or end)
            if fence:
                if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                    fence = ""
                elif language == "console" and not line.startswith(("$ ", "> ")):
                    self.output.add(number)
            elif end:
                end = "" if end in line else end
            elif opening := FENCE.match(line):
                fence, language = opening[1], opening[2]
            elif line.lstrip().startswith(("<!--", "$$")):
                end = "-->" if "<!--" in line else "$$"
                end = "" if end in line.strip()[2:] else end
                inside = True
            yield number, "" if inside or fence else line

    @cached_property
    def prose(self) -> Lines:
        return Lines(self.lines)

    @cached_property
    def anchors(self) -> set[str]:
        seen: dict[str, int] = {}
        found = set(re.findall(r"<a\s[^>]*(?:id|name)=\"([^\"]+)\"", self.text))
        for heading in self.headings:
            slug = slug_of(heading)
            found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
            seen[slug] = seen.get(slug, 0) + 1
        return found

    def has_section(self, name: str) -> bool:
        """``name`` is 4.4, the number of a heading, or B4, the name of a step."""
        if name[0].isdigit():
            return any(re.match(rf"{re.escape(name)}\.?\s", heading) for heading in self.headings)
        return re.search(rf"\b{name}\b", self.text) is not None

    def links(self) -> Iterator[tuple[int, str]]:
        """The targets of links. In a page without definitions [x][y] is text: K[i][j]."""
        bare = CODE.sub(lambda m: "x" * len(m[0]), self.prose.text)
        defined = {m[1].lower() for m in DEFINITION.finditer(bare)}
        yield from ((self.prose.number(m.start()), m[2]) for m in DEFINITION.finditer(bare))
        for outer in LINK.finditer(bare):
            number = self.prose.number(outer.start())
            for link in (outer, *LINK.finditer(outer[1])):  # perhaps around an image
                if link[2] is not None:
                    yield number, link[2]
                elif defined and (link[3] or link[1]).lower() not in defined:
                    yield number, f"[{link[3] or link[1]}]"


def slug_of(heading: str) -> str:
    """GitHub's anchor of a heading: the text as shown, in lower case, without punctuation, with hyphens for blanks."""
    shown = LINK.sub(r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


# ---- sentences ----

# A single dot (".." goes on), perhaps closing quotes or brackets, and a blank or the end. 3.5 and .5 have none.
END = re.compile(r"(?<![.\s])[.!?][)\]\"'”*]*(?=\s|$)")
ABBREVIATIONS = ("e.g.", "i.e.", "vs.", "cf.", "approx.", "resp.", "Fig.", "Eq.", "Sec.", "No.")


def without_targets(text: str) -> str:
    """Replaces links by their words. Keeps line breaks."""
    return LINK.sub(lambda m: m[1] + "\n" * (m[0].count("\n") - m[1].count("\n")), text)


def readable(text: str) -> str:
    """Replaces links by their words, and a formula or piece of code by one word, since it is read as one thing. Keeps
    line breaks, too."""

    def one_word(match: re.Match[str]) -> str:
        return "x" + "\n" * match[0].count("\n")

    text = without_targets(FORMULA.sub(one_word, CODE.sub(one_word, text)))
    return re.sub(r"<https?:[^>]*>", "x", re.sub(r"</?[a-z]+(?:\s[^>]*)?>", " ", text))


def words(sentence: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def sentences(text: Text) -> Iterator[tuple[int, str]]:
    """Each sentence, with the number of the line in which it begins."""
    numbers = [number for number, _ in text.lines]
    whole = Lines(list(zip(numbers, readable("\n".join(line for _, line in text.lines)).split("\n"), strict=True)))
    start = 0
    for end in [*(m.end() for m in END.finditer(whole.text)), len(whole.text)]:
        sentence = whole.text[start:end]
        if sentence.rstrip(")]\"'”*").endswith(ABBREVIATIONS) and end < len(whole.text):
            continue
        if words(sentence):
            yield whole.number(start + len(sentence) - len(sentence.lstrip())), " ".join(sentence.split())
        start = end


def average(page: Page) -> float:
    """Words per sentence. Cells do not count: one that says "forward" is no sentence, and would offset long ones."""
    counts = [words(s) for text in page.texts if not text.is_cell for _, s in sentences(text)]
    return sum(counts) / len(counts) if counts else 0.0


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


# ---- functions ----

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


def check_functions(path: str, text: str, exceptions: dict[str, str]) -> Iterator[Finding]:
    """Removes the exceptions that it needs from the list."""
    for line, length, name in functions(text):
        if length > MOST_LINES and not exceptions.pop(f"{path}: {name}", ""):
            yield Finding(path, line, f"{name} has {length} lines, at most {MOST_LINES}")


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


def check_tree(root: Path, long_functions: dict[str, str]) -> Iterator[Finding]:
    tree = Tree.at(root)
    exceptions = dict(long_functions)
    for path in page_paths(root):
        yield from check_page(path, tree.page(path), tree)
    for path in filter(is_source, tree.files):
        text = (root / path).read_text()
        yield from check_columns(path, text)
        if path != OWN_TEST:
            yield from check_names(path, list(enumerate(text.splitlines(), 1)), tree)
        if path.startswith("src/cuda/") and path.endswith((".cu", ".h")):
            yield from check_functions(path, text, exceptions)
    for name in exceptions:
        yield Finding("tools/lint_house.py", 1, f"LONG_FUNCTIONS: {name} needs no exception")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--averages", action="store_true", help="print the mean words a sentence of each page")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree (default: this one)")
    options = parser.parse_args()
    if options.averages:
        for path in page_paths(options.root):
            print(f"{average(Page((options.root / path).read_text())):5.1f}  {path}")
    exceptions = LONG_FUNCTIONS if options.root == ROOT else {}
    findings = sorted(check_tree(options.root, exceptions))
    for finding in findings:
        print(finding)
    if findings:
        sys.exit(f"{len(findings)} findings")


if __name__ == "__main__":
    main()

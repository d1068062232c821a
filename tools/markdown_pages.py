"""Markdown pages, as far as the rules of the house need them: texts, headings, links, sentences."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate


class Lines:
    """Numbered lines as one text, with the line number for any offset."""

    def __init__(self, lines: list[tuple[int, str]]) -> None:
        self.text = "\n".join(line for _, line in lines)
        self.numbers = [number for number, _ in lines]
        self.begins = [0, *accumulate(len(line) + 1 for _, line in lines)][: len(lines)]

    def number(self, offset: int) -> int:
        return self.numbers[bisect_right(self.begins, offset) - 1]


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

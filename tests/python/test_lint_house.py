"""tools/lint_house.py: each rule on a small tree that breaks it, and on one that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lint_house
from cpp_functions import functions
from markdown_pages import Page, average, sentences, slug_of, words

SCRIPT = Path(lint_house.__file__)


def findings(root: Path, files: dict[str, str], long: dict[str, str] | None = None) -> list[str]:
    """What the lint reports about a tree of these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [str(finding) for finding in sorted(lint_house.check_tree(root, long or {}))]


def counts(page: str) -> list[int]:
    """The number of words in each sentence."""
    return [words(s) for text in Page(page).texts for _, s in sentences(text)]


# ---- sentences ----

LONG, SHORT = (" ".join(["of"] * count) + "." for count in (36, 35))


@pytest.mark.parametrize("name", ["README.md", "HACKING.md", "CHANGELOG.md", "docs/a/b.md", "tests/x/README.md"])
def test_a_long_sentence(tmp_path: Path, name: str) -> None:
    text = "# Title\n\nShort.\nAnother\none. "
    reason = "a sentence of 36 words, at most 35: of of of of of of .."
    assert findings(tmp_path, {name: text + SHORT}) == []
    assert findings(tmp_path, {name: text + LONG}) == [f"{name}:5: {reason}"]


@pytest.mark.parametrize("name", ["tests/python/bugs.md", "tests/notes.md", "src/README.md"])
def test_pages_that_are_none(tmp_path: Path, name: str) -> None:
    assert findings(tmp_path, {name: LONG}) == []


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("One two. Three four five! Six?", [2, 3, 1]),
        ('About 3.5 of .5, e.g. this, 1, 2, 4, .. 32 of them. (In all.) "Quoted." End', [12, 2, 1, 1]),
        ("See [the page](docs/a_b.md#c), ![a picture](b.png) and <https://a.b>.", [7]),
        ("`a = b + c` is `kda.f(x, y)` and $x + y$ = z, a + b.", [8]),
        ("Lines that\ngo on. And\non.", [4, 2]),
        ("# A heading\ntext\n## Another\n", [1]),
        ("- one two\n  three\n- four\n1. five\n\n   six seven\n", [3, 1, 1, 2]),
        ("| one two | three |\n|---|:-:|\n| `a \\| b` | four. five |\n", [2, 1, 1, 1, 1]),
        ("Text:\n\n    indented code\n\n```python\nx = 1\n```\nmore\n", [1, 1]),
        ("- item\n\n      code of it\n- item\n", [1, 1]),
        ("<!-- a comment\nof two lines -->\n$$\nx = y\n$$\nOne<br>two <sub>three</sub>\n", [3]),
        ("[x]: docs/a.md\n\n---\n", []),
    ],
)
def test_words_of_sentences(page: str, expected: list[int]) -> None:
    assert counts(page) == expected


def test_kernel_pages_have_short_sentences_on_average(tmp_path: Path) -> None:
    words = " ".join(["word"] * 21)
    text = f"{words}.\n\n| cell | cell |\n"
    assert findings(tmp_path, {"docs/page.md": text}) == []
    assert findings(tmp_path, {"docs/kernels/page.md": text}) == [
        "docs/kernels/page.md:1: 21.0 words a sentence on average, at most 20"
    ]
    assert findings(tmp_path, {"docs/kernels/page.md": text + "\nFewer words here.\n"}) == []
    assert average(Page(text)) == 21
    assert average(Page("")) == 0


# ---- lines ----


@pytest.mark.parametrize("name", ["docs/page.md", "src/a.cc", "include/kda.h", "python/a.py", "tests/a.cu", "tools/a"])
def test_a_long_line(tmp_path: Path, name: str) -> None:
    line = "|" + "x" * 118 + "|\n"
    assert findings(tmp_path, {name: line}) == []
    assert findings(tmp_path, {name: "\n" + line[:-2] + "x|\n"}) == [f"{name}:2: 121 columns, at most 120"]


def test_lines_that_may_be_long(tmp_path: Path) -> None:
    long = "x" * 130
    page = f"```console\n$ kda\n{long}\n```\n[a]: https://{long}\n"
    assert findings(tmp_path, {"docs/page.md": page, "docs/experiments/page.md": f"| {long} |\n"}) == []
    page = f"```console\n$ kda {long}\n```\n```python\n{long}\n```\n| {long} |\n"
    assert [f.split(":")[1] for f in findings(tmp_path, {"docs/page.md": page})] == ["2", "5", "7"]


# ---- references ----


def test_links(tmp_path: Path) -> None:
    files = {
        "docs/a/page.md": "# One\n## The `h_every` of B.4\n## One\n[up](../other.md)",
        "docs/other.md": """# Here
<a name="mark"></a>[one](a/page.md#one-1), [two](a/page.md#the-h_every-of-b4), [here](#here), [three], [a long
link](a/page.md), [folder](a), [web](https://a.b/c), [mark](#mark), [x][page], [page][], `[y](none.md)`

[page]: a/page.md
""",
    }
    assert findings(tmp_path, files) == []
    page = (
        "[a](none.md)\n[b](a/page.md#two) [c](#none)\n\n[d](../src/x.h#L4)\n[e\n](gone.md) [f][nothing]\n\n[g]: gone\n"
    )
    assert findings(tmp_path, {"docs/other.md": page, "src/x.h": ""}) == [
        "docs/other.md:1: a link to none.md, which does not exist",
        "docs/other.md:2: a link to #none: the page has no such heading",
        "docs/other.md:2: a link to a/page.md#two: the page has no such heading",
        "docs/other.md:4: a link to ../src/x.h#L4: name the function, lines move",
        "docs/other.md:5: a link to gone.md, which does not exist",
        "docs/other.md:6: a link to [nothing], which no line defines",
        "docs/other.md:8: a link to gone, which does not exist",
    ]


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("What `make test` costs", "what-make-test-costs"),
        ("All of float32's range", "all-of-float32s-range"),
        ("bench prefill_f32: on a GPU", "bench-prefill_f32-on-a-gpu"),
        ("A -- B", "a----b"),
        ("The [page](a.md#b), *again*", "the-page-again"),
    ],
)
def test_slugs(heading: str, slug: str) -> None:
    assert slug_of(heading) == slug


def test_sections(tmp_path: Path) -> None:
    files = {
        "docs/math.md": "# Mathematics\n## 4. Forward\n### 4.4 Scores\n## 5 Backward\nB4 sums rows.\n",
        "src/a.h": "// Scores (math.md 4.4 c), math.md 4 and 5, math.md\n// 5, simplified, math.md B4: math.md 4.\n",
        "docs/page.md": "math.md 4.4",
        "tools/a.py": "# docs/math.md 5\n",
    }
    assert findings(tmp_path, files) == []
    files = {"src/a.h": "// math.md 4.5\n// math.md 5 and 6, math.md B9\n", "docs/page.md": "math.md 7, page.md 1\n"}
    assert findings(tmp_path, files) == [
        "docs/page.md:1: math.md has no 7",
        "docs/page.md:1: page.md has no 1",
        "src/a.h:1: math.md has no 4.5",
        "src/a.h:2: math.md has no 6",
        "src/a.h:2: math.md has no B9",
    ]


def test_names_of_pages(tmp_path: Path) -> None:
    files = {
        "docs/kernels/page.md": "# Title\n",
        "src/a.cc": "// page.md, kernels/page.md, https://a.b/none.md, docs/kernels/page.md#title\n",
        "python/a.py": '"""See docs/kernels/page.md."""\nname = f"{x}.md"\n',
        "tests/CMakeLists.txt": "# *.md, page.md\n",
    }
    assert findings(tmp_path, files) == []
    files = {"src/a.cc": "\n// none.md, page.md#none\n", "python/a.py": "# docs/page.md\n", "docs/b.md": "in none.md\n"}
    assert findings(tmp_path, files) == [
        "docs/b.md:1: none.md does not exist",
        "python/a.py:1: docs/page.md does not exist",
        "src/a.cc:2: none.md does not exist",
        "src/a.cc:2: page.md has no heading #none",
    ]


def test_names_of_files(tmp_path: Path) -> None:
    files = {
        "src/cuda/sm90/scan.h": "// scan.h, sm90/scan.h\nat.h = own.h;\n",
        "tests/python/test_a.py": "# src/cuda/sm90/scan.h, fla/ops/kda.py, gpu/test_x.py\n",
        "docs/page.md": "`src/cuda/sm90/scan.h:chunk`, `test_a.py::test_b`, `src/cuda`, `src/<x>.h`, `at.h2`, no.h\n",
        "tests/README.md": "`python/test_a.py`\n",
    }
    assert findings(tmp_path, files) == []
    files = {
        "src/cuda/sm90/scan.h": "int x;  // sm80/scan.h\n/* gone.h */\n",
        "tests/python/test_a.py": "x = 'src/gone.h'\n",
        "docs/page.md": "`src/scan.h:chunk`\n`gone.py` and `src/cuda/sm80`\n",
    }
    assert findings(tmp_path, files) == [
        "docs/page.md:1: src/scan.h does not exist",
        "docs/page.md:2: gone.py does not exist",
        "docs/page.md:2: src/cuda/sm80 does not exist",
        "src/cuda/sm90/scan.h:1: sm80/scan.h does not exist",
        "src/cuda/sm90/scan.h:2: gone.h does not exist",
        "tests/python/test_a.py:1: src/gone.h does not exist",
    ]


# ---- files and functions ----


@pytest.mark.parametrize(
    "name", ["src/a.cc", "include/a.h", "tests/a.cu", "tools/a", "examples/a.c", "python/kda/a.py", "python/kda/a.cc"]
)
def test_a_long_file(tmp_path: Path, name: str) -> None:
    most = 500
    assert findings(tmp_path, {name: "\n" * most}) == []
    assert findings(tmp_path, {name: "\n" * (most + 1)}) == [f"{name}:1: {most + 1} lines, at most {most}"]
    assert findings(tmp_path, {name: "\n" * (most + 1)}, {name: "because"}) == []
    assert findings(tmp_path, {name: "\n" * most}, {name: "because"}) == [
        f"tools/lint_house.py:1: {name} needs no exception"
    ]


def test_the_formatter_has_the_last_word(tmp_path: Path) -> None:
    files = {"python/kda/a.py": "x = 1\ny = [\n    2]  # fmt: skip\n", "tests/a.py": "y = [\n    2]  # fmt: skip\n"}
    assert findings(tmp_path, files) == ["python/kda/a.py:3: a line that the formatter must not touch"]


def body(lines: int) -> str:
    return "".join(f"  f({i});\n" for i in range(lines))


def test_a_long_function(tmp_path: Path) -> None:
    long, short = f"void f() {{\n{body(119)}}}\n", f"void f() {{\n{body(118)}}}\n"
    assert findings(tmp_path, {"src/cuda/a.h": "\n" + short, "src/cpu/a.cc": long, "src/a.h": long}) == []
    assert findings(tmp_path, {"src/cuda/a.h": "\n" + long}) == ["src/cuda/a.h:2: f has 121 lines, at most 120"]
    assert findings(tmp_path, {"src/cuda/sm80/a.cu": long})[1:] == [
        "src/cuda/sm80/a.cu:1: f has 121 lines, at most 120"
    ]


def test_exceptions_are_needed(tmp_path: Path) -> None:
    files = {"src/cuda/a.h": f"void f() {{\n{body(119)}}}\n"}
    assert findings(tmp_path, files, {"src/cuda/a.h: f": "because"}) == []
    assert findings(tmp_path, files, {"src/cuda/a.h: f": "because", "src/cuda/b.h: f": "because"}) == [
        "tools/lint_house.py:1: src/cuda/b.h: f needs no exception"
    ]


def test_functions() -> None:
    code = r"""
#define F(x) { x
namespace kda {
namespace {
constexpr int table[] = {1, 2, 3};
enum class E : int { a, b };
struct S final : B<2> {
  int x{0}, y = f({1});
  S(int a, int b) : x{a}, y(b) {}
  ~S();
  bool operator()(int i) const { return "}" == '}'; }  // }
 public:
  template <class T, int N = f(2)>
    requires std::is_same_v<T, int>
  __device__ auto get(T x)
      -> decltype(x) {
    const auto g = [&](int i) {
      return i;
    };
    return g(x);
  }
};
}  // namespace
template <class T>
__global__ void __launch_bounds__(kWarps * 32, f(1))
    kernel(const __grid_constant__ P p) {
  if (p) { g(); }
}
const auto later = [](int x) { return x; };
int S::last() { return 1'000; }
}
"""
    assert [(line, length, name) for line, length, name in functions(code)] == [
        (9, 1, "S::S"),
        (11, 1, "S::operator()"),
        (13, 9, "S::get"),
        (24, 5, "kernel"),
        (29, 1, "later"),
        (30, 1, "last"),
    ]


# ---- calls ----

NINE, EIGHT = "a, b, c, d, e, f, g, h, i", "a, b, c, d, e, f, g, h"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (f"f({NINE})", "9 arguments by position, at most 8: give them by name"),
        (f"f({EIGHT}, *more)", "9 arguments by position, at most 8: give them by name"),
        (f"f(*({NINE}))", "9 arguments by position, at most 8: give them by name"),
        (f"f(a, *[{EIGHT}])", "9 arguments by position, at most 8: give them by name"),
        ("f(*a[:15])", "a slice is spread, *a[:15]: give its elements by name"),
        ("f(x, *call.fields[2:4], y=1)", "a slice is spread, *call.fields[2:4]: give its elements by name"),
        ("f(*(x, *a[1:]))", "a slice is spread, *a[1:]: give its elements by name"),
        (f"t = ({NINE})\n    f(*t)", "a tuple of 9 elements is spread, at most 8: give them by name"),
        (f"t = ({EIGHT}, *more)\n    f(0, *t, y=1)", "a tuple of 9 elements is spread, at most 8: give them by name"),
    ],
)
def test_calls_by_position(tmp_path: Path, call: str, reason: str) -> None:
    text = f"def caller():\n    {call}\n"
    line = text[: text.index("f(", 4 + len("caller"))].count("\n") + 1
    assert findings(tmp_path, {"tools/a.py": text}) == [], "the rule is for the package"
    expected = [f"python/kda/call/a.py:{line}: f gets {reason}"]
    assert findings(tmp_path, {"python/kda/call/a.py": text}) == expected
    assert findings(tmp_path, {}, {"python/kda/call/a.py: f": "because"}) == []
    assert findings(tmp_path, {}, {"python/kda/call/a.py: f": "because", "python/kda/b.py: f": "because"}) == [
        "tools/lint_house.py:1: python/kda/b.py: f needs no exception"
    ]


def test_calls_by_name(tmp_path: Path) -> None:
    calls = (
        f"f({EIGHT})",
        f"f({EIGHT}, i=1, j=2, **more)",
        f"f(*({EIGHT}), i=1)",
        "f(*x.shape[:-1], *y, y[1:], (a, *b[1:]))",
        f"f(({NINE}))",
        f"t = ({NINE})\n    f(t)",
        f"t = ({EIGHT})\n    f(*t)",
    )
    other = f"def other():\n    t = ({NINE})\n\n\n"  # another function's variable
    for call in calls:
        text = f"{other}def caller(t):\n    {call}\n"
        assert findings(tmp_path, {"python/kda/a.py": text}) == [], call


# ---- the command ----


def test_tensors_by_defaults(tmp_path: Path) -> None:
    text = """import torch
a = torch.zeros(3, device=x.device)
b = arrays.torch.arange(3, dtype=torch.int32)
c = torch.full((), 1.0)
d = torch.ones(2, dtype=d, device=None), torch.empty(2, **like), torch.zeros_like(a), numpy.zeros(3), a.new_zeros(3)
"""
    reason = "which then follow the defaults of the process"
    assert findings(tmp_path, {"tests/a.py": text}) == [], "the rule is for the package"
    assert findings(tmp_path, {"python/kda/call/a.py": text}) == [
        f"python/kda/call/a.py:2: torch.zeros is given no dtype, {reason}",
        f"python/kda/call/a.py:3: arrays.torch.arange is given no device, {reason}",
        f"python/kda/call/a.py:4: torch.full is given no dtype and device, {reason}",
    ]


def test_command(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, str(SCRIPT), "--root", str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert findings(tmp_path, {"docs/page.md": "Two words.\n"}) == []
    assert run() == (0, "", "")
    assert run("--averages") == (0, "  2.0  docs/page.md\n", "")
    (tmp_path / "docs/page.md").write_text("[a](b)\n")
    assert run() == (1, "docs/page.md:1: a link to b, which does not exist\n", "1 findings\n")

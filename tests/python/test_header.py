"""kda.h, which is written by hand, says what the tables of operands say, and its initialisers set the defaults."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from header import Header, differences
from kda.call.library import library

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "include/kda/kda.h"
TEXT = FILE.read_text()

# Text of the header, a mistake in its place, and what is then said. Any spaces match.
MISTAKES = {
    "a shape": ("G; /* [B,T,HV,K] out", "G; /* [B,T,H,K] out", "G: shape [B,T,H,K], in the table [B,T,HV,K]"),
    "a shape of two": (
        "w, u; /* [B,T,HV,K], [B,T,HV,V] out, optional */",
        "w, u; /* [B,T,HV,V], [B,T,HV,K] out, optional */",
        "stage_recompute_w_u: u: shape [B,T,HV,K], in the table [B,T,HV,V]",
    ),
    "no shape": ("M; /* [P,HV,K,K] f32 */", "M; /* f32 */", "segment_merge: M: 0 shapes for 1 names"),
    "a shape within inputs": ("/* [HV,K] f32, or absent", "/* [HV,V] f32, or absent", "in.dt_bias: shape [HV,V]"),
    "as elsewhere": ("as kda_forward wrote them", "as kda_decode wrote them", "Aqk: not as in kda_decode"),
    "no word of an output": ("o; /* [B,T,HV,V] out */", "o; /* [B,T,HV,V] */", "o: in, in the table out"),
    "written, not read": ("dG; /* [B,T,HV,K] in and out", "dG; /* [B,T,HV,K] out", "dG: out, in the table inout"),
    "optional": ("/* [N,HV,V,K] in, optional: f32 or bf16 */", "/* [N,HV,V,K] in */", "may not be absent"),
    "not optional": ("h; /* [NT,HV,V,K] in:", "h; /* [NT,HV,V,K] in, optional:", "fwd_o: h: may be absent"),
    "dtypes": ("in, with d: bf16, f16 or f32", "in, with d: bf16", "d_o: bfloat16, in the table float32"),
    "with another": ("in, with d: bf16", "in, with M: bf16", "d_o: does not name d, with which it comes"),
    "a scalar's type": ("int32_t h_every; /* chunks", "float h_every; /* chunks", "h_every: float, in the table int"),
    "a name": ("kda_tensor accept_len; /*", "kda_tensor accepted; /*", "flush: accept_len is not in the struct"),
    "a member more": ("kda_tensor y;", "kda_tensor y, z;", "norm_gate: z is not in the table"),
    "an order": ("kda_tensor kg, w;", "kda_tensor w, kg;", "stage_delta_h: the order in the table is at.cu_seqlens"),
    "the size": ("sizeof(kda_gate_args) */", "sizeof(kda_conv_args) */", "gate: does not begin with its size"),
    "a struct": ("} kda_flush_args;", "} kda_flush_all_args;", "kda_flush: no args"),
    "a struct of nobody": ("/* B1:", "typedef struct kda_x_args {\n} kda_x_args; /* B1:", "x_args: no operator has it"),
    "a function": ("kda_verify_explain(", "kda_verify_explains(", "verify: kda_verify_explain is not declared"),
    "an initialiser": ("KDA_ARGS_INIT(kda_gate_args)", "KDA_ARGS_INIT(kda_conv_args)", "gate: no initialiser"),
}


def found(text: str) -> list[str]:
    return list(differences(text, library().operators, library().operands))


def test_the_header_is_as_the_tables() -> None:
    assert found(TEXT) == [], "kda.h and src/contract/tables*.h differ"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    right, wrong, sentence = MISTAKES[mistake]
    spoilt, count = re.subn(r"\s+".join(map(re.escape, right.split())), wrong, TEXT)
    assert count > 0, "the header has another text there now: plant the mistake again"
    said = found(spoilt)
    assert any(sentence in line for line in said), said


def test_everything_is_read() -> None:
    """What a form of declaration hides from the reader would also hide from the comparison."""
    header = Header(TEXT)
    assert len(header.structs) == TEXT.count("typedef struct ")
    args = [name for name in header.structs if name.endswith("_args")]
    assert len(args) == len(library().operators) == TEXT.count("uint64_t struct_size;")
    assert all(m.comment for name in args for _, m in header.members(name) if m.type == "kda_tensor")


# ---- initialisers ----


def wrong_initialisers(header: Path, folder: Path, language: str) -> str:
    """Compiles and runs a program of every initialiser. Prints those that set anything but the size."""
    names = [f"kda_{op}_args" for op in library().operators]
    checks = "".join(f"  CHECK({name}, {name.upper()}_INIT)\n" for name in names)
    program = folder / f"initialisers.{language}"
    program.write_text(
        f"""#include "{header}"
#include <stdio.h>
#include <string.h>
#define CHECK(Args, INIT) {{ \\
    static Args given = INIT, wanted; \\
    wanted.struct_size = sizeof(Args); \\
    if (memcmp(&given, &wanted, sizeof given)) puts(#Args); \\
  }}
int main() {{
{checks}  return 0;
}}
"""
    )
    compiler = {"c": os.environ.get("CC", "gcc"), "cc": os.environ.get("CXX", "g++")}[language]
    standard = {"c": "-std=c11", "cc": "-std=c++17"}[language]
    binary = folder / "initialisers"
    options = [standard, str(program), "-o", str(binary)]
    subprocess.run([compiler, *options], check=True, capture_output=True, text=True)
    return subprocess.run([binary], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("language", ["c", "cc"])
def test_initialisers_set_the_size_and_else_zeros(language: str, tmp_path: Path) -> None:
    assert wrong_initialisers(FILE, tmp_path, language) == ""


@pytest.mark.parametrize(
    ("language", "right", "wrong"),
    [
        ("c", "{ .struct_size = sizeof(Args) }", "{ .struct_size = sizeof(Args), .exec.num_threads = 1 }"),
        ("cc", "  args.struct_size = sizeof(Args);\n", "  args.struct_size = 8;\n"),
    ],
)
def test_another_default_is_noticed(language: str, right: str, wrong: str, tmp_path: Path) -> None:
    assert right in TEXT
    (spoilt := tmp_path / "spoilt.h").write_text(TEXT.replace(right, wrong))
    assert len(wrong_initialisers(spoilt, tmp_path, language).split()) == len(library().operators)

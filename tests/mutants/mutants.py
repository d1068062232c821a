#!/usr/bin/env python3
"""Deliberately wrong variants of the kernels: the tests must catch every one.

    mutants.py BUILD_DIR [SUBSTRING]     all mutants, or those whose name contains SUBSTRING

Each mutant is one substitution in one file. The translation units it reaches are compiled as compile_commands.json
says (for one instruction set only, and with -O1: seconds count), linked with the other objects into a libkda.so, and
the tests of that family run against it. Exit status 0: all of them failed, as they should, and the unmutated library
built the same way passed.
"""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Which units a file reaches, and the tests that should notice: program and filter.
CASES = ("tokens_65", "packed", "gva_2", "softplus_bias", "lower_bound", "beta_2sigmoid", "K5_V200", "state_K_first")


def numerics(*suites: str) -> tuple[str, str]:
    return "test_numerics", ":".join(f"All/{s}.*_{c}" for s in suites for c in CASES)


FORWARD = numerics("Forward", "ForwardSaved")
BACKWARD = numerics("Backward")
DECODE = numerics("Decode")
GATE = ("test_numerics", "All/GateTest.*:GateAccuracy.*")
CHECKPOINTS = ("test_numerics", "All/Checkpoints.*")
ORACLE = ("test_oracle", "*")

CHUNK = "src/cpu/chunk-inl.h"
CHUNK_FORWARD = "src/cpu/chunk_forward.cc"
CHUNK_BACKWARD = "src/cpu/chunk_backward.cc"
RECURRENT = "src/cpu/recurrent.cc"
SIMD = "src/cpu/simd-inl.h"
GATES = "src/cpu/gate.cc"
REFERENCE = "src/reference/math.h"
REFERENCE_FORWARD = "src/reference/forward.cc"
REFERENCE_BACKWARD = "src/reference/backward.cc"
# A header's mutant is compiled into the units that its tests run.
UNITS = {CHUNK: [CHUNK_FORWARD], SIMD: [GATES], REFERENCE: [REFERENCE_FORWARD, REFERENCE_BACKWARD]}


@dataclass
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, str]


MUTANTS = [
    # ---- one chunk, forward ----
    Mutant("chunk: undecayed state carried on", CHUNK, "if (ell) store(product, ell + d);", "if (ell) store(splat(1), ell + d);", FORWARD),
    Mutant("chunk: E instead of F in the state", CHUNK, "c.kg.columns(), c.v, next", "c.kG.columns(), c.v, next", FORWARD),
    Mutant("chunk: keys not decayed to the chunk's end", CHUNK, "c.kg.columns(), c.v, next", "c.k.columns(), c.v, next", FORWARD),
    Mutant("chunk: prediction from the undecayed state", CHUNK, "c.kG.rows(), S, c.v", "c.k.rows(), S, c.v", FORWARD),
    Mutant("chunk: missing diagonal of Aqk", CHUNK, "Aqk.row(j + 1)[j + 1] = sum_lanes(qk1);", "Aqk.row(j + 1)[j + 1] = 0;", FORWARD),
    Mutant("chunk: one gate step off in a block", CHUNK, "load(alpha.row(j + 1) + d)), k1", "load(alpha.row(j) + d)), k1", FORWARD),
    Mutant("chunk: one gate step off at an anchor", CHUNK, "decay_columns<true>(c, first, half", "decay_columns<false>(c, first, half", FORWARD),
    Mutant("chunk: forgotten beta in Akk", CHUNK, "Akk.row(i)[j] = c.beta[b + i] * sum_lanes(kk0);", "Akk.row(i)[j] = sum_lanes(kk0);", FORWARD),
    Mutant("chunk: beta of the column in Akk", CHUNK, "c.beta[b + i] * sum_lanes(kk1)", "c.beta[b + j + 1] * sum_lanes(kk1)", FORWARD),
    Mutant("chunk: forgotten beta in the off-diagonal blocks", CHUNK, "c.row_k, c.beta, nullptr);", "c.row_k, nullptr, nullptr);", FORWARD),
    Mutant("chunk: forgotten beta of the corrections", CHUNK, "scale_row(c.v.row(i), c.beta[i], c.V, c.v.row(i))", "scale_row(c.v.row(i), 1, c.V, c.v.row(i))", FORWARD),
    Mutant("chunk: wrong triangle solved", CHUNK, "solve_triangle<Triangle::kLower>(c.L, c.V, c.Akk.rows()", "solve_triangle<Triangle::kUpper>(c.L, c.V, c.Akk.columns()", FORWARD),
    Mutant("chunk: largest off-diagonal block left out", CHUNK, "half < kChunk; half *= 2", "half < kChunk / 2; half *= 2", FORWARD),
    Mutant("forward: output reads the undecayed state", CHUNK_FORWARD, "c.qG.rows(), s.S, s.o", "c.q.rows(), s.S, s.o", FORWARD),
    Mutant("forward: output without its own chunk", CHUNK_FORWARD, "add_triangle<Triangle::kLower>(L, V, c.Aqk.rows(), c.v, s.o);", "", FORWARD),
    Mutant("forward: all states of h in one row", CHUNK_FORWARD, "first_chunk + t / kChunk, hv, v0, s.S", "first_chunk, hv, v0, s.S", FORWARD),
    Mutant("forward: initial state ignored", CHUNK_FORWARD, "if (seq.initial) load_state", "if (false) load_state", FORWARD),
    Mutant("forward: padded sequences computed", CHUNK_FORWARD, "if (!seq.live) {", "if (false) {", ("test_edges", "Padding.Forward")),
    Mutant("forward: tail rows not zeroed", CHUNK_FORWARD, "KDA_ISA_CALL(zero_tail)(a.o, end, p.T - end);", "static_cast<void>(end);", ("test_edges", "Tail.*")),
    Mutant("forward: checkpoint of every chunk", CHUNK_FORWARD, "(t + L) % a.checkpoint_every == 0", "(t + L) % kChunk == 0", CHECKPOINTS),
    # ---- chunked backward ----
    Mutant("backward: forgotten E", CHUNK_BACKWARD, "E = hn::Mul(E, load(alpha.row(i)));", "", BACKWARD),
    Mutant("backward: forgotten F", CHUNK_BACKWARD, "F = hn::Mul(F, load(alpha.row(i)));", "", BACKWARD),
    Mutant("backward: F of the next row", CHUNK_BACKWARD, "Vec F = splat(1), last = hn::Zero(kF32);", "Vec F = load(alpha.row(L - 1)), last = hn::Zero(kF32);", BACKWARD),
    Mutant("backward: missing last-row term of dG", CHUNK_BACKWARD, "hn::MulAdd(load(c.ell + d), SdS, last)", "last", BACKWARD),
    Mutant("backward: missing write part of the last row", CHUNK_BACKWARD, "last = hn::Add(last, kdk);", "", BACKWARD),
    Mutant("backward: wrong triangle of Aqk", CHUNK_BACKWARD, "add_triangle<Triangle::kUpper>(L, V, saved.Aqk.columns()", "add_triangle<Triangle::kLower>(L, V, saved.Aqk.rows()", BACKWARD),
    Mutant("backward: undecayed dS", CHUNK_BACKWARD, "gemm<Acc::kDecay>(K, V, L, c.qG.columns(), s.D, s.dS, {c.ell, s.dS});", "gemm<Acc::kAdd>(K, V, L, c.qG.columns(), s.D, s.dS);", BACKWARD),
    Mutant("backward: diagonal pairs left out", CHUNK_BACKWARD, "splat(s.dAqk.row(b + j)[b + j])", "splat(0)", BACKWARD),
    Mutant("backward: column terms of dG left out", CHUNK_BACKWARD, "store(hn::NegMulAdd(pc, load(c.col_k.row(j) + d), load(dG)), dG);", "", BACKWARD),
    Mutant("backward: dbeta without its pairs", CHUNK_BACKWARD, "dbeta[i] += dot(c.k.row(i), s.y.row(i), padded(c.K));", "", BACKWARD),
    Mutant("backward: 2 of 2 sigmoid forgotten", CHUNK_BACKWARD, "factor * sg * (1.0f - sg)", "sg * (1.0f - sg)", BACKWARD),
    Mutant("backward: l2norm backward dropped", CHUNK_BACKWARD, "splat(normalised ? -r * dot(y, dy, padded(K)) / scale : 0)", "splat(0)", BACKWARD),
    Mutant("backward: one value head of a group lost", CHUNK_BACKWARD, "for (int64_t g = 0; g < p.group(); ++g)", "for (int64_t g = 1; g < p.group(); ++g)", BACKWARD),
    Mutant("backward: reverse sum of dG stops early", CHUNK_BACKWARD, "for (int64_t i = c.L - 2; i >= 0; --i)", "for (int64_t i = c.L - 2; i > 0; --i)", BACKWARD),
    Mutant("backward: dA_log of the last chunk only", CHUNK_BACKWARD, "partials.dA_log[seq.n * p.HV + hv] += sum_lanes(A_sum)", "partials.dA_log[seq.n * p.HV + hv] = sum_lanes(A_sum)", BACKWARD),
    # ---- recurrence ----
    Mutant("decode: undecayed state", RECURRENT, "const Vec S = hn::Mul(load(from + d), load(alpha + d));", "const Vec S = load(from + d);", DECODE),
    Mutant("decode: prediction from the undecayed state", RECURRENT, "read = hn::MulAdd(S, load(alpha_k + d), read);", "read = hn::MulAdd(S, load(k + d), read);", DECODE),
    Mutant("decode: output before the correction", RECURRENT, "x.o[i][column] = sum_lanes(out) + x.kq[i] * u;", "x.o[i][column] = sum_lanes(out);", DECODE),
    Mutant("decode: forgotten beta", RECURRENT, "const float u = x.beta[i] * (", "const float u = (", DECODE),
    Mutant("decode: forgotten beta, K-first", RECURRENT, "u[j] = hn::Mul(u[j], splat(x.beta[i]));", "", DECODE),
    Mutant("decode: forgotten decay, K-first", RECURRENT, "hn::Mul(load(from + k * from_pitch + j * N), alpha)", "load(from + k * from_pitch + j * N)", DECODE),
    Mutant("decode: scale ignored", RECURRENT, "normalise_row(q, K, r.in.qk_l2norm, r.in.scale)", "normalise_row(q, K, r.in.qk_l2norm, 1)", DECODE),
    # ---- gate ----
    Mutant("gate: softplus derivative of -z", SIMD, "hn::IfThenElse(hn::Lt(z, splat(0)), e, splat(1))", "hn::IfThenElse(hn::Lt(z, splat(0)), splat(1), e)", GATE),
    Mutant("gate: dA_log without z", SIMD, "dA_log = hn::Mul(dx, z);", "dA_log = dx;", GATE),
    Mutant("gate: A_log left out of the bounded gate", SIMD, "return hn::Mul(splat(lower_bound), sigmoid(hn::Mul(splat(a), z)));", "return hn::Mul(splat(lower_bound), sigmoid(z));", GATE),
    Mutant("gate: softplus series cut short", SIMD, "{2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}", "{2.0f / 3, 2.0f}", GATE),
    Mutant("gate: bias forgotten", GATES, "store(gate(gate.z(row, i)), row + i)", "store(gate(load(row + i)), row + i)", GATE),
    Mutant("gate: first block of rows not summed", GATES, "for (int64_t block = 0; block < blocks; ++block) sum", "for (int64_t block = 1; block < blocks; ++block) sum", GATE),
    # ---- the oracle ----
    Mutant("oracle: no decay", REFERENCE, "S[i * V + j] *= std::exp(gt[i]);", "S[i * V + j] *= 1;", ORACLE),
    Mutant("oracle: output before the correction", REFERENCE, "S[i * V + j] += kt[i] * correction, sum += S[i * V + j] * qt[i];", "sum += S[i * V + j] * qt[i], S[i * V + j] += kt[i] * correction;", ORACLE),
    Mutant("oracle: one gate step off in the scores", REFERENCE_FORWARD, "for (int64_t t = j + 1; t <= i; ++t) decay", "for (int64_t t = j; t <= i; ++t) decay", ORACLE),
    Mutant("oracle: dg from the gradient before the read", REFERENCE_BACKWARD, "dg[t * K + i] += dSt * St[i * V + j];", "dg[t * K + i] += dS[i * V + j] * St[i * V + j];", ORACLE),
    Mutant("oracle: l2norm backward dropped", REFERENCE_BACKWARD, "r[t] * (dy[t * K + i] - y[t * K + i] * dot)", "r[t] * dy[t * K + i]", ORACLE),
    Mutant("oracle: undecayed dS", REFERENCE_BACKWARD, "dS[i * V + j] = std::exp(g[i]) * dSt;", "dS[i * V + j] = dSt;", ORACLE),
]  # fmt: skip

# Every kernel file asks for its function of the one instruction set that is compiled here.
ISA_H = """#pragma once
namespace kda::cpu {
enum class Isa { kBaseline, kSse4, kAvx2, kAvx512 };
Isa isa();
}
#define KDA_ISA_CALL(function) (&HWY_STATIC_DISPATCH(function))
"""
ONE_TARGET = "-DHWY_COMPILE_ONLY_STATIC -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul".split()


class Build:
    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.work = directory / "mutants"
        shutil.rmtree(self.work, ignore_errors=True)
        self.commands = {}
        self.objects = {}
        for entry in json.loads((directory / "compile_commands.json").read_text()):
            arguments = shlex.split(entry["command"])
            if "kda_objects.dir" in (output := arguments[arguments.index("-o") + 1]):
                self.commands[entry["file"]] = arguments
                self.objects[entry["file"]] = directory / output

    def compile(self, unit: str, overlay: pathlib.Path) -> pathlib.Path:
        """`unit` with the files in `overlay` in front of those in src/."""
        source = ROOT / unit
        relative = pathlib.Path(unit).relative_to("src")
        target = overlay / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(source, target)
        output = overlay / relative.with_suffix(".o")
        arguments = [a for a in self.commands[str(source)] if not a.startswith(("-O", "-W", "-DHWY_DISABLED_TARGETS"))]
        arguments[arguments.index("-o") + 1] = str(output)
        arguments[arguments.index("-c") + 1] = str(target)
        arguments[1:1] = [f"-I{overlay}", "-O1", "-w"]
        if relative.parts[0] == "cpu":
            (overlay / "cpu/isa.h").write_text(ISA_H)
            arguments[1:1] = ONE_TARGET
        if ccache := shutil.which("ccache"):
            arguments.insert(0, ccache)
        subprocess.run(arguments, cwd=self.directory, check=True)
        return output

    def link(self, replaced: dict[str, pathlib.Path], library: pathlib.Path) -> None:
        objects = [str(replaced.get(file, built)) for file, built in self.objects.items()]
        compiler = next(iter(self.commands.values()))[0]
        subprocess.run([compiler, "-shared", "-fopenmp", "-o", str(library), *objects], check=True)

    def library(self, name: str, mutated: dict[str, str], units: list[str]) -> pathlib.Path:
        overlay = self.work / "".join(c if c.isalnum() else "_" for c in name)
        for file, text in mutated.items():
            path = overlay / pathlib.Path(file).relative_to("src")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        replaced = {str(ROOT / unit): self.compile(unit, overlay) for unit in units}
        self.link(replaced, overlay / "libkda.so")
        return overlay / "libkda.so"

    def passes(self, library: pathlib.Path, tests: tuple[str, str]) -> bool:
        program, chosen = tests
        environment = os.environ | {"LD_PRELOAD": str(library), "OMP_WAIT_POLICY": "passive"}
        command = [str(self.directory / "tests/cpp" / program), f"--gtest_filter={chosen}", "--gtest_brief=1"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if "[==========] 0 tests" in result.stdout:
            sys.exit(f"no test matches {chosen} in {program}")
        return result.returncode == 0


def mutate(mutant: Mutant) -> str:
    text = (ROOT / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        sys.exit(f"mutant '{mutant.name}': found {count} times in {mutant.file}, expected once: {mutant.old}")
    return text.replace(mutant.old, mutant.new)


def main() -> None:
    build = Build(pathlib.Path(sys.argv[1]).resolve())
    wanted = [m for m in MUTANTS if len(sys.argv) < 3 or sys.argv[2] in m.name]
    texts = [mutate(m) for m in wanted]  # all of them fit, before the first is compiled

    # Built the same way but not mutated, everything passes: otherwise what follows would prove nothing.
    units = sorted({u for m in wanted for u in UNITS.get(m.file, [m.file])})
    right = build.library("unmutated", {}, units)
    for tests in sorted({m.tests for m in wanted}):
        if not build.passes(right, tests):
            sys.exit(f"{tests[0]} --gtest_filter={tests[1]} fails without any mutant")

    survivors = []
    for mutant, text in zip(wanted, texts):
        start = time.monotonic()
        library = build.library(mutant.name, {mutant.file: text}, UNITS.get(mutant.file, [mutant.file]))
        caught = not build.passes(library, mutant.tests)
        print(f"{'caught' if caught else 'SURVIVED':9} {time.monotonic() - start:4.1f} s  {mutant.name}", flush=True)
        if not caught:
            survivors.append(mutant.name)
    print(f"{len(wanted)} mutants, {len(wanted) - len(survivors)} caught")
    sys.exit(1 if survivors or not wanted else 0)


if __name__ == "__main__":
    main()

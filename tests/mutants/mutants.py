#!/usr/bin/env python3
"""Deliberately wrong variants of the kernels: the tests must catch every one.

    mutants.py BUILD_DIR [SUBSTRING]     all mutants, or those whose name contains SUBSTRING

Each mutant is one substitution in one file (table.py). The translation units it reaches are compiled as
compile_commands.json says (for one instruction set only, and with -O1: seconds count). The build's own command for
libkda.so, CUDA included, links them in place of the right ones, and the tests of that family run against the result.
Exit status 0: all of them failed, as they should, and the unmutated library built the same way passed.
"""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

from table import MUTANTS, UNITS, Mutant

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Every kernel file asks for its function of the one instruction set that is compiled here.
ISA_H = """#pragma once
namespace kda::cpu {
enum class Isa { kBaseline, kSse4, kAvx2, kAvx512 };
Isa isa();
}
#define KDA_ISA_CALL(function) (&HWY_STATIC_DISPATCH(function))
"""
ONE_TARGET = ["-DHWY_COMPILE_ONLY_STATIC", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-maes", "-mpclmul"]


class Build:
    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.work = directory / "mutants"
        shutil.rmtree(self.work, ignore_errors=True)
        commands = ["cmake", "--build", str(directory), "--", "-t", "commands", "kda"]
        last = subprocess.run(commands, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        self.link_command = shlex.split(last.removeprefix(": && ").removesuffix(" && :"))
        self.commands = {}
        for entry in json.loads((directory / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            if command[command.index("-o") + 1] in self.link_command:
                self.commands[entry["file"]] = command

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

    def link(self, objects: dict[str, pathlib.Path], library: pathlib.Path) -> None:
        """`objects`, by their units, instead of those of the build."""
        command = self.link_command.copy()
        command[command.index("-o") + 1] = str(library)
        for unit in objects:
            compiled = self.commands[str(ROOT / unit)]
            command.remove(compiled[compiled.index("-o") + 1])
        # In front of the others: of an inline function that several objects hold, the linker takes the first.
        command[1:1] = map(str, objects.values())
        subprocess.run(command, cwd=self.directory, check=True)

    def library(self, name: str, mutated: dict[str, str], units: list[str]) -> pathlib.Path:
        overlay = self.work / "".join(c if c.isalnum() else "_" for c in name)
        for file, text in mutated.items():
            path = overlay / pathlib.Path(file).relative_to("src")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.link({unit: self.compile(unit, overlay) for unit in units}, overlay / "libkda.so")
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
    for mutant, text in zip(wanted, texts, strict=True):
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

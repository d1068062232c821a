#!/usr/bin/env python3
"""Deliberately wrong variants of the kernels: the tests must catch every one.

    mutants.py BUILD_DIR [SUBSTRING]     all mutants, or those whose name contains SUBSTRING

Each mutant is one substitution in one file (table.py). The translation units it reaches are compiled as
compile_commands.json says (for one instruction set only, and with -O1: seconds count). The build's own command for
libkda.so, CUDA included, links them in place of the right ones, and the tests of that family run against the result.
One mutant per core at a time. Exit status 0: all of them failed, as they should, and the unmutated library built the
same way passed.
"""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
CCACHE = [ccache] if (ccache := shutil.which("ccache")) else []

# The cores are busy with other mutants, and a test that has failed need not go on.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GTEST_FAIL_FAST": "1", "GTEST_BRIEF": "1"}
TIMEOUT_S = 120


def units_of(mutant: Mutant) -> list[str]:
    return UNITS.get(mutant.file, [mutant.file])


class Build:
    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.work = directory / "mutants"
        shutil.rmtree(self.work, ignore_errors=True)
        self.one_isa = self.work / "one_isa"
        (self.one_isa / "cpu").mkdir(parents=True)
        (self.one_isa / "cpu/isa.h").write_text(ISA_H)
        commands = ["cmake", "--build", str(directory), "--", "-t", "commands", "kda"]
        lines = subprocess.run(commands, check=True, capture_output=True, text=True).stdout.splitlines()
        [link] = [line for line in lines if " -shared " in line]  # the last one makes a link to the library
        self.link_command = shlex.split(link.removeprefix(": && ").removesuffix(" && :"))
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
        command = [a for a in self.commands[str(source)] if not a.startswith(("-O", "-W", "-DHWY_DISABLED_TARGETS"))]
        command[command.index("-o") + 1] = str(output)
        command[command.index("-c") + 1] = str(target)
        command[1:1] = [f"-I{overlay}", "-O1", "-w"]
        if relative.parts[0] == "cpu":
            command[1:1] = [*ONE_TARGET, f"-I{self.one_isa}"]
        self.execute(CCACHE + command)
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
        self.execute(command)

    def execute(self, command: list[str]) -> None:
        subprocess.run(
            command, cwd=self.directory, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def overlay(self, name: str) -> pathlib.Path:
        return self.work / "".join(c if c.isalnum() else "_" for c in name)

    def run(self, library: pathlib.Path, tests: tuple[str, str]) -> subprocess.CompletedProcess[str]:
        program, chosen = tests
        return subprocess.run(
            [str(self.directory / "tests/cpp" / program), f"--gtest_filter={chosen}"],
            env=ENVIRONMENT | {"LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )


def check_unmutated(build: Build, mutants: list[Mutant], pool: ThreadPoolExecutor) -> None:
    """Built the same way but not mutated, everything passes: otherwise the rest would prove nothing."""
    units = sorted({unit for m in mutants for unit in units_of(m)})
    overlay = build.overlay("unmutated")
    library = overlay / "libkda.so"
    try:
        objects = list(pool.map(lambda unit: build.compile(unit, overlay), units))
        build.link(dict(zip(units, objects, strict=True)), library)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout}the unmutated library is not built")
    families = sorted({m.tests for m in mutants})
    for (program, chosen), result in zip(families, pool.map(lambda f: build.run(library, f), families), strict=True):
        if "[==========] 0 tests" in result.stdout:
            sys.exit(f"no test matches {chosen} in {program}")
        if result.returncode:
            sys.exit(f"{result.stdout}{result.stderr}{program} --gtest_filter={chosen} fails without any mutant")


@dataclass
class Verdict:
    result: str  # "caught", or else what is wrong
    seconds: float
    details: str = ""


def judge(build: Build, mutant: Mutant, text: str) -> Verdict:
    start = time.monotonic()
    overlay = build.overlay(mutant.name)
    path = overlay / pathlib.Path(mutant.file).relative_to("src")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    if path.suffix == ".h":  # headers look for others beside themselves first
        for other in (ROOT / mutant.file).parent.glob("*.h"):
            if other.name != path.name:
                shutil.copy(other, path.parent)
    library = overlay / "libkda.so"
    result, details = "SURVIVED", ""
    try:
        build.link({unit: build.compile(unit, overlay) for unit in units_of(mutant)}, library)
        if build.run(library, mutant.tests).returncode:
            result = "caught"
            shutil.rmtree(overlay)  # a library with all CUDA kernels each; that of a survivor is kept to look at
    except subprocess.CalledProcessError as error:
        result, details = "NOT BUILT", error.stdout
    except subprocess.TimeoutExpired:  # not caught: the machine may have been too busy for any library
        result = "TIMED OUT"
    return Verdict(result, time.monotonic() - start, details)


def mutate(mutants: list[Mutant]) -> list[str]:
    """The changed text of each one's file."""
    texts, misfits = [], []
    for m in mutants:
        text = (ROOT / m.file).read_text()
        if (count := text.count(m.old)) != 1:
            misfits.append(f"mutant '{m.name}': found {count} times in {m.file}, expected once: {m.old}")
        texts.append(text.replace(m.old, m.new))
    if misfits:
        sys.exit("\n".join(misfits))
    return texts


def main() -> None:
    start = time.monotonic()
    mutants = [m for m in MUTANTS if len(sys.argv) < 3 or sys.argv[2] in m.name]
    if not mutants:
        sys.exit("no such mutant")
    texts = mutate(mutants)  # all of them fit, before the first is compiled
    build = Build(pathlib.Path(sys.argv[1]).resolve())
    caught = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        check_unmutated(build, mutants, pool)
        verdicts = pool.map(lambda mutant, text: judge(build, mutant, text), mutants, texts)
        for mutant, v in zip(mutants, verdicts, strict=True):
            print(f"{v.result:9} {v.seconds:4.1f} s  {mutant.name}\n{v.details}", end="", flush=True)
            caught += v.result == "caught"
    print(f"{len(mutants)} mutants, {caught} caught, in {time.monotonic() - start:.0f} s")
    sys.exit(caught != len(mutants))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Deliberately wrong variants of the kernels: the tests must catch every one.

    mutants.py BUILD_DIR [SUBSTRING]     all mutants, or those whose name contains SUBSTRING

Each mutant is one substitution in one file (table/). The translation units it reaches are compiled as
compile_commands.json says (for one instruction set only, with -O0, and with common headers compiled once: seconds
count). The build's own command for libkda.so, CUDA included, links them in place of the right ones, and the tests of
that family run against the result. Those of CUDA kernels run on the emulator (tests/emulator), which is linked into
its tests: there the program takes the place of the library. One mutant per core at a time.

A mutant is caught if a test says which of its expectations failed: a program that is killed, or that does not load,
proves nothing. Exit status 0: all of them were caught, and the tests that caught them pass with the library built the
same way but not mutated.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from table import EMULATOR, ENDS, MUTANTS, UNITS, Mutant

ROOT = pathlib.Path(__file__).resolve().parents[2]

ONE_ISA = ROOT / "tests/one_isa"  # here every kernel file asks for the one instruction set that is compiled
# The last one brings vzeroupper, which g++ leaves out below -O2: without it all that runs behind a kernel is slow.
ONE_TARGET = ["-DHWY_COMPILE_ONLY_STATIC", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-maes", "-mpclmul"]
ONE_TARGET += ["-fexpensive-optimizations"]

# Headers of each room that are compiled once: half or more of what a kernel takes to compile. No mutant changes them
# or what they include: it would survive. With -O0 they leave 1.2 s of the 3.7 of -O1 on the CPU, and 0.5 s of the 1.1
# of a small kernel of CUDA.
HEADERS = {
    "cpu": ("hwy/foreach_target.h", "hwy/highway.h", "algorithm", "atomic", "cmath", "cstring", "span", "string"),
    "cuda": (
        *("algorithm", "array", "cmath", "cstring", "functional", "limits", "map", "memory", "sstream", "string"),
        *("string_view", "system_error", "type_traits", "unordered_map", "utility", "vector"),
        *("cuda.h", "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda/ptx/sm100.h"),
    ),
}
KERNELS = {"cpu": "src/cpu/gate.cc", "cuda": "src/cuda/gate/gate.cu"}  # as good as any: a room's options are the same
# gold takes half as long to link as the usual linker does.
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
CCACHE = [ccache] if (ccache := shutil.which("ccache")) else []

# The cores are busy with other mutants, and the first expectation that fails ends the program.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GTEST_THROW_ON_FAILURE": "1"}
TIMEOUT_S = 120
# What gtest prints in front of an expectation that failed, and the emulator (global_memory.cc) in front of an access
# to memory of nobody; and in front of a test.
FAILED = re.compile(r"^\S.*: Failure$", re.M)
RUNS = re.compile(r"^\[ RUN      \] (\S+)$", re.M)
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)
# What a unit's own command has and mutants do without: -O0 comes instead, and the copies of glibc that know sizes warn
# with that.
LEFT_OUT = ("-O", "-W", "-DHWY_DISABLED_TARGETS", "-D_FORTIFY_SOURCE")
# ccache needs this for precompiled headers: no unit of ours has a macro that changes them, or the time.
COMPILE_ENVIRONMENT = os.environ | {"CCACHE_SLOPPINESS": "pch_defines,time_macros"}


def units_of(mutant: Mutant) -> list[str]:
    return UNITS.get(mutant.file, [mutant.file])


class Target:
    """The program or library that mutated units are linked into, by the build's own commands."""

    def __init__(self, directory: pathlib.Path, name: str) -> None:
        commands = ["cmake", "--build", str(directory), "--", "-t", "commands", name]
        lines = subprocess.run(commands, check=True, capture_output=True, text=True).stdout.splitlines()
        link = [line for line in lines if " -o " in line][-1]  # the commands behind it make a link to the library
        compiler, *options = shlex.split(link.removeprefix(": && ").removesuffix(" && :"))
        self.link_command = [compiler, *LINKER, *options]
        self.file = pathlib.Path(self.link_command[self.link_command.index("-o") + 1]).name
        self.commands = {}
        for entry in json.loads((directory / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            if command[command.index("-o") + 1] in self.link_command:
                self.commands[entry["file"]] = command


class Build:
    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.work = directory / "mutants"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.library, self.emulator = Target(directory, "kda"), Target(directory, EMULATOR)
        self.headers = {room: self.precompile(room) for room in HEADERS}

    def target_of(self, tests: tuple[str, str]) -> Target:
        return self.emulator if tests[0].endswith(EMULATOR) else self.library

    def compile(self, target: Target, unit: str, overlay: pathlib.Path) -> pathlib.Path:
        """Compiles `unit`, with the files in `overlay` in front of those in src/."""
        source = ROOT / unit
        relative = pathlib.Path(unit).relative_to("src")
        changed = overlay / relative
        changed.parent.mkdir(parents=True, exist_ok=True)
        if not changed.exists():
            shutil.copy(source, changed)
        output = overlay / relative.with_suffix(".o")
        options, room = [f"-I{overlay}"], relative.parts[0]
        if room == "cpu":
            options = [*ONE_TARGET, f"-I{ONE_ISA}", *options]
        if room in self.headers:
            options += ["-include", str(self.headers[room])]
        self.execute(CCACHE + self.compiler(target, unit, changed, output, options))
        return output

    def precompile(self, room: str) -> pathlib.Path:
        """Precompiles headers. If the result does not fit a unit, the compiler reads the headers themselves."""
        headers = self.work / f"headers_{room}.h"
        headers.write_text("".join(f"#include <{name}>\n" for name in HEADERS[room]))
        target = self.library if room == "cpu" else self.emulator
        options = ONE_TARGET if room == "cpu" else []
        command = self.compiler(target, KERNELS[room], headers, headers.with_suffix(".h.gch"), options)
        language = command.index("-c")
        self.execute([*CCACHE, *command[:language], "-x", "c++-header", *command[language:]])
        return headers

    def compiler(
        self, target: Target, unit: str, source: pathlib.Path, output: pathlib.Path, options: list[str]
    ) -> list[str]:
        """The build's command for `unit`, applied to `source` instead."""
        command = target.commands[str(ROOT / unit)]
        command = [a for a in command if not a.startswith(LEFT_OUT)]
        command[command.index("-o") + 1] = str(output)
        command[command.index("-c") + 1] = str(source)
        return [command[0], *options, "-O0", "-w", *command[1:]]

    def link(self, target: Target, objects: dict[str, pathlib.Path], overlay: pathlib.Path) -> pathlib.Path:
        """Links `objects`, by their units, instead of those of the build."""
        command = target.link_command.copy()
        output = overlay / target.file
        command[command.index("-o") + 1] = str(output)
        for unit in objects:
            compiled = target.commands[str(ROOT / unit)]
            command.remove(compiled[compiled.index("-o") + 1])
        # In front of the others: of an inline function that several objects hold, the linker takes the first.
        command[1:1] = map(str, objects.values())
        self.execute(command)
        return output

    def execute(self, command: list[str]) -> None:
        subprocess.run(
            command,
            cwd=self.directory,
            env=COMPILE_ENVIRONMENT,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def overlay(self, name: str) -> pathlib.Path:
        return self.work / "".join(c if c.isalnum() else "_" for c in name)

    def run(
        self, linked: pathlib.Path, tests: tuple[str, str], seconds: float = TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs tests. `linked`: their program, or a library that takes the place of the program's own."""
        (*settings, program), chosen = tests[0].split(), tests[1]
        environment, path = ENVIRONMENT | dict(setting.split("=") for setting in settings), linked
        if program != EMULATOR:
            environment = environment | {"LD_PRELOAD": str(linked)}
            path = self.directory / "tests/cpp" / program
        return subprocess.run(
            [str(path), f"--gtest_filter={chosen}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )


@dataclass
class Verdict:
    result: str  # "caught", or else what is wrong
    seconds: float
    test: str = ""  # that caught it
    details: str = ""


def check_unmutated(build: Build, caught: dict[tuple[str, str], set[str]], pool: ThreadPoolExecutor) -> None:
    """Built the same way but not mutated, the tests that caught mutants pass: otherwise they would prove nothing.
    `caught`: these tests, by the mutants' own."""
    overlay = build.overlay("unmutated")
    linked = {}
    try:
        for target in (build.library, build.emulator):
            units = sorted(
                {u for m in MUTANTS if m.tests in caught and build.target_of(m.tests) is target for u in units_of(m)}
            )
            if not units:
                continue
            objects = list(pool.map(lambda unit, target=target: build.compile(target, unit, overlay), units))
            linked[target.file] = build.link(target, dict(zip(units, objects, strict=True)), overlay)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout}the unmutated library is not built")
    runs = [(tests, (tests[0], ":".join(sorted(names)))) for tests, names in caught.items()]
    results = pool.map(lambda r: build.run(linked[build.target_of(r[0]).file], r[1], 5 * TIMEOUT_S), runs)
    for (_, (program, chosen)), result in zip(runs, results, strict=True):
        if result.returncode:  # also if no test has such a name
            sys.exit(f"{result.stdout}{result.stderr}{program} --gtest_filter={chosen} fails without any mutant")


def verdict(run: subprocess.CompletedProcess[str], ends: bool = False) -> tuple[str, str]:
    """What a run of the tests says of a mutant: that it is caught, and by which test; else why it is not. ``ends``: a
    crash is expected."""
    if run.returncode == 0:
        return "SURVIVED", ""
    tests = RUNS.findall(run.stdout)
    if tests and (FAILED.search(run.stdout) or (ends and run.returncode in CRASHES)):
        return "caught", tests[-1]
    return "ENDED", f"status {run.returncode}, and no expectation failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"


def judge(build: Build, mutant: Mutant, text: str) -> Verdict:
    start = time.monotonic()
    overlay = build.overlay(mutant.name)
    path = overlay / pathlib.Path(mutant.file).relative_to("src")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    if path.suffix == ".h":  # a header looks for others beside itself first
        for other in (ROOT / mutant.file).parent.glob("*.h"):
            if other.name != path.name:
                shutil.copy(other, path.parent)
    target = build.target_of(mutant.tests)
    result, details = "SURVIVED", ""
    try:
        objects = {unit: build.compile(target, unit, overlay) for unit in units_of(mutant)}
        linked = build.link(target, objects, overlay)
        result, details = verdict(build.run(linked, mutant.tests), mutant.ends)
        if result == "caught":
            shutil.rmtree(overlay)  # it has a library with all CUDA kernels; a survivor's is kept to look at
    except subprocess.CalledProcessError as error:
        result, details = "NOT BUILT", error.stdout
    except subprocess.TimeoutExpired:  # not caught: the machine may have been too busy for any library
        result = "TIMED OUT"
    seconds = time.monotonic() - start
    return Verdict(result, seconds, test=details) if result == "caught" else Verdict(result, seconds, details=details)


def mutate(mutants: list[Mutant]) -> list[str]:
    """The changed text of each mutant's file."""
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
    if unknown := ENDS - {m.name for m in MUTANTS}:
        sys.exit(f"no such mutants: {', '.join(sorted(unknown))}")
    mutants = [m for m in MUTANTS if len(sys.argv) < 3 or sys.argv[2] in m.name]
    if not mutants:
        sys.exit("no such mutant")
    texts = mutate(mutants)  # all of them fit, before the first is compiled
    build = Build(pathlib.Path(sys.argv[1]).resolve())
    wrong, caught = [], defaultdict(set)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(lambda mutant, text: judge(build, mutant, text), mutants, texts)
        for mutant, v in zip(mutants, verdicts, strict=True):
            by = f", by {v.test}" if v.test else ""
            print(f"{v.result:9} {v.seconds:4.1f} s  {mutant.name}{by}\n{v.details}", end="", flush=True)
            if v.result == "caught":
                caught[mutant.tests].add(v.test)
            else:
                wrong.append(f"{v.result}: {mutant.name}")
        check_unmutated(build, caught, pool)
    print(f"{len(mutants)} mutants, {len(mutants) - len(wrong)} caught, in {time.monotonic() - start:.0f} s")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()

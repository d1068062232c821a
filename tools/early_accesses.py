#!/usr/bin/env python3
"""Does every kernel wait for the one in front of it before it touches global memory?

    early_accesses.py libkda.so [sm_90 ..]        or an object file; all architectures by default

Kernels for sm_90 and newer are launched before the one in front of them has ended. This reads their machine code, as
cuobjdump prints it, and follows all ways from the first instruction to the wait (ACQBULK). On none of them may there be
an access to global memory or an allocation of tensor memory. Hints for the cache are none. Some kernels peek at an
index (EARLY): what they find decides only about hints, or does not come from the kernel in front.

Fails if a kernel has no wait (but for those that are launched in order), or if there is no code.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from machine_code import extract, find

ARCHITECTURES = ("sm_90", "sm_90a", "sm_100", "sm_100a")
# Kernels that are launched when the one in front has ended, and have no wait: those of src/cuda/gate/gate.cu.
IN_ORDER = re.compile(r"_7_gate_cu_\w+?(14forward_kernel|15backward_kernel|10sum_kernelE\w*6ParamsEl)")
PEEK = r"LDG\.E\.STRONG\.GPU"
# What kernels may do before they wait. Most peek at an index; cursor_kernel reads all that it needs, by peeks, but for
# cu_seqlens: it waits for these under the condition under which it reads them, which the walk does not see.
EARLY = {
    "13decode_kernel": PEEK,
    "16snapshots_kernel": PEEK,
    "9recurrent16recurrent_kernel": PEEK,
    "10mma_kernel": PEEK,
    "12flush_kernel": PEEK,
    "13cursor_kernel": rf"{PEEK}|LDG\.E(\.64)?",
}

ACCESS = re.compile(
    r"(LDG|LD|STG|ST|RED|REDG|ATOM|ATOMG|LDGSTS|UBLKCP|UBLKRED|UTMALDG|UTMASTG|UTMAREDG|UTCATOMSWS)(\.|$)"
)
PLACE = "        /*"
LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z0-9_.]+)\s*([^;]*);")


@dataclass
class Instruction:
    sometimes: bool  # has a predicate
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        numbers = re.findall(r"0x[0-9a-f]+", self.operands)
        return int(numbers[-1], 16) if numbers else None


@dataclass
class Kernel:
    architecture: str
    name: str
    lines: dict[int, str] = field(default_factory=dict)  # one an instruction, by its place

    def instruction(self, place: int) -> Instruction:
        """Read when it is asked for: few are in front of a wait."""
        found = LINE.match(self.lines[place])
        assert found, self.lines[place]
        return Instruction(bool(found[2]), found[3], found[4])


def kernels_of(text: Iterable[str]) -> Iterator[Kernel]:
    """Reads what cuobjdump prints."""
    architecture, kernel = "", None
    for line in text:
        if line.startswith(PLACE):
            if kernel:
                kernel.lines[int(line[len(PLACE) : line.index("*", len(PLACE))], 16)] = line
            continue
        if found := re.match(r"arch = (\w+)", line):
            architecture = found[1]
        elif found := re.match(r"\s+Function : (\S+)", line):
            if kernel:
                yield kernel
            kernel = Kernel(architecture, found[1])
    if kernel:
        yield kernel


class Walk:
    """All ways from a kernel's first instruction to its waits."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        places = sorted(kernel.lines)
        self.next = dict(itertools.pairwise(places))
        self.waits = 0
        self.early: list[str] = []  # what comes before them
        self.meetings: dict[str, set[int]] = defaultdict(set)  # where lanes go on that have met, by register
        self.met: dict[str, set[int]] = defaultdict(set)  # where they meet
        self.known: set[int] = set()
        self.open = places[:1]
        while self.open:
            self.visit(self.open.pop())

    def go(self, to: int | None) -> None:
        if to is not None and to in self.kernel.lines and to not in self.known:
            self.known.add(to)
            self.open.append(to)

    def visit(self, place: int) -> None:
        x = self.kernel.instruction(place)
        goes_on = True
        if x.kind == "ACQBULK":
            self.waits += 1
            goes_on = x.sometimes
        elif ACCESS.match(x.name):
            self.early.append(f"{x.name} {x.operands}".strip())
        elif x.kind in ("EXIT", "RET"):
            goes_on = x.sometimes
        elif x.kind == "BRA":
            self.go(x.target)
            goes_on = x.sometimes or "," in x.operands
        elif x.kind in ("BRX", "BRXU", "JMX", "JMXU"):  # where to is in a register
            self.early.append(f"{x.name} {x.operands}".strip())
        elif x.kind in ("CALL", "WARPSYNC"):
            self.go(x.target)
        elif x.kind in ("BSSY", "BSYNC"):
            goes_on = self.meet(x, place)
        if goes_on:
            self.go(self.next.get(place))

    def meet(self, x: Instruction, place: int) -> bool:
        """BSSY says where lanes go on that meet at BSYNC."""
        register = x.operands.split(",")[0].strip()
        if x.kind == "BSSY":
            if x.target is not None:
                self.meetings[register].add(x.target)
        else:
            self.met[register].add(place)
        if self.met[register]:
            for target in self.meetings[register]:
                self.go(target)
        return x.kind == "BSSY" or x.sometimes


def faults_of(kernel: Kernel) -> list[str]:
    walk = Walk(kernel)
    allowed = [may for name, may in EARLY.items() if name in kernel.name]
    early = [access for access in walk.early if not any(re.fullmatch(may, access.split()[0]) for may in allowed)]
    faults = [f"{access} in front of the wait" for access in early]
    return faults if walk.waits else [*faults, "no wait"]


def disassembly(cubin: Path) -> list[Kernel]:
    """The kernels of an ELF file of one architecture."""
    cuobjdump, nvdisasm = find("cuobjdump"), find("nvdisasm")
    if not cuobjdump or not nvdisasm:
        sys.exit("cuobjdump or nvdisasm not found: tools/setup.sh test installs them")
    environment = os.environ | {"NVDISASM_PATH": str(Path(nvdisasm).parent)}
    command = [cuobjdump, "--dump-sass", str(cubin)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        kernels = list(kernels_of(process.stdout))
    if process.returncode:
        sys.exit(f"cuobjdump of {cubin} fails")
    return kernels


def check(cubin: Path) -> tuple[int, int, list[str]]:
    """How many kernels there are, how many of them are launched in order, and what is wrong with the others."""
    kernels = disassembly(cubin)
    early = [k for k in kernels if not IN_ORDER.search(k.name)]
    return len(kernels), len(kernels) - len(early), [f"{k.name}: {fault}" for k in early for fault in faults_of(k)]


def main() -> None:
    file, architectures, failed = Path(sys.argv[1]), sys.argv[2:] or ARCHITECTURES, False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as at_once:
        cubins = [c for c in extract(file, Path(folder)) if c[0] in architectures]
        checks = list(at_once.map(check, (path for _, path in cubins)))
        for architecture in architectures:
            of_this = [found for (name, _), found in zip(cubins, checks, strict=True) if name == architecture]
            count, in_order = sum(found[0] for found in of_this), sum(found[1] for found in of_this)
            faults = [fault for found in of_this for fault in found[2]]
            print(f"{architecture}: {count} kernels, {in_order} of them launched in order, {len(faults)} faults")
            print("".join(f"  {fault}\n" for fault in faults), end="")
            failed |= bool(faults) or count == in_order
    sys.exit("a kernel does not wait, or there is none" if failed else None)


if __name__ == "__main__":
    main()

"""Reports what a build has cost: CUDA kernels, compile times, sizes. `make` prints it after every build.

    python tools/build_report.py build/release [--wheel dist/*.whl]
    python tools/build_report.py build/release --wheel dist/*.whl --measure --record docs/results/build.json

Printed times are by ninja's clock, from when each file was last compiled: files that are compiled at the same time
share the cores, and files that ccache finds take no time. --measure compiles them again, without ccache, and counts
processor time instead, which depends little on what else runs. It takes twenty minutes on two cores. Without it the
record has no times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import standing
from machine_code import kernels
from source_hash import source_hash

MIB = 1 << 20


def seconds(log: str) -> dict[str, float]:
    """Seconds by output, from the text of ninja's log. Its columns are start and end in ms, a time stamp, the output,
    a hash."""
    lines = [line.split("\t") for line in log.splitlines() if not line.startswith("#")]
    return {output: (int(end) - int(start)) / 1000 for start, end, _, output, _ in lines}


def processor_seconds(command: list[str], folder: Path) -> float:
    """Processor time of a compiler and the programs that it starts."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, env={**os.environ, "CCACHE_DISABLE": "1"}
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)}: failed")
    return usage.ru_utime + usage.ru_stime


class Build:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = (folder / "CMakeCache.txt").read_text()
        # Objects of a build with CUDA remain in a later build without it.
        with_cuda = self.setting("KDA_CUDA") != "OFF"
        self.objects = sorted((folder / "CMakeFiles").glob("kda_cuda_*/**/*.cu.o")) if with_cuda else []

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.hashes = dict(zip(map(self.file_of, self.objects), pool.map(kernels, self.objects), strict=True))

    @staticmethod
    def file_of(path: Path) -> str:
        """The source of an object."""
        return str(path)[str(path).index("/src/cuda/") + 1 :].removesuffix(".o")

    def setting(self, name: str) -> str:
        found = re.search(rf"^{name}:\w+=(.*)$", self.cache, re.M)
        return found[1] if found else ""

    def clock_seconds(self) -> list[float]:
        times = seconds((self.folder / ".ninja_log").read_text())
        return [times.get(str(path.relative_to(self.folder)), 0.0) for path in self.objects]

    def measured_seconds(self) -> list[float]:
        commands = {}
        for entry in json.loads((self.folder / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            output = command.index("-o") + 1
            commands[command[output]] = [*command[:output], "/dev/null", *command[output + 1 :]]

        def measure(path: Path) -> float:
            return processor_seconds(commands[str(path.relative_to(self.folder))], self.folder)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(measure, self.objects))

    def report(self, wheel: Path | None, measure: bool) -> dict[str, Any]:
        files = {}
        times = self.measured_seconds() if measure else self.clock_seconds()
        for path, took in zip(self.objects, times, strict=True):
            counts = Counter(name.split()[0] for name in self.hashes[self.file_of(path)])
            name = "/".join(path.parts[-2:]).removesuffix(".o")
            files[name] = {"kernels": max(counts.values(), default=0), "seconds": round(took, 1)}
        sizes = {"libkda.so": self.folder / "lib/libkda.so", **({"wheel": wheel} if wheel else {})}
        return {
            "source_hash": source_hash(Path(self.setting("CMAKE_HOME_DIRECTORY"))),
            "seconds_are": "of the processor" if measure else "of the clock",
            "kernels": sum(f["kernels"] for f in files.values()),
            "seconds": round(sum(f["seconds"] for f in files.values())),
            "mib": {name: round(path.stat().st_size / MIB, 1) for name, path in sizes.items()},
            "files": files,
        }


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    files = {name: {"kernels": file["kernels"]} for name, file in result["files"].items()}
    return {name: x for name, x in result.items() if not name.startswith("seconds")} | {"files": files}


def show(result: dict[str, Any]) -> None:
    files = result["files"]
    if not files:
        print("CUDA: none compiled (KDA_CUDA=ON compiles it)")
    else:
        print(
            f"CUDA: {result['kernels']} kernels in {len(files)} files, {result['seconds']} s {result['seconds_are']} "
            "to compile them, added up"
        )
    for name, file in sorted(files.items(), key=lambda item: -item[1]["seconds"]):
        print(f"  {name:30} {file['kernels']:4} kernels {file['seconds']:7.1f} s")
    print(", ".join(f"{name} {size} MiB" for name, size in result["mib"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a build has cost.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--measure", action="store_true", help="compile CUDA again, for the time of the processor")
    parser.add_argument("--record", type=Path, help="write the result there, too")
    options = parser.parse_args()
    build = Build(options.build.resolve())
    result = build.report(options.wheel, options.measure)
    show(result)
    if build.hashes:
        (options.build / standing.KERNELS).write_text(json.dumps(build.hashes, indent=0) + "\n")
        print("\n".join(standing.report(options.build)))
    if options.record:
        kept = result if options.measure else without_times(result)
        options.record.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

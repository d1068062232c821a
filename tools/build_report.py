"""What a build has cost: kernels, sizes, seconds of the CUDA compiler. `make` prints it after every build.

    python tools/build_report.py build/release [--wheel dist/*.whl] [--record docs/results/build.json]

Seconds are those of the last time each file was compiled, as ninja logged them, added up over the files; files that
are compiled side by side share the cores. What ccache finds takes none: CCACHE_RECACHE=1 makes it compile all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from source_hash import source_hash

MIB = 1 << 20


def kernels(symbols: str) -> int:
    """How many kernels an object launches, by its symbols: each instantiation has a stub on the host, and the length of
    that name stands before it."""
    found = re.findall(r"(\d+)(__device_stub__\w+)", symbols)
    return len({name[: int(length)] for length, name in found})


def seconds(log: str) -> dict[str, float]:
    """Of each output, from the text of ninja's log: start and end in ms, a time stamp, the output, a hash."""
    lines = [line.split("\t") for line in log.splitlines() if not line.startswith("#")]
    return {output: (int(end) - int(start)) / 1000 for start, end, _, output, _ in lines}


class Build:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = (folder / "CMakeCache.txt").read_text()

    def setting(self, name: str) -> str:
        found = re.search(rf"^{name}:\w+=(.*)$", self.cache, re.M)
        return found[1] if found else ""

    def cuda_files(self) -> dict[str, dict[str, float]]:
        """Kernels and seconds of each. Objects of a build with CUDA outlast a later one without."""
        if self.setting("KDA_CUDA") == "OFF":
            return {}
        times = seconds((self.folder / ".ninja_log").read_text())
        files = {}
        for path in sorted((self.folder / "CMakeFiles").glob("kda_cuda_*/**/*.cu.o")):
            nm = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True)
            took = times.get(str(path.relative_to(self.folder)), 0.0)
            files["/".join(path.parts[-2:]).removesuffix(".o")] = {
                "kernels": kernels(nm.stdout),
                "seconds": round(took, 1),
            }
        return files

    def report(self, wheel: Path | None) -> dict[str, Any]:
        files = self.cuda_files()
        total = {name: sum(f[name] for f in files.values()) for name in ("kernels", "seconds")}
        mib = {"libkda.so": self.folder / "lib/libkda.so", **({"wheel": wheel} if wheel else {})}
        return {
            "source_hash": source_hash(Path(self.setting("CMAKE_HOME_DIRECTORY"))),
            "cores": os.cpu_count(),
            "cuda": {"kernels": total["kernels"], "seconds": round(total["seconds"]), "files": files},
            "mib": {name: round(path.stat().st_size / MIB, 1) for name, path in mib.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a build has cost.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--record", type=Path, help="write it there, too")
    options = parser.parse_args()
    result = Build(options.build).report(options.wheel)
    cuda = result["cuda"]
    if cuda["files"]:
        print(f"CUDA: {cuda['kernels']} kernels in {len(cuda['files'])} files, {cuda['seconds']} s of compiling")
        for name, file in sorted(cuda["files"].items(), key=lambda f: -f[1]["seconds"]):
            print(f"  {name:28} {file['kernels']:4.0f} kernels {file['seconds']:7.1f} s")
    else:
        print("CUDA: none compiled (KDA_CUDA=ON compiles it)")
    print(", ".join(f"{name} {size} MiB" for name, size in result["mib"].items()))
    if options.record:
        options.record.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

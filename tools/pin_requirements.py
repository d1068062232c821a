#!/usr/bin/env python3
"""Writes tools/*.txt from tools/*.in: every package that is installed, with its version and the hashes of its files.
Also tools/engines/*.txt: packages of which the tests of plugs read files, without what those need.

    python3 -m venv /tmp/pins && /tmp/pins/bin/pip install -U pip    # 23.3 or newer, which downloads nothing for this
    /tmp/pins/bin/python tools/pin_requirements.py

Dependencies are resolved as this machine's pip is configured: run it where that offers CI's build of torch, which is
for CPUs only. Such a build has its own version, such as 2.13.0+cpu, and goes to a separate list. (In one list pip
would prefer the index's file, of gigabytes, because it knows that file's hash before downloading it.) From the index
come the wheels for Linux, for the Pythons and machines below. The libraries of CUDA that its torch needs are in no
list.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")

Pins = list[tuple[str, str]]  # name==version, SHA-256 of a file


def resolve(*arguments: str) -> Pins:
    """The packages that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["-q", "--dry-run", "--ignore-installed", "--only-binary=:all:", f"--report={report}"]
        subprocess.run([sys.executable, "-m", "pip", *arguments, *options, f"--target={folder}"], check=True)
        pins = []
        for item in json.loads(report.read_text())["install"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            hashes = item["download_info"]["archive_info"]["hashes"]
            pins.append((f"{name}=={item['metadata']['version']}", hashes["sha256"]))
        return pins


def of_the_index(pins: Iterable[str], python: str, machine: str) -> Pins:
    """The same versions for another Python and machine, only from the index."""
    tags = [*(f"manylinux_2_{n}" for n in range(5, 37)), "manylinux1", "manylinux2010", "manylinux2014"]
    platforms = [f"--platform={tag}_{machine}" for tag in tags]
    return resolve("--isolated", "install", "--no-deps", f"--python-version={python}", *platforms, *pins)


def write(path: Path, source: Path, pins: Pins) -> None:
    hashes = defaultdict(set)
    for pin, sha256 in pins:
        hashes[pin].add(sha256)
    lines = [" \\\n".join([pin, *(f"    --hash=sha256:{h}" for h in sorted(hashes[pin]))]) for pin in sorted(hashes)]
    path.write_text("\n".join([f"# Written by tools/pin_requirements.py from {source.name}: do not edit.", *lines, ""]))


def main() -> None:
    for source in sorted(TOOLS.glob("*.in")):
        here = resolve("install", "-r", str(source))
        versions = [pin.split("+")[0] for pin, _ in here]
        index = [x for python in PYTHONS for machine in MACHINES for x in of_the_index(versions, python, machine)]
        write(source.with_suffix(".txt"), source, [x for x in here if "+" not in x[0]] + index)
        if any("+" in pin for pin, _ in here):
            write(TOOLS / f"{source.stem}-local.txt", source, [x for x in here if "+" in x[0]])
    for source in sorted(TOOLS.glob("engines/*.in")):
        names = source.read_text().split()
        pins = [x for python in PYTHONS for machine in MACHINES for x in of_the_index(names, python, machine)]
        write(source.with_suffix(".txt"), source, pins)


if __name__ == "__main__":
    main()

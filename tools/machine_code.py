"""Hashes of the machine code of kernels: what ties a measured row to the code that ran, whatever a file is called.

    machine_code.py build/base/lib/libkda.so build/release/lib/libkda.so      compares libraries, programs or objects

cuobjdump takes the code for each architecture out of the file, an ELF file in which every kernel has a section of its
own. The hash is that of the section's bytes. So a comment, a rename or a move changes no hash, and an instruction does.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SECTION = ".text."  # the kernel's name follows


def find(program: str) -> str | None:
    """On the path, beside nvcc, or where tools/setup.sh puts it."""
    folders = [Path(nvcc).resolve().parent] if (nvcc := shutil.which("nvcc")) else []
    folders += [Path("/usr/local/cuda/bin"), *Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/cu13/bin")]
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(map(str, folders)))


def extract(file: Path, folder: Path) -> list[tuple[str, Path]]:
    """Writes the code for each architecture into ``folder``: ELF files, each with its architecture."""
    cuobjdump = find("cuobjdump")
    if not cuobjdump:
        sys.exit("cuobjdump not found: tools/setup.sh test installs it")
    subprocess.run([cuobjdump, "-xelf", "all", str(file.resolve())], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found = ((re.search(r"\.(sm_\w+)\.cubin$", path.name), path) for path in sorted(folder.iterdir()))
    return [(name[1], path) for name, path in found if name]


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections of a 64-bit ELF file: name and content."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    text = heads[names][4]
    for name, _, _, _, offset, length in heads:
        end = elf.index(b"\0", text + name)
        yield elf[text + name : end].decode(), elf[offset : offset + length]


def demangled(names: list[str]) -> list[str]:
    filt = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return filt.stdout.splitlines()


def kernels(file: Path) -> dict[str, str]:
    """By ``sm_90 name(arguments)``, the first 16 digits of the SHA-256 of the code. Kernels of one name in several
    files have one hash together."""
    found: dict[tuple[str, str], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture, path in extract(file, Path(folder)):
            for name, code in sections(path.read_bytes()):
                if name.startswith(SECTION):
                    digest = hashlib.sha256(code).hexdigest()
                    found.setdefault((architecture, name.removeprefix(SECTION)), []).append(digest)
    # In names, a namespace without one has a hash of the file's path.
    names = demangled([re.sub(r"_GLOBAL__N__[0-9a-f]{8}_", "_GLOBAL__N__00000000_", name) for _, name in found])
    keys = [f"{architecture} {name}" for (architecture, _), name in zip(found, names, strict=True)]
    hashes = [d[0] if len(d) == 1 else hashlib.sha256("".join(sorted(d)).encode()).hexdigest() for d in found.values()]
    return {key: digest[:16] for key, digest in sorted(zip(keys, hashes, strict=True))}


def without_counterpart(these: dict[str, str], those: dict[str, str]) -> list[str]:
    """Which of ``these`` have a hash that none of ``those`` of the same architecture has. Names do not matter."""
    there = {(name.split()[0], digest) for name, digest in those.items()}
    return [name for name, digest in these.items() if (name.split()[0], digest) not in there]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("machine_code.py ONE OTHER: libraries, programs or objects, of which the kernels are compared")
    one, other = (kernels(Path(file)) for file in sys.argv[1:])
    gone, new = without_counterpart(one, other), without_counterpart(other, one)
    print("".join(f"- {name}\n" for name in gone) + "".join(f"+ {name}\n" for name in new), end="")
    print(f"{len(one)} and {len(other)} kernels: {len(gone)} of the first and {len(new)} of the second differ")
    sys.exit(bool(gone or new))


if __name__ == "__main__":
    main()

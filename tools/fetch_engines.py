#!/usr/bin/env python3
"""Puts files of the engines that kda plugs into under build/engines, a folder for each: FLA, Triton, which FLA imports,
SGLang and vLLM. The tests of the plugs compare with them, and fail where they are missing. Nothing is installed,
and nothing of them is part of this project.

    tools/fetch_engines.py                      # all
    tools/fetch_engines.py fla-0.6 vllm-0.33.0  # those named
    tools/fetch_engines.py --kernels            # SGLang and vLLM once more, with their Triton kernels: for a GPU

pip brings each package by version and hash, without what it depends on: those in tools/engines/*.txt, and two of which
a few files are enough, below. A folder that was made from the same stays as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tools" / "engines"
FOLDER = ROOT / "build" / "engines"
COMPLETE = "complete"  # in a folder: what it was made from
# Of no use without a GPU: 250 MB of NVIDIA's programs and of kernels that are compiled for AMD.
LEFT_OUT = ("triton/backends/nvidia/bin/*", "triton/backends/nvidia/lib/*", "triton/backends/amd/lib/*")


@dataclass(frozen=True)
class Engine:
    pins: str  # as pip reads them: names, versions, hashes
    options: tuple[str, ...] = ("--only-binary=:all:",)  # of pip download
    needs: tuple[str, ...] = ()  # what pip runs to read the metadata of a source package
    files: tuple[str, ...] = ()  # files and folders, of which Python is unpacked; none: everything but LEFT_OUT
    kernels: tuple[str, ...] = ()  # more of them, which only a GPU can run

    def text(self) -> str:
        """What a folder is made from."""
        return "\n".join([self.pins.strip(), *self.files, ""])

    def has(self, path: str) -> bool:
        if not self.files:
            return not any(PurePosixPath(path).match(pattern) for pattern in LEFT_OUT)
        return path.endswith(".py") and any(path == name or path.startswith(f"{name}/") for name in self.files)


_ATTENTION = "sglang/srt/layers/attention"
_KIMI, _GLM = "vllm/models/kimi_k3/nvidia", "vllm/models/glm5next"
ENGINES = {path.stem: Engine(path.read_text()) for path in sorted(LISTS.glob("*.txt"))} | {
    "sglang-0.5.23": Engine(
        "sglang==0.5.23 --hash=sha256:00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
        ("--only-binary=:all:", "--python-version=3.11", "--abi=cp311", "--platform=manylinux_2_34_x86_64"),
        (),
        (
            "sglang/srt/arg_groups/choices.py", "sglang/srt/environ.py", "sglang/srt/plugins",
            "sglang/srt/runtime_context.py",
            f"{_ATTENTION}/linear/kda_backend.py", f"{_ATTENTION}/linear/kda_prefill_graph.py",
            f"{_ATTENTION}/linear/utils.py", f"{_ATTENTION}/linear/kernels/kernel_backend.py",
            f"{_ATTENTION}/linear/kernels/kda_triton.py", f"{_ATTENTION}/hybrid_linear_attn_backend.py",
            f"{_ATTENTION}/mamba/mamba2_metadata.py", f"{_ATTENTION}/mamba/prefill_track_metadata.py",
        ),
        ("sglang/kernels/ops",),
    ),
    "vllm-0.33.0": Engine(
        "vllm==0.33.0 --hash=sha256:f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        ("--no-binary=:all:", "--no-build-isolation"),
        ("setuptools-rust==1.13.0", "setuptools-scm==10.3.4", "semantic-version==2.10.0", "vcs-versioning==2.6.0"),
        (
            "vllm/model_executor/custom_op.py", "vllm/model_executor/layers/mamba/gdn/base.py",
            "vllm/model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py", f"{_KIMI}/kda.py",
            f"{_KIMI}/ops/third_party", f"{_GLM}/common/kda.py", f"{_GLM}/nvidia/ops/third_party",
        ),
        ("vllm/third_party/flash_linear_attention",),
    ),
}  # fmt: skip
# Without these, the version in vLLM's metadata would name the device that the package is built for.
ENVIRONMENT = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"}


def fetch(name: str, kernels: bool) -> None:
    engine = ENGINES[name]
    wanted = {FOLDER / name: engine}
    if kernels and engine.kernels:
        wanted[FOLDER / f"{name}-kernels"] = replace(engine, files=engine.files + engine.kernels)
    wanted = {folder: e for folder, e in wanted.items() if not is_complete(folder, e)}
    if not wanted:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        archives = download(engine, Path(temporary))
        for folder, e in wanted.items():
            unpack(archives, folder, e)
            print(f"fetched {folder.relative_to(ROOT)}", flush=True)


def is_complete(folder: Path, engine: Engine) -> bool:
    complete = folder / COMPLETE
    return complete.exists() and complete.read_text() == engine.text()


def unpack(archives: list[Path], folder: Path, engine: Engine) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for archive in archives:
        for path, read in members(archive):
            if engine.has(path):
                to = folder / path
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(read())
    (folder / COMPLETE).write_text(engine.text())


def download(engine: Engine, folder: Path) -> list[Path]:
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    environment = os.environ | ENVIRONMENT
    if engine.needs:
        subprocess.run([*pip, "install", "--no-deps", "--target", folder / "needs", *engine.needs], check=True)
        environment |= {"PYTHONPATH": str(folder / "needs")}
    pins, archives = folder / "pins.txt", folder / "archives"
    pins.write_text(engine.pins)
    command = [*pip, "download", "--no-deps", "--require-hashes", *engine.options, "-d", archives, "-r", pins]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    return sorted(archives.iterdir())


def members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Files of a wheel or a source package, named from the package's folder on, and what reads each."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, lambda name=name: wheel.read(name)  # type: ignore[misc]
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and (file := source.extractfile(member)):
                yield member.name.split("/", 1)[-1], file.read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENGINES)}; all by default")
    parser.add_argument("--kernels", action="store_true", help="unpack kernels that only a GPU can run, too")
    parser.add_argument("--clean", action="store_true", help="remove what is there")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ENGINES):
        parser.error(f"expected names of {', '.join(ENGINES)}, got {', '.join(sorted(unknown))}")
    if given.clean:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return
    missing = []
    for name in given.names or ENGINES:
        try:
            fetch(name, given.kernels)
        except subprocess.CalledProcessError:  # pip has said why
            missing.append(name)
    if missing:
        sys.exit(f"could not be had: {', '.join(missing)}")


if __name__ == "__main__":
    main()

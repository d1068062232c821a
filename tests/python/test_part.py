"""tools/part, which runs the parts of `make test` and `make demo`, and what the build reports about itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import build_report

ROOT = Path(__file__).resolve().parents[2]
PART = ROOT / "tools/part"


def start(folder: Path, *words: str, patience: int = 10) -> subprocess.Popen[str]:
    """Starts it as make does: not as the leader of the terminal's processes."""
    return subprocess.Popen(
        [str(PART), *words],
        cwd=folder,
        env={**os.environ, "KDA_PART_PATIENCE": str(patience)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *words: str, patience: int = 10) -> tuple[int, str, str]:
    process = start(folder, *words, patience=patience)
    printed, errors = process.communicate(timeout=60)
    return process.returncode, printed, errors


def alive(pid: int) -> bool:
    """A process that has ended counts as dead, whether or not its parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_and_time(tmp_path: Path) -> None:
    status, printed, errors = run(tmp_path, "a part", "bash", "-c", "echo one; echo two >&2")
    assert (status, errors) == (0, "")
    assert printed.splitlines()[:3] == ["== a part", "one", "two"]
    assert printed.splitlines()[3].startswith("== a part: ")
    assert (tmp_path / "build/logs/a-part.log").read_text() == "one\ntwo\n"


def test_words_keep_their_spaces(tmp_path: Path) -> None:
    assert "two  words,*\n" in run(tmp_path, "words", "printf", "%s\n", "two  words,*")[1]


def test_a_silent_command_is_not_silent(tmp_path: Path) -> None:
    """The dots of pytest have no end of line, but the line about them must be separate."""
    _, printed, _ = run(tmp_path, "slow", "bash", "-c", "echo begun; printf dots; sleep 6", patience=2)
    lines = printed.splitlines()
    assert lines[:3] == ["== slow", "begun", "dots"]
    assert sum(line.startswith("   .. slow, ") and line.endswith(" s: dots") for line in lines) >= 2


def test_a_talking_command_is_left_alone(tmp_path: Path) -> None:
    _, printed, _ = run(tmp_path, "talk", "bash", "-c", "for i in {1..8}; do echo $i; sleep 0.5; done", patience=3)
    assert ".." not in printed


def test_the_status_is_passed_on(tmp_path: Path) -> None:
    status, printed, errors = run(tmp_path, "bad", "bash", "-c", "echo why; exit 7")
    assert status == 7 and "why\n" in printed
    assert "bad: failed" in errors and "build/logs/bad.log" in errors
    assert run(tmp_path, "none", "/no/such/command")[0] == 127


def test_the_command_does_not_wait_for_input(tmp_path: Path) -> None:
    assert run(tmp_path, "input", "cat")[0] == 0


def test_times_are_a_table(tmp_path: Path) -> None:
    run(
        tmp_path,
        "first part",
        "python3",
        "-c",
        "import time; start = time.process_time()\nwhile time.process_time() < 1.6: pass",
    )
    run(tmp_path, "second", "false")
    rows = [line.split("\t") for line in (tmp_path / "build/times.txt").read_text().splitlines()]
    assert [row[2:] for row in rows] == [["0", "first part"], ["1", "second"]]
    assert int(rows[0][0]) >= 1 and int(rows[0][1]) in (2, 3), "processor time, however busy the machine"
    assert rows[1][1] == "0"
    status, printed, _ = run(tmp_path, "--table")
    lines = printed.splitlines()
    assert status == 0 and len(lines) == 4
    assert lines[1].endswith(" s  first part") and lines[2].endswith(" s  second  (failed)")
    assert lines[3].split()[0:3:2] == [str(sum(int(row[i]) for row in rows)) for i in (0, 1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_its_children(tmp_path: Path, number: signal.Signals) -> None:
    """make passes SIGTERM on to what it runs, a terminal its Ctrl-C."""
    code = "import subprocess; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    process = start(tmp_path, "long", "python3", "-c", code)
    assert process.stdout and process.stdout.readline() == "== long\n"
    child = int(process.stdout.readline())
    assert alive(child)
    begin = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode not in (0, None) and time.monotonic() - begin < 20
    assert not alive(child)
    assert (tmp_path / "build/times.txt").read_text().count("long") == 1


def test_a_command_may_end_on_a_signal_in_its_own_way(tmp_path: Path) -> None:
    code = "trap 'echo tidied; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    process = start(tmp_path, "tidy", "bash", "-c", code)
    assert process.stdout
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 5 and "tidied\n" in printed


# ---- the Makefile ----


def plan(*words: str, **settings: str) -> str:
    """What make would run, starting from nothing."""
    inherited = ("KDA_CUDA", "KDA_CUDA_PORTABLE", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = ["make", "--dry-run", "--always-make", *words]
    done = subprocess.run(command, cwd=ROOT, env={**environment, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cuda_is_compiled_where_it_is_asked_for() -> None:
    for value in ("ON", "OFF"):
        for text in (plan("demo", KDA_CUDA=value), plan("demo", f"KDA_CUDA={value}")):
            assert f"wheel (KDA_CUDA={value})" in text and f"build/wheel-cuda-{value}" in text
    text = plan("test", KDA_CUDA="OFF")
    assert "wheel (KDA_CUDA=ON)" in text and "-DKDA_CUDA=ON" in text, "tests always compile it"
    assert "-DKDA_CUDA=OFF" in plan("build", "KDA_CUDA=OFF"), "unless the command itself says otherwise"


def test_the_wheel_and_the_build_are_for_the_same_gpus() -> None:
    for words, gpus in ((["test"], "90"), (["test-all"], "90"), (["build"], "80;90;100")):
        text = plan(*words)
        assert f'"-DKDA_CUDA_PORTABLE={gpus}"' in text
        assert words == ["build"] or f"build/wheel-cuda-ON-{gpus.replace(';', '-')}\n" in text
    assert '"-DKDA_CUDA_PORTABLE=100"' in plan("test", KDA_CUDA_PORTABLE="100")


PARTS = re.findall(r'^\t[$]\(PART\) "([^"]*)"', (ROOT / "Makefile").read_text().replace("$(KDA_CUDA)", "ON"), re.M)


def test_test_all_leaves_nothing_out() -> None:
    everything = {part.replace("$*", name) for part in PARTS for name in ("asan", "tsan")} - {"demonstration"}
    assert everything == set(re.findall(r'^tools/part "([^"]*)"', plan("test-all"), re.M)) | {"setup"}
    assert "exec make test-all\n" in (ROOT / ".ci/run").read_text()


def test_every_long_command_is_a_part() -> None:
    text = plan("test-all").replace("\\\n", " ")
    for line in text.splitlines():
        if re.search(r"ctest|pytest|cmake|pip|mypy|ruff|clang-format|setup", line):
            assert line.startswith("tools/part "), line


# ---- tools/build_report.py ----


def test_seconds_are_those_of_the_last_time() -> None:
    log = "# ninja log v5\n0\t1500\t1\ta.cu.o\tx\n100\t300\t1\tb.o\ty\n1000\t4000\t2\ta.cu.o\tz\n"
    assert build_report.seconds(log) == {"a.cu.o": 3.0, "b.o": 0.2}


def test_a_record_has_no_times_of_the_clock() -> None:
    result = {
        "seconds": 3,
        "seconds_are": "of the clock",
        "kernels": 2,
        "files": {"a.cu": {"kernels": 2, "seconds": 3.0}},
    }
    assert build_report.without_times(result) == {"kernels": 2, "files": {"a.cu": {"kernels": 2}}}

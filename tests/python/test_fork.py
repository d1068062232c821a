"""A process that has used the library forks, as data loaders and servers do, and its child uses the library, too."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import kda

SECONDS = 60  # after that a hanging child is killed
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 512, 4, 32), dtype=np.float32)
CALL = (X, X, X, -np.abs(X), np.full((2, 512, 4), 0.5, np.float32))


def outputs():
    return kda.prefill(*CALL, use_qk_l2norm_in_kernel=True)


def work(queue, generations):
    queue.put(outputs().tobytes())
    if generations > 1:
        run_children(queue, generations - 1)


def run_children(queue, generations=1):
    child = multiprocessing.get_context("fork").Process(target=work, args=(queue, generations))
    child.start()
    child.join(SECONDS)
    alive = child.is_alive()
    if alive:
        child.kill()
    assert not alive, "the forked child hangs"
    assert child.exitcode == 0


def check_children(generations=1):
    queue = multiprocessing.get_context("fork").SimpleQueue()
    want = outputs().tobytes()
    reader = []
    thread = threading.Thread(target=lambda: reader.extend(queue.get() for _ in range(generations)), daemon=True)
    thread.start()  # children put more than a pipe holds
    run_children(queue, generations)
    thread.join(SECONDS)
    assert reader == [want] * generations
    assert outputs().tobytes() == want  # the parent continues


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of forks with threads
def test_children_of_children():
    check_children(generations=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_while_another_thread_is_in_a_call():
    done = threading.Event()

    def call():
        while not done.is_set():
            outputs()

    other = threading.Thread(target=call)
    other.start()
    try:
        for _ in range(5):
            check_children()
    finally:
        done.set()
        other.join()


def test_after_torch_has_used_its_threads():
    """In a separate process, because torch's OpenMP may be the one that the library uses. (The child itself calls
    nothing in torch that would start threads: that hangs.)"""
    pytest.importorskip("torch")
    script = """
        import os, torch
        torch.randn(600, 600) @ torch.randn(600, 600)
        torch.set_num_threads(4)
        torch.randn(1 << 20).exp().sum()
        import kda
        torch.manual_seed(0)
        x = torch.randn(1, 512, 4, 32)
        g, beta = -x.abs(), torch.full((1, 512, 4), 0.5)
        call = lambda: kda.prefill(x, x, x, g, beta, use_qk_l2norm_in_kernel=True).numpy().tobytes()
        want = call()
        child = os.fork()
        if child == 0:
            os._exit(0 if call() == want else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert call() == want
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=2 * SECONDS, env=environment())


@pytest.mark.parametrize("before", [None, "0"])
def test_loading_asks_torch_for_no_driver(before):
    """A process that has asked CUDA's driver must not fork workers. torch asks NVML while this is set."""
    script = """
        import os, torch, kda.call.library
        name, seen = "PYTORCH_NVML_BASED_CUDA_CHECK", []
        torch.cuda.is_available = lambda: bool(seen.append(os.environ.get(name)))
        before = os.environ.get(name)
        kda.call.library.library()
        assert seen and set(seen) == {"1"}, seen
        assert os.environ.get(name) == before
    """
    more = {} if before is None else {"PYTORCH_NVML_BASED_CUDA_CHECK": before}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=SECONDS, env=environment(**more)
    )


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(Path(kda.__file__).parent.parent), **more}


@pytest.mark.parametrize("name", ["AVX2", "avx2 ", "garbage"])
def test_an_instruction_set_that_is_none(name):
    script = """
        import kda, numpy as np
        x, b = np.ones((1, 1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
        for call in (kda.info, lambda: kda.prefill(x, x, x, -x, b)):
            try:
                call()
            except ValueError as error:
                print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment(KDA_CPU_ISA=name),
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    sentence = f"KDA_CPU_ISA: expected one of avx512, avx2, sse4, baseline, got {name}"
    assert run.stdout == f"{sentence}\n{sentence}\n"


def test_names_of_implementations_that_are_no_text(environment):
    with pytest.raises(ValueError, match=r"^impl: expected a name, got one with a character 0 behind 'cpu_chunk'$"):
        kda.prefill(*CALL, impl="cpu_chunk\0x")
    environment("KDA_IMPL", os.fsdecode(b"\xff\xfe"))
    with pytest.raises(ValueError, match=r"^KDA_IMPL: expected names of implementations, got \\xff\\xfe$"):
        kda.prefill(*CALL)


def test_numbers_of_threads():
    x, b = np.ones((1, 1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    sizes = {kda.workspace_size(x, x, x, -x, b, num_threads=n) for n in (1, 1000, 40000)}
    assert len(sizes) == 1
    assert np.array_equal(kda.prefill(x, x, x, -x, b, num_threads=40000), kda.prefill(x, x, x, -x, b, num_threads=1))
    with pytest.raises(ValueError, match=r"^num_threads: expected an integer, got an integer beyond 64 bits$"):
        kda.prefill(x, x, x, -x, b, num_threads=1 << 70)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "out"])
def test_workspace_over_a_tensor(name):
    call = {"q": X, "k": X, "v": X, "g": -np.abs(X), "beta": CALL[4], "out": np.empty_like(X)}
    size = kda.workspace_size(*CALL, num_threads=1)
    memory = np.zeros(size + call[name].nbytes + 256, np.uint8)
    memory = memory[-memory.ctypes.data % 256 :]
    over = memory[: call[name].nbytes].view(np.float32).reshape(call[name].shape)
    over[...] = call[name] if name != "out" else 0
    with pytest.raises(ValueError, match=f"^workspace: expected memory of its own, got memory that overlaps {name}$"):
        kda.prefill(**{**call, name: over}, workspace=memory[:size], num_threads=1)

"""The package as a whole: cheap to import, typed, documented, and able to say what it does and why not."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kda
from kda import _HOMES
from kda.call import library as _lib
from kda.call.library import OPERATORS
from kda.call.run import by_name
from kda.information import FUNCTIONS
from support import cpu_implementations, explained, make, run_examples


def python(code: str, **environment: str) -> str:
    """Standard output of a new interpreter."""
    environment = {**{n: v for n, v in os.environ.items() if n != "KDA_IMPL"}, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- import ----


def test_import_loads_nothing_else() -> None:
    heavy = python("import sys, kda; dir(kda); print([m for m in ('torch', 'tvm_ffi', 'numpy') if m in sys.modules])")
    assert heavy.strip() == "[]"


def test_import_is_fast() -> None:
    """At most 0.1 s; the best of five, because other processes may be running."""
    code = "import time; t = time.perf_counter(); import kda; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(5)) <= 0.1


def test_without_torch_numpy_arrays_work() -> None:
    """torch is optional: its import fails here, as where it is not installed."""
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, kda
x, beta = np.ones((1, 70, 2, 4), np.float32) / 2, np.ones((1, 70, 2), np.float32)
state = np.zeros((1, 2, 4, 4), np.float32)
o = kda.prefill(x, x, x, 0 * x, beta, state)
o = kda.decode(x[:, :1], x[:, :1], x[:, :1], 0 * x[:, :1], beta[:, :1], state)
o, s = kda.fused_recurrent_kda(x, x, x, 0 * x, beta, output_final_state=True)
g = kda.fused_kda_gate(x, lower_bound=-5.0)
buffer, slots, m = kda.DraftBuffer(1, 5, 2, 2, 4, 4), np.array([0], np.int32), np.array([3], np.int32)
drafts = (x[:, :5], x[:, :5], x[:, :5], 0 * x[:, :5], beta[:, :5])
kda.flush_kvbuffer(state, kda.new_records(1, 5, 2, 2, 4, 4), m)
buffer.step(*drafts, state, slots, 0 * m)
buffer.flush(state, slots, m)
assert type(buffer.records.u) is np.ndarray and state.any() and not buffer.records.ring_count.any()
print(type(o).__module__, s.shape, kda.info()["version"])
try:
    kda.chunk_kda(x, x, x, 0 * x, beta)
except ValueError as e:
    print(e)
"""
    lines = python(code).splitlines()
    assert lines[0] == f"numpy (1, 2, 4, 4) {kda.__version__}"
    assert re.match("q: .*torch", lines[1]), "training needs torch, and says so"


def test_names() -> None:
    assert set(kda.__all__) <= set(dir(kda)) and "nn" in dir(kda)
    home = {name: module for module, names in _HOMES.items() for name in names}
    assert set(home) == set(kda.__all__) and len(home) == sum(map(len, _HOMES.values())), "one home each"
    for name in kda.__all__:
        module = importlib.import_module(f"kda.{home[name]}")
        assert getattr(kda, name) is getattr(module, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        kda.no_such_name  # noqa: B018
    for module, names in _HOMES.items():
        assert {getattr(kda, name).__module__ for name in names} == {f"kda.{module}"}


def test_typed() -> None:
    assert (Path(inspect.getfile(kda)).parent / "py.typed").exists()
    for name in filter(lambda n: inspect.isfunction(getattr(kda, n)), kda.__all__):
        signature = inspect.signature(getattr(kda, name))
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values()), name


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    code = """
import kda, kda.information
kda.__path__[:] = ["/nowhere"]  # where an installed wheel has it
try:
    kda.info()
except ImportError as e:
    print(e)
"""
    message = python(code, KDA_LIBRARY_DIR=str(tmp_path))
    assert str(tmp_path) in message and "KDA_LIBRARY_DIR" in message


# ---- documentation ----


@pytest.mark.parametrize("name", kda.__all__)
def test_docstrings(name: str) -> None:
    """Every function says what it does; functions on tensors name each argument and give shapes."""
    function = getattr(kda, name)
    text = inspect.getdoc(function) or ""
    assert len(text.splitlines()[0]) > 20 and ">>> " in text, "a sentence and an example"
    refers = re.findall(r":func:`(\w+)`", text)
    assert all(r in kda.__all__ for r in refers)
    if name in ("chunk_kda", "fused_kda_gate", "prefill"):
        for argument in inspect.signature(function).parameters:
            known = argument in text or argument.startswith("use_") or argument in ("kwargs", "state_v_first")
            assert known, f"{argument} is not documented"
        assert re.search(r"\[.*HV.*\]", text), "no shapes"


@pytest.mark.parametrize(
    "module",
    ["kda", "kda.cp._context", "kda.stages", "kda.tp", *(f"kda.{module}" for module in _HOMES)],
)
def test_examples_in_docstrings(module: str) -> None:
    result = run_examples(importlib.import_module(module))
    assert result.failed == 0 and (result.attempted > 0 or module == "kda")


# ---- information ----


def test_info() -> None:
    info = kda.info()
    assert info["version"] == kda.__version__ and set(info) == {"version", "cpu", "cuda"}
    assert re.match(r"(avx512|avx2|sse4|baseline)\b", info["cpu"])


def test_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "kda", "info"], capture_output=True, text=True, check=True)
    words = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(words) == {"version", "cpu", "cuda", *OPERATORS}
    assert all(name in words[op] for op in OPERATORS for name in kda.implementations(op))


def test_instruction_set_from_the_environment() -> None:
    for isa in ("baseline", "sse4"):
        if isa in kda.info()["cpu"]:
            assert python("import kda; print(kda.info()['cpu'])", KDA_CPU_ISA=isa).startswith(isa)


@pytest.mark.parametrize("op", OPERATORS)
def test_implementations(op: str) -> None:
    names = list(kda.implementations(op))
    assert names[-1] == "reference" and len(set(names)) == len(names) >= 2
    with pytest.raises(ValueError, match=r"^op: expected one of forward"):
        kda.implementations(op + "s")


@pytest.mark.parametrize("op", ["forward", "decode"])
def test_explain_says_which_and_why_not(op: str, environment: Callable[[str, str | None], None]) -> None:
    p = make(1, 5, v_first=True, state=False)
    lines = kda.explain(**p.keywords, op=op).splitlines()
    assert explained(lines) == kda.implementations(op)
    first = cpu_implementations(op)[0]
    assert [x for x in lines if x[0] == "*"] == [x for x in lines if x[2:].startswith(f"{first}: ")]
    for impl in cpu_implementations(op):
        lines = kda.explain(**p.keywords, op=op, impl=impl).splitlines()
        assert [x for x in lines if x[0] == "*"] == [x for x in lines if x[2:].startswith(f"{impl}: ")]
        assert all("another one is forced" in x for x in lines if x[0] == "-" and not x.startswith("- cuda"))
        environment("KDA_IMPL", impl)
        assert kda.explain(**p.keywords, op=op).splitlines() == lines
        environment("KDA_IMPL", None)
    wide = kda.explain(**p.map(torch.Tensor.double).keywords, op=op).splitlines()
    assert wide[-1].startswith("* reference")
    assert all("float64" in line for line in wide[:-1] if not line.startswith("- cuda"))
    with pytest.raises(ValueError, match=r"^op: "):
        kda.explain(**p.keywords, op="segment")


def training_call(**more: Any) -> dict[str, Any]:
    p = make(2, 70, state=False)
    tensors = {n: x for n, x in p.keywords.items() if n in ("q", "k", "v", "g", "beta")}
    return tensors | {"output_final_state": True} | more


def test_explain_of_a_backward() -> None:
    lines = kda.explain(**training_call(), op="backward").splitlines()
    assert explained(lines) == kda.implementations("backward")
    for impl in cpu_implementations("backward"):
        lines = kda.explain(**training_call(impl=impl), op="backward").splitlines()
        assert [line[2:].split(":")[0] for line in lines if line[0] == "*"] == [impl]
    with pytest.raises(TypeError, match="no_such_option"):
        kda.explain(**training_call(no_such_option=1), op="backward")
    with pytest.raises(ValueError, match=r"^beta: expected .*"):
        kda.explain(**training_call(beta=torch.zeros(2, 70, 3)), op="backward")
    with pytest.raises(ValueError, match=r"^cp_context: expected None"):
        kda.explain(**training_call(cp_context=object()), op="backward")


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_explain_hands_over_what_a_backward_does(
    v_first: bool, disable_recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gets the same arguments, except for the content of memory."""
    calls: list[dict[str, Any]] = []
    real = _lib.library()

    class Library:
        def __getattr__(self, name: str) -> Any:
            if name not in ("backward", "backward_explain"):
                return getattr(real, name)
            return lambda **operands: calls.append(operands) or getattr(real, name)(**operands)

    monkeypatch.setattr(_lib, "_library", Library())
    A_log = torch.zeros(2)
    inputs = training_call(use_gate_in_kernel=True, A_log=A_log, disable_recompute=disable_recompute)
    inputs |= {"state_v_first": v_first, "initial_state": torch.zeros(2, 2, *((24, 16) if v_first else (16, 24)))}
    kda.explain(**inputs, op="backward")
    for x in inputs.values():
        if isinstance(x, torch.Tensor):
            x.requires_grad_()
    o, state = kda.chunk_kda(**inputs)
    (o.sum() + state.sum()).backward()
    explained, called = calls
    assert called.keys() == explained.keys() and len(called) > 20
    for name, a in called.items():
        b = explained[name]
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        else:
            assert a == b


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("op", ["verify", "flush", "flush_verify"])
def test_explain_of_drafts(op: str, ring: bool) -> None:
    p = make(2, 3, v_first=True, state=False).keywords
    x: dict[str, Any] = {"state": torch.zeros(2, 2, 24, 16), "records": kda.new_records(2, 6, 2, 2, 16, 24, ring=ring)}
    x |= {} if op == "flush" else p
    x |= {} if op == "verify" else {"accept_len": torch.tensor([0, 3], dtype=torch.int32)}
    if op == "flush_verify" and not ring:
        x["last"] = kda.new_records(2, 6, 2, 2, 16, 24)
    lines = kda.explain(**x, op=op).splitlines()
    assert explained(lines) == kda.implementations(op)
    for impl in cpu_implementations(op):
        lines = kda.explain(**x, op=op, impl=impl).splitlines()
        assert [line[2:].split(":")[0] for line in lines if line[0] == "*"] == [impl]
    assert float(x["state"].sum()) == float(x["records"].u.sum()) == 0
    with pytest.raises(ValueError, match=r"^records\.u: expected .* got 3"):
        kda.explain(**{**x, "records": x["records"]._replace(u=torch.zeros(2, 6, 2))}, op=op)
    with pytest.raises(TypeError, match="no_such_option"):
        kda.explain(**x, op=op, no_such_option=1)
    with pytest.raises(TypeError, match="'q'" if op == "flush" else "'dt'"):
        kda.explain(**x, **({"q": p["q"]} if op == "flush" else {"dt": 1}), op=op)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_explain_hands_over_what_the_function_does(op: str, flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument has its name: the library gets the same ones."""
    calls: list[tuple[Any, ...]] = []
    real = _lib.library()

    class Library:
        def __getattr__(self, name: str) -> Any:
            return by_name(name, lambda *arguments: calls.append(arguments), real.operands(op))

    def tensors(count: int) -> list[torch.Tensor]:
        return [torch.zeros(4, 3, 2, 5) for _ in range(count)]

    monkeypatch.setattr(_lib, "_library", Library())
    keywords: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(inspect.signature(FUNCTIONS[op]).parameters.items()):
        kinds = {"bool": flag, "int": i, "float": i / 2, "str": "reference", "Conv": kda.Conv(*tensors(5))}
        kinds |= {"object": None}  # a stream, which the library does not get as an argument
        kinds |= {"Records": kda.Records(*tensors(6)), "Norm": kda.Norm(*tensors(2), 0.5, "silu")}
        keywords[name] = kinds.get(str(parameter.annotation).split(" ")[0], tensors(1)[0])
    if op != "flush":
        keywords |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2, 5)}
    FUNCTIONS[op](**keywords)
    kda.explain(**keywords, op=op)
    called, explained = calls
    assert len(called) == len(explained) > 10
    for a, b in zip(called, explained, strict=True):
        assert a is b or (not isinstance(a, torch.Tensor) and a == b)


def test_explain_knows_the_options_of_prefill() -> None:
    p = make(1, 70, v_first=True, state=False)
    pool = torch.zeros(2, 2, 24, 16)
    more: dict[str, Any] = {"checkpoints": pool, "checkpoint_slots": torch.zeros(1, 1).int(), "checkpoint_every": 64}
    text = kda.explain(**p.keywords, **more)
    assert "- cpu_recurrent: keeps no checkpoints" in text
    with pytest.raises(ValueError, match="checkpoint_every"):
        kda.explain(**p.keywords, **{**more, "checkpoint_every": 63})
    with pytest.raises(TypeError, match="no_such_option"):
        kda.explain(**p.keywords, no_such_option=1)


def test_workspace_size() -> None:
    p = make(1, 70, v_first=True, state=False)
    sizes = [kda.workspace_size(**p.keywords, num_threads=n) for n in (1, 2, 3)]
    assert 0 < sizes[0] < sizes[1] < sizes[2], "a share for each thread"
    rows = [kda.workspace_size(**p.keywords, impl="cpu_recurrent", num_threads=n) for n in (1, 2)]
    assert 0 < rows[0] < rows[1] < sizes[0], "of a token's rows alone"
    arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in p.keywords.items()}
    assert kda.workspace_size(**arrays, num_threads=1) == sizes[0]
    with pytest.raises(ValueError, match=r"^g: "):
        kda.workspace_size(**{**p.keywords, "g": torch.zeros(1, 70, 2, 15)})


# ---- forcing and refusing ----


def test_impl_environment_in_a_fresh_process() -> None:
    code = """
import torch, kda
x = [torch.randn(1, 70, 1, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
o, _ = kda.chunk_kda(x[0], x[1], x[2], -x[3].abs(), torch.ones(1, 70, 1), use_qk_l2norm_in_kernel=True)
print(o.double().sum().item().hex(), kda.explain(*x, x[0][..., 0]).count("another one is forced"))
"""
    free = python(code)
    assert python(code, KDA_IMPL="cpu_chunk,cpu_gate").split()[0] == free.split()[0]
    assert python(code, KDA_IMPL="reference") != free and python(code, KDA_IMPL="reference").split()[1] == "2"
    with pytest.raises(AssertionError, match="ValueError: KDA_IMPL: expected names of implementations, got nobody"):
        python(code, KDA_IMPL="cpu_chunk,nobody")


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "prefill", "decode"])
def test_refusals_say_why(name: str) -> None:
    p = make(1, 5, state=False, v_first=True)
    function, op = getattr(kda, name), "forward" if name in ("chunk_kda", "prefill") else "decode"
    with pytest.raises(ValueError, match=r"impl: expected one of .*reference, got nobody"):
        function(**p.keywords, impl="nobody")
    wide = p.map(torch.Tensor.double)
    for impl in cpu_implementations(op):
        if impl != "reference":
            with pytest.raises(NotImplementedError, match=f"^{impl} was forced but float64 runs on `reference` only"):
                function(**wide.keywords, impl=impl)


def test_a_forced_implementation_that_cannot_says_why() -> None:
    """(A call on CPU tensors that forces nothing always finds one: `reference` takes everything.)"""
    p = make(1, 70, state=False, v_first=True)
    pool = torch.zeros(1, 2, 24, 16)
    more: dict[str, Any] = {"checkpoints": pool, "checkpoint_slots": torch.zeros(1, 1).int()}
    with pytest.raises(NotImplementedError, match=r"^cpu_recurrent was forced but keeps no checkpoints$"):
        kda.prefill(**p.keywords, **more, impl="cpu_recurrent")
    assert not pool.any()


def test_errors_keep_their_classes() -> None:
    """ValueError and NotImplementedError themselves, raised from the binding like any Python exception."""
    x = np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError) as bad:
        kda.decode(x, x[..., :3], x, x, x[..., 0])
    assert type(bad.value) is ValueError and str(bad.value) == "k: expected shape [1,2,1,4] like q, got [1,2,1,3]"
    wide = x.astype(np.float64)
    with pytest.raises(NotImplementedError) as refused:
        kda.decode(wide, wide, wide, wide, wide[..., 0], impl="cpu_recurrent")
    assert type(refused.value) is NotImplementedError
    assert not np.isnan(kda.decode(x, x, x, x, x[..., 0])).any(), "and the next call is as if nothing had been"

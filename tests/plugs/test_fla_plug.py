"""How kda.fla plugs itself in: what it takes and declines, the switches, the report, processes, and an FLA that is not
as expected."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fla_calls import compare, fla, without_kda

import kda.fla
from kda.cli import main
from kda.plugs import engines as _plugs
from kda.plugs.fla_places import PLACES
from support import make, run


def registry(path: str) -> Any:
    """Where FLA keeps the backends of a function."""
    place = next(place for place in PLACES if place.path == path)
    if place.registry is None:
        return fla("backends")._function_registries[inspect.unwrap(_plugs.resolve(path))]
    return fla("backends")._operation_registries[place.registry]


@pytest.fixture
def backend() -> Any:
    return registry("fla.ops.kda.chunk.chunk_kda")._backends["kda_lib"]


def test_plugged_and_registered_once() -> None:
    plug = kda.fla.plug()
    assert plug.state == "plugged", plug
    assert plug.takes == tuple(place.path for place in PLACES)
    for _ in range(2):
        importlib.reload(kda.fla)
        assert kda.fla.plug() == plug
    for place in PLACES:
        ours = [b for b in registry(place.path)._get_sorted_backends() if b.backend_type == "kda_lib"]
        assert len(ours) == 1, place


def test_before_flash_kda_and_triton(backend: Any) -> None:
    others = [b for b in registry("fla.ops.kda.chunk.chunk_kda")._get_sorted_backends() if b.is_available()]
    assert others[0].backend_type == "kda_lib"


# ---- what is declined ----

CHUNK = {"q": (1, 70, 2, 16), "k": (1, 70, 2, 16), "v": (1, 70, 2, 16), "g": (1, 70, 2, 16), "beta": (1, 70, 2)}
STATE = torch.zeros(1, 2, 16, 16)
GATED = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
DECLINED: list[tuple[dict[str, Any], str]] = [
    ({"cp_context": SimpleNamespace(cu_seqlens=None)}, "context"),
    ({"cp_context": SimpleNamespace(cu_seqlens=torch.zeros(2)), "output_final_state": True}, "context"),
    ({"k": torch.zeros(1, 70, 2, 16, dtype=torch.bfloat16)}, "q, k and v of one dtype"),
    ({n: torch.zeros(1, 70, 2, 16).double() for n in "qkv"}, "not torch.float64"),
    ({n: torch.zeros(1, 70, 2, 16, device="meta") for n in "qkv"}, "not on meta"),
    ({n: torch.zeros(1, 70, 2, 300) for n in "qkg"}, "at most 256"),
    ({"initial_state": STATE.bfloat16()}, "FLA refuses initial states"),
    ({"chunk_size": 16}, "FLA refuses chunks"),
    ({"return_intermediate_states": True, "chunk_size": 32}, "intermediate states before every 64"),
    ({**GATED, "A_log": None}, "FLA refuses a gate without A_log"),
    ({**GATED, "lower_bound": 1.0}, "negative lower_bound"),
    ({**GATED, "lower_bound": -6.0, "safe_gate": True}, "outside of [-5, 0)"),
    ({**GATED, "safe_gate": True}, "outside of [-5, 0)"),
    ({"q": "no tensor"}, "AttributeError"),
]


@pytest.mark.parametrize(("changes", "reason"), DECLINED, ids=lambda x: x if isinstance(x, str) else "")
def test_declined(changes: dict[str, Any], reason: str, backend: Any) -> None:
    given = {name: torch.zeros(shape) for name, shape in CHUNK.items()}
    assert backend.verify("chunk_kda", **given) == (True, None)
    kda.fla.report(reset=True)
    accepted, why = backend.verify("chunk_kda", **given | changes)
    assert (accepted, reason in str(why)) == (False, True), why
    assert kda.fla.report().left == {"chunk_kda": {why: 1}}


RECURRENT: list[tuple[dict[str, Any], str | None]] = [
    ({"inplace_final_state": False}, None),
    ({}, "without a state"),
    ({"initial_state": STATE}, None),
    ({"initial_state": STATE.half()}, "not torch.float16"),
    ({"initial_state": STATE, "beta": torch.zeros(1, 70, 2, 16)}, "one beta per token"),
    ({"initial_state": STATE, "out": torch.zeros(1, 70, 2, 16).half()}, "in the dtype of v"),
    ({"initial_state": STATE, "ssm_state_indices": torch.zeros(1).int()}, "[N] slots for one token each"),
    ({"initial_state": STATE, "ssm_state_indices": torch.zeros(1, 70).int()}, None),
    ({"initial_state": STATE, "ssm_state_indices": torch.zeros(1, 3).int()}, "a slot for every token"),
    ({"initial_state": STATE, "num_accepted_tokens": torch.ones(1)}, "with ssm_state_indices alone"),
    (
        {"initial_state": STATE, "ssm_state_indices": torch.zeros(1, 70).int(), "inplace_final_state": False},
        "in place alone",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), RECURRENT)
def test_declined_recurrence(changes: dict[str, Any], reason: str | None, backend: Any) -> None:
    given = {name: torch.zeros(shape) for name, shape in CHUNK.items()}
    accepted, why = backend.verify("fused_recurrent_kda_fwd", **given | changes)
    assert accepted == (reason is None), why
    assert reason is None or reason in why


X, W = torch.zeros(2, 10, 8), torch.zeros(8, 4)
MODULES: list[tuple[str, dict[str, Any], str | None]] = [
    ("causal_conv1d_fwd", {"x": X, "weight": W, "bias": None, "residual": None}, None),
    ("causal_conv1d_fwd", {"x": X, "weight": torch.zeros(8, 7), "bias": None, "residual": None}, "2 to 4 weights"),
    ("causal_conv1d_fwd", {"x": X, "weight": None, "bias": None, "residual": None}, "2 to 4 weights"),
    ("causal_conv1d_fwd", {"x": X, "weight": W, "bias": None, "residual": X}, "residual"),
    ("causal_conv1d_fwd", {"x": X, "weight": W, "bias": None, "residual": None, "activation": "relu"}, "SiLU alone"),
    ("causal_conv1d_bwd", {"x": X, "dy": X, "dht": None, "weight": W}, None),
    ("causal_conv1d_bwd", {"x": X, "dy": X, "dht": X, "weight": W}, "oldest column"),
    ("causal_conv1d_bwd", {"x": X, "dy": X.half(), "dht": None, "weight": W}, "dtype of x"),
    ("causal_conv1d_update", {"x": X[:, :1], "cache": torch.zeros(2, 8, 4), "weight": W}, None),
    ("causal_conv1d_update", {"x": X, "cache": torch.zeros(2, 8, 4), "weight": W}, "one token"),
    ("causal_conv1d_update", {"x": X[:, :1], "cache": None, "weight": W}, "contiguous cache"),
    ("layer_norm_gated_fwd", {"x": X[0], "g": X[0], "weight": None, "bias": None, "is_rms_norm": True}, None),
    ("layer_norm_gated_fwd", {"x": X[0], "g": X[0], "weight": None, "bias": None}, "RMS norm"),
    (
        "layer_norm_gated_fwd",
        {"x": X[0], "g": X[0], "weight": None, "bias": None, "is_rms_norm": True, "residual": X[0]},
        "residual",
    ),
    (
        "layer_norm_gated_bwd",
        {"dy": X[0], "x": X[0], "g": X[0], "weight": None, "bias": None, "rstd": torch.ones(10)},
        "its forward was FLA's",
    ),
]


@pytest.mark.parametrize(("name", "given", "reason"), MODULES)
def test_declined_modules(name: str, given: dict[str, Any], reason: str | None, backend: Any) -> None:
    accepted, why = backend.verify(name, **given)
    assert accepted == (reason is None), why
    assert reason is None or reason in why


def test_functions_that_we_do_not_have(backend: Any) -> None:
    assert backend.verify("chunk_kda_fwd_intra", torch.zeros(1)) == (False, "kda has none")
    assert backend.get_implementation("chunk_kda_fwd_intra") is None


def test_errors_are_those_of_fla() -> None:
    p = make(T=20, K=16, V=16)
    for changes, error in (
        ({"initial_state": p.tensors["initial_state"].bfloat16()}, AssertionError),
        ({"chunk_size": 16}, ValueError),
        ({"safe_gate": True, **GATED}, ValueError),
    ):
        with pytest.raises(error):
            fla("ops.kda.chunk_kda")(**{**p.keywords, **changes})


def test_our_own_sentence_comes_as_a_value_error() -> None:
    p = make(T=20, K=16, V=16)
    with pytest.raises(ValueError, match=r"^beta: expected"):
        fla("ops.kda.chunk_kda")(**{**p.keywords, "beta": torch.zeros(1, 20, 3)})


# ---- what no kernel of ours takes: GPUs that are too old, KDA_IMPL ----


def refusing(*args: Any, **given: Any) -> Any:
    raise NotImplementedError("cuda_none was forced but runs on CUDA tensors only")


def test_what_no_kernel_takes_is_flas(monkeypatch: pytest.MonkeyPatch) -> None:
    p, call = make(T=5, K=16, V=16), fla("ops.kda.chunk_kda")
    monkeypatch.setattr("kda.plugs.fla_takes.chunk_kda", refusing)
    kda.fla.report(reset=True)
    ours = run(call, p)
    told = kda.fla.report(reset=True)
    assert told.left["chunk_kda"] == {"cuda_none was forced but runs on CUDA tensors only": 1}
    assert "chunk_kda" not in told.taken and not kda.fla._handed_on
    with without_kda():
        compare(ours, run(call, p), 1e-4)


def test_a_recurrence_that_no_kernel_takes_is_flas(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that was given: the state stays, as it is not in place."""
    x, state = torch.randn(1, 5, 2, 16), torch.randn(1, 2, 16, 16)
    given = {"q": x, "k": x / 4, "v": x, "g": -x.abs(), "beta": torch.rand(1, 5, 2), "initial_state": state.clone()}
    given |= {"output_final_state": True, "inplace_final_state": False}
    monkeypatch.setattr("kda.plugs.fla_takes.fused_recurrent_kda", refusing)
    call = fla("ops.kda.fused_recurrent.fused_recurrent_kda_fwd")
    kda.fla.report(reset=True)
    o, last = call(**given)
    assert kda.fla.report(reset=True).left["fused_recurrent_kda_fwd"], "FLA's own ran"
    with without_kda():
        wanted, wanted_last = call(**given)
    assert torch.equal(o, wanted) and torch.equal(last, wanted_last) and torch.equal(given["initial_state"], state)


def test_a_backward_that_is_forced_in_vain_leaves_the_forward_to_fla(
    backend: Any, environment: Callable[[str, str | None], None]
) -> None:
    given = {name: torch.zeros(shape) for name, shape in CHUNK.items()}
    environment("KDA_IMPL", "cuda_backward_chunk")
    accepted, why = backend.verify("chunk_kda", **given)
    assert not accepted and "KDA_IMPL" in why
    with torch.no_grad():
        assert backend.verify("chunk_kda", **given) == (True, None)
    context = {"cp_context": SimpleNamespace(cu_seqlens=torch.zeros(2))}
    accepted, why = backend.verify("chunk_kda", **given, **context)
    assert not accepted and "KDA_IMPL" in why and "context parallelism" in why
    environment("KDA_IMPL", "cpu_chunk")
    assert backend.verify("chunk_kda", **given) == (True, None)


# ---- the switches and the report ----


def test_switch_and_report() -> None:
    p, call = make(T=5, K=16, V=16), fla("ops.kda.chunk_kda")
    kda.fla.report(reset=True)
    for _ in range(3):
        run(call, p, backward=False)
    with without_kda():
        run(call, p, backward=False)
    told = kda.fla.report(reset=True)
    assert told.taken == {"chunk_kda": {"cpu float32": 3}}
    assert told.left["chunk_kda"] == {"switched off by FLA_KDA_LIB=0": 1}
    text = str(told).splitlines()
    assert text[0] == str(kda.fla.plug()) == f"FLA {_plugs.installed('FLA')}: plugged"
    assert "  chunk_kda: 3 taken (cpu float32)" in text
    assert "  chunk_kda: 1 left to FLA (switched off by FLA_KDA_LIB=0)" in text
    assert kda.fla.report().taken == {}


def test_reasons_do_not_pile_up(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kda.fla.report(reset=True)
    monkeypatch.setattr(kda.fla, "MOST_REASONS", 5)
    for i in range(20):
        kda.fla._count_left("chunk_kda", f"reason {i}")
    left = kda.fla.report(reset=True).left["chunk_kda"]
    assert (len(left), left["other reasons"]) == (6, 15)


# ---- processes ----

CALL = """
    import torch, kda.fla
    from fla.ops.kda import chunk_kda
    x = torch.randn(1, 5, 1, 16)
    chunk_kda(x, x, x, -x.abs(), torch.ones(1, 5, 1))
"""


def program(text: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_forked_and_spawned_workers() -> None:
    workers = """
        import multiprocessing, pathlib, sys
        import kda.fla
        from fla.ops.kda import chunk_kda
        import torch

        def work(queue):
            import kda.fla
            x = torch.ones(1, 5, 1, 16) / 4
            o, _ = chunk_kda(x, x, x, -x, torch.ones(1, 5, 1))
            queue.put((str(kda.fla.plug()), kda.fla.report().taken, float(o.sum())))

        if __name__ == "__main__":
            found = []
            for way in ("fork", "spawn"):
                context = multiprocessing.get_context(way)
                queue = context.Queue()
                process = context.Process(target=work, args=(queue,))
                process.start()
                found.append(queue.get(timeout=200))
                process.join()
            assert found[0] == found[1], found
            assert found[0][1] == {"chunk_kda": {"cpu float32": 1}}, found
            print(found[0][0])
    """
    path = os.path.join(os.path.dirname(__file__), "..", "..", "build", f"workers_{os.getpid()}.py")
    try:
        with open(path, "w") as file:
            file.write(textwrap.dedent(workers))
        command = [sys.executable, "-W", "ignore", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    finally:
        os.remove(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(kda.fla.plug())


def test_fla_first() -> None:
    taken = program(f"import fla.ops.kda, kda.fla\n{textwrap.dedent(CALL)}\nprint(kda.fla.report().taken)")
    assert taken.strip() == "{'chunk_kda': {'cpu float32': 1}}"


def test_importing_kda_imports_no_engine() -> None:
    modules = "kda.nn, kda.transformers, kda.training"
    text = f"import sys, kda, {modules}\nprint([m for m in sys.modules if m.startswith('fla')])"
    assert program(text).strip() == "[]"


def test_dispatch_that_fla_has_switched_off() -> None:
    told = program("import kda.fla\nprint(kda.fla.report())", FLA_DISABLE_BACKEND_DISPATCH="1")
    assert told.strip().endswith("switched off: FLA_DISABLE_BACKEND_DISPATCH=1 was set when FLA was imported")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(kda.fla.plug())
    assert [f"  takes {place.path}" for place in PLACES] == lines[1 : 1 + len(PLACES)]


# ---- an FLA that is not as expected ----


@pytest.fixture
def unplugged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], _plugs.Plug]:
    """As before the first plug; ``registered`` fails the test."""

    def registered() -> None:
        raise AssertionError("registered")

    monkeypatch.setattr(_plugs, "_plugs", {})
    monkeypatch.setattr(kda.fla, "_register", registered)
    return kda.fla.plug


@pytest.mark.parametrize("version", ["0.5.2", "0.60", "0.7.0", "1.0", "of unknown version"])
def test_another_version(version: str, unplugged: Callable[[], _plugs.Plug], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plugs, "installed", lambda engine: version)
    with pytest.warns(RuntimeWarning, match="FLA's own functions run"):
        plug = unplugged()
    assert (plug.state, plug.reasons) == ("refused", (f"FLA: expected version 0.6, got {version}",))


def test_a_signature_that_moved(unplugged: Callable[[], _plugs.Plug], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fla.backends"), "register", lambda entry_point, option: None)
    with pytest.warns(RuntimeWarning, match=r"register: expected \(.*\), got \(entry_point, option\)"):
        plug = unplugged()
    assert plug.state == "refused"


def test_a_function_that_is_gone(unplugged: Callable[[], _plugs.Plug], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module("fla.ops.kda.chunk"), "chunk_kda")
    with pytest.warns(RuntimeWarning, match=r"fla\.ops\.kda\.chunk\.chunk_kda: expected to find it"):
        assert unplugged().state == "refused"


def test_a_function_that_fla_dispatches_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind somebody's decorator. What is registered already is not asked."""
    everywhere = kda.fla._register_everywhere

    def half(backend: Any) -> None:
        everywhere(backend)
        raise KeyError("chunk_kda")

    p = make(T=5, K=16, V=16)
    try:
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="refused: KeyError: 'chunk_kda'"):
            patch.setattr(_plugs, "_plugs", {})
            patch.setattr(kda.fla, "_register_everywhere", half)
            assert kda.fla.plug().state == "refused"
        kda.fla.report(reset=True)
        run(fla("ops.kda.chunk_kda"), p, backward=False)
        told = kda.fla.report(reset=True)
        assert not told.taken and not told.left
    finally:
        kda.fla._register()
    run(fla("ops.kda.chunk_kda"), p, backward=False)
    assert kda.fla.report(reset=True).taken == {"chunk_kda": {"cpu float32": 1}}


def test_a_kda_without_its_library(unplugged: Callable[[], _plugs.Plug], monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise ImportError("kda: no library")

    monkeypatch.setattr(kda.fla, "library", library)
    with pytest.warns(RuntimeWarning, match="kda: no library"):
        assert unplugged().state == "refused"

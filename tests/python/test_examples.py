"""The examples run. The demonstration chooses separately where to train and where to serve. Its checks of serving in
bfloat16 run on the CPU, too."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.demo import device, serving
from examples.demo.device import PROBES, Place, choose
from examples.demo.model import Caches, LanguageModel
from examples.demo.serving import save_and_load, serve
from torch import Tensor

import kda.nn
from demonstration import CONFIG, sentences, trained_model

ROOT = Path(__file__).resolve().parents[2]
ON_CPU, ON_CPU_BF16 = (Place("cpu", dtype, "a test") for dtype in (torch.float32, torch.bfloat16))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two threads that spin for each other on a busy machine take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_example(*command: str) -> str:
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments, environment = [sys.executable, *command], {**os.environ, **own}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example_train_tiny() -> None:
    assert "recalled 100%" in run_example("examples/train_tiny.py")


def test_quick_demonstration(tmp_path: Path) -> None:
    printed = run_example("-m", "examples.demo", "--quick", "--out", str(tmp_path))
    assert "all 6 passed" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "model.pt", "summary.json", "text.txt"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    here = {"device": "cpu", "dtype": "float32", "why": "there is no CUDA device"}
    assert summary["training"] == summary["serving"] == here
    losses = summary["nats_per_byte"]
    assert losses["bigram"] < losses["unigram"] < losses["uniform"]
    assert losses["model"] < losses["uniform"] - 1
    assert summary["state_bytes_after_prefill"] == summary["state_bytes_after_decode"] > 0
    assert summary["agreement"]["in_pieces_and_one_by_one_relative"] < 1e-5
    assert len((tmp_path / "text.txt").read_bytes()) == 512 + 64
    for figures in summary["drafting"].values():
        assert figures["accepted_per_round"] >= 1
        assert figures["record_bytes"] < figures["snapshot_bytes"]


# ---- devices: with a pretended GPU ----


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``gpu(train=..., serve=...)``: pretends that there is a GPU, where these fail for these dtypes."""

    def pretend(**errors: dict[torch.dtype, Exception]) -> None:
        def probe(config: device.Config, place: Place, what: str) -> None:
            assert config == CONFIG
            assert place.device == "cuda"
            if place.dtype in errors.get(what, {}):
                raise errors[what][place.dtype]

        for what in PROBES:
            monkeypatch.setitem(PROBES, what, lambda *x, what=what: probe(*x, what))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    return pretend


NO_KERNEL = NotImplementedError("no kernel\nand much more")
NOWHERE = {torch.bfloat16: RuntimeError("other words"), torch.float32: NO_KERNEL}
NOT_IN_BF16 = {torch.bfloat16: NO_KERNEL}


def test_without_a_gpu_everything_is_done_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for what in PROBES:
        monkeypatch.setitem(PROBES, what, lambda *_: pytest.fail("nothing to try"))
        assert choose(what, CONFIG) == Place("cpu", torch.float32, "there is no CUDA device")
        with pytest.raises(SystemExit, match=f"--{what}-on cuda: there is no CUDA device"):
            choose(what, CONFIG, "cuda")


def test_the_gpu_serves_what_it_cannot_train(gpu: Callable[..., None]) -> None:
    gpu(train=NOWHERE)
    why = "NVIDIA X does not train in float32: no kernel"
    assert choose("train", CONFIG) == Place("cpu", torch.float32, why)
    assert choose("serve", CONFIG) == Place("cuda", torch.bfloat16, "NVIDIA X")
    with pytest.raises(SystemExit, match=f"--train-on cuda: {why}"):
        choose("train", CONFIG, "cuda")


def test_the_gpu_trains_what_it_cannot_serve(gpu: Callable[..., None]) -> None:
    gpu(serve=NOWHERE)
    assert choose("train", CONFIG) == Place("cuda", torch.bfloat16, "NVIDIA X")
    assert choose("serve", CONFIG) == Place("cpu", torch.float32, "NVIDIA X does not serve in float32: no kernel")


@pytest.mark.parametrize("forced", [None, "cuda"])
def test_float32_comes_second(gpu: Callable[..., None], forced: str | None) -> None:
    gpu(serve=NOT_IN_BF16)
    why = "NVIDIA X does not serve in bfloat16: no kernel"
    assert choose("serve", CONFIG, forced) == Place("cuda", torch.float32, why)
    assert choose("train", CONFIG, forced) == Place("cuda", torch.bfloat16, "NVIDIA X")


def test_the_cpu_can_be_asked_for(gpu: Callable[..., None]) -> None:
    gpu()
    assert (
        choose("train", CONFIG, "cpu") == choose("serve", CONFIG, "cpu") == Place("cpu", torch.float32, "as asked for")
    )


def test_mistakes_are_no_reason(gpu: Callable[..., None]) -> None:
    gpu(train={torch.bfloat16: ValueError("q: expected something else")})
    with pytest.raises(ValueError, match="something else"):
        choose("train", CONFIG)


def refuse(*_: Any, **__: Any) -> None:
    raise NO_KERNEL


def refusing_all(_: Any) -> Any:
    return refuse


def forward_only(function: Any) -> Any:
    """The function, whose first result has no gradients."""

    def call(*args: Any, **options: Any) -> Any:
        results = function(*args, **options)
        if results is not None and results[0].requires_grad:
            results[0].register_hook(refuse)
        return results

    return call


@pytest.mark.parametrize("place", [ON_CPU, ON_CPU_BF16], ids=lambda place: str(place.dtype))
@pytest.mark.parametrize(
    ("function", "stand_in", "refusing"),
    [
        ("layer.training.train nn.chunk_kda", forward_only, ["train"]),
        ("nn.prefill", refusing_all, ["serve"]),
        ("nn.quick_step layer.step.fused_decode nn.decode", refusing_all, ["serve"]),
        ("layer.convolution.causal_conv1d_update", refusing_all, ["serve"]),
        ("layer.draft_cache.verify_kvbuffer", refusing_all, ["serve"]),
        ("layer.draft_cache.flush_verify_kvbuffer", refusing_all, ["serve"]),
        ("layer.draft_cache.flush_kvbuffer", refusing_all, ["serve"]),
        ("nn.prefill", None, []),
    ],
)
def test_probes_find_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, place: Place, function: str, stand_in: Any, refusing: list[str]
) -> None:
    for name in function.split() if stand_in else ():  # under autocast the layer calls the latter
        monkeypatch.setattr(f"kda.{name}", stand_in(functools.reduce(getattr, name.split("."), kda)))
    found = []
    for what, probe in PROBES.items():
        try:
            probe(CONFIG, place)
        except NotImplementedError:
            found.append(what)
    assert found == refusing


# ---- serving on another device, and in bfloat16 ----


def test_what_follows_training_is_done_where_it_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other place, in bfloat16, is the same CPU, which torch also accepts under another name."""
    from examples.demo import __main__ as demo

    places = {"train": ON_CPU, "serve": Place("cpu:0", torch.bfloat16, "another place")}
    moves: list[str] = []
    done: list[tuple[str, torch.dtype, list[str]]] = []
    move = LanguageModel.to

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(demo, name)

        def call(model: LanguageModel, *args: Any, **options: Any) -> Any:
            dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
            done.append((name, dtype, [*moves]))
            return original(model, *args, **options)

        return call

    def to(model: LanguageModel, where: str | torch.device) -> LanguageModel:
        moves.append(str(where))
        return move(model, where)

    for name in ("train", "save_and_load", "serve"):
        monkeypatch.setattr(demo, name, noted(name))
    monkeypatch.setattr(demo, "choose", lambda what, config, forced: places[what])
    monkeypatch.setattr(LanguageModel, "to", to)
    monkeypatch.setattr(sys, "argv", ["demo", "--quick", "--steps", "4", "--out", str(tmp_path)])
    status, printed = demo.main(), capsys.readouterr().out
    assert status == 0, printed
    assert done == [
        ("train", torch.float32, ["cpu"]),
        ("save_and_load", torch.bfloat16, ["cpu", "cpu:0"]),
        ("serve", torch.bfloat16, ["cpu", "cpu:0", "cpu"]),  # the last is the loaded one, moved to the prompt
    ]
    assert "in float32: a test" in printed
    assert "cpu:0 in bfloat16: another place" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["training"] == {"device": "cpu", "dtype": "float32", "why": "a test"}
    assert summary["serving"] == {"device": "cpu:0", "dtype": "bfloat16", "why": "another place"}
    assert summary["agreement"]["in_pieces_and_one_by_one_relative"] > 1e-5, "rounding to bfloat16 shows"


@pytest.fixture(scope="module")
def learnt() -> LanguageModel:
    return trained_model()


@pytest.mark.parametrize("place", [ON_CPU, ON_CPU_BF16], ids=lambda place: str(place.dtype))
def test_serves_what_it_learnt(learnt: LanguageModel, place: Place, tmp_path: Path) -> None:
    prompt, expected = sentences(380).split([250, 130], 1)
    with place.autocast():
        loaded, same = save_and_load(learnt, tmp_path / "model.pt", prompt)
        served = serve(loaded, prompt, 130, place.dtype)
    assert same
    assert served.checks == dict.fromkeys(served.checks, True)
    assert torch.equal(served.new, expected)
    assert all(figures["accepted_per_round"] > 6 for figures in served.drafting.values())


def failed(model: LanguageModel, place: Place) -> list[str]:
    with place.autocast():
        served = serve(model, sentences(250), 130, place.dtype)
    return [name for name, passed in served.checks.items() if not passed]


def forget_inputs(caches: Caches) -> None:
    for cache in caches.values():
        cache.conv.zero_()


def forget_slowly(caches: Caches) -> None:
    for cache in caches.values():
        cache.state.mul_(0.97)


def overflow(caches: Caches) -> None:
    caches[0].state.fill_(torch.inf)


@pytest.mark.parametrize("place", [ON_CPU, ON_CPU_BF16], ids=lambda place: str(place.dtype))
@pytest.mark.parametrize("damage", [forget_inputs, forget_slowly, overflow])
def test_damage_between_bytes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, learnt: LanguageModel, damage: Callable[[Caches], None], place: Place
) -> None:
    whole = LanguageModel.forward

    def forward(model: LanguageModel, tokens: Tensor, caches: Caches | None = None) -> Tensor:
        if caches and tokens.shape[1] == 1 and isinstance(caches[0], kda.nn.KDACache):
            damage(caches)
        return whole(model, tokens, caches)

    monkeypatch.setattr(LanguageModel, "forward", forward)
    assert "prefill and decode agree" in failed(learnt, place)


@pytest.mark.parametrize("place", [ON_CPU, ON_CPU_BF16], ids=lambda place: str(place.dtype))
def test_other_text_of_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch, learnt: LanguageModel, place: Place) -> None:
    speculate = serving.speculate

    def other(*args: Any, fused: bool) -> tuple[Tensor, dict[str, Any]]:
        text, figures = speculate(*args, fused=fused)
        text[0, 70] += fused
        return text, figures

    monkeypatch.setattr(serving, "speculate", other)
    assert failed(learnt, place) == ["drafting (fused) writes the same"]

"""The demonstration's serving of a model that was trained on the CPU."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from examples.demo.device import Place, choose
from examples.demo.model import LanguageModel
from examples.demo.serving import TOLERANCES, save_and_load, serve

from demonstration import CONFIG, sentences, trained_model
from places import DEVICE, only_cuda
from support import rel_rmse

PLACES = [Place(str(DEVICE), dtype, "a test") for dtype in (torch.bfloat16, torch.float32)]
by_dtype = pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.dtype))


@pytest.fixture(scope="module")
def trained() -> LanguageModel:
    return trained_model()


@pytest.fixture
def there(trained: LanguageModel) -> LanguageModel:
    """A copy of the trained model on the device."""
    return deepcopy(trained).to(DEVICE)


@only_cuda
def test_is_served_in_bfloat16() -> None:
    assert choose("serve", CONFIG) == Place("cuda", torch.bfloat16, torch.cuda.get_device_name())


@by_dtype
def test_serves_what_it_learnt(there: LanguageModel, place: Place, tmp_path: Path) -> None:
    prompt, expected = sentences(830).to(DEVICE).split([700, 130], 1)
    with place.autocast():
        loaded, same = save_and_load(there, tmp_path / "model.pt", prompt)
        served = serve(loaded, prompt, 130, place.dtype)
    assert same
    assert served.checks == dict.fromkeys(served.checks, True), served.differences
    assert torch.equal(served.new, expected)
    assert all(figures["accepted_per_round"] > 6 for figures in served.drafting.values())


@by_dtype
@torch.no_grad()
def test_logits_are_those_of_the_cpu(trained: LanguageModel, there: LanguageModel, place: Place) -> None:
    """At the demonstration's length, which may use other kernels than short texts."""
    tokens = torch.randint(256, (1, 4096), generator=torch.Generator().manual_seed(0))
    expected = trained(tokens)
    with place.autocast():
        at_once, prefilled = (there(tokens.to(DEVICE), caches) for caches in (None, there.new_caches(1)))
    for logits in (at_once, prefilled):
        assert rel_rmse(expected, logits.cpu()) < TOLERANCES[place.dtype][0]

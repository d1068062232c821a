"""The example engine writes the texts of a float64 loop."""

from __future__ import annotations

from examples.engine import Model

from engine_requests import check, serve
from test_examples import run_example


def test_every_text_is_that_of_the_float64_loop() -> None:
    check(Model())


def test_requests_read_one_slot_together() -> None:
    model = Model(layers=1)
    engine, requests, _ = serve(model, count=12, seed=3)
    engine.submit(requests[0].text, 1)
    while engine.waiting or engine.running:
        engine.step()
    together = [engine.submit([*requests[0].text, 5], 3) for _ in range(4)]
    engine.step()
    assert {request.resumed[0] for request in together} == {len(requests[0].text)}
    while engine.running:
        engine.step()
    assert len({tuple(request.text) for request in together}) == 1


def test_it_runs() -> None:
    assert "24 requests" in run_example("examples/engine.py")

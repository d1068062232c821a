"""Requests for the example engine, and what it should answer: a loop over tokens in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
from examples.engine import EVERY, Engine, Model, Request

NAN = float("nan")


class PoisonedEngine(Engine):
    """A slot that is free holds NaN, in all layers. It is never read: NaN would reach the text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for slot in self.free:
            self._poison(slot)

    def _poison(self, slot: int) -> None:
        self.states[:, slot] = NAN
        self.tails[:, slot] = NAN

    def release(self, slot: int) -> None:
        super().release(slot)
        self._poison(slot)


def float64_texts(model: Model, prompts: list[list[int]], lengths: list[int]) -> tuple[list[list[int]], float]:
    """All texts, token by token, from the model's weights alone; and the smallest lead of a chosen token in its
    logits, relative to their size."""
    weights = {name: x.double().cpu() for name, x in vars(model).items() if isinstance(x, torch.Tensor)}
    L, H, HV, K, V, N = model.layers, model.H, model.HV, model.K, model.V, len(prompts)
    S = torch.zeros(L, N, HV, K, V, dtype=torch.float64)
    window = torch.zeros(L, N, model.D, 4, dtype=torch.float64)
    texts, lead = [list(prompt) for prompt in prompts], float("inf")
    for t in range(max(lengths) - 1):
        h = weights["embedding"][torch.tensor([text[min(t, len(text) - 1)] for text in texts])]
        for i in range(L):
            normed = torch.nn.functional.rms_norm(h, h.shape[-1:])
            window[i] = torch.cat((window[i, :, :, 1:], (normed @ weights["to_x"][i])[..., None]), -1)
            y = (window[i] * weights["taps"][i]).sum(-1)
            q, k, v = (y * y.sigmoid()).split((H * K, H * K, HV * V), -1)
            q, k = (x.unflatten(-1, (H, K)).repeat_interleave(HV // H, 1) for x in (q, k))
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
            g = (normed @ weights["to_g"][i]).unflatten(-1, (HV, K)) + weights["dt_bias"][i]
            decay = torch.exp(-weights["A_log"][i].exp()[:, None] * torch.nn.functional.softplus(g))
            S[i] *= decay[..., None]
            error = v.unflatten(-1, (HV, V)) - torch.einsum("nhkv,nhk->nhv", S[i], k)
            beta = (normed @ weights["to_beta"][i]).sigmoid()
            S[i] += torch.einsum("nhk,nhv->nhkv", k, beta[..., None] * error)
            o = torch.einsum("nhkv,nhk->nhv", S[i], q) * K**-0.5
            h = h + o.flatten(-2) @ weights["to_h"][i]
        logits = torch.nn.functional.rms_norm(h, h.shape[-1:]) @ weights["head"].T
        first, second = logits.topk(2).values.unbind(-1)
        for n, text in enumerate(texts):
            if len(text) == t + 1 < lengths[n]:
                lead = min(lead, float((first[n] - second[n]) / logits[n].abs().max()))
                text.append(int(logits[n].argmax()))
    return texts, lead


def serve(
    model: Model, device: str = "cpu", count: int = 200, seed: int = 0
) -> tuple[Engine, list[Request], list[int]]:
    """Serves requests that come in bursts: new ones, copies of one prompt, and answers to earlier texts. Some running
    ones are preempted. Returns them with the lengths of their prompts."""
    random.seed(seed)
    engine = PoisonedEngine(model, slots=26, rows=6, device=device)
    systems = [[random.randrange(model.vocabulary) for _ in range(n)] for n in (5, 21, 32, 50, 67)]
    requests: list[Request] = []
    prompts: list[int] = []
    while len(requests) < count or engine.waiting or engine.running:
        if len(requests) < count and random.random() < 0.6:
            user = [random.randrange(model.vocabulary) for _ in range(random.randint(1, 20))]
            finished = [request for request in requests if request.done]
            before = random.choice(finished).text if finished and random.random() < 0.3 else random.choice(systems)
            prompt = (before + user)[:120]
            for _ in range(min(random.choice([1, 1, 1, 3, 5]), count - len(requests))):
                requests.append(engine.submit(prompt, random.randint(1, 14)))
                prompts.append(len(prompt))
        if engine.running and random.random() < 0.1:
            engine.preempt(random.choice(engine.running))
        engine.step()
    return engine, requests, prompts


def check(model: Model, device: str = "cpu", count: int = 200) -> None:
    engine, requests, prompts = serve(model, device, count)
    expected, lead = float64_texts(
        model, [r.text[:n] for r, n in zip(requests, prompts, strict=True)], [r.length for r in requests]
    )
    assert lead > 3e-5, f"the choice of a token is too close to call: {lead:.1e}"
    wrong = [n for n, request in enumerate(requests) if request.text != expected[n]]
    assert len(requests) == count and not wrong, f"texts {wrong} differ from the float64 loop"
    resumed = [length for request in requests for length in request.resumed]
    assert sum(length > 0 for length in resumed) > count / 2, "most requests find a prefix"
    assert sum(length % EVERY != 0 for length in resumed) > count / 20, "some resume at odd positions"
    assert any(len(request.resumed) > 1 for request in requests), "some were preempted"
    assert engine.evicted > count / 4 and 0 < engine.accepted < engine.drafted
    assert sorted([*engine.free, *engine.cache.values()]) == list(range(26)), "no slot is lost, and none is used twice"

"""A serving engine in one file: continuous batching, a prefix cache, and speculative rounds.

python examples/engine.py

One pool of slots holds the states of all layers, those of running requests and those of cached prefixes. A request that
finds a prefix of its prompt in the cache reads that slot and writes its own, so any number of requests start from one
prefix, and nothing is copied. A prefill leaves checkpoints at multiples of EVERY tokens of the text. A finished request
leaves its own slot to the cache, wherever its text ends. Between prefills all running requests draft, verify and commit
in rounds of a fixed shape; rows without a request are padding.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch

import kda

EVERY = 16  # tokens between checkpoints of a prompt


class Model:
    """A small language model with random weights: per layer a convolution and KDA, with a residual around them."""

    def __init__(
        self, layers: int = 2, width: int = 32, vocabulary: int = 48, H: int = 1, HV: int = 2, K: int = 16, V: int = 16,
        dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

        self.layers, self.vocabulary, self.H, self.HV, self.K, self.V = layers, vocabulary, H, HV, K, V
        self.D = 2 * H * K + HV * V  # channels of the convolution
        into, out = width**-0.5, (HV * V) ** -0.5
        self.embedding, self.head = weights(vocabulary, width), weights(vocabulary, width)
        self.to_x, self.to_g = weights(layers, width, self.D, scale=into), weights(layers, width, HV * K, scale=into)
        self.to_beta, self.to_h = weights(layers, width, HV, scale=into), weights(layers, HV * V, width, scale=3 * out)
        self.taps = weights(layers, self.D, 4, scale=0.5)
        self.A_log, self.dt_bias = weights(layers, HV).float() - 3, weights(layers, HV, K).float()

    def inputs(self, i: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Raw rows of the convolution ``[B, T, D]``, gate ``[B, T, HV, K]`` and beta ``[B, T, HV]`` of layer i."""
        h = torch.nn.functional.rms_norm(h, h.shape[-1:])
        return h @ self.to_x[i], (h @ self.to_g[i]).unflatten(-1, (self.HV, self.K)), h @ self.to_beta[i]

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v from convolved rows."""
        q, k, v = x.split((self.H * self.K, self.H * self.K, self.HV * self.V), -1)
        return q.unflatten(-1, (self.H, self.K)), k.unflatten(-1, (self.H, self.K)), v.unflatten(-1, (self.HV, self.V))

    def options(self, i: int) -> dict[str, object]:
        forms = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel")
        return {"A_log": self.A_log[i], "dt_bias": self.dt_bias[i], **dict.fromkeys(forms, True)}

    def after(self, i: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return h + o.flatten(-2) @ self.to_h[i]

    def next_tokens(self, h: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.rms_norm(h, h.shape[-1:]) @ self.head.T).argmax(-1)


@dataclass(eq=False)
class Request:
    text: list[int]  # the prompt, then what was generated; the state lacks the last token of a running request
    length: int  # of the text, when it is done
    slot: int = -1
    resumed: list[int] = field(default_factory=list)  # how many tokens a prefix in the cache had, at each start

    @property
    def done(self) -> bool:
        return len(self.text) >= self.length


class Engine:
    def __init__(self, model: Model, slots: int, rows: int, drafts: int = 4, device: str = "cpu") -> None:
        self.model, self.rows, self.drafts, self.device = model, rows, drafts, device
        self.states = torch.zeros(model.layers, slots, model.HV, model.V, model.K, device=device)
        self.tails = torch.zeros(model.layers, slots, model.D, 3, device=device)
        self.buffer = kda.DraftBuffer(
            slots, drafts, model.H, model.HV, model.K, model.V, entries=4 * drafts, layers=model.layers,
            channels=model.D, device=device,
        )  # fmt: skip
        self.free = list(range(slots))
        self.cache: OrderedDict[tuple[int, ...], int] = OrderedDict()  # the slot of a prefix; the oldest use first
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.drafted = self.accepted = self.evicted = 0

    # ---- what a server calls ----

    def submit(self, prompt: list[int], new_tokens: int) -> Request:
        request = Request(list(prompt), len(prompt) + new_tokens)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Admits what there is room for, and runs one round of drafts."""
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        self._retire()
        if self.running:
            self._round()
            self._retire()

    def preempt(self, request: Request) -> None:
        """Makes room: the request waits, and goes on from its state if that is still in the cache."""
        self._settle([request])
        self.waiting.append(request)

    # ---- slots ----

    def take(self, in_use: set[int]) -> int:
        """A slot, if need be that of the prefix whose last use is the longest ago; -1: all are in use."""
        if not self.free:
            old = next((key for key, slot in self.cache.items() if slot not in in_use), None)
            if old is None:
                return -1
            self.release(self.cache.pop(old))
            self.evicted += 1
        return self.free.pop()

    def release(self, slot: int) -> None:
        self.free.append(slot)

    def _find(self, text: list[int]) -> tuple[int, int]:
        """How many tokens the longest cached prefix has, and its slot. The last token always runs: its logits are
        needed. (This looks at every length. An engine for long prompts hashes blocks.)"""
        for length in range(len(text) - 1, 0, -1):
            if (key := tuple(text[:length])) in self.cache:
                self.cache.move_to_end(key)
                return length, self.cache[key]
        return 0, -1

    def _indices(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # ---- prefill ----

    def _admit(self) -> list[tuple[Request, int, int]]:
        """The requests to begin, each with the length and the slot of its prefix."""
        admitted: list[tuple[Request, int, int]] = []
        in_use: set[int] = set()  # slots that this prefill reads
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting[0]
            length, prefix = self._find(request.text)
            slot = self.take(in_use | {prefix})
            if slot < 0:
                break
            request.slot = slot
            request.resumed.append(length)
            in_use.add(prefix)
            self.running.append(self.waiting.popleft())
            admitted.append((request, length, prefix if length else slot))
        return admitted

    def _checkpoints(self, admitted: list[tuple[Request, int, int]]) -> list[dict[tuple[int, ...], int]]:
        """For each request the prefixes to keep and their slots, or -1, in order."""
        in_use, pending = {slot for _, _, slot in admitted}, set(self.cache)
        kept: list[dict[tuple[int, ...], int]] = []
        for request, length, _ in admitted:
            kept.append({})
            for end in range(length // EVERY * EVERY + EVERY, len(request.text) + 1, EVERY):
                key = tuple(request.text[:end])
                kept[-1][key] = -1 if key in pending else self.take(in_use)
                pending.add(key)
        return kept

    def _prefill(self, admitted: list[tuple[Request, int, int]]) -> None:
        model, kept = self.model, self._checkpoints(admitted)
        pieces = [request.text[length:] for request, length, _ in admitted]
        most = max(1, *(len(one) for one in kept))
        slots = self._indices([request.slot for request, _, _ in admitted])
        cu = self._indices([0, *accumulate(map(len, pieces))])
        common = {
            "cu_seqlens": cu,
            "state_indices": self._indices([slot for _, _, slot in admitted]),  # a prefix's, for any number of requests
            "has_initial_state": self._indices([length for _, length, _ in admitted]) > 0,
            "out_state_indices": slots,
            "checkpoint_slots": self._indices([[*one.values()] + [-1] * (most - len(one)) for one in kept]),
            "checkpoint_offset": self._indices([length for _, length, _ in admitted]),
            "checkpoint_every": EVERY,
        }
        h = model.embedding[self._indices([*chain(*pieces)]).long()][None]
        for i in range(model.layers):
            x, g, beta = model.inputs(i, h)
            state, tail = self.states[i], self.tails[i]
            x = kda.causal_conv1d_update(x, tail, model.taps[i], checkpoints=tail, **common)
            o = kda.prefill(*model.heads(x), g, beta, state, checkpoints=state, **common, **model.options(i))
            h = model.after(i, h, o)
        tokens = model.next_tokens(h[0, cu[1:].long() - 1]).tolist()
        for (request, _, _), token, one in zip(admitted, tokens, kept, strict=True):
            request.text.append(token)
            self.cache |= {key: slot for key, slot in one.items() if slot >= 0}
        self.buffer.reset(slots)

    # ---- rounds ----

    def propose(self, text: list[int]) -> list[int]:
        """Drafts: what followed the last token where it stood before. A wrong draft costs nothing but its place."""
        end = len(text) - 1
        at = next((i for i in range(end - 1, -1, -1) if text[i] == text[end]), end)
        return (text[at + 1 :] + [0] * self.drafts)[: self.drafts - 1]

    def _round(self) -> None:
        """Each running request feeds its last token and drafts. What the model itself would have said is kept."""
        model, padding = self.model, self.rows - len(self.running)
        tokens = [[request.text[-1], *self.propose(request.text)] for request in self.running]
        slots = self._indices([request.slot for request in self.running] + [-1] * padding)
        h = model.embedding[self._indices(tokens + [[0] * self.drafts] * padding).long()]
        for i in range(model.layers):
            x, g, beta = model.inputs(i, h)
            conv = kda.Conv(x, model.taps[i], None, self.tails[i], slots)
            o = self.buffer.step(
                None, None, None, g, beta, self.states[i], slots, layer=i, conv=conv, **model.options(i)
            )  # fmt: skip
            h = model.after(i, h, o)
        best = model.next_tokens(h).tolist()
        lengths = [self._accept(*one) for one in zip(self.running, tokens, best, strict=False)]
        self.buffer.accept(slots, self._indices(lengths + [0] * padding))

    def _accept(self, request: Request, fed: list[int], best: list[int]) -> int:
        """Appends tokens to the text. Returns how many of those that were fed belong to it."""
        right = next((t for t in range(1, len(fed)) if fed[t] != best[t - 1]), len(fed))
        right = min(right, request.length - len(request.text))
        request.text += best[:right]
        self.drafted, self.accepted = self.drafted + len(fed) - 1, self.accepted + right - 1
        return right

    def _retire(self) -> None:
        if done := [request for request in self.running if request.done]:
            self._settle(done)

    def _settle(self, requests: list[Request]) -> None:
        """Brings the states of requests up to date, and leaves their slots to the cache."""
        slots = self._indices([request.slot for request in requests])
        self.buffer.flush(self.states, slots, conv_state=self.tails)
        for request in requests:
            self.running.remove(request)
            key = tuple(request.text[:-1])
            if key in self.cache:
                self.release(request.slot)
            else:
                self.cache[key] = request.slot
            request.slot = -1


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    engine = Engine(model, slots=24, rows=6)
    system = torch.randint(model.vocabulary, (37,)).tolist()
    requests = []
    for question in range(20):
        user = torch.randint(model.vocabulary, (3 + question % 5,)).tolist()
        requests.append(engine.submit(system + user, 12))
        engine.step()
    while engine.waiting or engine.running:
        engine.step()
    follow = [engine.submit([*request.text, 1, 2, 3], 8) for request in requests[-4:]]
    while engine.waiting or engine.running:
        engine.step()
    saved = sum(map(sum, (request.resumed for request in requests + follow)))
    print(f"{len(requests + follow)} requests; {saved} tokens of prompts came from the cache;", end=" ")
    print(f"{engine.accepted} of {engine.drafted} drafts were right; {engine.evicted} prefixes were evicted")


if __name__ == "__main__":
    main()

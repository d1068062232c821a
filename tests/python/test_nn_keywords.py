"""kda.nn: how trainers pass documents and padding, under every name, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kda.cp
from cp_layer_ranks import CASES, TOKENS, run_layer, run_layer_rank
from gloo import run_ranks
from kda.layer.packing import find_layout
from kda.nn import IGNORED_KEYWORDS, DraftCache
from layer_model import documents, float64_parameters, make, model, relative, tokens

LENGTHS = [5, 64, 1, 20]
T = sum(LENGTHS)
CU = torch.tensor([0, *LENGTHS]).cumsum(0)
SEQ_IDX = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None].int()
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
FLASH = {"cu_seq_lens_q": CU.int(), "cu_seq_lens_k": CU.int(), "max_length_q": 64, "max_length_k": 64}
WAYS: dict[str, dict[str, Any]] = {
    "cu_seqlens": {"cu_seqlens": CU.int()},
    "cu_seq_lens_q": {"cu_seq_lens_q": CU},
    "cu_seq_lens_k": {"cu_seq_lens_k": CU},
    "cu_seqlens_cpu": {"cu_seqlens_cpu": CU},
    "flash": FLASH,
    "list": {"cu_seqlens": CU.tolist()},
    "tuple": {"cu_seqlens": tuple(CU.tolist())},
    "numpy": {"cu_seqlens_cpu": CU.int().numpy()},
    "list_twice": {"cu_seq_lens_q": (offsets := CU.tolist()), "cu_seq_lens_k": offsets},
    "list_and_numpy": {"cu_seqlens": CU.tolist(), "cu_seqlens_cpu": CU.numpy(), "position_ids": POSITIONS},
    "position_ids": {"position_ids": POSITIONS},
    "positions_from_2": {"position_ids": POSITIONS.int() + 2},
    "seq_idx": {"seq_idx": SEQ_IDX},
    "numbers_with_gaps": {"seq_idx": 7 * SEQ_IDX.long() + 3},
    "collator": {**FLASH, "position_ids": POSITIONS, "seq_idx": SEQ_IDX},
    "model_counts_on": {**FLASH, "position_ids": torch.arange(T)[None]},  # positions that a model makes itself
    "all_ones": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, T)},
}


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, Tensor]:
    """Outputs and gradients of x, each document separately, in float64."""
    layer, x = make(), tokens(1, T, 48).double().requires_grad_()
    o = documents(float64_parameters(layer), x, layer, LENGTHS)
    (dx,) = torch.autograd.grad(o, x, tokens(1, T, 48, seed=2).double())
    return o.detach(), dx


@pytest.mark.parametrize("keywords", WAYS.values(), ids=WAYS)
def test_documents_keep_to_themselves(expected, keywords):
    layer, x = make(), tokens(1, T, 48).requires_grad_()
    o, _, _ = layer(x, **keywords)
    (dx,) = torch.autograd.grad(o, x, tokens(1, T, 48, seed=2))
    assert relative(expected[0], o) < 3e-6
    assert relative(expected[1], dx) < 2e-5
    with torch.no_grad():
        assert torch.equal(layer(x, **keywords)[0], o)


def test_rows_may_hold_documents_of_their_own():
    layer, x = make(), tokens(3, 40, 48)
    lengths = [[40], [7, 33], [1, 1, 38]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    p = float64_parameters(layer)
    want = torch.cat([documents(p, x[b : b + 1].double(), layer, row) for b, row in enumerate(lengths)])
    for keywords in ({"position_ids": positions}, {"seq_idx": numbers}):
        assert relative(want, layer(x, **keywords)[0]) < 3e-6
    o, _, cache = layer(x, seq_idx=numbers, use_cache=True)
    assert cache.state.shape[0] == 6
    assert relative(want, o) < 3e-6
    step = layer(
        tokens(1, 6, 48, seed=4), cache=cache, cu_seqlens=torch.arange(7), position_ids=torch.ones(1, 6).long()
    )
    whole = torch.cat([x[1, 7:], tokens(1, 6, 48, seed=4)[0, 2:3]])
    assert relative(model(p, whole.double(), layer)[-1], step[0][0, 2]) < 3e-6


@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_in_no_document(side, fill):
    """Positions as transformers makes them from a mask, and a packed row followed by padding."""
    layer, x = make(), tokens(2, 30, 48)
    mask = torch.ones(2, 30).long()
    mask[0, :11] = 0
    mask = mask if side == "left" else mask.flip(1)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, fill)
    want = layer(x, attention_mask=mask)[0]
    for ids in (positions, torch.arange(30)[None], torch.arange(30).expand(2, 30)):
        assert torch.equal(layer(x, attention_mask=mask, position_ids=ids)[0], want)
    assert torch.equal(layer(x, attention_mask=mask, seq_idx=torch.tensor([[0] * 30, [1] * 30]))[0], want)

    positions[1], positions[0, mask[0] == 1] = torch.arange(30), torch.tensor([*range(9), *range(10)])
    packed, kept = layer(x, attention_mask=mask, position_ids=positions)[0], mask[0] == 1
    row = documents(float64_parameters(layer), x[:1, kept].double(), layer, [9, 10])
    assert relative(row[0], packed[0, kept]) < 3e-6
    assert not packed[0, ~kept].any()
    assert relative(want[1], packed[1]) < 1e-6


def test_positions_that_only_count_change_no_bit():
    layer, x = make(), tokens(2, 20, 48)
    want = layer(x)[0]
    for ids in (
        torch.arange(20)[None],
        torch.arange(20).expand(2, 20),
        torch.arange(20)[None] + torch.tensor([[3], [9]]),
    ):
        assert torch.equal(layer(x, position_ids=ids)[0], want)
    cache, plain = layer.new_cache(2), layer.new_cache(2)
    with torch.no_grad():
        for at, n in ((0, 12), (12, 7), (19, 1)):
            piece, ids = x[:, at : at + n], torch.arange(at, at + n)[None]
            mask = torch.ones(2, at + n, dtype=torch.bool)
            o = layer(piece, cache=cache, position_ids=ids, cache_position=ids[0], attention_mask=mask)[0]
            assert torch.equal(o, layer(piece, cache=plain)[0])


def test_one_token_needs_no_positions():
    layer, x = make(), tokens(2, 1, 48)
    for keywords in ({"position_ids": torch.tensor([[5], [0]])}, {"seq_idx": torch.tensor([[1], [0]])}):
        assert torch.equal(layer(x, **keywords)[0], layer(x)[0])


def naive_layout(mask: Tensor, numbers: Tensor) -> tuple[list[int], list[int]]:
    """Offsets, and the tokens kept, computed token by token."""
    kept, begins = [], []
    for b, row in enumerate(mask.tolist()):
        last = None
        for t, keep in enumerate(row):
            if not keep:
                continue
            if last is None or numbers[b, t] != numbers[b, last]:
                begins.append(len(kept))
            kept.append(b * len(row) + t)
            last = t
    return [*begins, len(kept)], kept


def counted(mask: Tensor, numbers: Tensor) -> Tensor:
    """Positions of the kept tokens within each document, and 1 for padding."""
    positions = torch.ones_like(numbers)
    for b, row in enumerate(mask.tolist()):
        seen: dict[int, int] = {}
        for t, keep in enumerate(row):
            if keep:
                positions[b, t] = seen[int(numbers[b, t])] = seen.get(int(numbers[b, t]), -1) + 1
    return positions


def test_layouts_are_those_of_a_token_by_token_search():
    choose = random.Random(0)
    for _ in range(200):
        B, n = choose.randint(1, 3), choose.randint(2, 12)
        mask = torch.tensor([[choose.random() < 0.8 for _ in range(n)] for _ in range(B)])
        mask[:, 0] = True  # a row of only padding is a sequence only while rows are sequences
        numbers = torch.tensor([[choose.random() < 0.2 for _ in range(n)] for _ in range(B)]).cumsum(1)
        positions, x = counted(mask, numbers), torch.zeros(B, n, 1)
        want, kept = naive_layout(mask, numbers)
        for layout in (
            find_layout(x, {}, numbers, None, mask),
            find_layout(x, {}, None, positions, mask),
            find_layout(x, {}, numbers, positions, mask),
        ):
            got = torch.arange(B + 1) * n if layout.cu_seqlens is None else layout.cu_seqlens
            assert got.tolist() == want
            assert (torch.arange(B * n) if layout.kept is None else layout.kept).tolist() == kept


# ---- refused and accepted calls ----


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"cu_seqlens": CU, "cu_seq_lens_q": CU + (CU == 69)}, "cu_seq_lens_q: expected the offsets of cu_seqlens"),
        ({"cu_seq_lens_q": CU, "cu_seq_lens_k": CU[1:] - 5}, "cu_seq_lens_k: expected the offsets of cu_seq_lens_q"),
        ({"cu_seqlens": CU, "cu_seqlens_cpu": CU[:-1]}, "cu_seqlens_cpu: expected the offsets of cu_seqlens"),
        ({"cu_seqlens": CU, "seq_idx": SEQ_IDX.flip(1)}, "seq_idx: expected the documents of cu_seqlens, got others"),
        ({"cu_seqlens": CU, "seq_idx": 0 * SEQ_IDX}, "seq_idx: expected the documents of cu_seqlens, got others"),
        ({"cu_seq_lens_q": CU[[0, -1]], "position_ids": POSITIONS}, "position_ids: expected the documents of cu_seq"),
        ({"seq_idx": 0 * SEQ_IDX, "position_ids": POSITIONS}, "position_ids: expected the documents of seq_idx, got o"),
        ({"position_ids": 2 * POSITIONS}, r"position_ids: expected steps of 1 and restarts .*, got 2 after 0"),
        ({"position_ids": POSITIONS.float()}, r"position_ids: expected integers, got torch\.float32"),
        ({"position_ids": POSITIONS[0]}, r"position_ids: expected shape \[1, 90\], got \[90\]"),
        ({"position_ids": POSITIONS.expand(3, 1, -1)}, r"position_ids: expected shape \[1, 90\], got \[3, 1, 90\]"),
        ({"seq_idx": SEQ_IDX - 1}, "seq_idx: expected numbers from 0 on, got -1"),
        ({"seq_idx": SEQ_IDX[:, :-1]}, r"seq_idx: expected shape \[1, 90\], got \[1, 89\]"),
        ({"seq_idx": SEQ_IDX == 1}, r"seq_idx: expected integers, got torch\.bool"),
        ({"cu_seq_lens_q": CU + 1, "position_ids": POSITIONS}, "cu_seq_lens_q: expected offsets from 0 on"),
        ({"cu_seq_lens_q": 2 * CU, "position_ids": POSITIONS}, "cu_seq_lens_q: expected offsets up to 90 tokens"),
        ({"cu_seqlens": CU[0]}, r"cu_seqlens: expected \[N \+ 1\] int32 or int64, got \[\] torch\.int64"),
        ({"cu_seq_lens_q": CU.float()}, r"cu_seq_lens_q: expected \[N \+ 1\] int32 or int64, got \[5\] torch\.float32"),
        ({"cu_seq_lens_k": CU[None]}, r"cu_seq_lens_k: expected \[N \+ 1\] int32 or int64, got \[1, 5\] torch\.int64"),
        ({"cu_seqlens_cpu": CU[-1].numpy()}, "cu_seqlens_cpu: expected a tensor or a sequence of integers, got 90"),
        ({"cu_seqlens_cpu": 90}, "cu_seqlens_cpu: expected a tensor or a sequence of integers, got 90"),
        ({"cu_seqlens": "0"}, "cu_seqlens: expected a tensor or a sequence of integers, got '0'"),
        ({"cu_seqlens": CU.float().numpy()}, r"cu_seqlens\[0\]: expected an integer, got 0\.0"),
        ({"cu_seqlens": [0, 5, 3]}, r"cu_seqlens\[2\]: expected at least 5 \(never decreasing\), got 3"),
        ({"cu_seqlens": (1, 5)}, "cu_seqlens: expected offsets from 0 on"),
        ({"cu_seqlens": CU, "cu_seqlens_cpu": CU.tolist()[:-1]}, "cu_seqlens_cpu: expected the offsets of cu_seqlens"),
        ({"attention_mask": SEQ_IDX + 1}, "attention_mask: expected 0 for padding and 1 elsewhere, got 2"),
        ({"attention_mask": -1e9 * (SEQ_IDX == 1)}, "attention_mask: expected 0 .*, got -1000000000.0"),
        ({"attention_mask": torch.full((1, T), torch.nan)}, "attention_mask: expected 0 .*, got nan"),
        ({"attention_mask": torch.full((1, T), 0.5)}, "attention_mask: expected 0 .*, got 0.5"),
        ({"is_causal": False}, "is_causal: expected True"),
    ],
)  # fmt: skip
def test_contradictions_and_strange_values(keywords, sentence):
    with pytest.raises(ValueError, match="^" + sentence):
        make()(tokens(1, T, 48), **keywords)


@pytest.mark.parametrize("name", ["cu_seqlen", "seqlens", "past_key_value", "cp", "block_table", "layer_head_mask"])
@pytest.mark.parametrize("value", [CU, None])
def test_unknown_keywords(name, value):
    with pytest.raises(
        TypeError, match=rf"^{name}: expected a keyword of KimiDeltaAttention\.forward or one of those it"
    ):
        make()(tokens(1, T, 48), **{name: value})


def test_caches_by_two_names_and_for_other_documents():
    layer, x = make(), tokens(1, T, 48)
    with pytest.raises(ValueError, match=r"^cache: expected the same as past_key_values"):
        layer(x, past_key_values=layer.new_cache(1), cache=layer.new_cache(1))
    for keywords in (WAYS["position_ids"], WAYS["seq_idx"]):
        with pytest.raises(ValueError, match=r"^cache: expected one for 4 sequences, got one for 1"):
            layer(x, cache=layer.new_cache(1), **keywords)
        with torch.no_grad(), pytest.raises(ValueError, match=r"^cache: expected no padding, no packed documents"):
            layer(
                x[:, :6], cache=DraftCache(layer, layer.new_cache(2), 6), **{n: v[:, :6] for n, v in keywords.items()}
            )


def test_ignored_keywords_change_no_bit():
    layer, x = make(), tokens(1, 9, 48)
    keywords = dict.fromkeys(IGNORED_KEYWORDS, torch.arange(9))
    assert torch.equal(layer(x, **keywords, is_causal=True, output_attentions=True)[0], layer(x)[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(dtype):
    layer, x, mask = make(), tokens(2, 9, 48), torch.ones(2, 9).bool()
    assert torch.equal(layer(x, attention_mask=mask.to(dtype))[0], layer(x)[0])
    mask[1, :4] = False
    o, _, _ = layer(x, attention_mask=mask.to(dtype))
    assert torch.equal(o, layer(x, attention_mask=mask)[0])
    assert relative(model(float64_parameters(layer), x[1, 4:].double(), layer), o[1, 4:]) < 3e-6


def test_compiled(expected):
    layer, x = make(), tokens(1, T, 48)
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for name in ("flash", "collator"):  # offsets stay in the graph
        assert relative(expected[0], whole(x, **WAYS[name])[0]) < 3e-6
    broken = torch.compile(layer, backend="aot_eager")
    assert relative(expected[0], broken(x, position_ids=POSITIONS)[0]) < 3e-6
    torch._dynamo.reset()  # otherwise the graphs in pieces are found again
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(x, position_ids=POSITIONS)
    mask = torch.ones(1, T)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # a mask alone stays in the graph
        whole(x, position_ids=POSITIONS, attention_mask=mask)
    mask[:, :3] = 0
    assert torch.equal(whole(x, attention_mask=mask)[0], layer(x, attention_mask=mask)[0])


# ---- context parallelism ----

RANKS = (2, 3)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """The results of this many processes, which are started once."""
    folder, done = tmp_path_factory.mktemp("cp_layer"), {}

    def of(ranks: int) -> list[dict[str, Any]]:
        if ranks not in done:
            run_ranks(run_layer_rank, (ranks, str(folder)), ranks)
            done[ranks] = [torch.load(folder / f"{ranks}_{rank}.pt") for rank in range(ranks)]
        return done[ranks]

    return of


@pytest.mark.parametrize("name", CASES)
def test_one_process_with_offsets_is_the_model(name):
    case, got = CASES[name], run_layer(CASES[name])
    layer, x = case.layer(), tokens(1, TOKENS, 48).double().requires_grad_()
    p = float64_parameters(layer)
    (documents(p, x, layer, case.lengths) * tokens(1, TOKENS, 48, seed=2)).sum().backward()
    want = {"x": x.grad, **{n: w.grad for n, w in p.items()}}
    allowed = 0.05 if case.autocast else 5e-5
    assert all(relative(want[n], g) < allowed for n, g in got.items() if n != "o"), name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_windows_of_ranks_are_the_whole(windows, ranks, name):
    want, parts = run_layer(CASES[name]), [w[name] for w in windows(ranks)]
    for n, x in want.items():
        got = torch.cat([p[n] for p in parts], 1) if n in ("o", "x") else sum(p[n] for p in parts)
        # dA_log is one sum per head over all tokens and channels, with cancellation: one process is 1.3e-5 from
        # float64.
        allowed = 0.02 if CASES[name].autocast else 5e-5 if n == "A_log" else 1e-5
        assert relative(x, got) < allowed, n


def test_windows_are_checked(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer, x, cp = make(), tokens(1, T, 48), kda.cp.Context(CU)
        want = layer(x, cu_seqlens=CU)[0]
        for keywords in ({}, WAYS["cu_seqlens"], WAYS["collator"], {"cu_seqlens": cp.cu_seqlens, "use_cache": False}):
            assert torch.equal(layer(x, cp_context=cp, **keywords)[0], want)
        compiled = torch.compile(layer, backend="aot_eager")  # a graph break
        assert relative(want, compiled(x, cp_context=cp)[0]) < 1e-6
        for keywords, sentence in (
            ({"cp_context": CU}, r"cp_context: expected a kda\.cp\.Context, got Tensor"),
            (
                {"cp_context": cp, "use_cache": True},
                "past_key_values: expected None and use_cache=False with cp_context",
            ),
            ({"cp_context": cp, "cache": layer.new_cache(4)}, "past_key_values: expected None and use_cache=False"),
            ({"cp_context": cp, "cu_seqlens": CU[[0, -1]]}, "cu_seqlens: expected the offsets of cp_context, got oth"),
            ({"cp_context": cp, "seq_idx": 0 * SEQ_IDX}, "seq_idx: expected the documents of cp_context, got others"),
            ({"cp_context": kda.cp.Context([0, 8])}, r"hidden_states: expected shape \[1, 8, 48\], this rank's window"),
        ):
            with pytest.raises(ValueError, match="^" + sentence):
                layer(x, **keywords)
        with pytest.raises(ValueError, match=r"^mode: expected 'chunk' with cp_context, got 'fused_recurrent'"):
            make(mode="fused_recurrent")(x, cp_context=cp)
    finally:
        dist.destroy_process_group()

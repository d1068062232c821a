"""The table of the README: GPU figures beside other projects'."""

from __future__ import annotations

from collections.abc import Iterator

from bench.tables import decode, elementwise, prefill, training
from bench.tables.record import record, table

HEADS = (12, 24, 32, 64, 96)
REQUESTS = tuple(2**i for i in range(9))


def prefills() -> Iterator[list[str]]:
    for name, case, gate in (
        ("prefill, 96 heads x 8192 tokens", "H96 T8192", "strong"),
        ("the same with [slow gates](docs/bench.md#bench-prefill-on-a-gpu)", "H96 T8192", "slow"),
        ("prefill, 96 heads x 8 packed sequences of 1024", "H96 8 x 1024", "strong"),
        ("prefill, 32 heads x 8192", "H32 T8192", "strong"),
        ("prefill, 12 heads x 8192", "H12 T8192", "strong"),
        ("prefill, 12 heads x 65,536", "H12 T65536", "strong"),
        ("prefill, 32 heads x 8192, unbounded gates", "H32 T8192", "softplus"),
    ):
        ours = min(prefill.row(impl, case, gate)["ms"] for impl in (prefill.PAIRS, prefill.SEGMENTS))
        if gate == "softplus":
            beside = f"FLA, in an earlier run, {prefill.row('FLA', case, gate)['ms']:.2f} ms"
        else:
            cudnn, flash = (prefill.row(peer, case, gate)["ms"] for peer in ("cuDNN", "FlashKDA"))
            beside = f"cuDNN {cudnn:.2f}, FlashKDA {flash:.2f} ms"
        yield [name, f"{ours:.2f} ms", beside]


def trainings() -> Iterator[list[str]]:
    def cost(what: str, case: str) -> str:
        row = record().row(what=f"{what} training", case=case, gate="strong")
        return f"{row['ms']:.2f} ms, {row['peak_gib']:.2f} GiB"

    cases = {"12 heads x 8192": "H12 T8192", "32 heads x 8192": "H32 T8192", "64 heads x 8192": "H64 T8192"}
    for name, case in (*cases.items(), ("12 heads x 65,536", "H12 T65536")):
        beside = f"cuDNN {cost('cuDNN', case)}"
        if case == "H32 T8192":
            beside += f"; FLA, earlier, {record().row(what='FLA training', case=case, gate='strong')['ms']:.2f} ms"
        yield [f"forward and backward, {name}", cost("kda, h, v_new saved", case), beside]


def layers() -> Iterator[list[str]]:
    stage = {"what": "bwd_wy_dqkg", "case": "H32 T8192"}
    times = [
        record().row(what=f"{who} {stage['what']}", case=stage["case"])["ms"]
        for who in ("kda (cuda_hopper_stages_wy_dqkg)", "FLA")
    ]
    yield ["stage `bwd_wy_dqkg`, 32 heads x 8192", f"{times[0]:.2f} ms", f"FLA {times[1]:.2f} ms"]
    for name, what in (("8192 tokens", "prefill"), ("forward and backward", "training")):
        ours, fla = (training.layer_time(who, what, "B1 T8192") for who in ("kda", "FLA"))
        yield [f"[layer](docs/operators/layer.md#figures), {name}", f"{ours:.2f} ms", f"FLA's layer {fla:.2f} ms"]
    steps = {
        who: ", ".join(f"{training.layer_time(who, 'decode', f'B{B}') * 1e3:.0f}" for B in (1, 32, 128))
        for who in ("kda", "FLA")
    }
    yield ["layer, one token of 1, 32, 128 sequences", f"{steps['kda']} us", f"FLA's layer {steps['FLA']} us"]


def decodes() -> Iterator[list[str]]:
    def faster(HV: int, B: int) -> float:
        return float(min(decode.peers(HV, B)) / decode.fastest("decode", HV, B)["us"])

    def drafts(operator: str) -> list[float]:
        calls = [(HV, B) for HV in (32, 64) for B in REQUESTS if decode.measured(operator, HV, B, 4)]
        return [decode.fastest(operator, HV, B, 4)["over_baseline"] for HV, B in calls]

    one = [faster(HV, 1) for HV in HEADS]
    more = [faster(HV, B) for HV in HEADS for B in REQUESTS[1:] if decode.peers(HV, B)]
    both, two = drafts("flush_verify"), drafts("verify + flush")
    cula = [max(found) for HV in (32, 64) for B in REQUESTS if (found := decode.cula(HV, B, 4))]
    peers = "the best of FLA and SGLang"
    yield ["decode, 1 request, 12 to 96 heads", f"{min(one):.1f} to {max(one):.1f} times as fast", peers]
    yield ["decode, 2 to 256 requests", f"{min(more):.2f} to {max(more):.2f} times as fast", peers]
    name = "4 drafts, 32 or 64 heads, flush and verify in one"
    yield [name, f"{min(both):.1f} to {max(both):.1f} times as fast", "SGLang with a state per draft"]
    beside = f"the same; cuLA {min(cula):.1f} to {max(cula):.1f} times"
    yield ["the same in two calls", f"{min(two):.1f} to {max(two):.1f} times as fast", beside]
    shares = elementwise.gate_shares()
    percent = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"
    yield ["`kda_gate`", f"reaches {percent} of the bandwidth of a copy", "`y = 2 x`"]


def measured() -> list[str]:
    return table(["on an H200", "kda", "beside it"], [*prefills(), *trainings(), *layers(), *decodes()])


TABLES = {"readme": measured}

"""Tables of training, stages and the layer."""

from __future__ import annotations

from typing import Any

from bench.tables.record import plain, record, table

GATES = ("strong", "slow", "softplus")
CASES = {
    "H12 T8192": "H12", "H32 T8192": "H32", "H64 T8192": "H64", "H96 T8192": "H96",
    "H12 T65536": "H12, 65,536 tokens", "H32 8 x 1024": "H32, 8 sequences of 1024",
    "H16 HV32 T8192": "H16, 32 value heads", "H32 T8192 K64 V64": "H32, K = V = 64",
}  # fmt: skip
BYTES = 2820  # a token and value head at K = V = 128


def each_gate(what: str, case: str, column: str) -> str:
    found = [record().rows(what=f"{what} training", case=case, gate=gate) for gate in GATES]
    return " / ".join(f"{row[column]:.2f}" for rows in found for row in rows)


def floor(case: str) -> float | None:
    """Milliseconds, where each value head has a q/k head and 128 channels."""
    row = record().row(what="kda, h, v_new saved training", case=case, gate="strong")
    if row["H"] != row["HV"] or (row["K"], row["V"]) != (128, 128):
        return None
    return float(BYTES * row["B"] * row["T"] * row["HV"] / record().bandwidth * 1e3)


def share(what: str, case: str) -> str:
    least = floor(case)
    time = record().row(what=f"{what} training", case=case, gate="strong")["backward_ms"]
    return plain(least / time, 2) if least else ""


def peak(what: str, case: str) -> str:
    return f"{record().row(what=f'{what} training', case=case, gate='strong')['peak_gib']:.2f}"


def hopper() -> list[str]:
    saved, nothing = "kda, h, v_new saved", "kda, nothing saved"
    rows = []
    for case, name in CASES.items():
        times = [each_gate(saved, case, column) for column in ("forward_ms", "backward_ms", "ms")]
        least = f"{floor(case):.2f}" if floor(case) else ""
        both = [times[2], each_gate(nothing, case, "ms")]
        rows.append([name, *times[:2], least, share(saved, case), *both, peak(saved, case)])
    head = ["", "forward that saves", "backward", "floor", "share", "both", "both, nothing saved", "GiB"]
    return table(head, rows)


def any_gpu() -> list[str]:
    impl = "kda (cuda_prefill_chunk,cuda_backward_chunk)"
    saved, nothing = f"{impl}, h, v_new saved", f"{impl}, nothing saved"
    rows = []
    for case, name in [*CASES.items()][:7]:
        times = [each_gate(saved, case, column) for column in ("forward_ms", "backward_ms", "ms")]
        both = [times[2], each_gate(nothing, case, "ms")]
        rows.append([name, *times[:2], share(saved, case), *both, peak(saved, case)])
    return table(["", "forward that saves", "backward", "share", "both", "both, nothing saved", "GiB"], rows)


def cudnn() -> list[str]:
    rows = []
    for case, name in [*CASES.items()][:6]:
        found = [record().rows(what="cuDNN training", case=case, gate=gate) for gate in GATES[:2]]
        cells = []
        for column in ("forward_ms", "backward_ms", "ms"):
            cells.append(" / ".join(f"{row[column]:.2f}" for rows in found for row in rows))
        rows.append([name, *cells, peak("cuDNN", case)])
    return table(["", "forward", "backward", "both", "GiB"], rows)


def prefill_f32() -> list[str]:
    rows = []
    for T, HV, K in ((2048, 16, 128), (4096, 32, 128), (4096, 32, 64)):
        sizes: dict[str, Any] = {"T": T, "HV": HV, "K": K}
        ours = [
            record().row(what=f"kda (cuda_stages_prefill_f32), chunks of {C} prefill_f32", **sizes) for C in (64, 32)
        ]
        torch = record().row(what="torch, chunks of 64 prefill_f32", **sizes)["ms"]
        times = [plain(x, 3) for x in (ours[0]["ms"], ours[1]["ms"], torch)]
        rows.append([f"T {T}, H {HV}, K = V = {K}", *times, plain(torch / ours[0]["ms"], 1)])
    return table(["", "chunks of 64", "of 32", "torch", "torch over chunks of 64"], rows)


def bwd_wy_dqkg() -> list[str]:
    cases = {
        "H32 T1024": "1,024 tokens of 32 heads", "H32 T4096": "4,096 tokens of 32 heads",
        "H32 T8192": "8,192 tokens of 32 heads", "H32 B2 T8192": "two rows of 8,192 tokens, 32 heads",
        "H16 HV32 T8192": "8,192 tokens, 16 q/k heads, 32 value heads",
    }  # fmt: skip
    rows = []
    for case, name in cases.items():
        row = record().row(what="kda (cuda_hopper_stages_wy_dqkg) bwd_wy_dqkg", case=case)
        least = stage_bytes(row["H"], row["HV"]) * row["B"] * row["T"] * row["HV"] / record().bandwidth * 1e3
        fla = record().row(what="FLA bwd_wy_dqkg", case=case)["ms"]
        time = row["ms"]
        rows.append(
            [name, *(plain(x, 3) for x in (time, least)), plain(least / time, 2), plain(fla, 3), plain(fla / time, 1)]
        )
    return table(["", "measured", "floor", "share", "FLA", "FLA over it"], rows)


def stage_bytes(H: int, HV: int) -> int:
    """A token and value head: the page's sum, of which q and k count once for each of their heads."""
    q_and_k = 512
    return 5270 - q_and_k + q_and_k * H // HV


def layer_time(who: str, what: str, case: str) -> float:
    """Milliseconds."""
    return float(record().row(what=f"{who} layer, {what}", case=case)["ms"])


def layer() -> list[str]:
    def share(what: str, case: str) -> str:
        return plain(record().row(what=f"kda layer, {what}", case=case)["share_of_floor"], 2)

    rows = []
    calls = [("forward and backward", "training", 8192), *(("prefill", "prefill", T) for T in (8192, 2048, 512))]
    for name, what, T in calls:
        case = f"B1 T{T}"
        times = [layer_time(who, what, case) for who in ("kda", "FLA", "transformers (FLA)")]
        cells = [plain(x, 2 if x >= 1 else 3) for x in times]
        rows.append([f"{name}, {T:,} tokens, ms", *cells, share(what, case)])
    for pair in ((1, 8), (32, 128)):
        cells = [" / ".join(f"{layer_time(who, 'decode', f'B{B}') * 1e3:.0f}" for B in pair) for who in ("kda", "FLA")]
        shares = " / ".join(share("decode", f"B{B}") for B in pair)
        rows.append([f"one token of {pair[0]} / {pair[1]} sequences, us", *cells, "", shares])
    return table(["", "kda", "FLA 0.6", "transformers 5", "kda's share of the floor"], rows)


TABLES = {
    "training hopper": hopper, "training any gpu": any_gpu, "training cudnn": cudnn, "prefill_f32": prefill_f32,
    "bwd_wy_dqkg": bwd_wy_dqkg, "layer": layer,
}  # fmt: skip

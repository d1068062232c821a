"""Tables of prefill: one for each kernel."""

from __future__ import annotations

from collections.abc import Sequence

from bench.tables.record import Row, ms, plain, record, table, three

GATES = ("strong", "slow", "softplus")
PAIRS, SEGMENTS = "kda (cuda_hopper_prefill_pairs)", "kda (cuda_hopper_prefill_segments)"
CHUNK, RECURRENT = "kda (cuda_prefill_chunk)", "kda (cuda_prefill_recurrent)"


def row(what: str, case: str, gate: str = "strong") -> Row:
    return record().row(what=f"{what} prefill", case=case, gate=gate)


def has(what: str, case: str, gate: str) -> bool:
    return bool(record().rows(what=f"{what} prefill", case=case, gate=gate))


def floor(case: str) -> float:
    """Milliseconds that the bytes of the call take at the rate of y = 2 x."""
    return row(PAIRS, case)["least_bytes"] / record().bandwidth * 1e3


def each_gate(what: str, case: str, gates: Sequence[str] = GATES) -> str:
    return " / ".join(ms(row(what, case, gate)["ms"]) for gate in gates if has(what, case, gate))


def pairs() -> list[str]:
    cases = {
        "H96 T8192": "96 x 8,192", "H96 8 x 1024": "96 x 8 packed of 1,024",
        "H96 6 lengths, 8192": "96 x 6 packed, 8,192 in all", "H64 T8192": "64 x 8,192",
        "H64 8 x 1024": "64 x 8 packed of 1,024", "H64 B2 T16384": "64 x 2 rows of 16,384", "H64 T4096": "64 x 4,096",
        "H64 T1024": "64 x 1,024", "H64 T512": "64 x 512", "H16 8 x 2048": "16 x 8 packed of 2,048",
        "H12 T8192": "12 x 8,192",
    }  # fmt: skip
    rows = []
    for case, name in cases.items():
        slower = max(row(PAIRS, case, gate)["ms"] for gate in GATES[:2])
        floors = plain(slower / floor(case), 1)
        peers = [each_gate(peer, case, GATES[:2]) for peer in ("FlashKDA", "cuDNN")]
        rows.append([name, each_gate(PAIRS, case), ms(floor(case)), floors, *peers])
    head = ["heads x tokens", "strong / slow / unbounded", "floor", "floors"]
    return table([*head, "FlashKDA strong / slow", "cuDNN strong / slow"], rows)


def segments() -> list[str]:
    cases = ("H12 T2048", "H12 T4096", "H12 T8192", "H12 T65536", "H24 T8192", "H32 T8192")
    rows = []
    for gate, name in zip(GATES, ("strong gates", "slow gates", "unbounded gate"), strict=True):
        found = [three(row(SEGMENTS, case, gate)["ms"]) if has(SEGMENTS, case, gate) else "" for case in cases]
        rows.append([name, *found])
    rows.append(["floor", *(plain(floor(case), 3) for case in cases)])
    shares = [floor(case) / row(SEGMENTS, case)["ms"] for case in cases]
    rows.append(["share of it, strong gates", *(plain(share, 2) for share in shares)])
    rows.append(["`cuda_hopper_prefill_pairs`, strong", *(three(row(PAIRS, case)["ms"]) for case in cases)])
    rows.append(["FlashKDA, strong", *(three(row("FlashKDA", case)["ms"]) for case in cases)])
    both = [" / ".join(three(row("cuDNN", case, gate)["ms"]) for gate in GATES[:2]) for case in cases]
    rows.append(["cuDNN, strong / slow", *both])
    return table(["", *cases], rows)


def chunk() -> list[str]:
    cases = (
        ("96 heads of 8,192 tokens", "H96 T8192", "strong"), ("64 heads of 8,192", "H64 T8192", "strong"),
        ("32 heads of 8,192", "H32 T8192", "strong"), ("12 heads of 8,192", "H12 T8192", "strong"),
        ("12 heads of 2,048", "H12 T2048", "strong"),
        ("16 heads, 8 packed sequences of 2,048", "H16 8 x 2048", "strong"),
        ("32 heads of 2,048, unbounded gate", "H32 T2048", "softplus"),
        ("32 heads of 8,192, unbounded gate", "H32 T8192", "softplus"),
        ("32 heads of 32,768, unbounded gate", "H32 T32768", "softplus"),
    )  # fmt: skip
    rows = []
    for name, case, gate in cases:
        time = row(CHUNK, case, gate)["ms"]
        flash = cudnn = fla = ""
        if gate == "strong":
            flash = plain(row("FlashKDA", case)["ms"], 2)
            cudnn = " / ".join(plain(row("cuDNN", case, g)["ms"], 2) for g in GATES[:2])
        if has("FLA", case, gate):
            fla = plain(row("FLA", case, gate)["ms"], 2)
        share = plain(floor(case) / time, 2)
        rows.append([name, plain(time, 2), plain(floor(case), 3), share, flash, cudnn, fla])
    return table(["", "measured", "floor", "share of it", "FlashKDA", "cuDNN, strong / slow", "FLA"], rows)


def recurrent() -> list[str]:
    cases = (
        ("12 heads of 2,048 tokens", "H12 T2048", 2048), ("12 heads of 65,536", "H12 T65536", 65536),
        ("32 heads of 8,192", "H32 T8192", 8192), ("64 heads of 8,192", "H64 T8192", 8192),
        ("96 heads of 8,192", "H96 T8192", 8192), ("96 heads, 8 packed sequences of 1,024", "H96 8 x 1024", 1024),
    )  # fmt: skip
    rows = []
    for name, case, longest in cases:
        time = row(RECURRENT, case)["ms"]
        token = time * 1e3 / longest
        rows.append(
            [
                name,
                plain(floor(case), 3),
                three(time),
                plain(floor(case) / time, 3),
                plain(token, 2 if token < 5 else 1),
            ]
        )
    return table(["", "floor, ms", "measured, ms", "share of it", "us a token of the longest sequence"], rows)


def invariant() -> list[str]:
    """How many times as long the pairs take where segments are chosen."""
    lengths = {"2,048 tokens": 2048, "4,096": 4096, "8,192": 8192, "32,768": 32768, "65,536": 65536}
    rows = []
    for heads in (12, 24, 32):
        cells = []
        for T in lengths.values():
            case = f"H{heads} T{T}"
            known = has(SEGMENTS, case, "strong")
            cells.append(plain(row(PAIRS, case)["ms"] / row(SEGMENTS, case)["ms"], 2) if known else "")
        rows.append([str(heads), *cells])
    return table(["heads", *lengths], rows)


TABLES = {
    "prefill pairs": pairs, "prefill segments": segments, "prefill chunk": chunk, "prefill recurrent": recurrent,
    "batch invariant": invariant,
}  # fmt: skip

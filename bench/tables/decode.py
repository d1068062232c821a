"""Tables of decode and drafts. Times are microseconds a layer, of the fastest implementation that takes the call."""

from __future__ import annotations

from typing import Any

from bench.tables.record import Row, plain, record, table

STATES = "V-first float32"
PEERS = ("FLA, in place", "SGLang packed", "SGLang packed, CUDA", "SGLang fused_sigmoid")


def fastest(operator: str, HV: int, B: int, T: int = 1) -> Row:
    rows = record().rows(lambda what: what.split(" (")[0] == f"kda {operator}", HV=HV, B=B, T=T, states=STATES)
    return min(rows, key=lambda row: float(row["us"]))


def measured(operator: str, HV: int, B: int, T: int = 1) -> bool:
    return bool(record().rows(lambda what: what.split(" (")[0] == f"kda {operator}", HV=HV, B=B, T=T, states=STATES))


def peers(HV: int, B: int) -> list[float]:
    """Microseconds of a decode."""
    sizes: dict[str, Any] = {"HV": HV, "B": B, "T": 1, "states": STATES}
    return [row["us"] for name in PEERS for row in record().rows(what=name, **sizes)]


def cula(HV: int, B: int, T: int) -> list[float]:
    """How many times as fast as the baseline in their run: two chains."""
    rows = record().rows(lambda what: what.startswith("cuLA "), HV=HV, B=B, T=T, states=STATES)
    return [row["over_baseline"] for row in rows]


def us(x: float) -> str:
    return plain(x, 1 if x < 99.95 else 0)


def calls() -> list[str]:
    drafts = (2, 3, 4, 6)
    rows = []
    for HV, B in [*((32, 2**i) for i in range(8)), (64, 32), (64, 128)]:
        chain = [fastest("verify + flush", HV, B, T) for T in drafts]
        both = fastest("flush_verify", HV, B, 4)
        rows.append(
            [
                f"{HV}, {B}",
                plain(fastest("decode", HV, B)["us"], 1),
                plain(min(peers(HV, B)), 1),
                ", ".join(us(r["us"]) for r in chain),
                ", ".join(plain(r["over_baseline"], 2) for r in chain),
                ", ".join(plain(max(cula(HV, B, T)), 2) for T in drafts),
                plain(both["us"], 1),
                plain(both["over_baseline"], 2),
            ]
        )
    head = ["HV, B", "decode", "best peer", "chain T = 2, 3, 4, 6", "over baseline", "cuLA over baseline"]
    return table([*head, "both T = 4", "over baseline"], rows)


def shares() -> list[str]:
    requests = (1, 8, 32, 128)
    least = [fastest("decode", 32, B)["least_bytes"] / record().bandwidth * 1e6 for B in requests]
    rows = [["decode, microseconds at the roofline", *(f"{x:.1f}" for x in least), ""]]
    for operator, T, name, bound in (
        ("decode", 1, "decode", "latency, then memory"),
        ("verify", 4, "verify", "latency, then issue slots and memory"),
        ("flush_verify", 4, "both in one pass", "latency, then issue slots"),
        ("flush", 4, "flush of all layers in one launch", "memory"),
    ):
        cells = [f"{fastest(operator, 32, B, T)['share_of_stream_bandwidth']:.2f}" for B in requests]
        rows.append([name, *cells, bound])
    return table(["requests", *map(str, requests), "bound by"], rows)


TABLES = {"decode calls": calls, "decode shares": shares}

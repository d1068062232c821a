"""The tables of plugs: an engine's own kernels, and ours through the engine."""

from __future__ import annotations

from bench.tables.record import plain, record, table, three


def fla() -> list[str]:
    rows = [
        [
            row["case"],
            three(row["engine_ms"]),
            three(row["through_ms"]),
            three(row["direct_ms"]),
            plain(row["over_engine"], 2),
            plain(row["adapter_us"], 1),
        ]
        for row in record().rows(what="plug of FLA")
    ]
    return table(["", "FLA's, ms", "ours through FLA, ms", "ours alone, ms", "faster", "host, us"], rows)


def serving(package: str) -> list[str]:
    """By phase: a row for each case. Times are microseconds, since most are short."""
    rows = [
        [
            row["case"],
            "" if row["engine_ms"] is None else plain(1e3 * row["engine_ms"], 1),
            plain(1e3 * row["through_ms"], 1),
            "" if row["over_engine"] is None else plain(row["over_engine"], 2),
            "" if row["adapter_us"] is None else plain(row["adapter_us"], 1),
        ]
        for row in record().newest(what=f"plug of {package}")
    ]
    return table(["", "its own, us", "ours through it, us", "faster", "host, us"], rows)


TABLES = {
    "plug of fla": fla,
    "plug of sglang": lambda: serving("sglang"),
    "plug of vllm": lambda: serving("vllm"),
}

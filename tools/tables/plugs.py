"""The table of plugs: an engine's own kernels, and ours through the engine."""

from __future__ import annotations

from tables.record import plain, record, table, three


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


TABLES = {"plug of fla": fla}

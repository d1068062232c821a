"""The emulator's instructions against those of a GPU: the entry of bench/record/instructions.py in the record."""

from __future__ import annotations

from bench.tables.record import Record, record, table


def instructions(found: Record | None = None) -> list[str]:
    entries = [tests["instructions"] for tests in (found or record()).tests if "rows" in tests.get("instructions", {})]
    if not entries:
        return ["**Not measured yet**: no record of a GPU has it."]
    rows = []
    for row in entries[0]["rows"]:
        if "agrees" not in row:
            rows.append([row["instruction"], "", f"not on this GPU: needs sm_{row['needs']}", "", ""])
            continue
        limit = "to the bit" if row["kind"] == "exact" else f"{row['limit']:.1e}"
        largest = "" if row["kind"] == "exact" else f"{row['error']:.1e}"
        verdict = f"{row['different']}" if row["agrees"] else f"**{row['different']}, beyond the limit**"
        rows.append([row["instruction"], str(row["numbers"]), verdict, largest, limit])
    return table(["instruction", "numbers", "with other bits", "largest error", "allowed"], rows)


TABLES = {"instructions": instructions}

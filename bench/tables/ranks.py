"""The table of two GPUs, from the record of python -m bench cp."""

from __future__ import annotations

import json

from bench.tables.record import ROOT, table, three


def two() -> list[str]:
    found = json.loads((ROOT / "docs/results/two-nvidia-h200.json").read_text())
    contiguous, zigzag = ({row["case"]: row for row in run["rows"]} for run in found["runs"])
    rows = []
    for name, row in contiguous.items():
        heads, tokens = name[1:].split("T")
        for what, case in (("forward", f"H{heads} T{tokens}, forward"), ("forward and backward", "..")):
            one, both = (f"{three(row[f'{what}, ms on {ranks}'])} ms" for ranks in (1, 2))
            other = f"{three(zigzag[name][f'{what}, ms on 2'])} ms"
            maps = gib = ""
            if what == "forward":
                maps = f"{three(row['maps, ms on 2'])} ms"
            else:
                case += f" {what}"
                gib = " of ".join(f"{row[f'bytes on {ranks}'] / 2**30:.2f}" for ranks in (2, 1))
            rows.append([case, one, both, f"{row[f'{what}, speed-up']:.2f}", maps, other, gib])
    return table(["case", "one GPU", "two", "faster", "maps", "zigzag", "GiB a rank"], rows)


TABLES = {"two gpus": two}

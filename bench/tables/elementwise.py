"""Tables of gate, convolution and norm."""

from __future__ import annotations

from bench.tables.record import plain, record, table


def gate() -> list[str]:
    r = record()
    rows = []
    for what, name in (("gate", "forward"), ("gate_backward", "backward")):
        for HV in (32, 96):
            row = r.row(what=what, HV=HV)
            share = row["share_of_stream_bandwidth"]
            rows.append([f"{name}, HV = {HV}", plain(share * row["ms"], 3), plain(row["ms"], 3), plain(share, 2)])
    return table(["", "floor", "measured", "share of it"], rows)


def gate_shares() -> list[float]:
    return [record().row(what="gate", HV=HV)["share_of_stream_bandwidth"] for HV in (32, 96)]


def conv() -> list[str]:
    r = record()
    rows = []
    for what, name in (("conv", "forward"), ("conv_backward", "backward")):
        row = r.row(what=what)
        share = row["share_of_stream_bandwidth"]
        floor = plain(share * row["ms"], 3)
        rows.append([f"8,192 tokens, {name}", f"{floor} ms", f"{plain(row['ms'], 3)} ms", plain(share, 2)])
    for requests in ((1, 8, 32), (128, 512)):
        steps = [r.row(what="conv, one token", B=B) for B in requests]
        shares = [row["share_of_stream_bandwidth"] for row in steps]
        floors = [row["us"] * share for row, share in zip(steps, shares, strict=True)]
        name = f"one token of {' / '.join(map(str, requests))} requests"
        floor = " / ".join(plain(x, 2 if x < 1 else 1) for x in floors)
        measured = " / ".join(plain(row["us"], 1) for row in steps)
        rows.append([name, f"{floor} us", f"{measured} us", " / ".join(plain(x, 2) for x in shares)])
    return table(["", "floor", "measured", "share of it"], rows)


def norm() -> list[str]:
    r = record()
    rows = []
    for what, name in (("norm_gate", "forward"), ("norm_gate_backward", "backward")):
        row = r.row(what=what)
        share = plain(row["share_of_stream_bandwidth"], 2)
        rows.append([f"8,192 tokens, {name}", f"{plain(row['ms'], 3)} ms", share])
    requests = (1, 8, 32, 128, 512)
    times = " / ".join(plain(r.row(what="norm_gate, one token", B=B)["us"], 1) for B in requests)
    rows.append([f"one token of {' / '.join(map(str, requests))} requests", f"{times} us", ""])
    return table(["", "measured", "share of the floor"], rows)


TABLES = {"gate": gate, "conv": conv, "norm": norm}

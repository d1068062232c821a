"""Speculative decoding on the CPU."""

from .mutant import mutants

DRAFT_KERNELS = "src/cpu/speculation.cc"
DRAFTS_INL = "src/cpu/speculation-inl.h"
WINDOWS = "src/contract/drafts.h"
SPECULATION_RULES = "src/contract/drafts.cc"

DRAFTS = ("drafts_5", "ring", "ring_packed", "ring_tree", "tree", "gva_2", "K60_V100", "state_K_first", "state_bf16")
SPECULATION = ("test_speculation", ":".join(f"All/Speculation.*/{c}" for c in (*DRAFTS, "padded_0", "softplus")))
FLUSH_VERIFY_IS = ("test_speculation_oracle", "All/SpeculationIs.FlushThenVerify*/cpu")
ROUNDS = ("test_speculation_rounds", "All/SpeculationRounds.Ring*/cpu")
NO_WRITES = ("test_speculation_confinement", "All/SpeculationPromise.NothingToApply*")
GARBAGE = ("test_speculation_garbage", "*/cpu")
CONV_OPERATORS = ("test_conv_operators", "*")
LONG_MEMORY = ("test_drift", "*SpeculationDrift*/flush_slow")

UNITS = {
    WINDOWS: [DRAFT_KERNELS],
    DRAFTS_INL: [DRAFT_KERNELS],
}

MUTANTS = [
    *mutants(
        DRAFT_KERNELS,
        CONV_OPERATORS,
        (
            "conv: flush_verify rolls along the new drafts",
            "a.last_conv_x, a.last_parents, n, s.b,",
            "a.last_conv_x, a.parents, n, s.b,",
        ),
        (
            "conv: verify of the chain",
            "conv_front(p.args.conv, in.cu_seqlens, p.args.parents, z",
            "conv_front(p.args.conv, in.cu_seqlens, {}, z",
        ),
        (
            "conv: state rolled before the workspace is refused",
            "plan(p).threads(a.exec, 1);  // refuses a workspace that is too small, before",
            "//",
        ),
    ),
    *mutants(
        WINDOWS,
        CONV_OPERATORS,
        (
            "conv: flush_verify accepts rows that are not there",
            "if (present(a.last_conv_x)) most = within(a.last_conv_x.shape[1], 0, most);",
            "",
        ),
        (
            "conv: flush_verify accepts for a request without records",
            "c.slot < 0 || most <= 0 ? 0 :",
            "most <= 0 ? 0 :",
        ),
    ),
    *mutants(
        SPECULATION_RULES,
        CONV_OPERATORS,
        ("conv: flush accepts rows that are not there", "p.T = std::min(p.T, T);", ""),
    ),
    *mutants(
        DRAFTS_INL,
        SPECULATION,
        ("verify: undecayed kG", "kd = hn::Mul(load(k + d), alpha)", "kd = load(k + d)"),
        (
            "verify: a root of the tree forgets the ring",
            "return p < 0 ? committed - 1 : committed + p;",
            "return p < 0 ? -1 : committed + p;",
        ),
        (
            "verify: key of the first value head for all",
            "if (hv % c.d.group() == 0) store_row",
            "if (hv == 0) store_row",
        ),
        (
            "verify: corrections of the ring from the first strip",
            "at(c.records.u, r.slot, r.verify.entry(w), hv) + v0 * sizeof(float)",
            "at(c.records.u, r.slot, r.verify.entry(w), hv)",
        ),
        (
            "flush: one gate step off in the suffix product",
            "store(hn::Mul(load(key + i), load(x.f + i)), key + i)",
            "store(hn::Mul(load(key + i), hn::Mul(load(x.raw + i), load(x.f + i))), key + i)",
        ),
        ("flush: undecayed state, K-first", "gemm<Acc::kDecay>(K, V, flushed", "gemm<Acc::kAdd>(K, V, flushed"),
    ),
    *mutants(
        DRAFT_KERNELS,
        SPECULATION,
        ("flush_verify: cursors stay", "if (s.live) store_cursors", "if (false) store_cursors"),
    ),
    *mutants(
        DRAFT_KERNELS,
        ("test_speculation", "All/Speculation.FlushVerify/ring_long"),  # a ring with padding
        ("flush_verify: padding moves cursors", "if (s.live) store_cursors", "if (true) store_cursors"),
    ),
    *mutants(
        DRAFTS_INL,
        FLUSH_VERIFY_IS,
        (
            "flush_verify: drafts read a state that was not rounded",
            "load_row(c.hT.dtype, address(c.hT, v0, i), columns, row);",
            "",
        ),
    ),
    *mutants(
        DRAFTS_INL,
        NO_WRITES,
        ("flush_verify: state written back unchanged", "if (flushed) {", "if (flushed || present(c.hT)) {"),
    ),
    *mutants(
        DRAFTS_INL,
        LONG_MEMORY,
        ("flush: decays multiplied in f32", "static_cast<float>(x.product[i] *= x.raw[i])", "x.f[i] * x.raw[i]"),
    ),
    *mutants(
        WINDOWS,
        SPECULATION,
        (
            "speculation: entry of a ring off by one",
            "return first + w - (first + w >= R ? R : 0);",
            "return (first + w + (w < committed)) % R;",
        ),
        ("speculation: parents ignored", "const int p = parents[t];", "const int p = t - 1;"),
        (
            "flush: one entry too many",
            "r.newest = accepted ? r.flush.token(accepted - 1)",
            "r.newest = accepted ? r.flush.token(accepted)",
        ),
        ("flush: padding is a slot", "s.live = s.live && r.last_slot >= 0", "s.live = r.last_slot >= 0"),
    ),
    *mutants(
        WINDOWS,
        GARBAGE,
        (
            "speculation: accept_len not clamped from below",
            "within(at.accepted, 0, within(requests.most, 0, r.flush.R - r.flush.committed))",
            "std::min<int64_t>(at.accepted, within(requests.most, 0, r.flush.R - r.flush.committed))",
        ),
        (
            "speculation: committed entries leave no room",
            "0, w.R > reserved ? w.R - reserved : 0))",
            "0, w.R))",
        ),
    ),
    *mutants(
        WINDOWS,
        ROUNDS,
        (
            "flush_verify: ring folded too late",
            "entries > c.window.R - 2 * (r.max_tokens ? r.max_tokens : drafts)",
            "entries > c.window.R - (r.max_tokens ? r.max_tokens : drafts)",
        ),
    ),
]

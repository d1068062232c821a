"""Forward, backward and decode on the CPU, and their gates."""

from .mutant import mutants, numerics

CHUNK = "src/cpu/chunk-inl.h"
CHUNK_FORWARD = "src/cpu/chunk_forward.cc"
CHUNK_BACKWARD = "src/cpu/chunk_backward.cc"
GRADIENTS = "src/cpu/gradients-inl.h"
RECURRENT = "src/cpu/recurrent.cc"
TEAM = "src/cpu/team.h"
SIMD = "src/cpu/simd-inl.h"
GATES = "src/cpu/gate.cc"
PROBLEM = "src/contract/problem.h"

FORWARD = numerics("Forward", "ForwardSaved")
BACKWARD = numerics("Backward")
DECODE = numerics("Decode")
GATE = ("test_numerics", "All/GateTest.*:GateAccuracy.*")
RANGE = ("test_range", "Gates.*:Range.*")
STRONG = ("test_range", "StrongGates.*")
CHECKPOINTS = ("test_numerics", "All/Checkpoints.*")
PADDING = ("test_edges", "Padding.Forward")
TAIL = ("test_edges", "Tail.*")
LONG_HEADS = ("test_promises", "All/Promise.LongHeadsChangeNoBit/forward_cpu_chunk")
LAYOUTS = ("test_numerics", "All/*.*InAnotherLayout/*_packed")
RESUMED = ("test_promises", "ChunkSplits.*")
SNAPSHOTS = ("test_snapshots", "*")
SLOTS = ("test_slots", "*")

UNITS = {
    CHUNK: [CHUNK_FORWARD],
    GRADIENTS: [CHUNK_BACKWARD],
    TEAM: [CHUNK_FORWARD],
    SIMD: [GATES],
    PROBLEM: [RECURRENT],
}

MUTANTS = [
    *mutants(
        CHUNK,
        FORWARD,
        (
            "chunk: undecayed state carried on",
            "if (ell) store(product, ell + d);",
            "if (ell) store(splat(1), ell + d);",
        ),
    ),
    *mutants(
        CHUNK_FORWARD,
        FORWARD,
        ("forward: output reads the undecayed state", "c.qG.rows(), S, o)", "c.q.rows(), S, o)"),
        ("forward: all states of h in one row", "first_h + t / h_tokens, hv, v0, S", "first_h, hv, v0, S"),
    ),
    *mutants(
        CHUNK_FORWARD,
        LAYOUTS,
        ("forward: h has the layout of the other states", "h_layout(a), first_h", "layout, first_h"),
    ),
    *mutants(
        CHUNK_BACKWARD,
        LAYOUTS,
        ("backward: h is read in the layout of the other states", "h_layout(a), first_h", "a.in.state_layout, first_h"),
    ),
    *mutants(
        CHUNK_FORWARD,
        PADDING,
        ("forward: padded sequences computed", "if (!seq.live) return", "if (false) return"),
    ),
    *mutants(
        CHUNK_FORWARD,
        TAIL,
        ("forward: tail rows not zeroed", "KDA_ISA_CALL(zero_tail)(a.o, end, p.T - end);", "static_cast<void>(end);"),
    ),
    *mutants(
        CHUNK_FORWARD,
        CHECKPOINTS,
        ("forward: a checkpoint a chunk late", "checkpoint_row(a, seq.n, end)", "checkpoint_row(a, seq.n, t)"),
    ),
    *mutants(
        CHUNK_FORWARD,
        SLOTS,
        ("forward: the slot that was read is written", "final_row(a.out_state_indices, a.states, seq)", "seq.slot"),
    ),
    *mutants(
        RECURRENT,
        SLOTS,
        ("decode: the slot that was read is written", "final_row(*r.out_state_indices, r.states, s)", "s.slot"),
    ),
    *mutants(
        CHUNK,
        LONG_HEADS,
        ("team: chunks prepared over those still needed", "chunks + i % (kTeamGroups * group)", "chunks + i % group"),
    ),
    *mutants(
        CHUNK_FORWARD,
        RESUMED,
        (
            "team: chunks of a resumed request begin where the call's do",
            "std::max<int64_t>(i * kChunk - begun, 0)",
            "i * kChunk",
        ),
    ),
    *mutants(
        CHUNK_FORWARD,
        LONG_HEADS,
        ("team: one state for all tiles", "shared.S.from(0, v0), s.o", "shared.S, s.o"),
        (
            "team: last chunk as long as the others",
            "s.chunk.L = steps.length_at(t);",
            "s.chunk.L = kChunk;",
        ),
    ),
    *mutants(
        CHUNK_FORWARD,
        ("test_promises", "LongHeads.*"),
        ("team: long heads done once more", "if (chunks_of(n) <= longest) task_fn(", "task_fn("),
    ),
    *mutants(TEAM, LONG_HEADS, ("team: last group not scanned", "(groups + 2) * tickets", "(groups + 1) * tickets")),
    *mutants(
        GRADIENTS,
        BACKWARD,
        ("backward: forgotten E", "E = hn::Mul(E, load(alpha.row(i)));", ""),
    ),
    *mutants(
        CHUNK_BACKWARD,
        BACKWARD,
        (
            "backward: wrong triangle of Aqk",
            "add_triangle<Triangle::kUpper>(L, V, kept.Aqk.columns()",
            "add_triangle<Triangle::kLower>(L, V, kept.Aqk.rows()",
        ),
        ("backward: l2norm backward dropped", "splat(normalised ? -r * dot(y, dy, padded(K)) / scale : 0)", "splat(0)"),
        (
            "backward: reverse sum of dG stops early",
            "for (int64_t i = c.L - 2; i >= 0; --i)",
            "for (int64_t i = c.L - 2; i > 0; --i)",
        ),
        ("backward: every segment begins with the same state", "first_h + t / (kChunk * a.h_every)", "first_h"),
        (
            "backward: dA_log of the last chunk only",
            "partials.dA_log[seq.n * p.HV + hv] += sum_lanes(A_sum)",
            "partials.dA_log[seq.n * p.HV + hv] = sum_lanes(A_sum)",
        ),
    ),
    *mutants(
        RECURRENT,
        DECODE,
        (
            "decode: undecayed state",
            "const Vec S = hn::Mul(load(from + d), load(alpha + d));",
            "const Vec S = load(from + d);",
        ),
        (
            "decode: output before the correction",
            "x.o.row(i)[column] = sum_lanes(out) + x.kq[i] * u;",
            "x.o.row(i)[column] = sum_lanes(out);",
        ),
        ("decode: forgotten beta, K-first", "hn::Mul(load(u + d), splat(x.beta[i]))", "load(u + d)"),
    ),
    *mutants(
        SIMD,
        GATE,
        (
            "gate: softplus derivative of -z",
            "hn::IfThenElse(hn::Lt(z, splat(0)), e, splat(1))",
            "hn::IfThenElse(hn::Lt(z, splat(0)), splat(1), e)",
        ),
        ("gate: dA_log without z", "dA_log = hn::Mul(at_most_1000(y), slope);", "dA_log = slope;"),
        (
            "gate: softplus series cut short",
            "{2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}",
            "{2.0f / 3, 2.0f}",
        ),
    ),
    *mutants(
        SIMD,
        RANGE,
        ("gate: every rate a usual one", "return !(A_log >= -64 && A_log <= 16);", "return false;"),
        ("gate: gradient beside -inf", "hn::AndNot(hn::IsNaN(g), hn::Eq(dg, splat(0)))", "hn::Lt(splat(0), splat(0))"),
    ),
    *mutants(
        GRADIENTS,
        STRONG,
        ("backward: write part of the last row kept in dG", "if (i < L - 1) {", "{"),
    ),
    *mutants(
        GATES,
        GATE,
        ("gate: bias forgotten", "store(gate(gate.z(row, i)), row + i)", "store(gate(load(row + i)), row + i)"),
        (
            "gate: first block of rows not summed",
            "for (int64_t block = 0; block < blocks; ++block) sum",
            "for (int64_t block = 1; block < blocks; ++block) sum",
        ),
    ),
    *mutants(
        PROBLEM,
        SNAPSHOTS,
        (
            "snapshots: accepted counts from 0",
            "within(accepted, 1, count) - 1",
            "within(accepted, 0, count - 1)",
        ),
        (
            "snapshots: rows of the first sequence for all",
            "data) + n * s.states.stride[0]",
            "data) + 0 * s.states.stride[0]",
        ),
    ),
    *mutants(
        RECURRENT,
        SNAPSHOTS,
        ("snapshots: one token late", "snaps ? snapshots.row(t + j) : -1", "snaps ? snapshots.row(t) : -1"),
    ),
]

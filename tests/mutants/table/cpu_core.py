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
PROBLEM = "src/problem.h"

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
        ("chunk: E instead of F in the state", "c.kg.columns(), c.v, next", "c.kG.columns(), c.v, next"),
        ("chunk: keys not decayed to the chunk's end", "c.kg.columns(), c.v, next", "c.k.columns(), c.v, next"),
        ("chunk: prediction from the undecayed state", "c.kG.rows(), S, c.v", "c.k.rows(), S, c.v"),
        ("chunk: missing diagonal of Aqk", "Aqk.row(j + 1)[j + 1] = sum_lanes(qk1);", "Aqk.row(j + 1)[j + 1] = 0;"),
        ("chunk: one gate step off in a block", "load(alpha.row(j + 1) + d)), k1", "load(alpha.row(j) + d)), k1"),
        (
            "chunk: one gate step off at an anchor",
            "decay_columns<true>(c, first, half",
            "decay_columns<false>(c, first, half",
        ),
        (
            "chunk: forgotten beta in Akk",
            "Akk.row(i)[j] = c.beta[b + i] * sum_lanes(kk0);",
            "Akk.row(i)[j] = sum_lanes(kk0);",
        ),
        ("chunk: beta of the column in Akk", "c.beta[b + i] * sum_lanes(kk1)", "c.beta[b + j + 1] * sum_lanes(kk1)"),
        (
            "chunk: forgotten beta in the off-diagonal blocks",
            "c.row_k, c.beta, nullptr);",
            "c.row_k, nullptr, nullptr);",
        ),
        (
            "chunk: forgotten beta of the corrections",
            "scale_row(c.v.row(i), c.beta[i], c.V, c.v.row(i))",
            "scale_row(c.v.row(i), 1, c.V, c.v.row(i))",
        ),
        (
            "chunk: wrong triangle solved",
            "solve_triangle<Triangle::kLower>(c.L, c.V, c.Akk.rows()",
            "solve_triangle<Triangle::kUpper>(c.L, c.V, c.Akk.columns()",
        ),
        ("chunk: largest off-diagonal block left out", "half < kChunk; half *= 2", "half < kChunk / 2; half *= 2"),
    ),
    *mutants(
        CHUNK_FORWARD,
        FORWARD,
        ("forward: output reads the undecayed state", "c.qG.rows(), S, o)", "c.q.rows(), S, o)"),
        ("forward: output without its own chunk", "add_triangle<Triangle::kLower>(L, c.V, c.Aqk.rows(), c.v, o);", ""),
        ("forward: all states of h in one row", "first_h + t / h_tokens, hv, v0, S", "first_h, hv, v0, S"),
        ("forward: initial state ignored", "if (seq.initial) load_state", "if (false) load_state"),
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
        ("forward: chunks run over checkpoints", "if (keeps_within_chunks(a))\n", "if (false)\n"),
        ("forward: chunks of a resumed request end as the call's do", "(begun + t) % kChunk", "t % kChunk"),
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
        ("team: values of the first tile for all", "s.chunk.L, head.hv, v0);", "s.chunk.L, head.hv, 0);"),
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
        ("backward: forgotten F", "F = hn::Mul(F, load(alpha.row(i)));", ""),
        (
            "backward: F of the next row",
            "Vec F = splat(1), last = hn::Zero(kF32);",
            "Vec F = load(alpha.row(L - 1)), last = hn::Zero(kF32);",
        ),
        ("backward: missing last-row term of dG", "hn::MulAdd(load(c.ell + d), SdS, last)", "last"),
        ("backward: missing write part of the last row", "last = hn::Add(last, kdk);", ""),
        ("backward: diagonal pairs left out", "splat(s.dAqk.row(b + j)[b + j])", "splat(0)"),
        (
            "backward: column terms of dG left out",
            "store(hn::NegMulAdd(pc, load(c.col_k.row(j) + d), load(dG)), dG);",
            "",
        ),
        ("backward: dbeta without its pairs", "dbeta[i] += dot(c.k.row(i), s.y.row(i), padded(c.K));", ""),
    ),
    *mutants(
        CHUNK_BACKWARD,
        BACKWARD,
        (
            "backward: wrong triangle of Aqk",
            "add_triangle<Triangle::kUpper>(L, V, kept.Aqk.columns()",
            "add_triangle<Triangle::kLower>(L, V, kept.Aqk.rows()",
        ),
        (
            "backward: undecayed dS",
            "gemm<Acc::kDecay>(K, V, L, c.qG.columns(), s.D, s.dS, {c.ell, s.dS});",
            "gemm<Acc::kAdd>(K, V, L, c.qG.columns(), s.D, s.dS);",
        ),
        ("backward: 2 of 2 sigmoid forgotten", "beta_slope(a.in.beta_form, b)", "beta_slope(KDA_BETA_SIGMOID, b)"),
        ("backward: l2norm backward dropped", "splat(normalised ? -r * dot(y, dy, padded(K)) / scale : 0)", "splat(0)"),
        (
            "backward: one value head of a group lost",
            "for (int64_t g = 0; g < p.group(); ++g)",
            "for (int64_t g = 1; g < p.group(); ++g)",
        ),
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
            "decode: prediction from the undecayed state",
            "read = hn::MulAdd(S, load(alpha_k + d), read);",
            "read = hn::MulAdd(S, load(k + d), read);",
        ),
        (
            "decode: output before the correction",
            "x.o.row(i)[column] = sum_lanes(out) + x.kq[i] * u;",
            "x.o.row(i)[column] = sum_lanes(out);",
        ),
        ("decode: forgotten beta", "const float u = x.beta[i] * (", "const float u = ("),
        ("decode: forgotten beta, K-first", "hn::Mul(load(u + d), splat(x.beta[i]))", "load(u + d)"),
        (
            "decode: forgotten decay, K-first",
            "hn::Mul(load(from + k * from_pitch + d), alpha)",
            "load(from + k * from_pitch + d)",
        ),
        (
            "decode: scale ignored",
            "normalise_row(q, K, r.in.qk_l2norm, r.in.scale)",
            "normalise_row(q, K, r.in.qk_l2norm, 1)",
        ),
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
            "gate: A_log left out of the bounded gate",
            "return hn::Mul(splat(lower_bound), sigmoid(hn::Mul(splat(a), z)));",
            "return hn::Mul(splat(lower_bound), sigmoid(z));",
        ),
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
        ("gate: no gradient beside NaN", "const Vec g = is_wide() ? wide(z) : z;", "const Vec g = z;"),
        ("gate: a rate of 0 as any other", "A_log < -176 && !std::isinf(A_log)", "A_log < -176"),
        (
            "gate: a product with a power of 0 as any other",
            "hn::AndNot(hn::IsInf(exponent), hn::Lt(exponent, splat(-174)))",
            "hn::Lt(exponent, splat(-174))",
        ),
        ("gate: rates without h twice", "hn::Mul(hn::Mul(z, h), h)", "hn::Mul(z, h)"),
        (
            "gate: small softplus apart from the rate",
            "return hn::Lt(z, splat(-16));",
            "return hn::Lt(z, splat(-1000));",
        ),
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
        (
            "snapshots: start from the pool",
            "return {from, row, row >= 0 && row < from.shape[0]};",
            "return {a.states.h0, s.slot, s.initial};",
        ),
    ),
    *mutants(
        RECURRENT,
        SNAPSHOTS,
        ("snapshots: one token late", "snaps ? snapshots.row(t + j) : -1", "snaps ? snapshots.row(t) : -1"),
    ),
]

"""The substitutions, by the file they change and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass

# Tests: program and filter.
CASES = ("tokens_65", "packed", "gva_2", "softplus_bias", "lower_bound", "beta_2sigmoid", "K5_V200", "state_K_first")


def numerics(*suites: str) -> tuple[str, str]:
    return "test_numerics", ":".join(f"All/{s}.*_{c}" for s in suites for c in CASES)


FORWARD = numerics("Forward", "ForwardSaved")
BACKWARD = numerics("Backward")
DECODE = numerics("Decode")
GATE = ("test_numerics", "All/GateTest.*:GateAccuracy.*")
RANGE = ("test_range", "Gates.*:Range.*")
STRONG = ("test_range", "StrongGates.*")
CHECKPOINTS = ("test_numerics", "All/Checkpoints.*")
ORACLE = ("test_oracle", "*")
PADDING = ("test_edges", "Padding.Forward")
TAIL = ("test_edges", "Tail.*")
CONVOLUTION = ("test_conv", "*")
NORM = ("test_norm", "*")
NORM_BEHIND = ("test_norm_behind", "*")
LONG_HEADS = ("test_promises", "All/Promise.LongHeadsChangeNoBit/forward_cpu_chunk")
DRAFTS = ("drafts_5", "ring", "ring_packed", "ring_tree", "tree", "gva_2", "K60_V100", "state_K_first", "state_bf16")
SPECULATION = ("test_speculation", ":".join(f"All/Speculation.*/{c}" for c in (*DRAFTS, "padded_0", "softplus")))
FLUSH_VERIFY_IS = ("test_speculation_oracle", "All/SpeculationIs.FlushThenVerify*/cpu")
SPECULATION_ORACLE = ("test_speculation_oracle", "*Decode*/reference")
ROUNDS = ("test_speculation_rounds", "All/SpeculationRounds.Ring*/cpu")
NO_WRITES = ("test_speculation_confinement", "All/SpeculationPromise.NothingToApply*")
GARBAGE = ("test_speculation_garbage", "*/cpu")
STAGES = (
    "test_stages",
    ":".join(f"All/Stages.*/{c}" for c in ("packed", "gva_2", "state_K_first")) + ":StageDetails.*",
)
PREFILL_TESTS = ("AgainstTheOracle", "WantedOrNotChangesNoBit")  # the bits of forward are those of its instruction set
PREFILL_CASES = ("prefill_gva", "prefill_tokens_33", "state_K_first", "K5_V200")
PREFILL = ("test_prefill_f32", ":".join(f"All/PrefillF32.{t}/{c}" for t in PREFILL_TESTS for c in PREFILL_CASES))
CONV_OPERATORS = ("test_conv_operators", "*")
SNAPSHOTS = ("test_snapshots", "*")
SLOTS = ("test_slots", "*")
LONG_MEMORY = ("test_drift", "*SpeculationDrift*/flush_slow")
SEGMENT_MAPS = ("test_segment", ":".join(f"All/SegmentMap.EqualsTheOracle/*_{c}" for c in CASES))
SEGMENT_MERGE = ("test_segment", "SegmentMerge.*")

# CUDA kernels, on the emulator.
EMULATOR = "test_emulator"


def emulated(*tests: str) -> tuple[str, str]:
    return EMULATOR, ":".join(f"All/{t}" for t in tests)


CUDA_CHUNK = emulated(
    "ForwardChunkOnCuda.IsTheOracle/bound_33",
    "ForwardChunkOnCuda.IsTheOracle/bound_packed",
    "ForwardOnCuda.IsTheOracle/cuda_prefill_chunk_state_K_first",
)
CUDA_BACKWARD = emulated(
    *(
        f"BackwardOnCuda.IsTheOracle/cuda_backward_chunk_{c}"
        for c in ("bound_33", "wild", "cpu_gva_2", "bound_short_packed")
    )
)
CUDA_BACKWARD_UNUSUAL = emulated(
    *(f"BackwardOnCuda.IsTheOracle/cuda_backward_chunk_{c}" for c in ("edges_softplus", "deep_bound"))
)
CUDA_BACKWARD_HOPPER = emulated(
    *(
        f"BackwardOnCuda.IsTheOracle/cuda_hopper_backward_chunk_{c}"
        for c in ("bound_33", "softplus_17", "bound_short_packed")
    )
)
CUDA_DECODE_TESTS = emulated(*(f"TokensOnCuda.Decode/{c}" for c in ("K100_V60", "usual", "usual_64_K_first")))
CUDA_DRAFTS = emulated(*(f"TokensOnCuda.*/{c}" for c in ("usual_3", "usual_4", "usual_ring_3")))
CUDA_MORE_DRAFTS = emulated(*(f"TokensOnCuda.*Verify/{c}" for c in ("usual_6", "usual_8", "staged_tree_8")))
CUDA_REVERSE_HOPPER = emulated("BackwardOnCuda.IsTheOracle/cuda_hopper_backward_chunk_bound_33")
CUDA_REVERSE_SHARED = emulated("BackwardPromiseOnCuda.SharedHeads/cuda_hopper_backward_chunk")
CUDA_REVERSE_NAN = emulated("BackwardPromiseOnCuda.NaNReachesNoLaterToken/cuda_hopper_backward_chunk")
CUDA_FORWARD_HOPPER = emulated("ForwardChunkOnCuda.IsTheOracle/bound_33", "ForwardChunkOnCuda.IsTheOracle/bound_packed")
CUDA_FORWARD_NARROW = emulated(
    *(f"ForwardChunkOnCuda.IsTheOracle/K64_V64_{c}" for c in ("bound_33", "softplus_17", "bound_short_packed"))
)
CUDA_BACKWARD_NARROW = emulated(
    *(
        f"BackwardOnCuda.IsTheOracle/cuda_hopper_backward_chunk_K64_V64_{c}"
        for c in ("bound_33", "softplus_17", "bound_short_packed")
    )
)
CUDA_SEGMENTS_NARROW = emulated(*(f"ForwardChunkOnCuda.IsTheOracle/K64_V64_log_{c}_long" for c in ("none", "slow")))
CUDA_FORWARD_PACKED = emulated("ForwardChunkPromise.CompanyChangesNoBit/bound_heads")
CUDA_REVERSE_SIZES = emulated("BackwardPromiseOnCuda.ValuesOfAnySize/cuda_hopper_backward_chunk")
CUDA_SEGMENTS_HOPPER = emulated("ForwardChunkOnCuda.IsTheOracle/bound_long")
CUDA_BACKWARD_SIZES = emulated("BackwardPromiseOnCuda.ValuesOfAnySize/cuda_backward_chunk")
CUDA_BETA = emulated("BackwardPromiseOnCuda.SomeBetasAreZero/cuda_backward_chunk")
CUDA_RECURRENT_BACKWARD = emulated(
    *(f"BackwardOnCuda.IsTheOracle/cuda_backward_recurrent_{c}" for c in ("packed", "gva_2", "softplus_bias"))
)
CUDA_STAGES = emulated(*(f"StagesOnCuda.EachIsItsOracle/{c}" for c in ("gva_2", "K128_V128", "gates_slow")))
CUDA_NORM = emulated(
    *(
        f"NormOnCuda.IsTheOracle/{c}"
        for c in ("V_128", "V_300", "one_row", "many_rows", "dtype_2_V_64", "huge", "minute")
    )
)
CUDA_FUSED = emulated(*(f"FusedOnCuda.*/{c}" for c in ("usual", "packed_shared", "no_slots", "f32_W3")))
CUDA_NORM_NAN = (EMULATOR, "NormPromiseOnCuda.NotFiniteStaysInItsRow")
CUDA_WY_PACKED = emulated("StagesOnCuda.EachIsItsOracle/large_packed")
CUDA_WY_K_FIRST = emulated("StagesOnCuda.EachIsItsOracle/whole_K_first")
CUDA_WY_IDENTICAL = emulated("StagesOnCuda.EachIsItsOracle/whole_identical")
CUDA_WY_NAN = (EMULATOR, "StageDetailsOnCuda.HopperReadsNoUpperTriangle:StageDetailsOnCuda.HopperKeepsOthersNaNOut")

CHUNK = "src/cpu/chunk-inl.h"
CHUNK_FORWARD = "src/cpu/chunk_forward.cc"
CHUNK_BACKWARD = "src/cpu/chunk_backward.cc"
GRADIENTS = "src/cpu/gradients-inl.h"
RECURRENT = "src/cpu/recurrent.cc"
TEAM = "src/cpu/team.h"
SEGMENT = "src/cpu/segment.cc"
STAGES_INL = "src/cpu/stages-inl.h"
STAGES_FORWARD = "src/cpu/stages_forward.cc"
STAGES_BACKWARD = "src/cpu/stages_backward.cc"
PREFILL_F32 = "src/cpu/prefill_f32.cc"
DRAFT_KERNELS = "src/cpu/speculation.cc"
WINDOWS = "src/speculation.h"
SIMD = "src/cpu/simd-inl.h"
GATES = "src/cpu/gate.cc"
NORM_CPU = "src/cpu/norm_gate.cc"
API = "src/api.cc"
CONV = "src/cpu/conv.cc"
CONV_ROWS = "src/convolution.h"
SPECULATION_RULES = "src/problem_speculation.cc"
PROBLEM = "src/problem.h"
REFERENCE = "src/reference/math.h"
REFERENCE_FORWARD = "src/reference/forward.cc"
REFERENCE_BACKWARD = "src/reference/backward.cc"
REFERENCE_NORM = "src/reference/norm_gate.cc"
REFERENCE_CONV = "src/reference/conv.cc"
REFERENCE_SEGMENT = "src/reference/segment.cc"
REFERENCE_DRAFTS = "src/reference/speculation.cc"
CUDA_NORM_GATE = "src/cuda/norm/gate.cu"
CUDA_NORM_MATH = "src/cuda/norm/norm.h"
CUDA_NORM_ROWS = "src/cuda/norm/rows.h"
CUDA_FORWARD_CHUNK = "src/cuda/prefill/chunk.cu"
CUDA_PREPARE = "src/cuda/prefill/chunk_prepare.h"
CUDA_SCAN = "src/cuda/prefill/chunk_scan.h"
CUDA_BACKWARD_CHUNK = "src/cuda/backward/chunk.cu"
CUDA_BACKWARD_RECURRENT = "src/cuda/backward/recurrent.cu"
CUDA_BACKWARD_SUMS = "src/cuda/backward/sums.cu"
CUDA_REVERSE = "src/cuda/backward/chunk_reverse.h"
CUDA_WIDE = "src/cuda/backward/wide_kernel.h"
CUDA_WIDE_MATH = "src/cuda/backward/wide.h"
CUDA_BETA_H = "src/cuda/backward/beta.h"
CUDA_DECODE = "src/cuda/decode/decode.cu"
CUDA_CONV = "src/cuda/conv/conv.cu"
CUDA_CONV_CALL = "src/cuda/conv/call.h"
CUDA_CONV_STEP = "src/cuda/conv/step.h"
CUDA_DECODE_PARAMS = "src/cuda/decode/params.h"
CUDA_FEW_DRAFTS = "src/cuda/drafts/recurrent_kernel.h"
CUDA_FEW_DRAFTS_ENTRIES = "src/cuda/drafts/recurrent_entries.h"
CUDA_MMA = "src/cuda/drafts/mma.cu"
CUDA_HOPPER_FORWARD = "src/cuda/hopper_prefill/pairs.cu"
CUDA_HOPPER_SEGMENTS = "src/cuda/hopper_prefill/segments.cu"
CUDA_HOPPER_PRODUCER = "src/cuda/hopper_prefill/producer.h"
CUDA_HOPPER_CONSUMER = "src/cuda/hopper_prefill/consumer.h"
CUDA_HOPPER_MAPS = "src/cuda/hopper_prefill/segments.h"
CUDA_HOPPER_BACKWARD = "src/cuda/hopper_backward/chunk.cu"
CUDA_HOPPER_REVERSE = "src/cuda/hopper_backward/reverse.cu"
CUDA_HOPPER_REVERSE_CONSUMER = "src/cuda/hopper_backward/reverse_consumer.h"
CUDA_HOPPER_PAIR = "src/cuda/hopper_prefill/pair.h"
CUDA_HOPPER_UNITS = "src/cuda/hopper_prefill/column_scale.h"
CUDA_HOPPER_OUTPUTS = "src/cuda/hopper_prefill/outputs.h"
CUDA_HOPPER_STATES = "src/cuda/hopper_prefill/state_io.h"
CUDA_HOPPER_THREAD = "src/cuda/hopper_prefill/consumer_thread.h"
CUDA_HOPPER_TILES = "src/cuda/hopper_prefill/tiles.h"
CUDA_HOPPER_MULTIPLIER = "src/cuda/hopper_backward/wide_multiplier.h"
CUDA_HOPPER_HELPERS = "src/cuda/hopper_backward/wide_helpers.h"
CUDA_STAGE_TILES = "src/cuda/stages/tiles.h"
CUDA_HOPPER_WY = "src/cuda/hopper_stages/wy_dqkg.cu"
CUDA_HOPPER_WY_CHUNK = "src/cuda/hopper_stages/wy_chunk.h"
CUDA_STAGE_BACKWARD = "src/cuda/stages/backward.cu"
CUDA_STAGE_BACKWARD_CALL = "src/cuda/stages/backward_call.h"
CUDA_STAGE_FWD_O = "src/cuda/stages/fwd_o.cu"
# A header's mutant is compiled into the units that its tests run.
UNITS = {
    CHUNK: [CHUNK_FORWARD],
    GRADIENTS: [CHUNK_BACKWARD],
    TEAM: [CHUNK_FORWARD],
    SIMD: [GATES],
    WINDOWS: [DRAFT_KERNELS],
    PROBLEM: [RECURRENT],
    STAGES_INL: [STAGES_FORWARD, STAGES_BACKWARD],
    CONV_ROWS: [CONV, RECURRENT, DRAFT_KERNELS],
    REFERENCE: [REFERENCE_FORWARD, REFERENCE_BACKWARD],
    CUDA_NORM_MATH: [CUDA_NORM_GATE],
    CUDA_NORM_ROWS: [CUDA_NORM_GATE],
    CUDA_PREPARE: [CUDA_FORWARD_CHUNK],
    CUDA_SCAN: [CUDA_FORWARD_CHUNK],
    CUDA_REVERSE: [CUDA_BACKWARD_CHUNK],
    CUDA_WIDE: [CUDA_BACKWARD_CHUNK],
    CUDA_WIDE_MATH: [CUDA_BACKWARD_CHUNK],
    CUDA_BETA_H: [CUDA_BACKWARD_CHUNK],
    CUDA_CONV_CALL: [CUDA_CONV],
    CUDA_CONV_STEP: [CUDA_CONV],
    CUDA_DECODE_PARAMS: [CUDA_DECODE, "src/cuda/decode/sweep.cu"],
    CUDA_FEW_DRAFTS: ["src/cuda/drafts/recurrent_verify.cu", "src/cuda/drafts/recurrent_ring.cu"],
    CUDA_FEW_DRAFTS_ENTRIES: ["src/cuda/drafts/flush_registers.cu", "src/cuda/drafts/recurrent_flush_verify.cu"],
    CUDA_HOPPER_PRODUCER: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_CONSUMER: [CUDA_HOPPER_FORWARD],
    CUDA_HOPPER_MAPS: [CUDA_HOPPER_SEGMENTS],
    CUDA_HOPPER_MULTIPLIER: [CUDA_HOPPER_BACKWARD],
    CUDA_HOPPER_HELPERS: [CUDA_HOPPER_BACKWARD],
    CUDA_HOPPER_REVERSE_CONSUMER: [CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_PAIR: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_UNITS: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_OUTPUTS: [CUDA_HOPPER_FORWARD],
    CUDA_HOPPER_STATES: [CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_THREAD: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_TILES: [CUDA_HOPPER_FORWARD],
    CUDA_STAGE_TILES: [CUDA_STAGE_FWD_O],
    CUDA_STAGE_BACKWARD_CALL: [CUDA_STAGE_BACKWARD],
    CUDA_HOPPER_WY_CHUNK: [CUDA_HOPPER_WY],
}


@dataclass
class Mutant:
    name: str
    file: str
    tests: tuple[str, str]
    old: str  # exactly once in the file
    new: str


def mutants(file: str, tests: tuple[str, str], *substitutions: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(name, file, tests, old, new) for name, old, new in substitutions]


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
        ("forward: chunks run over checkpoints", "if (!checkpoints_within_chunks(a)) return length;", "return length;"),
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
        LONG_HEADS,
        ("team: one state for all tiles", "shared.S.from(0, v0), s.o", "shared.S, s.o"),
        ("team: values of the first tile for all", "s.chunk.L, head.hv, v0);", "s.chunk.L, head.hv, 0);"),
        (
            "team: last chunk as long as the others",
            "s.chunk.L = std::min(kChunk, head.seq.length - i * kChunk);",
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
        SEGMENT,
        SEGMENT_MAPS,
        ("segment: map of the zero state", "S.row(k)[first_column_of_M(p) + k] = 1;", "S.row(k)[k] = 0;"),
        (
            "segment: columns of M keep what memory held",
            "else zero(c.v.row(row) + padded(c.V), padded(columns()) - padded(c.V));",
            "else continue;",
        ),
        ("segment: d from the first chunk on", "(reverse ? chunks() - 1 - i : i) * kChunk", "i * kChunk"),
        (
            "segment: d without the outputs of its own chunk",
            "add_triangle<Triangle::kUpper>(c.L, c.V, c.Aqk.columns(), c.v, x);",
            "",
        ),
        (
            "segment: forgotten beta in d",
            "scale_row(x.row(i), c.beta[i], c.V, x.row(i))",
            "scale_row(x.row(i), 1, c.V, x.row(i))",
        ),
        ("segment: d without the read path", "gemm<Acc::kSub>(p.K, c.V, c.L, c.kG.columns(), x, S);", ""),
        (
            "segment: wrong triangle solved",
            "solve_triangle<Triangle::kUpper>(c.L, c.V, c.Akk.columns()",
            "solve_triangle<Triangle::kLower>(c.L, c.V, c.Akk.rows()",
        ),
    ),
    *mutants(
        SEGMENT,
        SEGMENT_MERGE,
        (
            "merge: reverse without transposing",
            "a.reverse ? Scalars{M, 1, row} : Scalars{M, row, 1}",
            "Scalars{M, row, 1}",
        ),
        ("merge: initial state ignored", "if (present(a.h0)) load_state(s.tile", "if (false) load_state(s.tile"),
        ("merge: segments out of order", "a.reverse ? p.N - 1 - i : i, row", "i, row"),
        (
            "merge: one tile for all",
            "at(a.M, n, hv));\n    load_state(s.tile, a.b, layout, n, hv, v0, s.next)",
            "at(a.M, n, hv));\n    load_state(s.tile, a.b, layout, n, hv, 0, s.next)",
        ),
    ),
    *mutants(
        REFERENCE_SEGMENT,
        SEGMENT_MAPS,
        ("oracle: d without beta", "k[i] * x.beta[t] * du[j]", "k[i] * du[j]"),
        ("oracle: map of the zero state", "unit[i * p.K + i] = 1;", "unit[i * p.K + i] = 0;"),
    ),
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
        ("gate: gradient beside -inf", "hn::AndNot(hn::IsNaN(z), hn::Eq(dg, splat(0)))", "hn::Lt(splat(0), splat(0))"),
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
        REFERENCE,
        RANGE,
        ("oracle: squares that overflow", "return sum < INFINITY ? ", "return true ? "),
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
        NORM_CPU,
        NORM,
        ("norm: dx without the mean", "hn::NegMulAdd(load(g.n + i), mean, load(g.dn + i))", "load(g.dn + i)"),
        (
            "norm: first block of rows not summed",
            "for (int64_t block = 0; block < blocks; ++block)",
            "for (int64_t block = 1; block < blocks; ++block)",
        ),
        (
            "norm: scale of unusual rows left out",
            "hn::Mul(hn::Mul(load(x), splat(norm.scale)), splat(norm.factor))",
            "hn::Mul(load(x), splat(norm.factor))",
        ),
        ("norm: eps scaled once", "eps * scale * scale", "eps * scale"),
        ("norm: long rows keep their last piece", "      if (p.V > kPiece) load_piece(a.x, row, first, n, x);\n", ""),
        ("norm: sums begin with old workspace", "  if (sums) zero(sums, padded(p.V));\n", ""),
        (
            "norm: dz without the weight",
            "const Vec weighted = hn::Mul(load(g.n + i), load(w + i));",
            "const Vec weighted = load(g.n + i);",
        ),
    ),
    *mutants(
        NORM_CPU,
        NORM_BEHIND,
        ("norm: gates reach padding", "if (p.keep_zeros && norm.zeros) keep_zeros", "if (false) keep_zeros"),
    ),
    *mutants(
        REFERENCE_NORM,
        NORM_BEHIND,
        ("oracle: gates of a norm reach padding", "p.keep_zeros && row.zeros && std::isnan(y)", "false"),
    ),
    *mutants(
        API,
        NORM_BEHIND,
        (
            "norm behind: not the oracle behind the oracle",
            "== kOracle ? kOracle : nullptr",
            "== kOracle ? nullptr : nullptr",
        ),
    ),
    *mutants(
        REFERENCE_NORM,
        NORM,
        ("oracle: norm with eps that knows no unit", "eps / unit / unit", "eps"),
        (
            "oracle: norm's slope of silu without z",
            "sigmoid(z) + z * sigmoid_slope(z)",
            "sigmoid(z) + sigmoid_slope(z)",
        ),
    ),
    *mutants(
        CONV,
        CONVOLUTION,
        (
            "conv: block starts from the state",
            "load_past(c, s, a + W - 2, c0, n, past);",
            "load_past(c, s, W - 2, c0, n, past);",
        ),
        (
            "conv: the past of a group does not move on",
            "store(xx[G + j], past[j] + i);",
            "store(xx[j], past[j] + i);",
        ),
        ("conv: padded sequences keep what y held", "else zero_tokens(c.y, i.s, i.a, i.b, c0, n);", ""),
        ("conv: final state one token short", "s.length + p.W - 2, a.final_state", "s.length + p.W - 3, a.final_state"),
        ("conv: no silu in backward", "if (with_silu) d[W - 1 + g] =", "if (false) d[W - 1 + g] ="),
        ("conv: d_final dropped", "if (!inside && present(g.d_final)) {", "if (false) {"),
        (
            "conv: tokens after the block left out of dx",
            "for (; t < b + W - 1; ++t) edge(t);",
            "for (; t < b; ++t) edge(t);",
        ),
        ("conv: tokens after the block summed, too", "t < b ? sums : nullptr", "sums"),
        (
            "conv: first block not summed",
            "for (int64_t i = 1; i < blocks; ++i)",
            "for (int64_t i = 2; i < blocks; ++i)",
        ),
        (
            "conv: state of an empty sequence zeroed",
            "if (present(g.d_final)) load_entry(g.d_final, n, c0, channels, i, row);",
            "",
        ),
    ),
    *mutants(
        STAGES_FORWARD,
        STAGES,
        ("stage: steps of G not clamped", "hn::IfThenElse(hn::Lt(step, splat(-160)), splat(-160), step)", "step"),
        ("stage: w and u from an inverse that was not rounded", "load_scores(a.Akk_inv, where, s.T);  //", "//"),
        ("stage: forgotten beta in u", "scale_row(c.v.row(i), c.beta[i], c.V, c.v.row(i));", ""),
        ("stage: corrections without the state", "gemm<Acc::kSub>(c.L, c.V, c.K, s.w.rows(), s.S, c.v);", ""),
        ("stage: scale forgotten", "scale_rows(c.q, c.L, p.K, p.in.scale);", ""),
    ),
    *mutants(
        STAGES_BACKWARD,
        STAGES,
        (
            "stage: reverse scan from the front",
            "for (int64_t i = scan.chunks() - 1; i >= 0; --i) {",
            "for (int64_t i = 0; i < scan.chunks(); ++i) {",
        ),
        ("stage: sign of dAkk", "scale_rows(s.xv, L, kChunk, -1);", ""),
        ("stage: gradient through a decay of 0", "hn::IfThenZeroElse(gone, sum)", "sum"),
        ("stage: dbeta overwritten", "load_column(a.dbeta, where, dbeta);", "std::fill_n(dbeta, kChunk, 0.0f);"),
    ),
    *mutants(
        STAGES_INL,
        STAGES,
        (
            "stage: diagonal of dAkk stays",
            "const int64_t first = i + !strict;",
            "const int64_t first = i + 1;",
        ),
        (
            "stage: sequence's first step lost",
            "load(c.alpha.row(i - 1) + d)) : load(alpha);",
            "load(c.alpha.row(i - 1) + d)) : splat(0);",
        ),
    ),
    *mutants(
        PREFILL_F32,
        PREFILL,
        (
            "prefill: rows behind the last token keep what they held",
            "else std::memset(row, 0, columns * sizeof(float));",
            "",
        ),
        ("prefill: forgotten beta in w and u", "scale_row(x.row(i), c.beta[i], columns, x.row(i));", ""),
        (
            "prefill: columns of u from the first tile",
            "chunk_buffer(a.u, b, hv), n, a.chunk, v0);",
            "chunk_buffer(a.u, b, hv), n, a.chunk, 0);",
        ),
        (
            "prefill: chunks of 64 whatever is asked",
            "std::min<int64_t>(a.chunk, p.T - t)",
            "std::min<int64_t>(64, p.T - t)",
        ),
    ),
    *mutants(
        CONV_ROWS,
        CONVOLUTION,
        (
            "conv: state read with has_initial_state = 0",
            "s.slot < state.shape[0] && known;",
            "s.slot < state.shape[0];",
        ),
        ("conv: a piece begins with its sequence", "std::max(token, begin)", "begin"),
    ),
    *mutants(
        CONV_ROWS,
        CONV_OPERATORS,
        (
            "conv: taps of a root from the token before",
            "(parent < 0 ? -1 : parent) + keep;",
            "(parent < 0 ? t - 1 : parent) + keep;",
        ),
        ("conv: parents that are none", "parent >= t ? row - 1 :", "parent > t ? row - 1 :"),
        ("conv: decode rolls padding", "if (!s.live) s.length = 0;", ""),
        ("conv: flush rolls padding", "r.s.live ? r.newest + 1 -", "true ? r.newest + 1 -"),
        ("conv: flush rolls by committed entries, too", "r.newest + 1 - r.flush.committed : 0", "r.newest + 1 : 0"),
        ("conv: flush_verify rolls padding", "s.live ? commit_of(p,", "true ? commit_of(p,"),
    ),
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
    *mutants(
        REFERENCE_CONV,
        CONVOLUTION,
        (
            "oracle: taps reversed",
            "y += get(weight, c, j) * xx[t + j];",
            "y += get(weight, c, j) * xx[t + weight.shape[1] - 1 - j];",
        ),
        ("oracle: silu slope without x", "slope = y * sigmoid_slope(y)", "slope = sigmoid_slope(y)"),
    ),
    *mutants(
        REFERENCE,
        ORACLE,
        ("oracle: no decay", "S[i * V + j] *= std::exp(gt[i]);", "S[i * V + j] *= 1;"),
        (
            "oracle: output before the correction",
            "S[i * V + j] += kt[i] * correction, sum += S[i * V + j] * qt[i];",
            "sum += S[i * V + j] * qt[i], S[i * V + j] += kt[i] * correction;",
        ),
    ),
    *mutants(
        REFERENCE_FORWARD,
        ORACLE,
        (
            "oracle: one gate step off in the scores",
            "for (int64_t t = j + 1; t <= i; ++t) decay",
            "for (int64_t t = j; t <= i; ++t) decay",
        ),
    ),
    *mutants(
        REFERENCE_BACKWARD,
        ORACLE,
        (
            "oracle: dg from the gradient before the read",
            "dg[t * K + i] += dSt * St[i * V + j];",
            "dg[t * K + i] += dS[i * V + j] * St[i * V + j];",
        ),
        ("oracle: l2norm backward dropped", "r[t] * (dy[t * K + i] - y[t * K + i] * dot)", "r[t] * dy[t * K + i]"),
        ("oracle: undecayed dS", "dS[i * V + j] = std::exp(g[i]) * dSt;", "dS[i * V + j] = dSt;"),
    ),
    *mutants(
        DRAFT_KERNELS,
        SPECULATION,
        ("verify: undecayed kG", "kd = hn::Mul(load(k + d), alpha)", "kd = load(k + d)"),
        ("verify: undecayed qG", "qd = hn::Mul(load(q + d), alpha)", "qd = load(q + d)"),
        (
            "verify: one gate step off in the walk back",
            "k = kG, q = qG, decay = x.alpha.row(w);",
            "k = kG, q = qG, decay = x.alpha.row(committed + t);",
        ),
        ("verify: missing diagonal q.k", "store(hn::MulAdd(splat(x.qk[t]), e, out), o + d);", "store(out, o + d);"),
        ("verify: forgotten beta", "e = hn::Mul(e, splat(x.beta[t]));", ""),
        ("verify: corrections of others ignored", "e = hn::NegMulAdd(splat(A[i]), uw, e);", ""),
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
        (
            "flush: undecayed state",
            "Vec sum = hn::Mul(load(S + d), load(x.f + d));",
            "Vec sum = load(S + d);",
        ),
        ("flush: undecayed state, K-first", "gemm<Acc::kDecay>(K, V, flushed", "gemm<Acc::kAdd>(K, V, flushed"),
        ("flush: correction of the wrong column", "x.u_last.row(i)[column]", "x.u_last.row(i)[0]"),
        (
            "flush: corrections of the first strip for all",
            "at(c.last.u, r.last_slot, r.flush.entry(w), hv) + v0 * sizeof(float)",
            "at(c.last.u, r.last_slot, r.flush.entry(w), hv)",
        ),
        ("flush_verify: cursors stay", "if (s.live) store_cursors", "if (false) store_cursors"),
    ),
    *mutants(
        DRAFT_KERNELS,
        ("test_speculation", "All/Speculation.FlushVerify/ring_long"),  # a ring with padding
        ("flush_verify: padding moves cursors", "if (s.live) store_cursors", "if (true) store_cursors"),
    ),
    *mutants(
        DRAFT_KERNELS,
        FLUSH_VERIFY_IS,
        (
            "flush_verify: drafts read a state that was not rounded",
            "load_row(c.hT.dtype, address(c.hT, v0, i), columns, row);",
            "",
        ),
    ),
    *mutants(
        DRAFT_KERNELS,
        NO_WRITES,
        ("flush_verify: state written back unchanged", "if (flushed) {", "if (flushed || present(c.hT)) {"),
    ),
    *mutants(
        DRAFT_KERNELS,
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
        (
            "flush_verify: a folded ring starts where it did",
            "c.apply ? c.window.entry(entries) : c.window.first",
            "c.window.first",
        ),
    ),
    *mutants(
        REFERENCE_DRAFTS,
        SPECULATION_ORACLE,
        ("oracle: drafts from the state before", "after[t] = parent < 0 ? S : after[parent];", "after[t] = S;"),
        (
            "oracle: newest entry applied first",
            "for (auto e = entries.rbegin(); e != entries.rend(); ++e)",
            "for (auto e = entries.begin(); e != entries.end(); ++e)",
        ),
    ),
    *mutants(
        CUDA_PREPARE,
        CUDA_CHUNK,
        (
            "cuda_prefill_chunk: rows are read before they came",
            "  ptx::wait_for_copies<0>();\n",
            "",
        ),
        (
            "cuda_prefill_chunk: factors are read before they are there",
            "  __syncthreads();  // factors are there",
            "  // factors are there",
        ),
        (
            "cuda_prefill_chunk: T is read before all lanes wrote theirs",
            "    __syncwarp();      // all columns are staged\n",
            "",
        ),
        (
            "cuda_prefill_chunk: scores with tokens behind",
            "if (column > i()) return 0;",
            "if (column > i() + 1) return 0;",
        ),
        (
            "cuda_prefill_chunk: decays of tokens that are none",
            "gamma[e] = !is_real() ? 0.0f : step",
            "gamma[e] = step",
        ),
        (
            "cuda_prefill_chunk: a chunk goes to the sequence before",
            "p.T, n)) <= row;",
            "p.T, n)) < row;",
        ),
    ),
    *mutants(
        CUDA_PREPARE,
        CUDA_BACKWARD,
        ("cuda backward: keys are not mirrored", "if (mirrored) turn(kG), turn(qG);", "if (mirrored) turn(qG);"),
    ),
    *mutants(
        CUDA_SCAN,
        CUDA_CHUNK,
        (
            "cuda_prefill_chunk: an image is read before it came",
            "ptx::wait_for_copies<1>();",
            "ptx::wait_for_copies<2>();",
        ),
        (
            "cuda_prefill_chunk: an image comes to where one is read",
            "kMostWarps = 8, kStages = 3;",
            "kMostWarps = 8, kStages = 2;",
        ),
        (
            "cuda_prefill_chunk: warps do not wait for each other's copies",
            "    __syncthreads();  // the image is in shared memory",
            "    // the image is in shared memory",
        ),
        ("cuda_prefill_chunk: one image for all chunks", "next_ += kReversed ? -step_ : step_, to_", "to_"),
        ("cuda_prefill_chunk: the image behind the next one", "unsigned image = at_;", "unsigned image = after(at_);"),
        (
            "cuda_prefill_chunk: keys of other channels in the state",
            "ptx::mma<__half>(S[2], first, k[0].z, k[1].z)",
            "ptx::mma<__half>(S[2], first, k[0].w, k[1].w)",
        ),
    ),
    *mutants(
        CUDA_REVERSE,
        CUDA_BACKWARD,
        (
            "cuda backward: dS is kept before odd chunks",
            "(c % 2 || c + 1 == which.chunks)",
            "(c % 2 == 0 || c + 1 == which.chunks)",
        ),
        (
            "cuda backward: keys decayed from the start, not to the end",
            "own + In::kg + (b * kPairs",
            "own + In::kG + (b * kPairs",
        ),
        ("cuda backward: begins before the last image", "- pass.first + end - 1;", "- pass.first + end - 2;"),
        (
            "cuda backward: dO without the scale",
            "dO[t][e] *= e % 2 ? scale.y : scale.x;",
            "dO[t][e] *= e % 2 ? 1 : scale.x;",
        ),
    ),
    *mutants(
        CUDA_REVERSE,
        CUDA_BACKWARD_SIZES,
        ("cuda backward: no units", "      state.choose_units(dO);\n", ""),
    ),
    *mutants(
        CUDA_WIDE_MATH,
        CUDA_BACKWARD,
        ("cuda backward: a step between anchors is 0", "exp2(kClamps ? fmaxf(step, kDeep) : step)", "exp2(step)"),
        ("cuda backward: nothing from behind the chunk", "behind[hh] = fmaf(sum * f, f, behind[hh]);", ""),
        (
            "cuda backward: no state in the gates' sums",
            "behind[hh] = fmaf(SdS[hh], ptx::exp2(kClamps ? whole_[hh] : decay[hh]), behind[hh]);",
            "",
        ),
        ("cuda backward: sums of gates end at eight tokens", "after[hh] += __shfl_sync(kAll, P, 0, 4);", ""),
        ("cuda backward: tokens behind the end decay", "KDA_GATE_LOG ? 0.0f : -INFINITY", "KDA_GATE_LOG ? 0.0f : 0.0f"),
        ("cuda backward: an anchor at a block's end", "else if (n % kOf == 0) anchor = total;", ""),
        (
            "cuda backward: dA of the rows above",
            "ptx::mma<bf16>(W[2 * r], k_[o], b[0], b[1])",
            "ptx::mma<bf16>(W[2 * r], q_[o], b[0], b[1])",
        ),
    ),
    *mutants(
        CUDA_WIDE,
        CUDA_BACKWARD,
        ("cuda backward: the diagonal of B", "8 * x + 2 * j() + e % 2 + of_B >", "8 * x + 2 * j() + e % 2 >"),
        ("cuda backward: no projection through the norm", "if (x_.qk_l2norm) sum_dots(), apply_norms();", ""),
        ("cuda backward: value heads are not added", "if (!first) x[0] += kept.x, x[1]", "if (!first) x[1]"),
        (
            "cuda backward: dA is written where a piece is read",
            "    __syncthreads();  // all reads of pieces are done",
            "    // all reads of pieces are done",
        ),
        (
            "cuda backward: a piece is read before it came",
            "wait_for_copies<kPieces - 2>",
            "wait_for_copies<kPieces - 1>",
        ),
        (
            "cuda backward: gates are read before they are there",
            "    __syncthreads();  // they are there, in f32\n",
            "",
        ),
    ),
    *mutants(
        CUDA_WIDE,
        CUDA_BACKWARD_UNUSUAL,
        (
            "cuda backward: no gradients of unusual gates",
            "for (int n = kTiles - 1; n >= 0; --n)",
            "for (int n = 0; n > 0; --n)",
        ),
        ("cuda backward: no launch for unusual gates", "if (unusual_) act(", "if (false) act("),
    ),
    *mutants(
        CUDA_HOPPER_PRODUCER,
        CUDA_FORWARD_HOPPER,
        (
            "Hopper's forward: wgmma does not see the tiles",
            "    ptx::fence_shared_for_async();\n    at_.sync();  // tiles are there",
            "    at_.sync();  // tiles are there",
        ),
        (
            "Hopper's forward: raw rows come to where scores are read",
            "    at_.sync();                           // Akk is there; all reads of tiles are done\n",
            "",
        ),
        (
            "Hopper's forward: a stage is written to while it is read",
            "    if (role(turn) == WarpRole::kCopy) ring().wait_empty(number);\n",
            "",
        ),
        ("Hopper's forward: T is sent before all lanes have written it", "      __syncwarp();  // T is there\n", ""),
        (
            "Hopper's forward: v comes to where U leaves",
            "    if (Source::kKeepsU && call_.saved->used) ring().wait_values_empty(number);\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_OUTPUTS,
        CUDA_FORWARD_HOPPER,
        (
            "Hopper's forward: v is released while other warps read U",
            "    if (sends_U()) ptx::sync_threads(Base::kBarrier, kGroup);  // those of U, too, of all warps\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_CONSUMER,
        CUDA_FORWARD_HOPPER,
        (
            "Hopper's forward: one lane releases what others still read",
            "__syncwarp();  // all lanes have read the stage\n        if (lane_ == 0) ring_",
            "if (lane_ == 0) ring_",
        ),
        (
            "Hopper's forward: outputs are overwritten while TMA reads them",
            "        if (stores()) ptx::wait_for_bulk_reads<0>();\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MAPS,
        CUDA_SEGMENTS_HOPPER,
        (
            "segments: a map comes to where one is read",
            "      ptx::sync_threads(NamedBarrier::kConsumer, kGroup);  // all threads have read the map\n",
            "",
        ),
        (
            "segments: TMA does not see a map",
            "    ptx::fence_shared_for_async();\n    ptx::sync_threads(Base::kBarrier, kGroup);  // all of M",
            "    ptx::sync_threads(Base::kBarrier, kGroup);  // all of M",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MULTIPLIER,
        CUDA_BACKWARD_HOPPER,
        (
            "Hopper's backward: scores are read before all warps have written theirs",
            "      at_.wait(KDA_AT(scores_full), n_);\n",
            "",
        ),
        (
            "Hopper's backward: a tile is released while products read it",
            "    ptx::wait_for_products<0>();\n    ptx::settle(accumulators<64>",
            "    ptx::settle(accumulators<64>",
        ),
        (
            "Hopper's backward: TMA does not see dq and dk",
            "    ptx::fence_shared_for_async();  // copies read them\n",
            "",
        ),
        ("Hopper's backward: norms are read before they are there", "      at_.wait_norms(n_);\n", ""),
        (
            "Hopper's backward: dots come to where other lanes read steps",
            "    __syncwarp();  // all lanes have read their steps, whose places dots take\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_HELPERS,
        CUDA_BACKWARD_HOPPER,
        (
            "Hopper's backward: tiles come to where others are read",
            "      if (n) at_.wait(KDA_AT(big_read), n - 1);\n",
            "",
        ),
        (
            "Hopper's backward: tiles come to where others leave",
            "      ptx::wait_for_bulk_reads<0>();\n",
            "",
        ),
        (
            "Hopper's backward: dbeta is computed before its diagonal is there",
            "    at_.wait(KDA_AT(scores_full), n);\n",
            "",
        ),
        ("Hopper's backward: rows behind the end stay", "clear(at_.raw(n), max(rows, first_));", ""),
        (
            "Hopper's backward: one lane says that all have written",
            "      __syncwarp();  // all tokens' are there\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_REVERSE_CONSUMER,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: the update takes dv with its own sign",
            "x.dv[2 * j + 1]) ^ 0x80008000;",
            "x.dv[2 * j + 1]);",
        ),
        (
            "Hopper's reverse scan: no qG^T dO in the update",
            "ptx::wgmma<__half, true>(S_, x.D[k], ptx::further(kG, Stage::q - Stage::k + k * 16 * kRowBytes), true);",
            ";",
        ),
        (
            "Hopper's reverse scan: T is not transposed",
            "ptx::wgmma<__half, true>(x.dv, R[k], ptx::further(T_beta, k * 16 * 64), k > 0);",
            "ptx::wgmma<__half, false>(x.dv, R[k],"
            " ptx::further(ptx::matrix_at(stage + Stage::T, 16, 512, ptx::Swizzle::k64), 32 * k), k > 0);",
        ),
        (
            "Hopper's reverse scan: states are kept when they have decayed",
            "        if (stores_before && (n % 2 != odd || n == first_number))"
            " Base::template store_before<false>(before);\n"
            "        start_values(stage, x);\n",
            "        start_values(stage, x);\n"
            "        if (stores_before && (n % 2 != odd || n == first_number))"
            " Base::template store_before<false>(before);\n",
        ),
        (
            "Hopper's reverse scan: spans end one chunk off",
            "n % 2 != odd || n == first_number",
            "n % 2 == odd || n == first_number",
        ),
        (
            "Hopper's reverse scan: one lane releases what others still read",
            "__syncwarp();  // all lanes have read the stage\n        if (lane_ == 0) ring_.release(number, kWarps",
            "if (lane_ == 0) ring_.release(number, kWarps",
        ),
    ),
    *mutants(
        CUDA_HOPPER_REVERSE_CONSUMER,
        CUDA_REVERSE_SHARED,
        (
            "Hopper's reverse scan: outputs are overwritten while TMA reads them",
            "        if (stores()) ptx::wait_for_bulk_reads<0>();\n",
            "",
        ),
        (
            "Hopper's reverse scan: outputs of a partial chunk are stored twice",
            "store_last(out, last, end - last, 0), pending = false;",
            "store_last(out, last, end - last, 0);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_UNITS,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: dO without the scale",
            "const float scale = inverse(unit_[j % 2]) * call_.x.scale;",
            "const float scale = inverse(unit_[j % 2]);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_UNITS,
        CUDA_FORWARD_PACKED,
        (
            "Hopper's forward: states come to where zeros were stored behind a sequence",
            "    ptx::fence_shared_for_async();  // copies will overwrite them\n"
            "    __syncwarp();                   // zeros are there\n  }",
            "    __syncwarp();                   // zeros are there\n  }",
        ),
    ),
    *mutants(
        CUDA_HOPPER_UNITS,
        CUDA_REVERSE_NAN,
        (
            "Hopper's reverse scan: the first bad token in place of the last",
            "return kReversed ? max(a, b) : min(a, b);",
            "return min(a, b);",
        ),
        (
            "Hopper's reverse scan: the bad token itself",
            "earlier(bad[i], kReversed ? token + 1 : token)",
            "earlier(bad[i], token)",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PAIR,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: chunks go forwards",
            "kReversed ? first_ + states - i : first_ + i - states",
            "first_ + i - states",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PAIR,
        CUDA_REVERSE_SHARED,
        (
            "Hopper's reverse scan: spans of shared heads count from the beginning",
            "const TokenRange tokens(now, length_, kReversed);",
            "const TokenRange tokens(now, length_, false);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_THREAD,
        CUDA_FORWARD_NARROW,
        (
            "Hopper's forward, V = 64: states are stored beside their columns",
            "return first_column() < static_cast<unsigned>(call_.p.V);",
            "return true;",
        ),
        (
            "Hopper's forward, K = 64: states are stored beside their channels",
            "return j < 8 || call_.p.K > kSizeHalf;",
            "return true;",
        ),
    ),
    *mutants(
        CUDA_HOPPER_TILES,
        CUDA_FORWARD_NARROW,
        (
            "Hopper's forward, K = 64: a column's state ends where the next one's does",
            "{.sizes = {size(3), size(2) / 8,",
            "{.sizes = {kSize, size(2) / 8,",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PAIR,
        CUDA_FORWARD_NARROW,
        (
            "Hopper's forward, V = 64: the CTA without columns keeps first states",
            "number + call_.state_tiles->used + (work.end",
            "number + (work.end",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MAPS,
        CUDA_SEGMENTS_NARROW,
        (
            "segments, V = 64: M begins from columns of the other half",
            "Base::column(i / 2 % 2) + first ==",
            "Base::column(i / 2 % 2) ==",
        ),
        (
            "segments, V = 64: warps that leave chunks out release the last ones, too",
            "leave_out(chunks() - kHeld)",
            "leave_out(chunks())",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_BACKWARD_NARROW,
        (
            "Hopper's reverse scan, K = 64: columns of dh lie as with K = 128",
            "return static_cast<unsigned>(call_.p.K) * 2;",
            "return kSize * 2;",
        ),
    ),
    *mutants(
        CUDA_HOPPER_HELPERS,
        CUDA_BACKWARD_NARROW,
        (
            "Hopper's backward, K = 64: dots of warps without channels count",
            "w < call_.warps()",
            "w < kWideWarps",
        ),
        (
            "Hopper's backward, K = 64: rows of gradients are twice as long",
            "if (i % 16 < call_.channels() / 8)",
            "if (true)",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MULTIPLIER,
        CUDA_BACKWARD_NARROW,
        (
            "Hopper's backward, K = 64: B is overwritten while warps with channels read it",
            "      arrive(KDA_AT(dots_full));\n      at_.wait(KDA_AT(factors_full), n_);\n",
            "      arrive(KDA_AT(dots_full));\n",
        ),
        (
            "Hopper's backward, K = 64: parts of dA_log lie as with K = 128",
            "sums[call_.channels() + warp_]",
            "sums[kSize + warp_]",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: states are stored in the order of the stage",
            "return kOrder.run * (lane_ % 4)",
            "return 2 * (lane_ % 4)",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_REVERSE_SIZES,
        (
            "Hopper's reverse scan: states are stored in units",
            "kUnits ? unit_[i] : 1",
            "1",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PRODUCER,
        CUDA_REVERSE_NAN,
        (
            "Hopper's reverse scan: a NaN of k spoils no outputs of its chunk",
            "(Source::kReversed ? Stage::kg : Stage::q)",
            "Stage::q",
        ),
        (
            "Hopper's reverse scan: NaN comes where other lanes have yet to store",
            "    __syncwarp();  // the warp's rows are there, and ell\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_REVERSE,
        CUDA_REVERSE_SHARED,
        (
            "Hopper's reverse scan: dv is not converted",
            "  if (plan.own_dv && present(p.args.dv)) convert(p.args.exec, plan.dv, p.args.dv);\n",
            "",
        ),
    ),
    *mutants(
        CUDA_BETA_H,
        CUDA_BETA,
        ("cuda backward: betas of about 0 are not looked at", "kLeastBeta = 0x1p-30f", "kLeastBeta = 0"),
        ("cuda backward: dbeta without later tokens", "all = fmaf(-of.kk, value(places_.dv, KDA_BF16, j), all);", ""),
    ),
    *mutants(
        CUDA_BACKWARD_RECURRENT,
        CUDA_RECURRENT_BACKWARD,
        (
            "cuda_backward_recurrent: dv is read before it is there",
            "    __syncthreads();  // u and dv are there",
            "    // u and dv are there",
        ),
        (
            "cuda_backward_recurrent: keys meet the state undecayed",
            "m_.alpha[k] * from[at] * m_.k[k]",
            "from[at] * m_.k[k]",
        ),
        ("cuda_backward_recurrent: dS undecayed", "dS_[at] = m_.alpha[k] * before;", "dS_[at] = before;"),
    ),
    *mutants(
        CUDA_STAGE_BACKWARD,
        CUDA_STAGES,
        ("cuda_stages_backward: the diagonal of dAkk", "j < i ? -sum", "j <= i ? -sum"),
        ("cuda_stages_backward: dh of the chunk before", "first_row + c, hv);", "first_row + c + 1, hv);"),
        ("cuda_stages_backward: pairs without later rows", "j = i + 1; j < at.rows", "j = i + 2; j < at.rows"),
        (
            "cuda_stages_backward: sums to the chunk's start",
            "for (int i = at.rows; i-- > 0;) {",
            "for (int i = 0; i < at.rows; ++i) {",
        ),
        ("cuda_stages_backward: the last row without S dS", "fmaf(ptx::exp2(G(last, k0 + own)), m_.SdS[own],", "(0 +"),
    ),
    *mutants(
        CUDA_STAGE_BACKWARD_CALL,
        CUDA_STAGES,
        (
            "cuda_stages_backward: operands are read before they are there",
            "    __syncthreads();  // the operands are there\n",
            "",
        ),
    ),
    *mutants(
        CUDA_STAGE_TILES,
        CUDA_STAGES,
        (
            "cuda_stages_fwd_o: operands are read before they came",
            "  ptx::wait_for_copies<0>();\n  __syncthreads();  // what came",
            "  __syncthreads();  // what came",
        ),
    ),
    *mutants(
        CUDA_STAGE_FWD_O,
        CUDA_STAGES,
        (
            "cuda_stages_fwd_o: o leaves before it is there",
            "  __syncthreads();  // o is there",
            "  // o is there",
        ),
    ),
    *mutants(
        CUDA_HOPPER_WY_CHUNK,
        CUDA_WY_NAN,
        ("cuda wy: what lies above J's diagonal", "real = i >= j && i < at_.rows;", "real = i < at_.rows;"),
        ("cuda wy: dv_new behind the chunk's end", "if (at_.rows < static_cast<int>(kChunk)) clear_tail();", ""),
    ),
    *mutants(
        CUDA_HOPPER_WY_CHUNK,
        CUDA_WY_IDENTICAL,
        (
            "cuda wy: J rounded to bf16",
            "ptx::pack<bf16>(two[0] - __uint_as_float(both << 16), two[1] - __uint_as_float(both & 0xffff0000u));",
            "0;",
        ),
        ("cuda wy: the other half of S dS", "first + r8, v / 8 + i8, kWideHalf));", "r8, v / 8 + i8, kWideHalf));"),
    ),
    *mutants(
        CUDA_HOPPER_WY_CHUNK,
        CUDA_WY_PACKED,
        ("cuda wy: forgotten beta in dk", "dk = fmaf(-E, read, dk);", "dk = fmaf(-E, y, dk);"),
        ("cuda wy: k in place of q in dG", "y = fmaf(q, dq, -fmaf", "y = fmaf(k, dq, -fmaf"),
        ("cuda wy: the last row without S dS", "const float2 SdS = state_dots();", "const float2 SdS{0, 0};"),
        ("cuda wy: S dS twice in the last row", "adds = n == warp_ && g() == 0;", "adds = n == warp_ && g() < 2;"),
        (
            "cuda wy: rows behind the chunk's end in its last row",
            "if (is_real(r)) written[n].x += first, written[n].y += second;",
            "written[n].x += first, written[n].y += second;",
        ),
        ("cuda wy: the diagonal of dAkk", "two{j < row(r) ?", "two{j <= row(r) ?"),
        (
            "cuda wy: dbeta of the first CTA's channels alone",
            "= sum + ptx::load_shared_f32(buffer + own + 32 * r);",
            "= sum;",
        ),
        ("cuda wy: dbeta is read before it came", "    if (rank_ == 0) ptx::wait_barrier(sent, 0);\n", ""),
    ),
    *mutants(
        CUDA_HOPPER_WY_CHUNK,
        CUDA_WY_K_FIRST,
        (
            "cuda wy: x is written while products read dv_new",
            "    sync_group();  // products of all warps have read dv_new\n",
            "",
        ),
        ("cuda wy: sums are written over gates", "    sync_group();  // gates have been read\n", ""),
    ),
    *mutants(
        CUDA_HOPPER_WY,
        CUDA_WY_K_FIRST,
        (
            "cuda wy: tiles go to a CTA that does not wait for them yet",
            "  ptx::arrive_at_cluster();\n  ptx::wait_for_cluster();",
            "  ",
        ),
    ),
    *mutants(
        CUDA_DECODE,
        CUDA_DECODE_TESTS,
        (
            "cuda decode: tokens of the request before",
            "    keys.locate(x, b, t, at.hv, at.h);\n    from_v = x.v.at(b, t, at.hv) + static_cast",
            "    keys.locate(x, b ? b - 1 : b, t, at.hv, at.h);\n    from_v = x.v.at(b, t, at.hv) + static_cast",
        ),
    ),
    *mutants(
        CUDA_DECODE_PARAMS,
        CUDA_DECODE_TESTS,
        (
            "cuda decode: K-first states as V-first",
            "? Access::kColumns : Access::kAny",
            "? Access::kRows : Access::kAny",
        ),
    ),
    *mutants(
        CUDA_FEW_DRAFTS,
        CUDA_DRAFTS,
        ("cuda drafts: scores undecayed", "        k[e] *= alpha_i, q[e] *= alpha_i;\n", ""),
        ("cuda drafts: u of the drafts before is added", "which ? sum : -sum;", "sum;"),
        (
            "cuda drafts: committed entries are no tokens",
            "committed = !kMayCommit || before.apply ? 0",
            "committed = true ? 0",
        ),
    ),
    *mutants(
        CUDA_FEW_DRAFTS_ENTRIES,
        CUDA_DRAFTS,
        ("cuda drafts: entries keep what lay behind K", "= shared[m.alpha + count * kMostK + c] = 0;", "= NAN;"),
        ("cuda drafts: entries undecayed", "*= static_cast<float>(product);", "*= 1.0f;"),
    ),
    *mutants(
        CUDA_MMA,
        CUDA_MORE_DRAFTS,
        (
            "cuda mma: channels from K on are multiplied",
            "steps = K / kQuarters / 16;",
            "steps = kMostK / kQuarters / 16;",
        ),
        ("cuda mma: drafts that are no ancestors", "if (!kCall.fast && !(ancestors >> i & 1)) continue;", ""),
    ),
    *mutants(
        CUDA_CONV_CALL,
        CUDA_FUSED,
        ("cuda front: padding rolls its state", "(s.length > 0 && is_live(s.n))", "s.length > 0"),
        ("cuda front: slots beyond the pool are written", "slot < states.shape[0] && (", "("),
    ),
    *mutants(
        CUDA_CONV_STEP,
        CUDA_FUSED,
        ("cuda conv: one token leaves the state as it was", "state.rows[2] = row;", ""),
    ),
    *mutants(
        CUDA_NORM_GATE,
        CUDA_FUSED,
        (
            "cuda norm: gates reach padding",
            "if (p.keep_zeros && norm.zeros) {\n        values_of",
            "if (false) {\n        values_of",
        ),
        (
            "cuda norm: gates reach padding in long rows",
            "if (p.keep_zeros && norm.zeros) {\n        load_some",
            "if (false) {\n        load_some",
        ),
    ),
    *mutants(
        CUDA_NORM_GATE,
        CUDA_NORM,
        ("cuda norm: a row is summed over the whole warp", "x += i < lanes ? other : 0.0f;", "x += other;"),
        (
            "cuda norm: rows behind the last are stored",
            "if (first + j * step + lane / p.lanes < rows) store_chunk",
            "store_chunk",
        ),
        (
            "cuda norm: the first of a warp's runs is not summed",
            "for (unsigned i = warp * part; i < end; ++i)",
            "for (unsigned i = warp * part + 1; i < end; ++i)",
        ),
        ("cuda norm: rows side by side are not summed", "dw[i] += other >= p.lanes ? more : 0.0f;", ""),
        (
            "cuda norm: sums of warps are read before they are there",
            "  __syncthreads();  // the sums of all warps are in shared memory\n  for (unsigned i",
            "  for (unsigned i",
        ),
        ("cuda norm: rows of the next run", "    if (row >= end) continue;\n", ""),
        ("cuda norm: dx without the mean", "fmaf(-n[i], mean, dn[i])", "dn[i]"),
        ("cuda norm: sums of a run begin with old workspace", "row == begin ? dw[i] : sums", "sums"),
        (
            "cuda norm: long rows unscaled",
            "for (int i = 0; i < kChunkSize; ++i) x[i] *= norm.scale;\n      gate_chunk",
            "gate_chunk",
        ),
    ),
    *mutants(
        CUDA_NORM_MATH,
        CUDA_NORM,
        ("cuda norm: every row a usual one", "if (__any_sync(kAll, !usual)) {", "if (false) {"),
        ("cuda norm: slope of silu without its own", "fmaf(z, slope, s)", "s"),
    ),
    *mutants(
        CUDA_NORM_MATH,
        CUDA_NORM_NAN,
        ("cuda norm: rows beside NaN are scaled", "usual ? 1 : mean < kLeastMean", "mean < kLeastMean"),
    ),
    *mutants(
        CUDA_NORM_ROWS,
        CUDA_NORM,
        ("cuda norm: tokens of the batch before", "token - b * tokens.divisor", "token"),
        (
            "cuda norm: numbers behind a row are read",
            "if (rows.wide && column + kChunkSize <= V)\n    return values_of",
            "if (rows.wide)\n    return values_of",
        ),
    ),
]

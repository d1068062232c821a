"""Decode, drafts, convolution, norm and gate on the GPU."""

from .mutant import EMULATOR, emulated, mutants

CUDA_RUNTIME = "src/cuda/runtime.cc"
CUDA_GATE = "src/cuda/gate/gate.cu"
CUDA_GATE_MATH = "src/cuda/gate/gate.h"
CUDA_NORM_GATE = "src/cuda/norm/gate.cu"
CUDA_NORM_MATH = "src/cuda/norm/norm.h"
CUDA_NORM_ROWS = "src/cuda/norm/rows.h"
CUDA_DECODE = "src/cuda/decode/decode.cu"
CUDA_DECODE_SNAPSHOTS = "src/cuda/decode/snapshots.cu"
CUDA_CONV = "src/cuda/conv/conv.cu"
CUDA_CONV_BACKWARD = "src/cuda/conv/backward.cu"
CUDA_CONV_CALL = "src/cuda/conv/call.h"
CUDA_FRONT = "src/cuda/decode/front.h"
CUDA_CONV_STEP = "src/cuda/conv/step.h"
CUDA_DECODE_PARAMS = "src/cuda/decode/params.h"
CUDA_FEW_DRAFTS = "src/cuda/drafts/recurrent_kernel.h"
CUDA_FEW_DRAFTS_WALK = "src/cuda/drafts/recurrent_draft.h"
CUDA_FEW_DRAFTS_ENTRIES = "src/cuda/drafts/recurrent_entries.h"
CUDA_MMA = "src/cuda/drafts/mma_block.h"

CUDA_DECODE_TESTS = emulated(*(f"TokensOnCuda.Decode/{c}" for c in ("K100_V60", "usual", "usual_64_K_first")))
CUDA_SNAPSHOTS = emulated(*(f"SnapshotsOnCuda.*/usual_{calls}_*" for calls in ("packed", "states_bf16", "full")))
CUDA_DRAFTS = emulated(*(f"TokensOnCuda.*/{c}" for c in ("usual_3", "usual_4", "usual_ring_3")))
CUDA_MORE_DRAFTS = emulated(*(f"TokensOnCuda.*Verify/{c}" for c in ("usual_6", "usual_8", "staged_tree_8")))
CUDA_NORM = emulated(
    *(
        f"NormOnCuda.IsTheOracle/{c}"
        for c in ("V_128", "V_300", "one_row", "many_rows", "dtype_2_V_64", "huge", "minute")
    )
)
CUDA_FUSED = emulated(*(f"FusedOnCuda.*/{c}" for c in ("usual", "packed_shared", "no_slots", "f32_W3")))
CUDA_CONV_CASES = emulated(*(f"ConvOnCuda.*ward/{c}" for c in ("packed_W*", "dtype_*", "state_by_rows_*")))
CUDA_CONV_PARTS = (EMULATOR, "ConvPromiseOnCuda.Parts*")
CUDA_NEWER_GPU = (f"KDA_EMULATOR_ARCH=120 {EMULATOR}", "All/TokensOnCuda.Decode/usual")
CUDA_NORM_BESIDE = (EMULATOR, "NormPromiseOnCuda.SmallNumbersBesideHugeOnes")
CUDA_CORNERS = (EMULATOR, "RangeOnCuda.GatesAtCorners")
CUDA_NORM_NAN = (EMULATOR, "NormPromiseOnCuda.NotFiniteStaysInItsRow")

CUDA_GATE_CASES = emulated(*(f"GateOnCuda.MatchesTheOracle/{c}_*" for c in ("softplus", "bound")))

UNITS = {
    CUDA_GATE_MATH: [CUDA_GATE],
    CUDA_NORM_MATH: [CUDA_NORM_GATE],
    CUDA_NORM_ROWS: [CUDA_NORM_GATE],
    CUDA_CONV_CALL: [CUDA_CONV],
    CUDA_CONV_STEP: [CUDA_CONV],
    CUDA_FRONT: [CUDA_DECODE, "src/cuda/decode/sweep.cu"],
    CUDA_DECODE_PARAMS: [CUDA_DECODE, "src/cuda/decode/sweep.cu", CUDA_DECODE_SNAPSHOTS],
    CUDA_FEW_DRAFTS: ["src/cuda/drafts/recurrent_verify.cu", "src/cuda/drafts/recurrent_ring.cu"],
    CUDA_FEW_DRAFTS_WALK: ["src/cuda/drafts/recurrent_verify.cu", "src/cuda/drafts/recurrent_ring.cu"],
    CUDA_MMA: ["src/cuda/drafts/mma.cu"],
    CUDA_FEW_DRAFTS_ENTRIES: ["src/cuda/drafts/flush_registers.cu", "src/cuda/drafts/recurrent_flush_verify.cu"],
}

MUTANTS = [
    *mutants(
        CUDA_RUNTIME,
        CUDA_NEWER_GPU,
        ("cuda: code without a wait is launched early", "code.ptxVersion >= 90", "code.binaryVersion >= 90"),
    ),
    *mutants(
        CUDA_RUNTIME,
        (f"KDA_EMULATOR_DEVICES=2 {EMULATOR}", "DevicesOnCuda.*"),
        ("cuda: a call makes a context on another device", "!= CUDA_SUCCESS || active", "!= CUDA_SUCCESS || true"),
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
        CUDA_DECODE_SNAPSHOTS,
        CUDA_SNAPSHOTS,
        ("cuda snapshots: tokens over others that wait", "four = tokens[t / kTogether % 2];", "four = tokens[0];"),
        (
            "cuda snapshots: tokens that are not there yet",
            "        __syncthreads();  // these tokens",
            "        // these",
        ),
        (
            "cuda snapshots: sums in another order",
            "for (const Products& part : mine) {",
            "for (int i = 3; i >= 0; --i) {\n        const Products& part = mine[i];",
        ),
        ("cuda snapshots: nothing is accepted", "if (!p.accepted.data) {", "if (true) {"),
        ("cuda snapshots: rows that are not wanted", "row = x.rows[j]; row >= 0)", "row = x.rows[j]; true)"),
        ("cuda snapshots: rows behind the pool", "row < p.snapshot_rows ? row : -1", "row"),
    ),
    *mutants(
        CUDA_DECODE_PARAMS,
        CUDA_SNAPSHOTS,
        ("cuda decode: one token before its snapshot", "    if (path == FastPath::kSnapshots) return x;\n", ""),
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
        CUDA_FEW_DRAFTS_WALK,
        CUDA_DRAFTS,
        ("cuda drafts: scores undecayed", "        k[e] *= alpha_i, q[e] *= alpha_i;\n", ""),
        ("cuda drafts: u of the drafts before is added", "which ? sum : -sum;", "sum;"),
    ),
    *mutants(
        CUDA_FEW_DRAFTS,
        CUDA_DRAFTS,
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
            "steps = K() / kQuarters / 16,",
            "steps = kMostK / kQuarters / 16,",
        ),
        ("cuda mma: drafts that are no ancestors", "if (!kCall.fast && !(ancestors >> i & 1)) continue;", ""),
    ),
    *mutants(
        CUDA_CONV_CALL,
        CUDA_FUSED,
        ("cuda front: padding rolls its state", "(s.length > 0 && is_live(s.n))", "s.length > 0"),
        ("cuda front: slots beyond the pool are written", "slot < slots && (", "("),
    ),
    *mutants(
        CUDA_FRONT,
        CUDA_FUSED,
        ("cuda front: skipped snapshots are no padding", "present(a.snapshot_slots) ||", ""),
    ),
    *mutants(
        CUDA_CONV_STEP,
        CUDA_FUSED,
        ("cuda conv: one token leaves the state as it was", "past[2][i] = row.x[i];", "past[2][i];"),
    ),
    *mutants(
        CUDA_CONV_STEP,
        CUDA_CONV_PARTS,
        ("cuda conv: one token takes x alone", "p.rows_of(d).at(n, d)", "p.x.at(n, d)"),
    ),
    *mutants(
        CUDA_CONV,
        CUDA_CONV_PARTS,
        ("cuda conv: heads take x alone", "const kda_tensor& rows = c.rows_of(d);", "const kda_tensor& rows = c.x;"),
        ("cuda conv: four channels of two parts", "four_wide_rows(c.x1) &&", ""),
        ("cuda conv: checkpoints take x alone", "taps.fetch(c.rows_of(d), c.state", "taps.fetch(c.x, c.state"),
    ),
    *mutants(
        CUDA_CONV_BACKWARD,
        CUDA_CONV_PARTS,
        ("cuda conv: backward takes x alone", "const kda_tensor& in = c.rows_of(d);", "const kda_tensor& in = c.x;"),
        ("cuda conv: backward of four channels of two parts", "{&a.x, &a.x1, &a.x2, &a.dy", "{&a.x, &a.x2, &a.dy"),
    ),
    *mutants(
        CUDA_CONV_BACKWARD,
        CUDA_CONV_CASES,
        ("cuda conv: the tokens after a run are left out of dx", "for (; t < b + kPast; ++t)", "for (; t < b; ++t)"),
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
            "cuda norm: sums of warps are read before they are there",
            "  __syncthreads();  // the sums of all warps are in shared memory\n  for (unsigned i",
            "  for (unsigned i",
        ),
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
        ("cuda norm: rows beside NaN are scaled", "usual || mean < kLeastMean ? 1", "mean < kLeastMean ? 1"),
    ),
    *mutants(
        CUDA_NORM_MATH,
        CUDA_NORM_BESIDE,
        ("cuda norm: small numbers beside large ones are lost", "scale < 1 ? kHalfShrink : scale;", "scale;"),
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
    *mutants(
        CUDA_GATE_MATH,
        CUDA_CORNERS,
        ("cuda gate: a power of 0 as any other", "exponent < least && exponent > -INFINITY", "exponent < least"),
    ),
    *mutants(
        CUDA_GATE,
        CUDA_GATE_CASES,
        ("cuda gate: rows of the next block", "min(begin + p.rows, p.M), A_log", "p.M, A_log"),
        ("cuda gate: channels behind the last", "A_log, k < p.K};", "A_log, true};"),
        (
            "cuda gate: sums are read before they are there",
            "  __syncthreads();  // every thread's sums are in shared memory\n",
            "",
        ),
        ("cuda gate: half a tree of sums", "int half = 128; half > 0", "int half = 64; half > 0"),
    ),
]

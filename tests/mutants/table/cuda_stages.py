"""Stages and segments on the GPU."""

from .mutant import EMULATOR, emulated, mutants

CUDA_BACKWARD_RECURRENT = "src/cuda/backward/recurrent.cu"
CUDA_SEGMENT_MAP = "src/cuda/segment/map.cu"
CUDA_SEGMENT_MERGE = "src/cuda/segment/merge.cu"
CUDA_SEGMENT_PIECES = "src/cuda/segment/pieces.h"
CUDA_STAGE_TILES = "src/cuda/stages/tiles.h"
CUDA_HOPPER_WY = "src/cuda/stages/hopper_stages_wy_dqkg.cu"
CUDA_HOPPER_WY_CHUNK = "src/cuda/stages/hopper_wy_chunk.h"
CUDA_STAGE_CUMSUM = "src/cuda/stages/cumsum.cu"
CUDA_STAGE_INTRA = "src/cuda/stages/chunk_intra.cu"
CUDA_STAGE_INVERSE = "src/cuda/stages/chunk_intra_inverse.h"
CUDA_STAGE_SCORES = "src/cuda/stages/chunk_intra_scores.h"
CUDA_STAGE_GROUP = "src/cuda/stages/chunk_intra_group.h"
CUDA_STAGE_SCAN = "src/cuda/stages/delta_h_scan.h"
CUDA_PREFILL_F32 = "src/cuda/stages/prefill_f32.cu"
CUDA_STAGE_BACKWARD = "src/cuda/stages/backward.cu"
CUDA_STAGE_BACKWARD_CALL = "src/cuda/stages/backward_call.h"
CUDA_STAGE_FWD_O = "src/cuda/stages/fwd_o.cu"

CUDA_SEGMENT_MAPS = emulated(
    *(f"SegmentMapOnCuda.IsTheOracle/cuda_segment_{c}" for c in ("recurrent_packed", "recurrent_pieces_packed")),
    "SegmentMapOnCuda.IsTheOracle/cuda_segment_chunk_K64_V64_bound_33",
    "SegmentPromiseOnCuda.WithoutTokensNothingHappens/cuda_segment_recurrent",
)
CUDA_SEGMENT_ROWS = emulated("SegmentMapOnCuda.IsTheOracle/cuda_segment_recurrent_pieces_rows")
CUDA_SEGMENT_COMPANY = emulated("SegmentPromiseOnCuda.CompanyOfPiecesChangesNoBit/cuda_segment_recurrent")
CUDA_SEGMENT_MERGES = emulated(
    *(f"SegmentMergeOnCuda.IsTheOracle/{c}" for c in ("P3_HV2_K60_V100", "P3_HV1_K132_V33", "P2_HV1_K128_V128"))
)
CUDA_STAGES = emulated(*(f"StagesOnCuda.EachIsItsOracle/{c}" for c in ("gva_2", "K128_V128", "gates_slow")))
CUDA_STAGES_PACKED = emulated("StagesOnCuda.EachIsItsOracle/large_packed")
CUDA_WY_PACKED = emulated("StagesOnCuda.SpecialsAreTheirOracle/large_packed")
CUDA_WY_K_FIRST = emulated("StagesOnCuda.SpecialsAreTheirOracle/whole_K_first")
CUDA_WY_IDENTICAL = emulated("StagesOnCuda.SpecialsAreTheirOracle/whole_identical")
CUDA_WY_NAN = (EMULATOR, "WyOnCuda.ReadsNoUpperTriangle:WyOnCuda.KeepsOthersNaNOut")

CUDA_PREFILL_F32_CASES = emulated(
    *(f"PrefillF32OnCuda.IsTheOracle/{c}" for c in ("tokens_65", "gates_wild", "state_K_first", "whole_wild"))
)

UNITS = {
    CUDA_STAGE_INVERSE: [CUDA_STAGE_INTRA],
    CUDA_STAGE_SCORES: [CUDA_STAGE_INTRA],
    CUDA_STAGE_GROUP: [CUDA_STAGE_INTRA],
    CUDA_STAGE_SCAN: ["src/cuda/stages/delta_h.cu"],
    CUDA_SEGMENT_PIECES: [CUDA_SEGMENT_MAP, CUDA_SEGMENT_MERGE],
    CUDA_STAGE_TILES: [CUDA_STAGE_FWD_O],
    CUDA_STAGE_BACKWARD_CALL: [CUDA_STAGE_BACKWARD],
    CUDA_HOPPER_WY_CHUNK: [CUDA_HOPPER_WY],
}

MUTANTS = [
    *mutants(
        CUDA_STAGE_BACKWARD,
        CUDA_STAGES,
        ("cuda_stages_backward: the diagonal of dAkk", "j < i ? -sum", "j <= i ? -sum"),
        ("cuda_stages_backward: dh of the chunk before", "first_row + c, hv);", "first_row + c + 1, hv);"),
        ("cuda_stages_backward: pairs without later rows", "j = i + 1; j < at.rows", "j = i + 2; j < at.rows"),
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
    ),
    *mutants(
        CUDA_HOPPER_WY_CHUNK,
        CUDA_WY_PACKED,
        ("cuda wy: forgotten beta in dk", "dk = fmaf(-E, read, dk);", "dk = fmaf(-E, y, dk);"),
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
        CUDA_SEGMENT_MAP,
        CUDA_SEGMENT_MAPS,
        ("cuda segment: the identity has no end", "i % (K + 1) == 0 ? 1 : 0", "i % (K + 1) == 0 && i ? 1 : 0"),
        ("cuda segment: v of M is not zero", "i < K * K + unsigned{kMaxSize}", "i < K * K"),
    ),
    *mutants(
        CUDA_SEGMENT_MAP,
        CUDA_SEGMENT_ROWS,
        ("cuda segment: pieces of the first row alone", "(p.varlen ? 1 : p.B)", "1"),
    ),
    *mutants(
        CUDA_SEGMENT_PIECES,
        CUDA_SEGMENT_MAPS,
        ("cuda segment: the last piece is left out", "(length + tokens - 1) / tokens : 1", "length / tokens : 1"),
    ),
    *mutants(
        CUDA_SEGMENT_PIECES,
        CUDA_SEGMENT_COMPANY,
        (
            "cuda segment: empty pieces are merged",
            "return length > tokens ? (length + tokens - 1) / tokens : 1;",
            "return length ? length / tokens + 1 : 1;",
        ),
    ),
    *mutants(
        CUDA_SEGMENT_MERGE,
        CUDA_SEGMENT_MERGES,
        ("cuda merge: S is read before it is there", "      __syncthreads();  // S is there\n", ""),
        ("cuda merge: segments out of order", "(call_.reverse ? count_ - 1 - i : i)", "i"),
        ("cuda merge: channels in another order", "k / 16 * 16 + k % 4 * 4 + k % 16 / 4", "k"),
        ("cuda merge: the next slice of the same columns", "if (++slice == kTiles) slice = 0, ++tile;", "++tile;"),
    ),
    *mutants(
        CUDA_BACKWARD_RECURRENT,
        CUDA_SEGMENT_MAPS,
        (
            "cuda backward: d without decay",
            "m_.alpha[k] * (dS_[at] - m_.k[k] * m_.dv[v])",
            "dS_[at] - m_.k[k] * m_.dv[v]",
        ),
    ),
    *mutants(
        CUDA_BACKWARD_RECURRENT,
        (f"KDA_EMULATOR_SMS=1 {EMULATOR}", "OnCuda.FallingLengthsOfKeptStates"),
        ("cuda backward: kept states by the lengths before", "t0 / unsigned{kChunk} + n", "first_h_row(p, n)"),
    ),
    *mutants(
        CUDA_STAGE_INTRA,
        CUDA_STAGES,
        ("cuda intra: rows of T without its columns", "m <= row; ++m) {", "m < row; ++m) {"),
        ("cuda intra: kG is read before it is there", "    __syncthreads();  // kG is there, q is read\n", ""),
    ),
    *mutants(
        CUDA_STAGE_INTRA,
        CUDA_STAGES_PACKED,
        ("cuda intra: tokens of no sequence", "zero_rows(p.w, at, hv, p.K), zero_rows(p.u, at, hv, p.V);", ""),
    ),
    *mutants(
        CUDA_STAGE_INVERSE,
        CUDA_STAGES,
        ("cuda intra: T21 without its sign", "+ upper + j + e] = -sum[e];", "+ upper + j + e] = sum[e];"),
        ("cuda intra: A21 T11 is read before it is there", "  __syncthreads();  // A21 T11 is there\n", ""),
    ),
    *mutants(
        CUDA_STAGE_SCORES,
        CUDA_STAGES,
        ("cuda intra: scores without the largest level", "half < p.chunk; half *= 2", "half < p.chunk / 2; half *= 2"),
        (
            "cuda intra: keys of another key head",
            "tokens_of(p.q, at, hv / p.group,",
            "tokens_of(p.q, at, hv % p.group,",
        ),
        (
            "cuda intra: tiles of a level are read before they are there",
            "      __syncthreads();  // the level's tiles are there\n",
            "",
        ),
    ),
    *mutants(
        CUDA_STAGE_GROUP,
        CUDA_STAGES,
        (
            "cuda intra: kg decays from its own row",
            "store(p.kg, r, scaled(k[r], sum)), add(sum, r);",
            "add(sum, r), store(p.kg, r, scaled(k[r], sum));",
        ),
    ),
    *mutants(
        CUDA_PREFILL_F32,
        CUDA_PREFILL_F32_CASES,
        ("cuda prefill_f32: the state the other way round", "scan.v_first = v_first;\n", "scan.v_first = !v_first;\n"),
    ),
    *mutants(
        CUDA_STAGE_CUMSUM,
        CUDA_STAGES,
        (
            "cuda cumsum: sums of the chunk's first tokens",
            "first < at.rows; first += kAtOnce",
            "first < kAtOnce; first += kAtOnce",
        ),
    ),
    *mutants(
        CUDA_STAGE_SCAN,
        CUDA_STAGES,
        (
            "cuda delta_h: h is one chunk late",
            "const int64_t row = first_row + i;",
            "const int64_t row = first_row + i + 1;",
        ),
        (
            "cuda delta_h: v_new is read before it is there",
            "      __syncthreads();  // v_new is there, S and w are read\n",
            "",
        ),
    ),
]

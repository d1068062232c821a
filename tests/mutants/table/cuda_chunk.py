"""Forward and backward on any GPU."""

from .mutant import EMULATOR, emulated, mutants

CUDA_FORWARD_CHUNK = "src/cuda/prefill/chunk.cu"
CUDA_PREPARE = "src/cuda/prefill/chunk_prepare.h"
CUDA_SCAN = "src/cuda/prefill/chunk_scan.h"
CUDA_IMAGE = "src/cuda/prefill/chunk_image.h"
CUDA_BACKWARD_CHUNK = "src/cuda/backward/chunk.cu"
CUDA_BACKWARD_RECURRENT = "src/cuda/backward/recurrent.cu"
CUDA_REVERSE = "src/cuda/backward/chunk_reverse.h"
CUDA_WIDE = "src/cuda/backward/wide_chunk.h"
CUDA_WIDE_MATH = "src/cuda/backward/wide.h"
CUDA_BETA_H = "src/cuda/backward/beta.h"

CUDA_CHUNK = emulated(
    "ForwardChunkOnCuda.IsTheOracle/bound_33",
    "ForwardChunkOnCuda.IsTheOracle/bound_packed",
    "ForwardOnCuda.IsTheOracle/cuda_prefill_chunk_state_K_first",
)
CUDA_RESUMED = emulated("ResumeOnCuda.IsTheOracle/packed")
CUDA_BACKWARD = emulated(
    *(
        f"BackwardOnCuda.IsTheOracle/cuda_backward_chunk_{c}"
        for c in ("bound_33", "wild", "cpu_gva_2", "bound_short_packed")
    )
)
CUDA_BACKWARD_UNUSUAL = emulated(
    *(f"BackwardOnCuda.IsTheOracle/cuda_backward_chunk_{c}" for c in ("edges_softplus", "deep_bound"))
)
CUDA_BACKWARD_SIZES = emulated("BackwardPromiseOnCuda.ValuesOfAnySize/cuda_backward_chunk")
CUDA_LAYOUTS = emulated("LayoutsOnCuda.ForwardAndWhatItSaves/bf16")
CUDA_ENDS = (EMULATOR, "RangeOnCuda.RowsUpToTheEndOfF32")
CUDA_QUERIES = emulated("SegmentPromiseOnCuda.QueriesOfAnySize/cuda_segment_chunk")
CUDA_BETA = emulated("BackwardPromiseOnCuda.SomeBetasAreZero/cuda_backward_chunk")
CUDA_RECURRENT_BACKWARD = emulated(
    *(f"BackwardOnCuda.IsTheOracle/cuda_backward_recurrent_{c}" for c in ("packed", "gva_2", "softplus_bias"))
)

UNITS = {
    CUDA_PREPARE: [CUDA_FORWARD_CHUNK],
    CUDA_SCAN: [CUDA_FORWARD_CHUNK],
    CUDA_IMAGE: [CUDA_FORWARD_CHUNK],
    CUDA_REVERSE: [CUDA_BACKWARD_CHUNK],
    CUDA_WIDE: [CUDA_BACKWARD_CHUNK],
    CUDA_WIDE_MATH: [CUDA_BACKWARD_CHUNK],
    CUDA_BETA_H: [CUDA_BACKWARD_CHUNK],
}

MUTANTS = [
    *mutants(
        CUDA_SCAN,
        CUDA_LAYOUTS,
        ("cuda_prefill_chunk: h has the layout of the other states", "of_h ? h_v_first : v_first", "v_first"),
    ),
    *mutants(
        CUDA_IMAGE,
        CUDA_RESUMED,
        (
            "cuda_prefill_chunk: what is behind an opening begins a token early",
            "(in_opening(c) ? first() * kRows : begun)",
            "(in_opening(c) ? first() * kRows : begun + 1)",
        ),
    ),
    *mutants(
        CUDA_SCAN,
        CUDA_RESUMED,
        (
            "cuda_prefill_chunk: an opening is scanned with what is behind it",
            "stop = cuts.in_opening(c) ? min(end, Cuts::kBoth) : end;",
            "stop = end;",
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
            "cuda_prefill_chunk: warps do not wait for each other's copies",
            "    __syncthreads();  // the image is in shared memory",
            "    // the image is in shared memory",
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
    ),
    *mutants(
        CUDA_WIDE,
        CUDA_BACKWARD,
        ("cuda backward: the diagonal of B", "8 * x + 2 * j() + e % 2 + of_B >", "8 * x + 2 * j() + e % 2 >"),
        ("cuda backward: no projection through the norm", "if (x_.qk_l2norm) sum_dots(), apply_norms();", ""),
        ("cuda backward: value heads are not added", "if (!first) x[0] += kept.x, x[1]", "if (!first) x[1]"),
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
    ),
    *mutants(
        CUDA_BACKWARD_CHUNK,
        CUDA_ENDS,
        ("cuda backward: rows that round to infinity", "within_bf16(value_of(", "(value_of("),
    ),
    *mutants(
        CUDA_PREPARE,
        CUDA_QUERIES,
        ("cuda_prefill_chunk: queries whose squares overflow", "huge ? min(own + 70, 120) : own", "own"),
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
    ),
]

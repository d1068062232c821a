"""Forward on Hopper."""

from .mutant import EMULATOR, emulated, mutants

CUDA_HOPPER_FORWARD = "src/cuda/engine/hopper_prefill_pairs.cu"
CUDA_HOPPER_SEGMENTS = "src/cuda/engine/hopper_prefill_segments.cu"
CUDA_HOPPER_PRODUCER = "src/cuda/engine/producer.h"
CUDA_HOPPER_CONSUMER = "src/cuda/engine/consumer.h"
CUDA_HOPPER_MAPS = "src/cuda/engine/segments.h"
CUDA_HOPPER_MAP_CONSUMER = "src/cuda/engine/map_consumer.h"
CUDA_HOPPER_SEQUENCE_MAPS = "src/cuda/engine/maps.h"
CUDA_HOPPER_REVERSE = "src/cuda/engine/reverse.cu"
CUDA_HOPPER_PAIR = "src/cuda/engine/pair.h"
CUDA_HOPPER_UNITS = "src/cuda/engine/column_scale.h"
CUDA_HOPPER_OUTPUTS = "src/cuda/engine/outputs.h"
CUDA_HOPPER_THREAD = "src/cuda/engine/consumer_thread.h"
CUDA_HOPPER_TILES = "src/cuda/engine/tiles.h"
CUDA_HOPPER_STATES = "src/cuda/engine/state_io.h"
CUDA_HOPPER_SCHEDULE = "src/cuda/engine/schedule.h"

CUDA_FORWARD_HOPPER = emulated("ForwardChunkOnCuda.IsTheOracle/bound_33", "ForwardChunkOnCuda.IsTheOracle/bound_packed")
CUDA_FORWARD_NARROW = emulated(
    *(f"ForwardChunkOnCuda.IsTheOracle/K64_V64_{c}" for c in ("bound_33", "softplus_17", "bound_short_packed"))
)
CUDA_SEGMENTS_NARROW = emulated(*(f"ForwardChunkOnCuda.IsTheOracle/K64_V64_log_{c}_long" for c in ("none", "slow")))
CUDA_FORWARD_PACKED = emulated("ForwardChunkPromise.CompanyChangesNoBit/bound_heads")
CUDA_SEGMENTS_HOPPER = emulated("ForwardChunkOnCuda.IsTheOracle/bound_long")
CUDA_RESUMED = emulated("ResumeOnCuda.IsTheOracle/packed")
CUDA_RESUMED_SHARED = emulated("ResumeOnCuda.IsTheOracle/shared")
CUDA_RESUMED_SEGMENTS = emulated("ResumeOnCuda.IsTheOracle/rows")
CUDA_SEQUENCE_MAPS = emulated("SegmentMapOnCuda.IsTheOracle/cuda_segment_hopper_K64_V64_bound_33")
CUDA_SEQUENCE_MAPS_NAN = emulated("SegmentPromiseOnCuda.NaNStaysInItsSequenceAndHead/cuda_segment_hopper")

UNITS = {
    CUDA_HOPPER_PRODUCER: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_CONSUMER: [CUDA_HOPPER_FORWARD],
    CUDA_HOPPER_MAPS: [CUDA_HOPPER_SEGMENTS],
    CUDA_HOPPER_MAP_CONSUMER: [CUDA_HOPPER_SEGMENTS],
    CUDA_HOPPER_SEQUENCE_MAPS: ["src/cuda/engine/maps.cu", CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_PAIR: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_UNITS: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_OUTPUTS: [CUDA_HOPPER_FORWARD],
    CUDA_HOPPER_THREAD: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_TILES: [CUDA_HOPPER_FORWARD],
    "src/cuda/call/tma.h": [CUDA_HOPPER_FORWARD],
    CUDA_HOPPER_STATES: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_SCHEDULE: [CUDA_HOPPER_FORWARD, "src/cuda/engine/schedule.cu"],
}

MUTANTS = [
    *mutants(
        CUDA_HOPPER_PAIR,
        CUDA_RESUMED,
        (
            "Hopper's forward: a request that resumes has no opening",
            "const unsigned opening = begun_ ? unsigned{kChunk} - begun_ : 0;",
            "const unsigned opening = 0;",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_RESUMED,
        ("Hopper's forward: checkpoints count from behind the opening", "n, t0 + t - begin);", "n, t);"),
    ),
    *mutants(
        CUDA_HOPPER_SCHEDULE,
        CUDA_RESUMED_SHARED,
        (
            "Hopper's forward: heads have no place for an opening",
            "(tokens + begun + kChunk - 1) / kChunk",
            "(tokens + kChunk - 1) / kChunk",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MAPS,
        CUDA_RESUMED_SEGMENTS,
        (
            "segments: outputs behind an opening go to its rows",
            "begun = 0, remember();",
            "begun = 0;",
        ),
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
            "Hopper's forward: a stage is written to while it is read",
            "    if (role(turn) == WarpRole::kCopy) ring().wait_empty(number);\n",
            "",
        ),
        ("Hopper's forward: T is sent before all lanes have written it", "      __syncwarp();  // T is there\n", ""),
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
    ),
    *mutants(
        CUDA_HOPPER_MAPS,
        CUDA_SEGMENTS_HOPPER,
        (
            "segments: a map comes to where one is read",
            "      ptx::sync_threads(NamedBarrier::kConsumer, kGroup);  // all threads have read the map\n",
            "",
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
        CUDA_HOPPER_THREAD,
        CUDA_FORWARD_NARROW,
        (
            "Hopper's forward, V = 64: states are stored beside their columns",
            "return first_column() < static_cast<unsigned>(call_.p.V);",
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
        CUDA_FORWARD_PACKED,
        (
            "Hopper's forward: a stage is released by a lane that has not waited",
            "    __syncwarp();  // the lane that stored, whichever was elected, has waited\n",
            "",
        ),
    ),
    *mutants(
        "src/cuda/call/tma.h",
        (EMULATOR, "StridesOnCuda/forward.FirstDimensionsMayGoBackwards"),
        ("Hopper's forward: TMA with a stride below zero", "t.stride[i] >= least && ", ""),
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
        CUDA_HOPPER_MAP_CONSUMER,
        CUDA_SEGMENTS_NARROW,
        (
            "segments, V = 64: M begins from columns of the other half",
            "Base::column(i / 2 % 2) + columns_before() ==",
            "Base::column(i / 2 % 2) ==",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MAPS,
        CUDA_SEGMENTS_NARROW,
        (
            "segments, V = 64: warps that leave chunks out release the last ones, too",
            "leave_out(chunks(), kHeld)",
            "leave_out(chunks(), 0)",
        ),
    ),
    *mutants(
        CUDA_HOPPER_SEQUENCE_MAPS,
        CUDA_SEQUENCE_MAPS,
        ("Hopper's maps: M in the other half's columns", "+ Base::columns_before(), row", ", row"),
    ),
    *mutants(
        CUDA_HOPPER_SEQUENCE_MAPS,
        CUDA_SEQUENCE_MAPS_NAN,
        ("Hopper's maps: v of the next sequence counts", "if (kValues && (part > 0) != kReversed) {", "if (false) {"),
    ),
]

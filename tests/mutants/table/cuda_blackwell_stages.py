"""Stages on Blackwell: the scans, and the outputs of the forward."""

from .mutant import EMULATOR, mutants

TILES = "src/cuda/blackwell_stages/tiles.h"
SCAN = "src/cuda/blackwell_stages/scan.h"
DELTA_H = "src/cuda/blackwell_stages/delta_h.cu"
BWD_DELTA_H = "src/cuda/blackwell_stages/bwd_delta_h.cu"
FWD_O = "src/cuda/blackwell_stages/fwd_o.cu"

BLACKWELL = f"KDA_EMULATOR_ARCH=100 {EMULATOR}"
TESTS = (
    BLACKWELL,
    ":".join(f"StagesOnBlackwell.{name}" for name in ("AreTheForward", "ReadNoUpperTriangle", "KeepOthersNaNOut")),
)
ORACLE = (BLACKWELL, "StagesOnBlackwell.ScansAreTheirOracles")

UNITS = {TILES: [DELTA_H, FWD_O], SCAN: [DELTA_H, BWD_DELTA_H]}

MUTANTS = [
    *mutants(
        TILES,
        TESTS,
        (
            "Blackwell's stages: threads do not wait for their stores to tensor memory",
            "{ ptx::wait_for_tmem_stores(), ptx::fence_tmem_before_sync(); }",
            "{ ptx::fence_tmem_before_sync(); }",
        ),
        (
            "Blackwell's stages: no fence behind a barrier",
            "void after_sync() { ptx::fence_tmem_after_sync(); }",
            "void after_sync() {}",
        ),
        (
            "Blackwell's stages: no fence behind products",
            "phase_++ % 2);\n    ptx::fence_tmem_after_sync();\n",
            "phase_++ % 2);\n",
        ),
        (
            "Blackwell's stages: only the last row of the tail is cleared",
            "rows + i % (kChunk - rows), piece",
            "kChunk - 1, piece",
        ),
    ),
    *mutants(
        FWD_O,
        TESTS,
        ("Blackwell's fwd_o: tiles are not waited for", "    ptx::wait_barrier(base_ + OutputAt::full, 0);\n", ""),
        (
            "Blackwell's fwd_o: no fence in front of products",
            "    ptx::fence_shared_for_async();  // products read what was written\n",
            "",
        ),
        (
            "Blackwell's fwd_o: products begin before operands are there",
            "    __syncthreads();                // operands are there\n",
            "",
        ),
        ("Blackwell's fwd_o: o is stored before it is there", "    __syncthreads();  // o is there\n", ""),
        ("Blackwell's fwd_o: what is above the diagonal", "8 * piece + 7 <= row", "8 * piece <= row"),
        (
            "Blackwell's fwd_o: v_new behind a chunk",
            "if (at_.rows < static_cast<int>(kChunk)) clear_tail(",
            "if (false) clear_tail(",
        ),
    ),
    *mutants(
        SCAN,
        TESTS,
        (
            "Blackwell's delta_h: S is overwritten while it leaves for h",
            "      if (Tensors::is_issuer()) ptx::wait_for_bulk_reads<0>();\n",
            "",
        ),
        (
            "Blackwell's delta_h: products begin before S is there",
            "      __syncthreads();  // S and ell are there, and tails are cleared; the stage before is read\n",
            "",
        ),
        (
            "Blackwell's delta_h: products begin before v_new is there",
            "      __syncthreads();  // v_new is there, and S in tensor memory; the copy of S has left for h\n",
            "",
        ),
        (
            "Blackwell's delta_h: no fence behind v_new",
            "    ptx::fence_shared_for_async();  // products read it\n",
            "",
        ),
        (
            "Blackwell's delta_h: kg behind a chunk",
            "if (rows(i) < kChunk) clear_tail(stage(i) + KDA_SCAN_STAGE(right)",
            "if (false) clear_tail(stage(i) + KDA_SCAN_STAGE(right)",
        ),
    ),
    *mutants(
        SCAN,
        ORACLE,
        ("Blackwell's scans: tokens of no sequence keep what they had", "  if (at.tile > 0) return;\n", "  return;\n"),
    ),
]

// F4: v_new = u - w S, then S <- Diag(ell) S + kg^T v_new, chunk after chunk. Columns of a state are independent: a
// block has kColumns of those of a value head, and all chunks of a sequence. A warp has rows 16 w .. (and 128 +
// 16 w ..) of S in registers, in f32; a copy, rounded to E, is in shared memory for the products and for h.
//
// A chunk:
//   1 wait for w, u, kg; ask for the next chunk's, if there is room for two       barrier: all is there, and S
//   2 h from the copy of S; v_new = u - w S in place of u                          barrier: v_new is there, S is read
//   3 v_new to memory; S in registers; its copy                                    barrier: v_new and kg are read
//
// Shared memory at K = 128 in bf16: S 18, w 17, kg 17, u 9 KiB, the last three twice.
//
// The scan that also makes outputs is in delta_h_outputs.h.
#pragma once
#include "cuda/stages/delta_h_outputs.h"
#include "cuda/stages/delta_h_scan.h"

namespace kda::cuda::stages {

template <class E, int kTiles, int kColumns, int kSize, bool kOutputs>
__global__ void __launch_bounds__(kOutputs ? kThreads : block_of<E, kTiles>, sizeof(E) == 2 ? 2 : 1)
    scan_kernel(const __grid_constant__ ScanCall call, const Blocks blocks, const __grid_constant__ Memory memory) {
  extern __shared__ float4 dynamic[];
  wait_for_stream();
  const Place at(blocks);
  if (at.n >= blocks.rows) return;  // the grid's last rows
  auto* shared = reinterpret_cast<unsigned char*>(dynamic);
  if constexpr (kOutputs) ScanWithOutputs<E, kTiles, kColumns, kSize>(call, memory, at, shared).run();
  else Scan<E, kTiles, kColumns, kSize>(call, memory, at, shared).run();
}

}  // namespace kda::cuda::stages

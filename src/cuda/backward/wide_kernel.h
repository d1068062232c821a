// The wide kernel of backward for sm_80 and newer: the mathematics of wide.h with products by mma.sync and copies by
// cp.async. Chunks do not depend on each other. dbeta_i = (dv_i . v_new_i) / beta_i^2 comes from the diagonal of
// dv v_new^T (where beta is about 0: beta.h).
//
// A block, with a warp for every 16 channels, goes through chunks. The value heads of a q/k head follow one another,
// and their dq and dk are added in that order. Products with states take 16 columns of values (a piece) at a time,
// with three pieces in shared memory. After the products, dA, B, the gates' inputs, and gradients on their way out
// take their place.
#pragma once
#include "cuda/backward/wide_chunk.h"

namespace kda::cuda {

// A value head of a chunk. Its dq and dk stay in registers.
template <int kK, bool kBounded>
__device__ void run_head(WideChunk<kK, kBounded>& chunk, const Tokens& x, const WidePlaces& places, unsigned hv,
                         unsigned h_row, bool unusual, bool first, float* sums) {
  const ChosenGate<kBounded> gate(x, x.A_log ? *reinterpret_cast<const float*>(x.A_log + hv * 4) : 0.0f, unusual);
  float bias[2] = {};
  if (x.bias)
    for (int hh = 0; hh < 2; ++hh)
      bias[hh] = *reinterpret_cast<const float*>(x.bias + hv * x.bias_stride + chunk.channel(hh) * 4);
  chunk.take_beta(hv);
  chunk.multiply_states(hv, h_row);
  if (first) chunk.normalise();
  chunk.write_scores(hv);
  chunk.stage_gates(hv);  // after its barriers dA, B and norms are there, too
  chunk.decay(gate, bias);
  chunk.multiply_pairs();
  if (places.gate) chunk.write_gates(gate, bias, hv, sums);
  __syncthreads();  // all reads of dA, B and what is staged are done
}

template <int kK, bool kBounded>
__global__ void __launch_bounds__(WideMemory<kK>::kThreads, 1)
    wide_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                const __grid_constant__ WidePlaces places, const __grid_constant__ WideRows rows, const bool unusual) {
  extern __shared__ float4 dynamic[];
  using M = WideMemory<kK>;
  wait_for_stream();
  const auto group = static_cast<unsigned>(p.group());
  const auto HV = static_cast<unsigned>(p.HV);
  if (!kBounded && unusual) {  // there is seldom anything to do
    bool any = false;
    for (unsigned h = threadIdx.x % 32; h < rows.heads; h += 32) any |= !is_usual(x, h, group);
    if (!__any_sync(kAll, any)) return;
  }
  for (unsigned item = blockIdx.x; item < rows.rows * rows.heads; item += gridDim.x) {
    const unsigned row = rows.by_heads.quotient(item), h = item - row * rows.heads;
    if (is_usual(x, h, group) == (!kBounded && unusual)) continue;
    unsigned h_row = 0;
    const ChunkPlace at = wide_chunk_at(p, rows, row, h_row);
    float* sums = places.sums ? places.sums + (row * uint64_t{HV} + h * group) * (kK + M::kWarps) : nullptr;
    if (!at.rows) {
      for (unsigned i = threadIdx.x; sums && i < group * (kK + M::kWarps); i += M::kThreads) sums[i] = 0;
      continue;
    }
    WideChunk<kK, kBounded> chunk(x, places, ptx::shared_address(dynamic), at, h, static_cast<int>(p.V));
    __syncthreads();  // all reads of the item before are done
    chunk.ask_keys();
    for (unsigned i = 0; i < group; ++i) {
      run_head(chunk, x, places, h * group + i, h_row, unusual, i == 0, sums ? sums + i * (kK + M::kWarps) : nullptr);
      if (group > 1)
        chunk.add_heads(reinterpret_cast<float4*>(places.scratch) +
                            blockIdx.x * uint64_t{2 * kChunk / 8 * M::kThreads} + threadIdx.x,
                        i == 0, i + 1 == group);
    }
    if (places.dq.data || places.dk.data) chunk.write_keys();
  }
}

}  // namespace kda::cuda

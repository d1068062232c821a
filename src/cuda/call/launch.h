// How kernels are launched, and how a block finds its work.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "contract/problem.h"
#include "cuda/call/launch_kernel.h"
#include "cuda/call/launch_plans.h"
#include "cuda/ptx/sm80.h"
#include "cuda/runtime.h"

namespace kda::cuda {

// n / divisor for n < 2^31 without a division: the high half of a product and a shift.
struct Divisor {
  unsigned divisor, magic, shift;

  explicit Divisor(int64_t d) : divisor(static_cast<unsigned>(d)), shift(0) {
    while ((int64_t{1} << shift) < d) ++shift;
    magic = static_cast<unsigned>(((((uint64_t{1} << shift) - divisor) << 32) / divisor) + 1);
  }
  __device__ unsigned quotient(unsigned n) const { return (__umulhi(n, magic) + n) >> shift; }
};

// Which blocks give hints before wait_for_stream().
struct Hints {
  unsigned blocks = 0;  // the first ones give hints,
  unsigned states = 0;  // and so many of them also for states
};

// The blocks of a call: x walks over the tiles of a request's heads, y and z over requests (of all layers).
struct Blocks {
  static constexpr int64_t kMaxY = 65535;
  Divisor tiles, group;
  unsigned rows;  // requests
  Hints hints;

  Blocks(const Dims& d, int64_t tiles, Hints hints = {})
      : tiles(tiles),
        group(d.group()),
        rows(static_cast<unsigned>(std::max<int64_t>(d.N + d.varlen, 1))),
        hints(hints) {}

  static dim3 grid(const Dims& d, int64_t tiles, int64_t layers) {
    const int64_t all = layers * (d.N + d.varlen), y = std::min(all, kMaxY);
    return {static_cast<unsigned>(tiles * d.HV), static_cast<unsigned>(y), static_cast<unsigned>((all + y - 1) / y)};
  }
};
struct LayeredBlocks : Blocks {
  Divisor layer{rows};
  using Blocks::Blocks;
};

// One block of the grid. The grid's last rows may belong to no request or, with layers, to no layer.
struct Place {
  unsigned tile, hv, h, n, layer = 0;

  __device__ explicit Place(const Blocks& blocks) {
    hv = blocks.tiles.quotient(blockIdx.x), tile = blockIdx.x - hv * blocks.tiles.divisor;
    h = blocks.group.quotient(hv);
    n = blockIdx.y + blockIdx.z * static_cast<unsigned>(Blocks::kMaxY);
  }
  __device__ explicit Place(const LayeredBlocks& blocks) : Place(static_cast<const Blocks&>(blocks)) {
    layer = blocks.layer.quotient(n), n -= layer * blocks.rows;
  }

  // Is this block one of the first `first` ones? In later blocks, hints would only delay the work.
  __device__ static bool is_among(unsigned first) {
    return blockIdx.z == 0 && blockIdx.y * gridDim.x + blockIdx.x < first;
  }
};

// Why the call has more blocks than a grid holds, or nullptr.
inline const char* grid_why_not(const Dims& d, int64_t tiles, int64_t layers) {
  const int64_t most = (int64_t{1} << 31) - 1;
  return tiles * d.HV <= most && layers * (d.N + d.varlen) <= most ? nullptr : "takes at most 2^31 blocks";
}

// Kernels start while the one before them in the stream still runs, and wait for its results here, before they read or
// write memory. Addresses that need nothing from memory are computed, and hints given, while they wait.
__device__ inline void wait_for_stream() { ptx::wait_for_kernel_in_front(); }
// Lets the next kernel in the stream start once every block has come here or is done. A block comes here when it has
// requested its part of the state: blocks that start earlier only take issue slots and memory from those they wait
// for.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// A hint, also before wait_for_stream(): it brings memory to the L2 cache, where what the previous kernel still
// writes reaches it.
__device__ inline void prefetch(const void* at) { ptx::prefetch(at); }
// The same for neighbouring memory, but not for so much of it that most would be for other blocks.
__device__ inline void prefetch(const void* at, uint64_t bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes > 128 * 1024) return;
  const uint64_t first = reinterpret_cast<uint64_t>(at) & ~15ull, end = reinterpret_cast<uint64_t>(at) + bytes;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first),
               "r"((static_cast<unsigned>(end - first) + 15) & ~15u));
#endif
}
// Which blocks give hints: about as many as the GPU runs at a time. Hints for states come from the first blocks;
// `tiles` blocks share a state.
inline Hints hints_of(const Dims& d, int64_t layers, int state_dtype, int64_t tiles, int blocks_of_SM,
                      HintedStates states, int device_id) {
  const int64_t SMs = multiprocessors(device_id), state = d.K * d.V * dtype_size(state_dtype);
  const auto blocks = static_cast<unsigned>(blocks_of_SM * SMs);
  if (layers * d.N * d.HV * state <= states.all * 1024 * SMs) return {blocks, blocks};
  return {blocks, static_cast<unsigned>(states.some * 1024 * SMs * tiles / state)};
}
// The likely value of an index, also before wait_for_stream().
__device__ inline int32_t peek(const int32_t* at) { return ptx::peek(at); }

}  // namespace kda::cuda

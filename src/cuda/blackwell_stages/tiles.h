// What the stages on Blackwell share: tiles in shared memory as operands of tcgen05, and tensor memory.
//
// A tile has lines of 128 bytes: 64 channels or columns of a token or of a line of a state, swizzled (k128). Longer
// lines are in parts, one behind the other. A block has one warpgroup; one of its threads begins products.
#pragma once
#include "cuda/backward/hopper_memory.h"
#include "cuda/ptx/sm100.h"
#include "cuda/stages/chunks.h"
#include "cuda/stages/tiles.h"

namespace kda::cuda::sm100 {

using engine::kGroup, engine::kRowBytes, engine::kSize, engine::kStateHalf, engine::kWideHalf, engine::shared_memory,
    engine::swizzled;
using engine::WideHalf, engine::WideState, engine::WideTile;
using stages::bf16, stages::ChunkAt, stages::Chunks, stages::Rows;

constexpr unsigned kPartSize = kRowBytes / sizeof(bf16);  // channels or columns of a part
constexpr unsigned kStepSize = 16;                        // numbers of the contraction that a product takes

inline bool is_stage_size(int64_t n) { return n == kPartSize || n == 2 * kPartSize; }  // of K and V

// An operand of products: a tile.
struct Operand {
  uint64_t first;
  unsigned part;  // bytes from a part to the next
  bool transposed;

  // Lines of the tile are rows of the operand.
  __device__ static Operand of_rows(unsigned tile, unsigned part) {
    return {ptx::operand_at(tile, 16, 1024, ptx::Swizzling::k128), part, false};
  }
  // Lines of the tile are numbers of the contraction.
  __device__ static Operand of_lines(unsigned tile, unsigned part) {
    return {ptx::operand_at(tile, part, 1024, ptx::Swizzling::k128), part, true};
  }
  // Numbers kStepSize k and on of the contraction.
  __device__ uint64_t at(unsigned k) const {
    return ptx::further(first, transposed ? k * kStepSize * kRowBytes : k / 4 * part + k % 4 * 32);
  }
};

// The block's tensor memory and its products, as a thread sees them.
class Tensors {
 public:
  // Allocates columns. `address` and the mbarrier `done` are places in shared memory. All threads call it; behind it
  // mbarriers are there that a thread has initialised before.
  __device__ Tensors(unsigned address, unsigned done, unsigned columns) : done_(done), columns_(columns) {
    if (is_issuer()) ptx::tmem_alloc(address, columns), ptx::tmem_relinquish();
    if (threadIdx.x == 0) ptx::init_barrier(done, 1), ptx::fence_barriers();
    __syncthreads();  // the address and mbarriers are there
    first_ = ptx::load_shared(address);
  }
  __device__ ~Tensors() {
    before_sync();
    __syncthreads();  // all threads have read what they need
    after_sync();
    if (is_issuer()) ptx::tmem_dealloc(first_, columns_);
  }
  Tensors(const Tensors&) = delete;

  __device__ static bool is_issuer() { return __shfl_sync(kAll, threadIdx.x / 32, 0) == 0; }  // by warps
  // 16 lanes of the calling warp, the lower or upper half of its 32, from a column on.
  __device__ unsigned own(unsigned column, unsigned half = 0) const {
    return ptx::tmem_at(first_, threadIdx.x / 32 * 32 + 16 * half, column);
  }

  // Begins d += or = a b, or minus that, in columns d and on. By one thread, which begins all products.
  __device__ void multiply(unsigned d, const Operand& a, const Operand& b, unsigned M, unsigned N, unsigned steps,
                           bool accumulate, bool negated = false) const {
    const unsigned shape = ptx::umma_of<bf16>(
        {.M = M, .N = N, .transposed_a = a.transposed, .transposed_b = b.transposed, .negated_a = negated});
    for (unsigned k = 0; k < steps; ++k) ptx::umma_f16(first_ + d, a.at(k), b.at(k), shape, accumulate || k > 0);
  }
  // Behind the last of them that are waited for together.
  __device__ void commit() const { ptx::commit_umma(done_); }
  // Waits until all products that were committed are done.
  __device__ void wait() {
    ptx::wait_barrier(done_, phase_++ % 2);
    ptx::fence_tmem_after_sync();
  }
  // To be called in front of a barrier behind which products read what this thread has stored, and overwrite what it
  // has loaded; and behind that barrier.
  __device__ static void before_sync() { ptx::wait_for_tmem_stores(), ptx::fence_tmem_before_sync(); }
  __device__ static void after_sync() { ptx::fence_tmem_after_sync(); }

 private:
  const unsigned done_, columns_;
  unsigned first_;
  unsigned phase_ = 0;  // how often products have been waited for
};

// Puts a warp's 16 rows of 64 columns of accumulators (fragments) into a tile of 16-bit numbers: row `row` and on.
__device__ inline void put_rows(unsigned tile, unsigned row, const float (&x)[32]) {
  const unsigned lane = threadIdx.x % 32, own = row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (unsigned n = 0; n < 8; n += 2) {
    unsigned packed[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) packed[i] = ptx::pack<bf16>(x[4 * n + 2 * i], x[4 * n + 2 * i + 1]);
    ptx::store_matrices(tile + swizzled(own, n + lane / 16, 0), packed);
  }
}
// Clears rows behind a chunk's end: they came with data of other tokens, and 0 times NaN is NaN.
__device__ inline void clear_tail(unsigned tile, unsigned rows, unsigned channels) {
  for (unsigned i = threadIdx.x; i < (kChunk - rows) * (channels / 8); i += kGroup) {
    const unsigned row = rows + i % (kChunk - rows), piece = i / (kChunk - rows);
    ptx::store_shared4(tile + swizzled(row, piece, kWideHalf), make_uint4(0, 0, 0, 0));
  }
}
// Stores a tile of tokens to rows from `to` on; only `rows` of them are real.
__device__ inline void store_rows(unsigned tile, char* to, int64_t token, unsigned rows, unsigned columns) {
  const unsigned pieces = columns / 8;
  for (unsigned i = threadIdx.x; i < rows * pieces; i += kGroup)
    *reinterpret_cast<uint4*>(to + i / pieces * token + i % pieces * 16) =
        ptx::load_shared4(tile + swizzled(i / pieces, i % pieces, kWideHalf));
}

}  // namespace kda::cuda::sm100

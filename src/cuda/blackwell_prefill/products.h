// The products of a consumer on Blackwell: what is where in tensor memory, and who waits for whom.
//
// All products have 64 rows, the CTA's value columns. Row 16 w + i is in lane 32 w + i of tensor memory, so that warp w
// of the consumer has rows 16 w .. 16 w + 15, and the registers of its threads are those of Hopper's accumulators and
// left operands. Sums are f32, left operands f16, two of which share a column of tensor memory.
//
// One thread issues products, when all threads have stored their part of the left operand. An mbarrier says that they
// are done.
#pragma once
#include "cuda/hopper_prefill/shared_memory.h"
#include "cuda/ptx/sm100.h"

namespace kda::cuda::sm100 {

using sm90::kGroup, sm90::kHalf, sm90::kRowBytes, sm90::kRows, sm90::kSize, sm90::Stage;

// Columns of tensor memory.
struct TensorMemory {
  static constexpr unsigned state = 0;                                      // S^T, f32: 128 channels
  static constexpr unsigned predictions = state + kSize;                    // S^T kG^T, f32: 32 tokens
  static constexpr unsigned outputs = predictions + kRows;                  // S^T qG^T, then O^T, f32: 32 tokens
  static constexpr unsigned corrections = outputs + kRows;                  // U^T, f32: 32 tokens
  static constexpr unsigned state_operand = corrections + kRows;            // S^T, f16: 128 channels
  static constexpr unsigned right_sides = state_operand + kSize / 2;        // R^T, f16: 32 tokens
  static constexpr unsigned corrections_operand = right_sides + kRows / 2;  // U^T, f16: 32 tokens
  static constexpr unsigned end = corrections_operand + kRows / 2;
  static constexpr unsigned columns = 512;  // that are allocated: a power of two
};
static_assert(TensorMemory::end <= TensorMemory::columns);

// The products, as a thread of the consumer sees them.
class Products {
 public:
  // Allocates tensor memory; all threads of the consumer call it.
  __device__ explicit Products(unsigned memory) : memory_(memory) {
    if (is_issuer()) ptx::tmem_alloc(memory + kAddress, TensorMemory::columns), ptx::tmem_relinquish();
    if (threadIdx.x == 0) ptx::init_barrier(memory + kDone, 1), ptx::fence_barriers();
    sync();
    tensors_ = ptx::load_shared(memory + kAddress);
    own_ = ptx::tmem_at(tensors_, threadIdx.x / 32 % 4 * 32, 0);
  }
  __device__ ~Products() {
    before_sync(), sync(), after_sync();  // all threads have read what they need
    if (is_issuer()) ptx::tmem_dealloc(tensors_, TensorMemory::columns);
  }
  Products(const Products&) = delete;

  // Waits until the products that were started last are done.
  __device__ __forceinline__ void wait() {
    ptx::wait_barrier(memory_ + kDone, phase_++ % 2);
    ptx::fence_tmem_after_sync();
  }
  // To be called in front of a barrier behind which products read what this thread has stored, and overwrite what it
  // has loaded; and behind that barrier.
  __device__ void before_sync() const { ptx::wait_for_tmem_stores(), ptx::fence_tmem_before_sync(); }
  __device__ void after_sync() const { ptx::fence_tmem_after_sync(); }

  // Stores the state, in f16, as the operand of its products.
  __device__ __forceinline__ void store_state_operand(const unsigned (&left)[8][4]) const {
    unsigned all[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) all[i] = left[i / 4][i % 4];
    ptx::store_tmem_operands(own_ + TensorMemory::state_operand, all);
  }
  // S^T [kG; qG]^T, behind a barrier.
  __device__ __forceinline__ void start_state_products(unsigned stage) const {
    if (!is_issuer()) return;
    const uint64_t kG = ptx::operand_at(stage + Stage::k, 16, 1024, ptx::Swizzling::k128);
    if (!ptx::elect()) return;
#pragma unroll
    for (int k = 0; k < 8; ++k)
      multiply<2 * kRows>(TensorMemory::predictions, TensorMemory::state_operand + 8 * k,
                          ptx::further(kG, k / 4 * kHalf + k % 4 * 32), k > 0);
    ptx::commit_umma(memory_ + kDone);
  }
  __device__ __forceinline__ void store_state(const float (&S)[64]) const {
    ptx::store_tmem_fragments(own_ + TensorMemory::state, S);
  }
  __device__ __forceinline__ void load_state(float (&S)[64]) const { load(TensorMemory::state, S); }
  __device__ __forceinline__ void load_predictions(float (&x)[16]) const { load(TensorMemory::predictions, x); }
  __device__ __forceinline__ void load_corrections(float (&x)[16]) const { load(TensorMemory::corrections, x); }
  __device__ __forceinline__ void load_outputs(float (&x)[16]) const { load(TensorMemory::outputs, x); }

  // U^T = R^T T^T
  __device__ __forceinline__ void start_corrections(unsigned stage, const unsigned (&R)[2][4]) const {
    store(TensorMemory::right_sides, R);
    if (!is_issuer()) return;
    const uint64_t T = ptx::operand_at(stage + Stage::T, 16, 512, ptx::Swizzling::k64);
    if (!ptx::elect()) return;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      multiply<kRows>(TensorMemory::corrections, TensorMemory::right_sides + 8 * k, ptx::further(T, 32 * k), k > 0);
    ptx::commit_umma(memory_ + kDone);
  }
  // S^T += U^T kg, O^T += U^T Aqk^T
  __device__ __forceinline__ void start_update(unsigned stage, const unsigned (&U)[2][4]) const {
    store(TensorMemory::corrections_operand, U);
    if (!is_issuer()) return;
    const uint64_t kg = ptx::operand_at(stage + Stage::kg, kHalf, 1024, ptx::Swizzling::k128);
    const uint64_t Aqk = ptx::operand_at(stage + Stage::Aqk, 16, 512, ptx::Swizzling::k64);
    if (!ptx::elect()) return;
    constexpr unsigned kLeft = TensorMemory::corrections_operand;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      multiply<kSize, true>(TensorMemory::state, kLeft + 8 * k, ptx::further(kg, k * 16 * kRowBytes), true);
#pragma unroll
    for (int k = 0; k < 2; ++k) multiply<kRows>(TensorMemory::outputs, kLeft + 8 * k, ptx::further(Aqk, 32 * k), true);
    ptx::commit_umma(memory_ + kDone);
  }

 private:
  // In shared memory: an mbarrier, that products are done, and the address of tensor memory. They are where kernels
  // with segments have something else.
  static constexpr unsigned kDone = sm90::Shared::maps, kAddress = sm90::Shared::task;
  static constexpr unsigned kBarrier = sm90::NamedBarrier::kMapConsumer;  // of the consumer's threads

  __device__ bool is_issuer() const { return __shfl_sync(kAll, threadIdx.x / 32, 0) == 0; }  // by warps
  __device__ static void sync() { ptx::sync_threads(kBarrier, kGroup); }
  // d += or = a b, for 16 numbers of the contraction; kTransposed: those of b lie one behind the other.
  template <unsigned kColumns, bool kTransposed = false>
  __device__ __forceinline__ void multiply(unsigned d, unsigned a, uint64_t b, bool accumulate) const {
    constexpr unsigned kShape = ptx::umma_of<__half>({.M = 64, .N = kColumns, .transposed_b = kTransposed});
    ptx::umma_f16_tmem(tensors_ + d, tensors_ + a, b, kShape, accumulate);
  }
  template <int kCount>
  __device__ __forceinline__ void load(unsigned column, float (&x)[kCount]) const {
    ptx::load_tmem_fragments(x, own_ + column), ptx::wait_for_tmem_loads();
  }
  // Stores the operand of 32 tokens, when all threads have stored theirs.
  __device__ __forceinline__ void store(unsigned column, const unsigned (&x)[2][4]) const {
    const unsigned all[8] = {x[0][0], x[0][1], x[0][2], x[0][3], x[1][0], x[1][1], x[1][2], x[1][3]};
    ptx::store_tmem_operands(own_ + column, all);
    before_sync(), sync(), after_sync();
  }

  const unsigned memory_;
  unsigned tensors_, own_;  // addresses of tensor memory: its first lane, this warp's first lane
  unsigned phase_ = 0;      // how often products have been waited for
};

}  // namespace kda::cuda::sm100

// The products of a consumer on Blackwell: what is where in tensor memory, and who waits for whom.
//
// All products have 64 rows, the CTA's value columns. Row 16 w + i is in lane 32 w + i of tensor memory, so that warp w
// of the consumer has rows 16 w .. 16 w + 15, and the registers of its threads are those of Hopper's accumulators and
// left operands. Sums are f32, left operands f16, two of which share a column of tensor memory.
//
// One thread issues products, when all threads have stored their part of the left operand. An mbarrier says that they
// are done.
#pragma once
#include "cuda/engine/consumer_thread.h"
#include "cuda/ptx/sm100.h"

namespace kda::cuda::sm100 {

using engine::kGroup, engine::kHalf, engine::kRowBytes, engine::kRows, engine::kSize, engine::Stage;

// Columns of a consumer's tensor memory. The operand of the state is read by the first product of a chunk alone, and
// what comes then takes its place. So does the second operand of a map.
struct TensorMemory {
  static constexpr unsigned state = 0;                                      // S^T, f32: 128 channels
  static constexpr unsigned predictions = state + kSize;                    // S^T kG^T, f32: 32 tokens
  static constexpr unsigned outputs = predictions + kRows;                  // S^T qG^T, then O^T, f32: 32 tokens
  static constexpr unsigned state_operand = outputs + kRows;                // S^T, f16: 128 channels
  static constexpr unsigned corrections = state_operand;                    // U^T, f32: 32 tokens
  static constexpr unsigned right_sides = corrections + kRows;              // R^T, f16: 32 tokens
  static constexpr unsigned corrections_operand = right_sides + kRows / 2;  // U^T, f16: 32 tokens
  static constexpr unsigned leading = predictions;                          // S^T, leading bf16: 128 channels
  static constexpr unsigned rest = leading + kSize / 2;                     // the rests
  static constexpr unsigned columns = 256;                                  // of a consumer: a power of two
};
static_assert(TensorMemory::state_operand + kSize / 2 == TensorMemory::columns);
static_assert(TensorMemory::corrections_operand + kRows / 2 == TensorMemory::columns);
static_assert(TensorMemory::rest + kSize / 2 == TensorMemory::columns);

// The tensor memory of a kernel, which has one consumer or two, and the mbarriers of their products.
template <unsigned kConsumers>
class Tensors {
  static constexpr unsigned kColumns = kConsumers * TensorMemory::columns;

 public:
  // All threads of the CTA call it, behind wait_for_stream(): a kernel that held columns while it waits could keep the
  // one in front from getting its own.
  __device__ explicit Tensors(unsigned memory) : memory_(memory) {
    if (is_owner()) start();
    __syncthreads();  // the address of tensor memory and the mbarriers are there
  }
  // They meet behind the last ones, too.
  __device__ ~Tensors() {
    ptx::fence_tmem_after_sync();
    if (is_owner()) ptx::tmem_dealloc(ptx::load_shared(memory_ + engine::Shared::tensors), kColumns);
  }
  Tensors(const Tensors&) = delete;

 private:
  __device__ static bool is_owner() { return __shfl_sync(kAll, threadIdx.x / 32, 0) == 3; }  // the fourth warp
  __device__ void start() const {
    ptx::tmem_alloc(memory_ + engine::Shared::tensors, kColumns), ptx::tmem_relinquish();
    if (!ptx::elect()) return;
    for (unsigned i = 0; i < kConsumers; ++i) ptx::init_barrier(memory_ + engine::Shared::products + 8 * i, 1);
    ptx::fence_barriers();
  }
  const unsigned memory_;
};

// The products of a kernel's consumer, the first (0) or the second one (1), as one of its threads sees them.
template <unsigned kConsumer>
class Products {
 public:
  __device__ explicit Products(unsigned memory)
      : done_(memory + engine::Shared::products + 8 * kConsumer),
        tensors_(ptx::load_shared(memory + engine::Shared::tensors) + kConsumer * TensorMemory::columns),
        own_(ptx::tmem_at(tensors_, threadIdx.x / 32 % 4 * 32, 0)) {}
  __device__ ~Products() { before_sync(); }  // tensor memory may be freed behind the next barrier
  Products(const Products&) = delete;

  // Waits until the products that were started last are done.
  __device__ __forceinline__ void wait() {
    ptx::wait_barrier(done_, phase_++ % 2);
    ptx::fence_tmem_after_sync();
  }
  // To be called in front of a barrier behind which products read what this thread has stored, and overwrite what it
  // has loaded; and behind that barrier.
  __device__ void before_sync() const { ptx::wait_for_tmem_stores(), ptx::fence_tmem_before_sync(); }
  __device__ void after_sync() const { ptx::fence_tmem_after_sync(); }

  // Stores the state, in f16, as the operand of its products.
  __device__ __forceinline__ void store_state_operand(const unsigned (&left)[8][4]) const {
    store(TensorMemory::state_operand, left);
  }
  // S^T [kG; qG]^T or, without outputs, S^T kG^T; behind a barrier.
  template <bool kOutputs>
  __device__ __forceinline__ void start_state_products(unsigned stage) const {
    if (!is_issuer()) return;
    const uint64_t kG = ptx::operand_at(stage + Stage::k, 16, 1024, ptx::Swizzling::k128);
    if (!ptx::elect()) return;
#pragma unroll
    for (int k = 0; k < 8; ++k)
      multiply<kOutputs ? 2 * kRows : kRows>(TensorMemory::predictions, TensorMemory::state_operand + 8 * k,
                                             ptx::further(kG, k / 4 * kHalf + k % 4 * 32), k > 0);
    ptx::commit_umma(done_);
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
    store_for_all(TensorMemory::right_sides, R);
    if (!is_issuer()) return;
    const uint64_t T = ptx::operand_at(stage + Stage::T, 16, 512, ptx::Swizzling::k64);
    if (!ptx::elect()) return;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      multiply<kRows>(TensorMemory::corrections, TensorMemory::right_sides + 8 * k, ptx::further(T, 32 * k), k > 0);
    ptx::commit_umma(done_);
  }
  // S^T += U^T kg and, for outputs, O^T += U^T Aqk^T
  template <bool kOutputs>
  __device__ __forceinline__ void start_update(unsigned stage, const unsigned (&U)[2][4]) const {
    store_for_all(TensorMemory::corrections_operand, U);
    if (!is_issuer()) return;
    const uint64_t kg = ptx::operand_at(stage + Stage::kg, kHalf, 1024, ptx::Swizzling::k128);
    const uint64_t Aqk = ptx::operand_at(stage + Stage::Aqk, 16, 512, ptx::Swizzling::k64);
    if (!ptx::elect()) return;
    constexpr unsigned kLeft = TensorMemory::corrections_operand;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      multiply<kSize, true>(TensorMemory::state, kLeft + 8 * k, ptx::further(kg, k * 16 * kRowBytes), true);
#pragma unroll
    for (int k = 0; kOutputs && k < 2; ++k)
      multiply<kRows>(TensorMemory::outputs, kLeft + 8 * k, ptx::further(Aqk, 32 * k), true);
    ptx::commit_umma(done_);
  }
  // S^T M^T, but for the product of both rests. halves: where those of M^T are.
  __device__ __forceinline__ void start_map(const unsigned (&leading)[8][4], const unsigned (&rest)[8][4],
                                            const unsigned (&halves)[2]) const {
    store(TensorMemory::leading, leading), store_for_all(TensorMemory::rest, rest);
    if (!is_issuer() || !ptx::elect()) return;
    const auto add = [&](unsigned a, uint64_t b, bool accumulate) {
      multiply<kSize, true, __nv_bfloat16>(TensorMemory::state, a, b, accumulate);
    };
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint64_t M =
          ptx::further(ptx::operand_at(halves[k / 4], kHalf, 1024, ptx::Swizzling::k128), k % 4 * 16 * kRowBytes);
      add(TensorMemory::leading + 8 * k, M, k > 0);
      add(TensorMemory::rest + 8 * k, M, true);
      add(TensorMemory::leading + 8 * k, ptx::further(M, engine::kRestOfMap), true);
    }
    ptx::commit_umma(done_);
  }

 private:
  static constexpr unsigned kBarrier = engine::NamedBarrier::kProducts + kConsumer;  // of the consumer's threads

  __device__ static bool is_issuer() { return __shfl_sync(kAll, threadIdx.x / 32 % 4, 0) == 0; }  // by warps
  __device__ static void sync() { ptx::sync_threads(kBarrier, kGroup); }
  // d += or = a b, for 16 numbers of the contraction; kTransposed: those of b lie one behind the other.
  template <unsigned kColumns, bool kTransposed = false, class T = __half>
  __device__ __forceinline__ void multiply(unsigned d, unsigned a, uint64_t b, bool accumulate) const {
    constexpr unsigned kShape = ptx::umma_of<T>({.M = 64, .N = kColumns, .transposed_b = kTransposed});
    ptx::umma_f16_tmem(tensors_ + d, tensors_ + a, b, kShape, accumulate);
  }
  template <int kCount>
  __device__ __forceinline__ void load(unsigned column, float (&x)[kCount]) const {
    ptx::load_tmem_fragments(x, own_ + column), ptx::wait_for_tmem_loads();
  }
  // Stores an operand of 16 kCount tokens or channels.
  template <int kCount>
  __device__ __forceinline__ void store(unsigned column, const unsigned (&x)[kCount][4]) const {
    unsigned all[4 * kCount];
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) all[i] = x[i / 4][i % 4];
    ptx::store_tmem_operands(own_ + column, all);
  }
  // Likewise, and waits until all threads have stored theirs.
  template <int kCount>
  __device__ __forceinline__ void store_for_all(unsigned column, const unsigned (&x)[kCount][4]) const {
    store(column, x);
    before_sync(), sync(), after_sync();
  }

  const unsigned done_;           // mbarrier: products are done
  const unsigned tensors_, own_;  // addresses of tensor memory: its first lane, this warp's first lane
  // How often products have been waited for. Whoever takes over from other Products of the same consumer begins with 0
  // again: the number must be even then.
  unsigned phase_ = 0;
};

}  // namespace kda::cuda::sm100

// What mma.cu is compiled for, its shared memory, and the draft that a warp prepares.
#pragma once
#include <type_traits>

#include "cuda/conv/front.h"
#include "cuda/drafts/entries.h"
#include "cuda/tile/state_columns.h"

namespace kda::cuda::mma {

constexpr int kWarps = MmaPlan::kWarps, kThreads = kWarps * 32;
constexpr int kMaxColumns = 128;  // of a block
constexpr int kMostK = 128, kPerLane = kMostK / 32;
constexpr int kQuarters = 4;
constexpr int kWarpColumns = kMaxColumns / kWarps, kTiles = kWarpColumns / 8;

// What a kernel is compiled for. On the fast path (`fast`) its calls are on_fast_path(), with K = 128 and states of
// dtype `state`, and perhaps a convolution in front (`conv`). A general kernel takes any call with at most max_drafts
// drafts; from K on, channels are zeros, or not read.
struct Traits {
  bool fast;
  int32_t state;
  int max_drafts;
  bool conv = false;
};
constexpr int32_t kAnyState = -1;
constexpr Traits general(int max_drafts) { return {false, kAnyState, max_drafts}; }
// The same as a type. nvcc repeats a kernel's template arguments in code for the host, where it has no name for the
// type of a value.
template <bool kFast, int32_t kState, int kMaxDrafts, bool kConv>
struct TraitsType {
  static constexpr Traits kValue{kFast, kState, kMaxDrafts, kConv};
};
template <Traits kCall>
using TypeOf = TraitsType<kCall.fast, kCall.state, kCall.max_drafts, kCall.conv>;
// What shared memory holds of a state: general kernels convert.
template <Traits kCall>
using Element = std::conditional_t<kCall.state == KDA_BF16, __nv_bfloat16, float>;

// Where things are in shared memory, in floats behind the tile of the state. Strides keep fragments free of bank
// conflicts.
struct Memory {
  int drafts, columns;  // drafts: how many there is room for
  int keys_stride, scores;
  FrontMemory front;
  EntryMemory entries;
  int floats;

  __host__ __device__ Memory(int drafts, int columns, const Sizes& sizes)
      : drafts(drafts),
        columns(columns),
        keys_stride(2 * kMostK + 4),
        // In front of the scores: [drafts][kMostK] pairs k, alpha; then kG, qG; then X and O of all parts of K.
        scores(std::max(drafts * keys_stride, kMaxColumns * 2 * drafts)),
        front{sizes.front,
              sizes.by_four,
              0,
              keys_stride,
              (scores + 2 * drafts * drafts + 2 * drafts + 3) / 4 * 4,  // in front: A, P; beta, ancestors
              columns},
        entries(kMostK, columns, sizes.entries, front.v + (front.given ? drafts * columns : 0)),
        floats(this->entries.end) {}
};

// Four numbers as operands: x itself, of which tensor cores take the upper 19 bits, and the rest.
struct Split {
  unsigned big[4], small[4];
  Split() = default;
  __device__ explicit Split(float4 x) {
    const float all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      big[i] = __float_as_uint(all[i]);
      small[i] = __float_as_uint(all[i] - __uint_as_float(big[i] & 0xffffe000u));
    }
  }
};

// c += a b, where lanes hold the rows of b for two steps (i = 0: the first). Without small_b all of b is in `big`.
__device__ inline void mma3(float (&c)[4], const Split& a, const Split& b, int i, bool small_b) {
  if (small_b) ptx::mma_tf32(c, a.big, b.small[2 * i], b.small[2 * i + 1]);
  ptx::mma_tf32(c, a.small, b.big[2 * i], b.big[2 * i + 1]);
  ptx::mma_tf32(c, a.big, b.big[2 * i], b.big[2 * i + 1]);
}

// Accumulators of a warp: all slices of eight drafts, and all its columns, eight a tile.
template <int kSlices>
struct Sums {
  float sum[kSlices][kTiles][4];
  __device__ Sums& operator+=(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kSlices * kTiles * 4; ++i)
      sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] += other.sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4];
    return *this;
  }
};

// One draft, in registers of a warp: activated, then walked back to the start.
template <int kMaxDrafts>
struct Draft {
  TokenKeys<kPerLane, 32> key{static_cast<int>(threadIdx.x % 32)};
  int t;

  __device__ float2* pair(const Memory& m, float* shared, int draft, int i) const {
    return reinterpret_cast<float2*>(shared + draft * m.keys_stride) + key.channel(i);
  }

  // What FrontDrafts has left in shared memory.
  __device__ void take(const Memory& m, const float* shared, int K) {
    const float* row = shared + t * m.keys_stride;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = key.channel(i);
      const bool real = K == kMostK || c < K;
      key.take(i, real ? row[c] : 0.0f, real ? row[K + c] : 0.0f);
    }
    __syncwarp();  // the row is read: k and alpha will lie there
  }

  // Leaves k and alpha in shared memory.
  __device__ void activate(const Tokens& x, const Memory& m, float* shared) {
    key.activate(x, OverWarp());
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) *pair(m, shared, t, i) = make_float2(key.k[i], key.alpha[i]);
  }
  __device__ void record(const Entries& to, int entry, bool k_too, int K) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (K != kMostK && key.channel(i) >= K) continue;
      to.alpha_at(entry, key.channel(i)) = key.alpha[i];
      if (k_too) to.k_at(entry, key.channel(i)) = key.k[i];
    }
  }

  // k and q become kG and qG; writes the draft's row of scores.
  __device__ void walk(const Window& window, const Memory& m, float* shared) {
    float* scores = shared + m.scores;
    const int lane = static_cast<int>(threadIdx.x % 32);
    constexpr int kCount = 2 * kMaxDrafts;             // A of step 0, 1, .. then P; the last P is k . q itself
    const int mine = lane * kCount / 32 % kMaxDrafts;  // step of this lane's sum
    float sums[kCount] = {};
    int ancestor = 0, i = t;
    unsigned mask = 0;
#pragma unroll
    for (int step = 0; step < kMaxDrafts; ++step) {
      if (i < 0) continue;
      i = window.parent(i);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) key.k[j] *= key.alpha[j], key.q[j] *= key.alpha[j];
      if (i < 0) continue;
      mask |= 1u << i;
      if (step == mine) ancestor = i;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float2 k_alpha = *pair(m, shared, i, j);
        sums[step] = fmaf(key.k[j], k_alpha.x, sums[step]);
        sums[kMaxDrafts + step] = fmaf(key.q[j], k_alpha.x, sums[kMaxDrafts + step]);
        key.alpha[j] = k_alpha.y;
      }
    }
    const float sum = spread_sums(sums);
    float* row = scores + (lane * kCount / 32 >= kMaxDrafts ? m.drafts * m.drafts : 0) + t * m.drafts;
    if (mine < __popc(mask)) row[ancestor] = sum;
    if (lane == 0) {
      scores[m.drafts * m.drafts + t * m.drafts + t] = key.qk;
      float* rest = scores + 2 * m.drafts * m.drafts;
      rest[t] = key.beta, rest[m.drafts + t] = __uint_as_float(mask);
    }
  }

  __device__ void store(const Memory& m, float* shared) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) *pair(m, shared, t, i) = make_float2(key.k[i], key.q[i]);
  }
};

template <Traits kCall>
__device__ bool holds_bf16(int32_t dtype) {
  return (kCall.state == kAnyState ? dtype : kCall.state) == KDA_BF16;
}
template <Traits kCall>
__device__ size_t bytes_of_state(int32_t dtype) {
  return holds_bf16<kCall>(dtype) ? 2 : 4;
}
// Stores four channels of a column from c on, and returns what memory then holds.
template <Traits kCall>
__device__ float4 store_rounded(char* column, int c, int32_t dtype, float4 x) {
  if (!holds_bf16<kCall>(dtype)) {
    store_four(reinterpret_cast<float*>(column) + c, x);
    return x;
  }
  const float4 rounded = rounded_to_bf16(x);
  store_four(reinterpret_cast<__nv_bfloat16*>(column) + c, rounded);
  return rounded;
}

}  // namespace kda::cuda::mma

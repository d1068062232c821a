// What the blocks of recurrent_kernel.h have in shared memory, and the walk from a draft back to the start.
#pragma once
#include "cuda/conv/front.h"
#include "cuda/drafts/recurrent_entries.h"

namespace kda::cuda::recurrent {

// A draft in shared memory: what later ones need to walk over it, then what the state is multiplied with.
struct alignas(16) PreparedDraft {
  float alpha[kMostK], k[kMostK], kG[kMostK], qG[kMostK];
};
constexpr int kVectors = 4;  // of kMostK floats, in PreparedDraft

// Where things are in shared memory, in floats.
struct Memory {
  int drafts, before;  // there is room for so many drafts, and so many tokens before one of them that are not applied
  int v, factors, scores;
  FrontMemory front;
  EntryMemory entries;  // those that are not applied have k in place of w
  int end;

  // ring: entries may stay committed.
  __host__ __device__ Memory(int columns, int drafts, const Sizes& sizes, bool ring)
      : drafts(drafts),
        before(drafts + (ring ? sizes.entries : 0)),
        v(drafts * kVectors * kMostK),  // in front: [drafts] PreparedDraft, or q and k as the convolution leaves them
        factors(v + drafts * columns),  // in front: [drafts][columns] of v
        scores(factors + 2 * drafts),   // in front: beta, k . q
        front{sizes.front, sizes.by_four, 0, kVectors * kMostK, v, columns},
        entries(kMostK, columns, sizes.entries, scores + 2 * drafts * before, true),  // in front: -A, P
        end(entries.end) {}

  // The score of draft t with the token `steps` before it, 1 the nearest; which: 0 -A, 1 P.
  __device__ int score(int which, int t, int steps) const { return scores + (which * drafts + t) * before + steps - 1; }
};

// The layout for a kernel's call. The fast path has room for all drafts it may have, so nearly all offsets are
// constants.
template <class P>
__host__ __device__ Memory memory_of(const Traits& traits, const Shape& shape, const Parts<P>& x) {
  const int drafts = traits.fast ? traits.max_drafts : static_cast<int>(x.sizes.T);
  return Memory(shape.columns(), drafts, x.sizes, x.requests.records.ring);
}

// Products of a draft with kRows columns of a thread: first kG with each column, then qG, spread over the eight
// lanes.
template <int kRows>
__device__ float products(const PreparedDraft& x, const float (&S)[kRows][kElements]) {
  float even[2 * kRows] = {}, odd[2 * kRows] = {};  // two chains each
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
    const float4 k = load_four(x.kG + channel(e)), q = load_four(x.qG + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float* four = S[row] + e;
      even[row] = fmaf(four[0], k.x, even[row]), odd[row] = fmaf(four[1], k.y, odd[row]);
      even[row] = fmaf(four[2], k.z, even[row]), odd[row] = fmaf(four[3], k.w, odd[row]);
      float &a = even[kRows + row], &b = odd[kRows + row];
      a = fmaf(four[0], q.x, a), b = fmaf(four[1], q.y, b);
      a = fmaf(four[2], q.z, a), b = fmaf(four[3], q.w, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) even[i] += odd[i];
  return spread_sums<2 * kRows, kRowLanes / 2>(even);
}

// A draft on its way back to the start, in a warp.
template <int kAtOnce>
struct Walk {
  float k[kPerLane], q[kPerLane];  // decayed from the next token of the walk through the draft
  const Memory& m;
  float* shared;
  int t, steps = 0;

  // Walks over `count` tokens, at most kAtOnce: the first one has these k and alpha, and the others are `next` floats
  // apart.
  __device__ void over(int count, const float* from_k, const float* from_alpha, int next) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float sums[2 * kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const float k_i = from_k[i * next + lane + 32 * e], alpha_i = from_alpha[i * next + lane + 32 * e];
        sums[i] = fmaf(k[e], k_i, sums[i]), sums[kAtOnce + i] = fmaf(q[e], k_i, sums[kAtOnce + i]);
        k[e] *= alpha_i, q[e] *= alpha_i;
      }
    }
    const float sum = spread_sums(sums);
    constexpr int kLanes = 32 / (2 * kAtOnce);  // of a sum
    const int number = lane / kLanes, i = number % kAtOnce, which = number / kAtOnce;
    if (lane % kLanes == 0 && i < count) shared[m.score(which, t, steps + i + 1)] = which ? sum : -sum;
    steps += count;
  }
};

}  // namespace kda::cuda::recurrent

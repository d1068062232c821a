// The scores of a chunk, level by level (chunk_intra.cu).
#pragma once
#include "cuda/stages/chunk_intra_group.h"
#include "cuda/stages/products.h"

namespace kda::cuda::stages {

// Adds to the scores of a warp's own rows: lane 4 r has entry r of eight.
template <class E>
__device__ void add_nearest(const Group<E>& group, Smem<E>& shared, bool first) {
  const int w = group.warp, r = static_cast<int>(threadIdx.x % 32) / 4;
  const auto add = [&](float& to, float x) {
    if (threadIdx.x % 4 == 0) to = first ? x : to + x;
  };
  float by_q[kGroup], by_k[kGroup], decay[kGroup][kPerLane<E>];
  group.decays(decay);
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    group.column(shared, decay, j, [&](int i, float x, float y) { by_q[i] = x, by_k[i] = y; });
    group.column(shared, decay, 6 - j, [&](int i, float x, float y) { by_q[i + j - 7] = x, by_k[i + j - 7] = y; });
    add(shared.nearest.of_q[w][j][r], spread_sums(by_q)), add(shared.nearest.of_k[w][j][r], spread_sums(by_k));
  }
  group.column(shared, decay, 3, [&](int i, float x, float y) { by_q[i - 4] = x, by_q[i] = y; });
  add(shared.nearest.middle[w][r], spread_sums(by_q));
}
// Stores these scores where they belong, with the scale and beta.
template <class E>
__device__ void store_nearest(Smem<E>& shared, float scale) {
  if (threadIdx.x % 4) return;
  const int w = static_cast<int>(threadIdx.x) / 32, r = static_cast<int>(threadIdx.x % 32) / 4, row0 = w * kGroup;
  const auto put_q = [&](int i, int j, float x) { shared.Aqk[(row0 + i) * kScoreStride + row0 + j] = x * scale; };
  const auto put_k = [&](int i, int j, float x) {
    shared.Akk[(row0 + i) * kScoreStride + row0 + j] = x * shared.beta[row0 + i];
  };
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    const bool first = r > j;
    const int row = first ? r : r + 7 - j, column = first ? j : 6 - j;
    put_q(row, column, shared.nearest.of_q[w][j][r]), put_k(row, column, shared.nearest.of_k[w][j][r]);
  }
  const float middle = shared.nearest.middle[w][r];
  if (r < 4) put_q(r + 4, 3, middle);
  else put_k(r, 3, middle);
}

// A warp's part of the levels: of q k^T if the warp is even, else of k k^T. Pair i of warps has diagonal block i,
// eight columns of the block (i | 1, i & -2) of the second largest level, and the block (2 + i / 2, i % 2) of the
// largest.
template <class E>
struct Scores {
  Sum diagonal, largest;
  float second[4] = {};
  bool of_k = threadIdx.x / 32 % 2;
  int pair = static_cast<int>(threadIdx.x) / 64;
  // Whether level `half` has that element of a diagonal block: its row is in a second half, its column in the first
  // half.
  __device__ static bool on_level(int half, int row, int column) {
    return first_half<E> == kGroup ? row >= kGroup && column < kGroup
                                   : (row & -2 * half) == (column & -2 * half) && row & half && !(column & half);
  }

  __device__ void add_level(const Smem<E>& shared, int half, int channels) {
    using M = Math<E>;
    const int row = half == 32 ? 2 + pair / 2 : half == 16 ? pair | 1 : pair;
    const int column = half == 32 ? pair % 2 : half == 16 ? pair & -2 : pair;
    const unsigned char* tile = of_k ? shared.k : shared.q;
    Chains sums;
#pragma unroll 1
    for (int c = 0; c < channels; c += 32)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        if (c + 16 * odd < channels)
          M::add(sums, M::load_a(tile, kStride<E>, row * 16, c + 16 * odd),
                 M::load_b_transposed(shared.k, kStride<E>, column * 16, c + 16 * odd), odd);
    const Sum all = sums.sum();
    const int g = static_cast<int>(threadIdx.x % 32) / 4, t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (half == 32) largest.x[n][i] += all.x[n][i];
        else if (half == 16) second[i] += n == pair % 2 ? all.x[n][i] : 0.0f;
        else if (on_level(half, g + i / 2 * 8, n * 8 + 2 * t + i % 2)) diagonal.x[n][i] += all.x[n][i];
  }

  // Stores Akk with its beta, and Aqk with the scale. Of a diagonal block these are the elements below the diagonal,
  // or those that the neighbours do not have.
  __device__ void store(Smem<E>& shared, float scale) const {
    float* to = of_k ? shared.Akk : shared.Aqk;
    const auto put = [&](int i, int j, float x) { to[i * kScoreStride + j] = x * (of_k ? shared.beta[i] : scale); };
    const auto put_below = [&](int i, int j, float x) {
      if (first_half<E> == kGroup ? i >= kGroup && j < kGroup : i > j) put(pair * 16 + i, pair * 16 + j, x);
    };
    for_each_pair(diagonal, [&](int i, int j, float x, float y) { put_below(i, j, x), put_below(i, j + 1, y); });
    for_each_pair(largest, [&](int i, int j, float x, float y) {
      put(32 + pair / 2 * 16 + i, pair % 2 * 16 + j, x), put(32 + pair / 2 * 16 + i, pair % 2 * 16 + j + 1, y);
    });
    const int i = (pair | 1) * 16 + static_cast<int>(threadIdx.x % 32) / 4;
    const int j = (pair & -2) * 16 + pair % 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2;
    put(i, j, second[0]), put(i, j + 1, second[1]), put(i + 8, j, second[2]), put(i + 8, j + 1, second[3]);
  }
};

// Starts the copy of q of slice s, loads the rest of the slice, and waits for its copies. All is there after the next
// barrier.
template <class E>
__device__ void load_slice(const IntraCall& p, const ChunkAt& chunk, int hv, int s, bool with_q, Group<E>& group,
                           Smem<E>& shared) {
  const ChunkAt at = anew(chunk);
  if (with_q && p.q.data)
    stage<E, kRows, slice_of<E>>(tokens_of(p.q, at, hv / p.group, s * slice_of<E>, p.K), shared.from_q,
                                 kStrideAcross<E>);
  ptx::commit_copies();
  group.load(p, at, hv, s);
  group.share(shared);
  ptx::wait_for_copies<0>();
}

template <class E>
__device__ void put_scores(const IntraCall& p, const ChunkAt& at, int hv, Group<E>& group, Smem<E>& shared) {
  Scores<E> scores;
  const int row = group.warp * kGroup + static_cast<int>(threadIdx.x % 32) / 4;  // whose q.k this lane has
#pragma unroll 1
  for (int s = 0; s < slices(p.K, slice_of<E>); ++s) {
    if (s) {
      __syncthreads();  // q and the sums of steps are read
      load_slice(p, at, hv, s, true, group, shared);
    }
    const int channels = (min(p.K - s * slice_of<E>, slice_of<E>) + 15) / 16 * 16;
    __syncthreads();  // q and the sums of steps are there
    if constexpr (first_half<E> == kGroup) add_nearest(group, shared, s == 0);
#pragma unroll 1
    for (int half = first_half<E>; half < p.chunk; half *= 2) {
      if (half > first_half<E>) __syncthreads();  // the last level's tiles are read
      if (half >= kGroup) group.put_level(shared, half / kGroup);
      else if (half == 1) group.template put_level<1>(shared);
      else if (half == 2) group.template put_level<2>(shared);
      else group.template put_level<4>(shared);
      __syncthreads();  // the level's tiles are there
      scores.add_level(shared, half, channels);
    }
    const float diagonal = group.diagonal(shared);
    if (threadIdx.x % 4 == 0) shared.diagonal[row] = s ? shared.diagonal[row] + diagonal : diagonal;
  }
  __syncthreads();  // the last tiles are read
  scores.store(shared, p.scale);
  if constexpr (first_half<E> == kGroup) store_nearest(shared, p.scale);
  if (threadIdx.x % 4 == 0) shared.Aqk[row * (kScoreStride + 1)] = p.scale * shared.diagonal[row];
  __syncthreads();  // Aqk and Akk are there
}

}  // namespace kda::cuda::stages

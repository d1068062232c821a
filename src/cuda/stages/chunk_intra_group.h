// The rows of a warp in chunk_intra.cu, and what is in shared memory.
#pragma once
#include "cuda/gate/activations.h"
#include "cuda/stages/stages.h"
#include "cuda/stages/tiles.h"

namespace kda::cuda::stages {

constexpr int kGroup = kRows / kWarps;        // rows of a warp
constexpr int kScoreStride = kStride<float>;  // of 64 x 64 numbers in f32

// The first level.
template <class E>
constexpr int first_half = sizeof(E) == 4 ? kGroup : 1;

// f32: scores of each warp's own rows, below the diagonal. Columns j and 6 - j have eight entries together: entry
// i > j is row i of column j, and the entries before are those of column 6 - j, from its row 7 - j on. Column 3 has
// four entries of q and four of k.
struct Nearest {
  float of_q[kWarps][3][kGroup], of_k[kWarps][3][kGroup], middle[kWarps][kGroup];
};

template <class E>
struct Smem {
  // For each warp's rows: the step into the first one, and the sum of those into the others.
  float first[kWarps][slice_of<E>], rest[kWarps][slice_of<E>];
  float beta[kRows], diagonal[kRows];  // diagonal: of q k^T
  Nearest nearest;
  union {
    alignas(16) unsigned char q[kTileBytes<E>];  // scaled
    float Aqk[kRows * kScoreStride];             // then
    unsigned char kG[kTileBytesAcross<E>];       // and then
  };
  union {
    alignas(16) unsigned char k[kTileBytes<E>];  // scaled
    float T[kRows * kScoreStride];               // then
  };
  union {
    alignas(16) float Akk[kRows * kScoreStride];  // above the diagonal: parts of the inverse
    unsigned char out[kTileBytesAcross<E>];       // then
  };
  union {
    alignas(16) unsigned char from_q[kTileBytesAcross<E>];  // as it came
    unsigned char v[kTileBytesAcross<E>];                   // then
  };
};

// Eight rows of a warp, kPerLane channels of a lane. Those of q stay in shared memory.
template <class E>
struct Group {
  uint2 k[kGroup];
  float step[kGroup][kPerLane<E>];
  int warp, c;  // c: of the slice

  __device__ Group() : warp(static_cast<int>(threadIdx.x) / 32), c(static_cast<int>(threadIdx.x % 32) * kPerLane<E>) {}

  // Loads slice s, with zeros behind the last row.
  __device__ void load(const IntraCall& p, const ChunkAt& at, int hv, int s) {
    const int channel = s * slice_of<E> + c, i0 = warp * kGroup;
    const int64_t t = at.t0 + i0, h = hv / p.group;
    const char *from_k = p.k.at(at.b, t, h), *from_G = p.G.at(at.b, t, hv);
    float before[kPerLane<E>] = {};
    const bool steps = sizeof(E) == 4 && p.steps;  // of prefill_f32
    if (!steps && warp && i0 <= at.rows) load_values(p.G, from_G - p.G.token, channel, p.K, before);
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      const bool real = i0 + r < at.rows;
      k[r] = real ? load_packed<E>(p.k, from_k, channel, p.K) : uint2{};
      load_values(p.G, from_G, channel, real ? p.K : 0, step[r]);
      from_k += p.k.token, from_G += p.G.token;
    }
#pragma unroll
    for (int r = 0; r < kGroup; ++r)
#pragma unroll
      for (int j = 0; j < kPerLane<E>; ++j) {
        const float x = step[r][j], gamma = x * kLog2e;
        step[r][j] = steps ? gamma < -160 ? -160 : gamma : i0 + r < at.rows ? x - before[j] : 0;
        before[j] = x;
      }
  }
  // Adds numbers of these channels to a sum; add_steps() adds all steps of warps begin .. end - 1.
  __device__ void add_from(const float* from, float (&sum)[kPerLane<E>]) const {
    if constexpr (kPerLane<E> == 4) {
      const float4 x = load_four(from + c);
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    } else {
      const float2 x = *reinterpret_cast<const float2*>(from + c);
      sum[0] += x.x, sum[1] += x.y;
    }
  }
  __device__ void add_steps(const Smem<E>& shared, int begin, int end, float (&sum)[kPerLane<E>]) const {
#pragma unroll 1
    for (int w = begin; w < end; ++w) add_from(shared.first[w], sum), add_from(shared.rest[w], sum);
  }
  __device__ void share(Smem<E>& shared) const {
#pragma unroll
    for (int j = 0; j < kPerLane<E>; ++j) {
      float rest = 0;
#pragma unroll
      for (int r = 1; r < kGroup; ++r) rest += step[r][j];
      shared.first[warp][c + j] = step[0][j], shared.rest[warp][c + j] = rest;
    }
  }

  // x 2^exponent of a row.
  __device__ uint2 scaled(uint2 x, const float (&exponent)[kPerLane<E>]) const {
    if constexpr (sizeof(E) == 2)
      asm volatile("" : "+r"(x.x), "+r"(x.y));  // unpacked each time: there are no registers for it
    float y[kPerLane<E>];
    unpack<E>(x, y);
#pragma unroll
    for (int j = 0; j < kPerLane<E>; ++j) y[j] *= ptx::exp2(exponent[j]);
    return packed<E>(y);
  }
  __device__ int place(int r, int stride) const {
    return ((warp * kGroup + r) * stride + c) * static_cast<int>(sizeof(E));
  }
  __device__ uint2 q(const Smem<E>& shared, int r) const {
    return *reinterpret_cast<const uint2*>(shared.from_q + place(r, kStrideAcross<E>));
  }
  __device__ void put(unsigned char* tile, int r, uint2 x, int stride = kStride<E>) const {
    *reinterpret_cast<uint2*>(tile + place(r, stride)) = x;
  }
  // Writes a row of second halves; put_column() writes one of first halves.
  __device__ void put_row(Smem<E>& shared, int r, const float (&exponent)[kPerLane<E>]) const {
    put(shared.q, r, scaled(q(shared, r), exponent)), put(shared.k, r, scaled(k[r], exponent));
  }
  __device__ void put_column(Smem<E>& shared, int r, const float (&exponent)[kPerLane<E>]) const {
    put(shared.k, r, scaled(k[r], exponent));
  }
  __device__ void add(float (&sum)[kPerLane<E>], int r) const {
#pragma unroll
    for (int j = 0; j < kPerLane<E>; ++j) sum[j] += step[r][j];
  }

  // 2^step of each row.
  __device__ void decays(float (&decay)[kGroup][kPerLane<E>]) const {
#pragma unroll
    for (int r = 0; r < kGroup; ++r)
#pragma unroll
      for (int j = 0; j < kPerLane<E>; ++j) decay[r][j] = ptx::exp2(step[r][j]);
  }
  // Calls f(i, the lane's part of q_i k_j, that of k_i k_j), with their decays, for the warp's rows i below row j.
  template <class F>
  __device__ void column(const Smem<E>& shared, const float (&decay)[kGroup][kPerLane<E>], int j, const F& f) const {
    float x[kPerLane<E>];
    unpack<E>(k[j], x);
#pragma unroll
    for (int i = j + 1; i < kGroup; ++i) {
      float of_q[kPerLane<E>], of_k[kPerLane<E>], by_q = 0, by_k = 0;
      unpack<E>(q(shared, i), of_q), unpack<E>(k[i], of_k);
#pragma unroll
      for (int e = 0; e < kPerLane<E>; ++e) {
        x[e] *= decay[i][e];
        by_q = fmaf(of_q[e], x[e], by_q), by_k = fmaf(of_k[e], x[e], by_k);
      }
      f(i, by_q, by_k);
    }
  }

  // Sets a sum to 0, without the compiler's knowledge. Otherwise it would compute sums of all levels before the loop
  // over them, and there are no registers for those.
  __device__ static void start(float (&sum)[kPerLane<E>]) {
#pragma unroll
    for (int j = 0; j < kPerLane<E>; ++j) sum[j] = ptx::zero();
  }
  // Writes the tiles of a level inside the warp's rows; the second function, those of a level with halves of `size`
  // warps.
  template <int kHalf>
  __device__ void put_level(Smem<E>& shared) const {
#pragma unroll
    for (int b = 0; b < kGroup; b += 2 * kHalf) {
      float sum[kPerLane<E>];
      start(sum);
#pragma unroll
      for (int r = b + kHalf; r < b + 2 * kHalf; ++r) {
        if (r > b + kHalf) add(sum, r);
        put_row(shared, r, sum);
      }
      start(sum);
#pragma unroll
      for (int r = b + kHalf - 1; r >= b; --r) add(sum, r + 1), put_column(shared, r, sum);
    }
  }
  __device__ void put_level(Smem<E>& shared, int size) const {
    float sum[kPerLane<E>];
    start(sum);
    const int anchor = warp / (2 * size) * 2 * size + size;
    if (warp >= anchor) {
      if (warp > anchor) add_from(shared.rest[anchor], sum), add_steps(shared, anchor + 1, warp, sum), add(sum, 0);
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        if (r) add(sum, r);
        put_row(shared, r, sum);
      }
    } else {
      add_steps(shared, warp + 1, anchor, sum), add_from(shared.first[anchor], sum);
#pragma unroll
      for (int r = kGroup - 1; r >= 0; --r) put_column(shared, r, sum), add(sum, r);
    }
  }

  // q.k of the warp's rows: in lane 4 r that of row r.
  __device__ float diagonal(const Smem<E>& shared) const {
    float dots[kGroup];
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      float x[kPerLane<E>], y[kPerLane<E>];
      unpack<E>(q(shared, r), x), unpack<E>(k[r], y);
      dots[r] = 0;
#pragma unroll
      for (int j = 0; j < kPerLane<E>; ++j) dots[r] = fmaf(x[j], y[j], dots[r]);
    }
    return spread_sums(dots);
  }

  // Stores slice s of G.
  __device__ void store_sums(const IntraCall& p, const ChunkAt& chunk, int hv, int s, const Smem<E>& shared) const {
    const ChunkAt at = anew(chunk);
    const int channel = s * slice_of<E> + c;
    float sum[kPerLane<E>] = {};
    add_steps(shared, 0, warp, sum);
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      add(sum, r);
      const int i = warp * kGroup + r;
      auto* to = reinterpret_cast<float*>(p.sums.at(at.b, at.t0 + i, hv));
#pragma unroll
      for (int j = 0; j < kPerLane<E>; ++j)
        if (i < at.rows && channel + j < p.K) to[channel + j] = sum[j];
    }
  }

  // Writes kG to its tile, for w, and qG and kg to memory.
  __device__ void put_decayed(const IntraCall& p, const ChunkAt& chunk, int hv, int s, Smem<E>& shared) const {
    const ChunkAt at = anew(chunk);
    const int size = p.chunk / kGroup, begin = warp / size * size, channel = s * slice_of<E> + c;
    const auto store = [&](const Rows& x, int r, uint2 y) {
      const int i = warp * kGroup + r;
      if (x.data && i < at.rows) store_packed<E>(x, x.at(at.b, at.t0 + i, hv), channel, p.K, y);
    };
    float sum[kPerLane<E>] = {};
    add_steps(shared, begin, warp, sum);
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      add(sum, r);
      put(shared.kG, r, scaled(k[r], sum), kStrideAcross<E>);
      if (p.qG.data) store(p.qG, r, scaled(q(shared, r), sum));
    }
    if constexpr (sizeof(E) == 4)
      if (p.ends.data && warp == kWarps - 1 && channel < p.K)
        *reinterpret_cast<float2*>(p.ends.at(at.b, at.t0 / kRows, hv) + channel * 4) = {sum[0], sum[1]};
#pragma unroll
    for (int j = 0; j < kPerLane<E>; ++j) sum[j] = 0;
    add_steps(shared, warp + 1, begin + size, sum);
#pragma unroll
    for (int r = kGroup - 1; r >= 0; --r) store(p.kg, r, scaled(k[r], sum)), add(sum, r);
  }
};

}  // namespace kda::cuda::stages

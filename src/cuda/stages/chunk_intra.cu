// F2 and F3: the scores of a chunk, the inverse of its triangle, and what follows from both without a state. A block
// has a chunk of a value head.
//
// Scores, for any gate (math.md 4.4 c). On level h = 1, 2, 4, .. 32 the rows of the second half of every 2 h meet the
// columns of its first half. Between them lies the first row of the second half, the anchor a:
//   2^(G_i - G_j) = 2^(G_i - G_a) 2^(G_a - G_j)
// So every row of q and k is scaled once a level by a factor in [0, 1], in f32, and the products are those of
// matrices. The exponents are sums of steps G_t - G_(t-1) of one sign, so nothing cancels. In f32, products of
// matrices are expensive. There each pair of the eight neighbouring rows that a warp has in registers is computed by
// itself, in place of the levels below 8.
//
//   levels    a warp scales its eight rows                             barrier: tiles q, k
//             a block of 16 x 16 scores and one of q, k: its products  barrier: tiles are read
//   inverse   T of 16 x 16 blocks by forward substitution, one column a lane; then twice T21 = -T22 (A21 T11), in f32
//   outputs   qG and kg; kG to a tile; w = (T beta) kG, u = (T beta) v with T as it is stored, exact to 16 bits
//
// Shared memory: four tiles and the steps' sums, 77 KiB; two blocks an SM.
#include "cuda/cuda.h"
#include "cuda/stages/stages.h"
#include "problem_stages.h"

namespace kda::cuda {
namespace stages {
namespace {

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
        const float x = step[r][j], gamma = x * 1.44269504f;
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
    for (int j = 0; j < kPerLane<E>; ++j) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sum[j]));
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

// ---- scores ----

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

// ---- the inverse: T = (I + Akk)^-1 ----

// sum[j] += x[m] y[m][j] for m of begin .. end - 1.
template <int kCount>
__device__ void dot_rows(const float* x, const float* y, int begin, int end, float (&sum)[kCount]) {
#pragma unroll 4
  for (int m = begin; m < end; ++m)
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = fmaf(x[m], y[m * kScoreStride + j], sum[j]);
}

// T21 = -T22 (A21 T11) for pairs of kSize x kSize blocks. The product in brackets goes where Akk has nothing.
template <int kSize>
__device__ void merge(float* Akk, float* T) {
  constexpr int kPairs = kRows / (2 * kSize), kTeam = kThreads / kPairs, kCount = kSize * kSize / kTeam;
  static_assert(kSize % kCount == 0);
  const int thread = static_cast<int>(threadIdx.x) % kTeam, pair = static_cast<int>(threadIdx.x) / kTeam;
  const int i = thread / (kSize / kCount), j = thread % (kSize / kCount) * kCount;
  const int upper = pair * 2 * kSize, lower = upper + kSize;  // rows
  float* const X = Akk + upper * kScoreStride + lower;
  float sum[kCount] = {};
  dot_rows(Akk + (lower + i) * kScoreStride + upper, T + upper * (kScoreStride + 1) + j, j / 16 * 16, kSize, sum);
#pragma unroll
  for (int e = 0; e < kCount; ++e) X[i * kScoreStride + j + e] = sum[e], sum[e] = 0;
  __syncthreads();  // A21 T11 is there
  dot_rows(T + (lower + i) * kScoreStride + lower, X + j, 0, i / 16 * 16 + 16, sum);
#pragma unroll
  for (int e = 0; e < kCount; ++e) T[(lower + i) * kScoreStride + upper + j + e] = -sum[e];
  __syncthreads();  // T21 is there
}

__device__ inline void invert(float* Akk, float* T, int chunk) {
  const int block = static_cast<int>(threadIdx.x) / 32, j = static_cast<int>(threadIdx.x % 32);
  if (block < kRows / 16 && j < 16) {
    const int origin = block * 16 * (kScoreStride + 1);
    float x[16];  // column j
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = i == j ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; ++m) x[i] = fmaf(-Akk[origin + i * kScoreStride + m], x[m], x[i]);
      x[i] = i < j ? 0.0f : x[i];
      T[origin + i * kScoreStride + j] = x[i];
    }
  }
  __syncthreads();  // the blocks on the diagonal are there
  merge<16>(Akk, T);
  if (chunk == kRows) merge<32>(Akk, T);
}

// ---- matrices of the chunk between memory and 64 x 64 numbers ----

__device__ inline void store_matrix(const Rows& x, const ChunkAt& at, int hv, const float* from) {
  if (!x.data) return;
  for (int e = static_cast<int>(threadIdx.x) * 4; e < kRows * kRows; e += kThreads * 4) {
    const int i = e / kRows, j = e % kRows;
    if (i >= at.rows) break;
    float4 y = load_four(from + i * kScoreStride + j);
    y = {j <= i ? y.x : 0, j + 1 <= i ? y.y : 0, j + 2 <= i ? y.z : 0, j + 3 <= i ? y.w : 0};
    char* to = x.at(at.b, at.t0 + i, hv) + j * x.size();
    if (x.wide && x.dtype == KDA_F32) store_four(reinterpret_cast<float*>(to), y);
    else if (x.wide && x.dtype == KDA_BF16) store_four(reinterpret_cast<bf16*>(to), y);
    else {
      const float four[4] = {y.x, y.y, y.z, y.w};
      for (int k = 0; k < 4; ++k) store_element(to + k * x.size(), x.dtype, four[k]);
    }
  }
}
__device__ inline void load_matrix(const Rows& x, const ChunkAt& at, int hv, float* to) {
  for (int e = static_cast<int>(threadIdx.x) * 4; e < kRows * kRows; e += kThreads * 4) {
    const int i = e / kRows, j = e % kRows;
    float y[4] = {};
    if (i < at.rows && j <= i) load_values(x, x.at(at.b, at.t0 + i, hv), j, kRows, y);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[i * kScoreStride + j + k] = j + k <= i ? y[k] : 0.0f;
  }
}
// Rounds the numbers to what a tensor of that dtype holds.
__device__ inline void round_matrix(int32_t dtype, float* x) {
  if (dtype == KDA_F32) return;
  for (int e = static_cast<int>(threadIdx.x); e < kRows * kRows; e += kThreads) {
    float& y = x[e / kRows * kScoreStride + e % kRows];
    y = dtype == KDA_BF16 ? __bfloat162float(__float2bfloat16_rn(y)) : __half2float(__float2half_rn(y));
  }
}

// Replaces T by T beta.
__device__ inline void multiply_by_beta(float* T, const float* beta) {
  for (int e = static_cast<int>(threadIdx.x) * 4; e < kRows * kRows; e += kThreads * 4) {
    auto& x = *reinterpret_cast<float4*>(T + e / kRows * kScoreStride + e % kRows);
    const float4 y = load_four(beta + e % kRows);
    x.x *= y.x, x.y *= y.y, x.z *= y.z, x.w *= y.w;
  }
}

// ---- w and u ----

// Stores T beta x, for a tile x, to slice s of y, whose chunks are `skip` bytes apart unless it is 0. A warp has two
// rows of 16 x 16 blocks, the first or second and the last or last but one: five blocks of T either way. Results in
// 16 bits go through a tile.
template <class E>
__device__ void multiply(const IntraCall& p, const unsigned char* x, const Rows& y, int64_t skip, const ChunkAt& chunk,
                         int hv, int s, int n, Smem<E>& shared) {
  using M = Math<E>;
  constexpr bool kDirect = sizeof(E) == 4;
  constexpr int kPairs = slice_of<E> / 64;  // 16 columns each
  const ChunkAt at = anew(chunk);
  const bool padded = kDirect && skip;  // of prefill_f32
  const int c0 = s * slice_of<E>, lines = padded ? (at.rows + p.chunk - 1) / p.chunk * p.chunk : at.rows;
  char* to = y.data + at.b * y.batch + hv * y.head + c0 * y.size();
  to += padded ? at.t0 / p.chunk * skip : at.t0 * y.token;
  const int64_t gap = padded ? skip - p.chunk * y.token : 0;  // between two chunks of 32
  const auto line_at = [&](int i) { return to + i * y.token + (i < p.chunk ? 0 : gap); };

  const int warp = static_cast<int>(threadIdx.x) / 32, column0 = warp / 2 * kPairs * 16;
#pragma unroll 1
  for (int last = 1; last >= 0; --last) {
    const int row = last ? 3 - warp % 2 : warp % 2;
    typename M::Accurate sums[kPairs];
#pragma unroll 1
    for (int m = p.chunk == kRows ? 0 : row / 2 * 2; m <= row; ++m) {
      const auto a = M::load_exact(shared.T, kScoreStride, row * 16, m * 16);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) M::add(sums[i], a, M::load_b(x, kStrideAcross<E>, m * 16, column0 + i * 16));
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
      for_each_pair(sums[pair].sum(), [&](int i, int j, float x, float z) {
        i += row * 16, j += column0 + pair * 16;
        if constexpr (!kDirect) M::store_two(shared.out, kStrideAcross<E>, i, j, x, z);
        else if (i < lines) store_pair(y, line_at(i), j, n - c0, x, z);
      });
  }
  if constexpr (!kDirect) {
    __syncthreads();  // `out` is there
    unstage<E, kRows, slice_of<E>>(shared.out, kStrideAcross<E>, y, lines, n - c0, line_at);
  }
}

// The K = V of a kernel made for prefill_f32's whole chunks, or for the stage in bf16; 0 for anything else.
template <class E>
int known_size(const IntraCall& p) {
  constexpr bool kF32 = sizeof(E) == 4;
  const bool usual =
      p.solve && p.chunk == kRows && p.steps == kF32 && p.G.wide && p.G.dtype == KDA_F32 &&
      (!kF32 || (p.chunks.whole() && !p.T.data && p.beta.dtype == KDA_F32 && are_known<E>({&p.sums, &p.Aqk})));
  return usual && are_known<E>({&p.q, &p.k, &p.v, &p.w, &p.u, &p.qG, &p.kg}) ? size_if_known(p.K, p.V) : 0;
}
template <class E, int kSize>
__device__ auto known(const IntraCall& call) -> std::conditional_t<kSize != 0, IntraCall, const IntraCall&> {
  if constexpr (kSize != 0) {
    IntraCall p = call;
    p.K = p.V = kSize, p.chunk = kRows, p.solve = true;
    set_known<E>(p.q, p.k, p.v, p.w, p.u, p.qG, p.kg), set_known<float>(p.G);
    if constexpr (sizeof(E) == 4) {
      p.steps = true, p.chunks.varlen = false, p.T = {};
      set_known<float>(p.beta, p.sums, p.Aqk);
    } else {
      p.steps = false, p.w_skip = p.u_skip = 0;
    }
    return p;
  } else {
    return call;
  }
}

template <class E, int kSize>
__global__ void __launch_bounds__(kThreads, 2) intra_kernel(const __grid_constant__ IntraCall call) {
  const auto& p = known<E, kSize>(call);
  extern __shared__ float4 dynamic[];
  auto& shared = *reinterpret_cast<Smem<E>*>(dynamic);
  wait_for_stream();
  const auto hv = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.HV));
  ChunkAt at;
  if (!p.chunks.find(blockIdx.x / static_cast<unsigned>(p.HV), at)) return;
  if constexpr (sizeof(E) == 4 && kSize != 0) at.rows = kRows;
  if (!at.owned) {
    if (p.solve) zero_rows(p.Aqk, at, hv, kRows), zero_rows(p.T, at, hv, kRows);
    zero_rows(p.w, at, hv, p.K), zero_rows(p.u, at, hv, p.V);
    return zero_rows(p.qG, at, hv, p.K), zero_rows(p.kg, at, hv, p.K);
  }
  if (threadIdx.x < kRows) {
    const int i = static_cast<int>(threadIdx.x);
    shared.beta[i] = i < at.rows ? load_element(p.beta.at(at.b, at.t0 + i, hv), p.beta.dtype) : 0.0f;
  }
  const int count = slices(p.K, slice_of<E>);
  Group<E> group;
  load_slice(p, at, hv, p.solve ? 0 : count - 1, true, group, shared);
  if (p.solve) {
    put_scores(p, at, hv, group, shared);
    invert(shared.Akk, shared.T, p.chunk);
    store_matrix(p.Aqk, at, hv, shared.Aqk), store_matrix(p.T, at, hv, shared.T);
    __syncthreads();  // both are read
    if (p.T.data) {
      round_matrix(p.T.dtype, shared.T);
      __syncthreads();  // T is what is stored
    }
  } else {
    load_matrix(p.T, at, hv, shared.T);
    __syncthreads();  // T is there
  }
  multiply_by_beta(shared.T, shared.beta);

  // Slices of v go to where q was. In f32 every other one goes to `out`, which has no other use there.
  constexpr int kTiles = sizeof(E) == 4 ? 2 : 1;
  const int count_v = p.u.data ? slices(p.V, slice_of<E>) : 0;
  const auto v_tile = [&](int s) { return s % kTiles == kTiles - 1 ? shared.v : shared.out; };
  const auto ask_v = [&](int s) {
    if (s < count_v)
      stage<E, kRows, slice_of<E>>(tokens_of(p.v, at, hv, s * slice_of<E>, p.V), v_tile(s), kStrideAcross<E>);
    ptx::commit_copies();
  };
  if (kTiles == 2) ask_v(0);
  __syncthreads();  // T beta is there; without solving, q and the sums of steps
#pragma unroll 1
  for (int s = count - 1;;) {  // from the slice that is there already
    group.put_decayed(p, at, hv, s, shared);
    if constexpr (sizeof(E) == 4)
      if (p.sums.data) group.store_sums(p, at, hv, s, shared);
    __syncthreads();  // kG is there, q is read
    if (s == 0) ask_v(kTiles - 1);
    if (p.w.data) multiply(p, shared.kG, p.w, p.w_skip, at, hv, s, p.K, shared);
    if (s-- == 0) break;
    __syncthreads();  // kG and the sums of steps are read
    load_slice(p, at, hv, s, p.qG.data != nullptr, group, shared);
    __syncthreads();  // q and the sums of steps are there
  }
#pragma unroll 1
  for (int s = 0; s < count_v; ++s) {
    if (s >= kTiles) {
      __syncthreads();  // that tile is read
      ask_v(s);
    }
    if (s == 0 || s >= kTiles) arrived();
    multiply(p, v_tile(s), p.u, p.u_skip, at, hv, s, p.V, shared);
  }
}

}  // namespace

void run(const kda_exec& exec, const IntraCall& c, bool exact) {
  const dim3 grid(static_cast<unsigned>(c.chunks.count * c.HV));
  if (grid.x == 0) return;
  const auto start = [&]<class E, int kSize>() {
    launch<intra_kernel<E, kSize>>(exec, grid, kThreads, sizeof(Smem<E>), c);
  };
  const auto start_known = [&]<class E>() {
    switch (known_size<E>(c)) {
      case 64: return start.template operator()<E, 64>();
      case 128: return start.template operator()<E, 128>();
      default: start.template operator()<E, 0>();
    }
  };
  exact ? start_known.template operator()<float>() : start_known.template operator()<bf16>();
}

namespace {

template <class P>
IntraCall call_of(const P& p, const kda_tensor& T) {
  const auto& a = p.args;
  IntraCall c{.chunks = Chunks(p, p.in.cu_seqlens), .q = rows_of(a.q), .k = rows_of(a.k), .v = rows_of(a.v)};
  c.beta = rows_of(a.beta), c.G = rows_of(a.G), c.T = rows_of(T);
  c.w = rows_of(a.w), c.u = rows_of(a.u), c.qG = rows_of(a.qG), c.kg = rows_of(a.kg);
  c.HV = static_cast<int32_t>(p.HV), c.group = static_cast<int32_t>(p.group());
  c.K = static_cast<int32_t>(p.K), c.V = static_cast<int32_t>(p.V);
  c.chunk = kRows, c.scale = p.in.scale;
  return c;
}

}  // namespace
}  // namespace stages

template <StageArgs Args>
const char* intra_why_not(const StageProblem<Args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::Chunks(p, p.in.cu_seqlens).count * p.HV);
}
const char* stage_why_not(const StageProblem<kda_stage_chunk_intra_args>& p) { return intra_why_not(p); }
const char* stage_why_not(const StageProblem<kda_stage_recompute_w_u_args>& p) { return intra_why_not(p); }

void stage(const StageProblem<kda_stage_chunk_intra_args>& p) {
  const kda_stage_chunk_intra_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  stages::IntraCall c = stages::call_of(p, a.Akk_inv);
  c.Aqk = stages::rows_of(a.Aqk), c.solve = true;
  run(a.exec, c, stages::is_exact({&a.k, &a.v}));
}

void stage(const StageProblem<kda_stage_recompute_w_u_args>& p) {
  const kda_stage_recompute_w_u_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  run(a.exec, stages::call_of(p, a.Akk_inv), stages::is_exact({&a.k, &a.v}));
}

}  // namespace kda::cuda

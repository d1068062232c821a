// T diag(beta) with T = (I + Akk)^-1, by one warp.
//
// Forward substitution in f32 inverts the four blocks of eight rows on the diagonal. The part below two blocks, first
// of eight rows and then of sixteen, is (T22 A21) T11, where A is -Akk. It comes from tensor cores. Each factor there
// is a sum of two f16: with one, equal keys would lose all digits.
#pragma once
#include "cuda/engine/scratch.h"

namespace kda::cuda::engine {

constexpr unsigned kBlock = 8;  // rows

// Two neighbouring elements of a factor, each as an f16 and what that leaves out.
struct Split {
  unsigned high = 0, low = 0;
  Split() = default;
  __device__ Split(unsigned high, unsigned low) : high(high), low(low) {}
  __device__ Split(float x, float y) : high(ptx::pack<__half>(x, y)) {
    const float2 part = __half22float2(reinterpret_cast<const __half2&>(high));
    low = ptx::pack<__half>(x - part.x, y - part.y);
  }
  __device__ Split transposed() const { return {ptx::transposed(high), ptx::transposed(low)}; }
};

// d = a b: 16 x 16 times 16 x 8.
__device__ inline void multiply(float (&d)[4], const Split (&a)[4], const Split& b0, const Split& b1) {
  const unsigned high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  const unsigned low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
  float rest[4] = {};  // a sum of its own, as a product waits for the sum it adds to
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] = 0;
  ptx::mma<__half>(d, high, b0.high, b1.high);
  ptx::mma<__half>(rest, low, b0.high, b1.high);
  ptx::mma<__half>(rest, high, b0.low, b1.low);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += rest[e];
}

// Inverts I + Akk of scratch memory, and stores T diag(beta) in the stage.
__device__ inline void invert(const Scratch& at, unsigned stage) {
  constexpr unsigned kStride = kStrideA * 4, kNext = kBlock * kStride + kBlock * 4, kLow = kBlock * 2;
  const unsigned lane = at.lane, r = lane % kBlock, block = lane / kBlock, T = stage + Stage::T;
  // T = I + T A in the blocks on the diagonal. A lane has a row, and takes columns from the right: a column is done
  // when all to its right have been added. What A has on and above its diagonal is not used.
  float row[kBlock];
#pragma unroll
  for (unsigned c = 0; c < kBlock; ++c) row[c] = c == r ? 1.0f : 0.0f;
  const unsigned A = at.address + Scratch::A + block * kNext;
#pragma unroll
  for (unsigned j = kBlock - 1; j > 0; --j)
#pragma unroll
    for (unsigned c = 0; c < j; c += 4) {
      float a[4];
      load_four(A + (j * kStrideA + c) * 4, a);
#pragma unroll
      for (unsigned e = 0; e < 4; ++e)
        if (c + e < j) row[c + e] = fmaf(row[j], a[e], row[c + e]);
    }

  // The blocks are stored twice: as operands where the blocks of A were, with low halves behind the high ones; and in
  // the stage, with zeros above them.
  Split pairs[4];
  float beta[8];
#pragma unroll
  for (unsigned e = 0; e < 4; ++e) pairs[e] = Split(row[2 * e], row[2 * e + 1]);
  at.load_factors(Scratch::kBeta, kBlock * block, reinterpret_cast<float(&)[4]>(beta[0]));
  at.load_factors(Scratch::kBeta, kBlock * block + 4, reinterpret_cast<float(&)[4]>(beta[4]));
  __syncwarp();  // blocks have been read
  ptx::store_shared4(A + r * kStride, make_uint4(pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high));
  ptx::store_shared4(A + r * kStride + kLow, make_uint4(pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low));
  unsigned scaled[4];
#pragma unroll
  for (unsigned e = 0; e < 4; ++e)
    scaled[e] = ptx::pack<__half>(row[2 * e] * beta[2 * e], row[2 * e + 1] * beta[2 * e + 1]);
  ptx::store_shared4(T + Scratch::square(lane, kBlock * block), make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  if (block % 2 == 0) ptx::store_shared4(T + Scratch::square(lane, kBlock * (block + 1)), zeros);
  ptx::store_shared4(T + Scratch::square(lane % 16, 16 + lane / 16 * kBlock), zeros);
  __syncwarp();  // operands are there

  // A lane has rows i and i + 8 and columns j and j + 1 of left operands and results; of right operands it is the
  // other way round.
  const unsigned i = lane / 4, j = lane % 4 * 2;
  const auto A_right = [&](unsigned rows, unsigned columns) {
    const unsigned from = at.address + Scratch::A + ((rows + j) * kStrideA + columns + i) * 4;
    return Split(ptx::load_shared_f32(from), ptx::load_shared_f32(from + kStride));
  };
  const auto store = [&](unsigned rows, unsigned columns, float x, float y) {
    const float2 beta = ptx::load_shared_f32x2(at.factor_at(Scratch::kBeta, columns + j));
    ptx::store_shared(T + Scratch::square(rows + i, columns + j), ptx::pack<__half>(x * beta.x, y * beta.y));
  };
  const unsigned two =
      at.address + Scratch::A + r * kStride + lane / 16 * kLow + block % 2 * 2 * kNext;  // blocks 0 and 2, both halves
  const unsigned one = at.address + Scratch::A + r * kStride + block % 2 * kLow;         // block 0, both halves, twice
  unsigned x[4];
  ptx::load_matrices(x, two + kNext);
  const Split T1{x[0], x[2]}, T3{x[1], x[3]};
  ptx::load_transposed(x, two);
  const Split T0_right{x[0], x[2]}, T2_right{x[1], x[3]};
  ptx::load_transposed(x, one + kNext);
  const Split T1_right{x[0], x[1]};
  ptx::load_matrices(x, one + 2 * kNext);
  const Split T2{x[0], x[1]}, none;

  float d[4], e[4];
  multiply(d, {T1, none, none, T3}, A_right(8, 0), A_right(24, 16));
  multiply(e, {Split(d[0], d[1]), none, none, Split(d[2], d[3])}, T0_right, T2_right);
  store(8, 0, e[0], e[1]), store(24, 16, e[2], e[3]);
  const Split T10_right = Split(e[0], e[1]).transposed(), T32(e[2], e[3]);

  multiply(d, {T2, T32, none, T3}, A_right(16, 0), A_right(24, 0));
  multiply(e, {T2, T32, none, T3}, A_right(16, 8), A_right(24, 8));
  const Split left[4] = {Split(d[0], d[1]), Split(d[2], d[3]), Split(e[0], e[1]), Split(e[2], e[3])};
  multiply(d, left, T0_right, T10_right);
  multiply(e, left, none, T1_right);
  store(16, 0, d[0], d[1]), store(24, 0, d[2], d[3]);
  store(16, 8, e[0], e[1]), store(24, 8, e[2], e[3]);
}

}  // namespace kda::cuda::engine

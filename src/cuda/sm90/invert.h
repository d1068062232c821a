// T diag(beta) with T = (I + Akk)^-1, by one warp. The two blocks of 16 rows on the diagonal by forward substitution in f32;
// the one below them is -(T22 Akk21) T11, on tensor cores. Factors there are sums of two f16: with one, equal keys would lose
// all digits.
#pragma once
#include "cuda/sm90/scores.h"

namespace kda::cuda::sm90 {

constexpr unsigned kBlock = 16;

// Two neighbouring elements of a factor, as f16 and what that leaves out.
struct Split {
  unsigned high, low;
  __device__ Split(float x, float y) : high(ptx::pack<__half>(x, y)) {
    const float2 part = __half22float2(reinterpret_cast<const __half2&>(high));
    low = ptx::pack<__half>(x - part.x, y - part.y);
  }
};

// d = a b of 16 x 16 matrices.
__device__ inline void multiply(float (&d)[2][4], const unsigned (&high)[4], const unsigned (&low)[4],
                                const unsigned (&b_high)[4], const unsigned (&b_low)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) d[n][e] = 0;
    ptx::mma<__half>(d[n], low, b_high[2 * n], b_high[2 * n + 1]);
    ptx::mma<__half>(d[n], high, b_low[2 * n], b_low[2 * n + 1]);
    ptx::mma<__half>(d[n], high, b_high[2 * n], b_high[2 * n + 1]);
  }
}

__device__ inline void invert(const Bench& at, unsigned stage) {
  const unsigned lane = at.lane, r = lane % kBlock, second = lane / kBlock;
  // T = I - T Akk, a lane its row, columns from the right: a column is done when all to its right have been subtracted. What
  // Akk has on and above its diagonal is not used.
  float row[kBlock];
#pragma unroll
  for (unsigned c = 0; c < kBlock; ++c) row[c] = c == r ? 1.0f : 0.0f;
  const unsigned A = at.A() + second * kBlock * (kStrideA + 1) * 4;
#pragma unroll
  for (unsigned j = kBlock - 1; j > 0; --j)
#pragma unroll
    for (unsigned c = 0; c < j; c += 4) {
      float a[4];
      load_four(A + (j * kStrideA + c) * 4, a);
#pragma unroll
      for (unsigned e = 0; e < 4; ++e)
        if (c + e < j) row[c + e] = fmaf(-row[j], a[e], row[c + e]);
    }

  // Into the stage; and as operands, second halves behind the first, where the blocks of Akk were.
  constexpr unsigned kStride = kStrideA * 4, kLow = kBlock * 2, kSecond = kBlock * kStride + kBlock * 4;
  const unsigned T = stage + Stage::T, own = at.A() + r * kStride + second * kSecond;
  __syncwarp();  // blocks have been read
#pragma unroll
  for (unsigned c = 0; c < kBlock; c += 8) {
    unsigned high[4], low[4], scaled[4];
#pragma unroll
    for (unsigned e = 0; e < 4; ++e) {
      const Split pair(row[c + 2 * e], row[c + 2 * e + 1]);
      high[e] = pair.high, low[e] = pair.low;
    }
    ptx::store_shared4(own + c * 2, make_uint4(high[0], high[1], high[2], high[3]));
    ptx::store_shared4(own + kLow + c * 2, make_uint4(low[0], low[1], low[2], low[3]));
    float beta[8];
    at.load_factors(Bench::kBeta, second * kBlock + c, reinterpret_cast<float(&)[4]>(beta[0]));
    at.load_factors(Bench::kBeta, second * kBlock + c + 4, reinterpret_cast<float(&)[4]>(beta[4]));
#pragma unroll
    for (unsigned e = 0; e < 4; ++e)
      scaled[e] = ptx::pack<__half>(row[c + 2 * e] * beta[2 * e], row[c + 2 * e + 1] * beta[2 * e + 1]);
    ptx::store_shared4(T + Bench::square(lane, second * kBlock + c),
                       make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
    if (!second) ptx::store_shared4(T + Bench::square(lane, kBlock + c), make_uint4(0, 0, 0, 0));
  }
  __syncwarp();  // operands are there

  const unsigned place = at.A() + (lane / 8 % 2 * 8 + lane % 8) * kStride + lane / 16 * 16;
  const unsigned i = lane / 4, j = lane % 4 * 2;
  unsigned high[4], low[4], b_high[4], b_low[4];
  ptx::load_matrices(high, place + kSecond), ptx::load_matrices(low, place + kSecond + kLow);
#pragma unroll
  for (unsigned n = 0; n < 4; ++n) {  // columns n / 2 * 8 + i, rows n % 2 * 8 + j and the next
    const unsigned from = at.A() + ((kBlock + n % 2 * 8 + j) * kStrideA + n / 2 * 8 + i) * 4;
    const Split pair(ptx::load_shared_f32(from), ptx::load_shared_f32(from + kStrideA * 4));
    b_high[n] = pair.high, b_low[n] = pair.low;
  }
  float d[2][4];
  multiply(d, high, low, b_high, b_low);
  ptx::load_transposed(b_high, place), ptx::load_transposed(b_low, place + kLow);
#pragma unroll
  for (unsigned n = 0; n < 4; ++n) {
    const Split pair(d[n / 2][n % 2 * 2], d[n / 2][n % 2 * 2 + 1]);
    high[n] = pair.high, low[n] = pair.low;
  }
  multiply(d, high, low, b_high, b_low);
#pragma unroll
  for (unsigned n = 0; n < 2; ++n) {
    const unsigned c = n * 8 + j;
    const float2 beta = ptx::load_shared_f32x2(at.factors + (Bench::kBeta * kRows + c) * 4);
#pragma unroll
    for (unsigned half = 0; half < 2; ++half)
      ptx::store_shared(T + Bench::square(kBlock + half * 8 + i, c),
                        ptx::pack<__half>(-d[n][2 * half] * beta.x, -d[n][2 * half + 1] * beta.y));
  }
}

}  // namespace kda::cuda::sm90

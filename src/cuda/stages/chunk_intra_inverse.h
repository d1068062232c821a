// The inverse T = (I + Akk)^-1 of a chunk (chunk_intra.cu), and the way of such matrices to memory and back.
#pragma once
#include "cuda/stages/chunk_intra_group.h"

namespace kda::cuda::stages {

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

}  // namespace kda::cuda::stages

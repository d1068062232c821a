// Rows of tensors on their way to tiles in shared memory, and back.
#pragma once
#include "cuda/call/state_rows.h"
#include "cuda/ptx/sm80.h"
#include "cuda/stages/chunks.h"

namespace kda::cuda::stages {

__device__ inline float load_element(const char* from, int32_t dtype) {
  return value_of(dtype, load_raw<false>(from, dtype));
}

// The 8 bytes that a lane has of a tile's row.
template <class E>
__device__ uint2 packed(const float (&x)[kPerLane<E>]) {
  if constexpr (sizeof(E) == 4) return {__float_as_uint(x[0]), __float_as_uint(x[1])};
  else return {ptx::pack<bf16>(x[0], x[1]), ptx::pack<bf16>(x[2], x[3])};
}
template <class E>
__device__ void unpack(uint2 from, float (&x)[kPerLane<E>]) {
  if constexpr (sizeof(E) == 4) x[0] = __uint_as_float(from.x), x[1] = __uint_as_float(from.y);
  else
    x[0] = __uint_as_float(from.x << 16), x[1] = __uint_as_float(from.x & 0xffff0000u),
    x[2] = __uint_as_float(from.y << 16), x[3] = __uint_as_float(from.y & 0xffff0000u);
}
// Loads channels from c on of a row of n; zeros beyond.
template <int kCount>
__device__ void load_values(const Rows& x, const char* row, int c, int n, float (&to)[kCount]) {
  if (x.wide && x.dtype == KDA_F32) {
    const auto* from = reinterpret_cast<const float*>(row) + c;
    if constexpr (kCount == 4) {
      const float4 four = c < n ? *reinterpret_cast<const float4*>(from) : float4{};
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
      const float2 two = c < n ? *reinterpret_cast<const float2*>(from) : float2{};
      to[0] = two.x, to[1] = two.y;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {  // not unrolled: it need not be fast, and there are many copies of it
      const float one = c + i < n ? load_element(row + (c + i) * x.size(), x.dtype) : 0.0f;
#pragma unroll
      for (int j = 0; j < kCount; ++j) to[j] = i == j ? one : i ? to[j] : 0.0f;
    }
  }
}
template <class E>
__device__ uint2 load_packed(const Rows& x, const char* row, int c, int n) {
  if (x.wide && x.dtype == dtype_of<E>)
    return c < n ? *reinterpret_cast<const uint2*>(row + c * static_cast<int>(sizeof(E))) : uint2{};
  float values[kPerLane<E>];
  load_values(x, row, c, n, values);
  return packed<E>(values);
}
template <class E>
__device__ void store_packed(const Rows& x, char* row, int c, int n, uint2 y) {
  if (x.wide && x.dtype == dtype_of<E>) {
    if (c < n) *reinterpret_cast<uint2*>(row + c * static_cast<int>(sizeof(E))) = y;
    return;
  }
  float values[kPerLane<E>];
  unpack<E>(y, values);
#pragma unroll
  for (int i = 0; i < kPerLane<E>; ++i)
    if (c + i < n) store_element(row + (c + i) * x.size(), x.dtype, values[i]);
}
// A matrix in memory: lines `step` bytes apart, `lines` of them, each with n elements from `from` on.
struct Matrix {
  const char* from;
  int64_t step;
  int lines, n, dtype;
  bool wide;
};
__device__ inline Matrix tokens_of(const Rows& x, const ChunkAt& at, int64_t h, int c0, int n) {
  return {x.at(at.b, at.t0, h) + c0 * x.size(), x.token, at.rows, n - c0, x.dtype, x.wide};
}

// Starts the copies of kLines x kColumns of the matrix, or stores them at once. They are there after
// wait_for_copies() and a barrier. Zeros beyond lines and n.
template <class E, int kLines, int kColumns, int kBlock = kThreads>
__device__ void stage(const Matrix& m, void* tile, int stride) {
  E* to = static_cast<E*>(tile);
  if (m.wide && m.dtype == dtype_of<E>) {
    constexpr int kPiece = 16 / sizeof(E), kPieces = kColumns / kPiece,
                  kStep = kBlock / kPieces;  // kStep: lines at once
    const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kPiece;
    const char* from = m.from + first * m.step + c * static_cast<int>(sizeof(E));
    __builtin_assume(first < kStep);  // as threadIdx.x < kBlock: saves the checks of lines that are known to exist
#pragma unroll(kLines == kRows ? 8 : 4)
    for (int line0 = 0; line0 < kLines; line0 += kStep, from += kStep * m.step) {
      const int line = first + line0;
      if (kLines % kStep != 0 && line >= kLines) break;
      const bool real = line < m.lines && c < m.n;
      ptx::copy16(ptx::shared_address(to + line * stride + c), real ? from : m.from, real ? 16 : 0);
    }
    return;
  }
  const int size = m.dtype == KDA_F32 ? 4 : 2;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kLines * kColumns; i += kBlock) {
    const int line = i / kColumns, c = i % kColumns;
    const bool real = line < m.lines && c < m.n;
    to[line * stride + c] = static_cast<E>(real ? load_element(m.from + line * m.step + c * size, m.dtype) : 0.0f);
  }
}
__device__ inline void arrived() {
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  __syncthreads();  // what came, and what was written, is there for all
}

// Stores kLines x kColumns of a tile to x, line i at to(i). Only `lines` lines and n columns are real.
template <class E, int kLines, int kColumns, int kBlock = kThreads, class F>
__device__ void unstage(const void* tile, int stride, const Rows& x, int lines, int n, const F& to) {
  const E* from = static_cast<const E*>(tile);
  if (x.wide && x.dtype == dtype_of<E>) {
    constexpr int kPiece = 16 / sizeof(E), kPieces = kColumns / kPiece, kStep = kBlock / kPieces;
    const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kPiece;
#pragma unroll 2
    for (int line0 = 0; line0 < kLines; line0 += kStep) {
      const int line = first + line0;
      if (kLines % kStep != 0 && line >= kLines) break;
      if (line < lines && c < n)
        *reinterpret_cast<uint4*>(to(line) + c * static_cast<int>(sizeof(E))) =
            *reinterpret_cast<const uint4*>(from + line * stride + c);
    }
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kLines * kColumns; i += kBlock) {
    const int line = i / kColumns, c = i % kColumns;
    if (line < lines && c < n)
      store_element(to(line) + c * x.size(), x.dtype, static_cast<float>(from[line * stride + c]));
  }
}

// Stores two neighbours of a row, columns c and c + 1 of n.
__device__ inline void store_pair(const Rows& x, char* row, int c, int n, float y, float z) {
  if (x.wide && x.dtype == KDA_F32) {
    if (c < n) *reinterpret_cast<float2*>(row + c * 4) = {y, z};
    return;
  }
  if (c < n) store_element(row + c * x.size(), x.dtype, y);
  if (c + 1 < n) store_element(row + (c + 1) * x.size(), x.dtype, z);
}

__device__ inline void zero_rows(const Rows& x, const ChunkAt& at, int64_t h, int n) {
  if (!x.data) return;
  for (int i = static_cast<int>(threadIdx.x); i < at.rows * n; i += static_cast<int>(blockDim.x))
    store_element(x.at(at.b, at.t0 + i / n, h) + i % n * x.size(), x.dtype, 0);
}

}  // namespace kda::cuda::stages

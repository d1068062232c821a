// Rows of [B,T,HV,V] tensors of any dtype and strides, in chunks of eight neighbouring numbers.
#pragma once
#include "contract/dtype.h"
#include "cuda/call/launch.h"
#include "cuda/ptx/sm80.h"

namespace kda::cuda {

constexpr int kChunkSize = 8;

// Strides are in bytes. wide: rows begin, and eight numbers lie, as loads of 16 bytes need it.
struct Rows {
  char* data = nullptr;  // nullptr: absent
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  int32_t dtype = KDA_F32;
  bool wide = false;
};

// The number of a row, taken apart.
struct RowPlace {
  unsigned b, t, h;
};
struct RowNumbers {
  Divisor heads, tokens;
  unsigned count;
  explicit RowNumbers(const kda_tensor& x)
      : heads(std::max<int64_t>(x.shape[2], 1)),
        tokens(std::max<int64_t>(x.shape[1], 1)),
        count(static_cast<unsigned>(x.shape[0] * x.shape[1] * x.shape[2])) {}
  __device__ RowPlace place(unsigned row) const {
    const unsigned token = heads.quotient(row), b = tokens.quotient(token);
    return {b, token - b * tokens.divisor, row - token * heads.divisor};
  }
};
__device__ inline char* row_at(const Rows& rows, const RowPlace& place) {
  return rows.data + place.b * rows.stride_b + place.t * rows.stride_t + place.h * rows.stride_h;
}

inline Rows rows_of(const kda_tensor& t) {
  if (!present(t)) return {};
  const int64_t size = dtype_size(t.dtype);
  bool wide = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  int64_t strides[3] = {};  // of the last dimension, which is dense, none
  for (int i = 0; i + 1 < t.ndim; ++i) {
    strides[i] = t.shape[i] > 1 ? t.stride[i] * size : 0;
    wide = wide && strides[i] % 16 == 0;
  }
  return {static_cast<char*>(t.data), strides[0], strides[1], strides[2], t.dtype, wide};
}

// Eight numbers as they lie in memory: `low` has all of them if they have 16 bits, otherwise the first four.
struct RawChunk {
  uint4 low{}, high{};
};
template <bool kBf16>
__device__ RawChunk load_chunk(const char* row, int32_t dtype, unsigned column) {
  const bool narrow = kBf16 || dtype != KDA_F32;
  const auto* from = reinterpret_cast<const uint4*>(row + column * (narrow ? 2u : 4u));
  RawChunk raw;
  raw.low = from[0];
  if (!narrow) raw.high = from[1];
  return raw;
}
__device__ inline void pair_of(int32_t dtype, unsigned raw, float& first, float& second) {
  if (dtype == KDA_BF16) {
    first = __uint_as_float(raw << 16), second = __uint_as_float(raw & 0xffff0000u);
  } else {
    first = __half2float(__ushort_as_half(static_cast<uint16_t>(raw & 0xffff)));
    second = __half2float(__ushort_as_half(static_cast<uint16_t>(raw >> 16)));
  }
}
template <bool kBf16>
__device__ void values_of(int32_t dtype, const RawChunk& raw, float (&x)[kChunkSize]) {
  const unsigned words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                             raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  if (!kBf16 && dtype == KDA_F32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair_of(kBf16 ? KDA_BF16 : dtype, words[i], x[2 * i], x[2 * i + 1]);
  }
}
template <bool kBf16>
__device__ void store_chunk(char* row, int32_t dtype, unsigned column, const float (&x)[kChunkSize]) {
  using ptx::pack;
  if (kBf16 || dtype == KDA_BF16) {
    const uint4 raw{pack<__nv_bfloat16>(x[0], x[1]), pack<__nv_bfloat16>(x[2], x[3]), pack<__nv_bfloat16>(x[4], x[5]),
                    pack<__nv_bfloat16>(x[6], x[7])};
    ptx::store_global(row + column * 2, raw);
  } else if (dtype == KDA_F16) {
    const uint4 raw{pack<__half>(x[0], x[1]), pack<__half>(x[2], x[3]), pack<__half>(x[4], x[5]),
                    pack<__half>(x[6], x[7])};
    ptx::store_global(row + column * 2, raw);
  } else {
    uint4 raw[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      raw[i] = {__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), __float_as_uint(x[4 * i + 2]),
                __float_as_uint(x[4 * i + 3])};
    ptx::store_global(row + column * 4, raw[0]);
    ptx::store_global(row + column * 4 + 16, raw[1]);
  }
}

// ---- chunks of any row: the last may be cut, and rows may begin anywhere ----

__device__ inline void load_some(const Rows& rows, const char* row, unsigned column, unsigned V,
                                 float (&x)[kChunkSize]) {
  if (rows.wide && column + kChunkSize <= V)
    return values_of<false>(rows.dtype, load_chunk<false>(row, rows.dtype, column), x);
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) {
    x[i] = 0;
    const unsigned at = column + i;
    if (at >= V) continue;
    switch (rows.dtype) {
      case KDA_F32: x[i] = reinterpret_cast<const float*>(row)[at]; break;
      case KDA_BF16: x[i] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[at]); break;
      default: x[i] = __half2float(reinterpret_cast<const __half*>(row)[at]); break;
    }
  }
}
__device__ inline void store_some(const Rows& rows, char* row, unsigned column, unsigned V,
                                  const float (&x)[kChunkSize]) {
  if (rows.wide && column + kChunkSize <= V) return store_chunk<false>(row, rows.dtype, column, x);
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) {
    const unsigned at = column + i;
    if (at >= V) continue;
    switch (rows.dtype) {
      case KDA_F32: reinterpret_cast<float*>(row)[at] = x[i]; break;
      case KDA_BF16: reinterpret_cast<__nv_bfloat16*>(row)[at] = __float2bfloat16_rn(x[i]); break;
      default: reinterpret_cast<__half*>(row)[at] = __float2half_rn(x[i]); break;
    }
  }
}

}  // namespace kda::cuda

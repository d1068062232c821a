// Rows of a state (its value columns) in registers, over eight lanes each.
#pragma once
#include <algorithm>

#include "cuda/call/view.h"

namespace kda::cuda {

constexpr int kRowLanes = 8;

// Lane l of a row's eight holds channels 32 j + 4 l .. 32 j + 4 l + 3 in registers 4 j .. 4 j + 3.
__device__ inline int channel(int element) {
  return element / 4 * 32 + static_cast<int>(threadIdx.x % kRowLanes) * 4 + element % 4;
}

// The first of the kRows neighbouring rows that a thread has of a block's.
template <int kRows>
__device__ int first_row() {
  return static_cast<int>(threadIdx.x / kRowLanes) * kRows;
}

// sum_e x[e] y[channel of e] over the row: in every lane, always in the same order.
template <int kElements>
__device__ float dot(const float (&x)[kElements], const float* y) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
    const float4 four = *reinterpret_cast<const float4*>(y + channel(e));
    sum = fmaf(x[e], four.x, sum), sum = fmaf(x[e + 1], four.y, sum);
    sum = fmaf(x[e + 2], four.z, sum), sum = fmaf(x[e + 3], four.w, sum);
  }
  return sum;
}

__device__ inline float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline float4 load_four(const __nv_bfloat16* from) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  const float2 lo = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.x));
  const float2 hi = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.y));
  return make_float4(lo.x, lo.y, hi.x, hi.y);
}
__device__ inline void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ inline void store_four(__nv_bfloat16* to, float4 x) {
  const __nv_bfloat162 lo = __floats2bfloat162_rn(x.x, x.y), hi = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(to) = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
}

__device__ inline float4 rounded_to_bf16(float4 x) {
  const auto one = [](float x) { return __bfloat162float(__float2bfloat16_rn(x)); };
  return make_float4(one(x.x), one(x.y), one(x.z), one(x.w));
}

// Neighbouring rows of a head's state. kWide: V-first, with K and addresses that are multiples of four, so that an
// access takes four channels.
template <bool kWide>
struct Rows {
  char* first;
  uint32_t row, channel_step;  // bytes from one row, and from one channel, to the next

  Rows() = default;
  __device__ Rows(const View& t, unsigned slot, unsigned hv, unsigned v) requires kWide : first(t.at(slot, hv, v)),
                                                                                          row(t.stride2),
                                                                                          channel_step(0) {}
  __device__ Rows(const TypedView& t, int32_t layout, unsigned slot, unsigned hv, unsigned v) {
    const bool v_first = kWide || layout == KDA_STATE_V_FIRST;
    row = v_first ? t.stride2 : size_of(t.dtype), channel_step = v_first ? size_of(t.dtype) : t.stride2;
    first = t.at(slot, hv, 0) + static_cast<uint64_t>(v) * row;
  }

  template <class T, int kElements>
  __device__ void load(int i, int K, float (&S)[kElements]) const {
    const char* from = first + static_cast<uint64_t>(i) * row;
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const int c = channel(e);
      if constexpr (kWide) {
        float4 x{};
        if (c < K) x = load_four(reinterpret_cast<const T*>(from) + c);
        S[e] = x.x, S[e + 1] = x.y, S[e + 2] = x.z, S[e + 3] = x.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          S[e + j] =
              c + j < K ? static_cast<float>(*reinterpret_cast<const T*>(from + uint64_t(c + j) * channel_step)) : 0;
      }
    }
  }
  template <class T, int kElements>
  __device__ void store(int i, int K, const float (&S)[kElements]) const {
    char* to = first + static_cast<uint64_t>(i) * row;
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const int c = channel(e);
      if constexpr (kWide) {
        if (c < K) store_four(reinterpret_cast<T*>(to) + c, make_float4(S[e], S[e + 1], S[e + 2], S[e + 3]));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (c + j < K) *reinterpret_cast<T*>(to + uint64_t(c + j) * channel_step) = static_cast<T>(S[e + j]);
      }
    }
  }
};

// Load and store the first `count` rows, f32 or bf16.
template <bool kWide, int kRows, int kElements>
__device__ void load_rows(const Rows<kWide>& rows, int32_t dtype, int count, int K, float (&S)[kRows][kElements]) {
  const auto all = [&]<class T>() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i < count) rows.template load<T>(i, K, S[i]);
  };
  if (dtype == KDA_F32) all.template operator()<float>();
  else all.template operator()<__nv_bfloat16>();
}
template <bool kWide, int kRows, int kElements>
__device__ void store_rows(const Rows<kWide>& rows, int32_t dtype, int count, int K,
                           const float (&S)[kRows][kElements]) {
  const auto all = [&]<class T>() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i < count) rows.template store<T>(i, K, S[i]);
  };
  if (dtype == KDA_F32) all.template operator()<float>();
  else all.template operator()<__nv_bfloat16>();
}

// The same for rows of any kind. wide: they are such as Rows<true> are.
struct AnyRows : Rows<false> {
  bool wide;

  __device__ AnyRows(const TypedView& t, int32_t layout, unsigned slot, unsigned hv, unsigned v, bool wide)
      : Rows<false>(t, layout, slot, hv, v), wide(wide) {}
  __device__ const Rows<false>& narrow() const { return *this; }
  __device__ Rows<true> widened() const {
    Rows<true> rows;
    rows.first = first, rows.row = row, rows.channel_step = 0;
    return rows;
  }
};
template <int kRows, int kElements>
__device__ void load_rows(const AnyRows& rows, int32_t dtype, int count, int K, float (&S)[kRows][kElements]) {
  if (rows.wide) load_rows(rows.widened(), dtype, count, K, S);
  else load_rows(rows.narrow(), dtype, count, K, S);
}
template <int kRows, int kElements>
__device__ void store_rows(const AnyRows& rows, int32_t dtype, int count, int K, const float (&S)[kRows][kElements]) {
  if (rows.wide) store_rows(rows.widened(), dtype, count, K, S);
  else store_rows(rows.narrow(), dtype, count, K, S);
}

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T x[kCount];
};

// kRows neighbouring columns of a head's K-first state, in the same registers as in Rows. An access takes one channel
// of all these columns, and the four threads of a warp that have this channel read neighbouring memory. V and
// addresses are multiples of kRows.
template <int kRows>
struct Columns {
  char* first;
  uint32_t channel_step;  // bytes from one channel to the next

  __device__ Columns(const TypedView& t, int32_t /*layout*/, unsigned slot, unsigned hv, unsigned v)
      : first(t.at(slot, hv, 0) + v * size_of(t.dtype)), channel_step(t.stride2) {}

  template <class T>
  __device__ Neighbours<T, kRows>& at(int c) const {
    return *reinterpret_cast<Neighbours<T, kRows>*>(first + static_cast<unsigned>(c) * uint64_t{channel_step});
  }
  template <class T, int kElements>
  __device__ void load(int K, float (&S)[kRows][kElements]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (channel(e) >= K) continue;
      const Neighbours<T, kRows> all = at<T>(channel(e));
#pragma unroll
      for (int row = 0; row < kRows; ++row) S[row][e] = static_cast<float>(all.x[row]);
    }
  }
  template <class T, int kElements>
  __device__ void store(int K, const float (&S)[kRows][kElements]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (channel(e) >= K) continue;
      Neighbours<T, kRows> all;
#pragma unroll
      for (int row = 0; row < kRows; ++row) all.x[row] = static_cast<T>(S[row][e]);
      at<T>(channel(e)) = all;
    }
  }
};

// The same for Columns: all of them or none.
template <int kRows, int kElements>
__device__ void load_rows(const Columns<kRows>& columns, int32_t dtype, int count, int K,
                          float (&S)[kRows][kElements]) {
  if (count == 0) return;
  if (dtype == KDA_F32) columns.template load<float>(K, S);
  else columns.template load<__nv_bfloat16>(K, S);
}
template <int kRows, int kElements>
__device__ void store_rows(const Columns<kRows>& columns, int32_t dtype, int count, int K,
                           const float (&S)[kRows][kElements]) {
  if (count == 0) return;
  if (dtype == KDA_F32) columns.template store<float>(K, S);
  else columns.template store<__nv_bfloat16>(K, S);
}

// Does every row begin at a multiple of so many elements? (An absent tensor's do.)
inline bool rows_aligned(const kda_tensor& t, int64_t elements) {
  for (int i = 0; i + 1 < t.ndim; ++i)
    if (t.stride[i] % elements) return false;
  return !present(t) || reinterpret_cast<uintptr_t>(t.data) % (elements * dtype_size(t.dtype)) == 0;
}
// Whether four-wide accesses fit all of these states.
inline bool wide_rows(const Dims& d, int32_t layout, std::initializer_list<const kda_tensor*> states) {
  if (layout != KDA_STATE_V_FIRST || d.K % 4) return false;
  return std::all_of(states.begin(), states.end(), [](const kda_tensor* t) { return rows_aligned(*t, 4); });
}
// Whether Columns of up to four fit all of these states.
inline bool wide_columns(const Dims& d, int32_t layout, std::initializer_list<const kda_tensor*> states) {
  if (layout != KDA_STATE_K_FIRST || d.V % 4) return false;
  return std::all_of(states.begin(), states.end(), [](const kda_tensor* t) { return rows_aligned(*t, 4); });
}

}  // namespace kda::cuda

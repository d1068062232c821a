// The causal convolution of neighbouring channels, for kda_conv and for kernels that take raw rows (kda_conv_inputs).
// All of them call the same function, convolve(), so a convolution fused into another kernel has the bits of kda_conv
// in front.
//
// For a chain of tokens, a window of the last rows moves along; in the end it is the state:
//   ConvWeights<1> weights;   weights.fetch(in.weight, in.bias, d);
//   ConvPast<1> past;         past.fetch(in.state, slot, d);  past.values(in.state, window);
//   each token:               z = rounded(in.x.dtype, convolve(w, bias, {window, x}, kTaps - W, true))
//   store_state<1>(in.state, slot, d, window)
// A token of a tree, or any single token, loads its own taps:
//   const ConvRows rows = rows_until(parents, W - 1, n, t + W - 1, W);      the same in all threads
//   ConvTaps taps;            taps.fetch(in.x, in.state, rows, s, slot, d);
//   z = convolved(in, weights, taps)
// A state that rolls on along a path does the same, once all reads of the old state are done; roll_of() gives slot, s
// and m > 0:
//   taps.fetch(in.x, in.state, rows_until(parents, W - 1, n, m - 1 + W - 1, W - 1), s, slot, d);
//   taps.values(in.x, in.state, xx);  store_state<1>(in.state, slot, d, the last W-1 of xx)
#pragma once
#include "contract/conv.h"
#include "cuda/call/launch.h"
#include "cuda/call/state_rows.h"
#include "cuda/call/view.h"
#include "cuda/gate/activations.h"

namespace kda::cuda {

// Taps and rows are numbered as if W were 4: those of a narrower convolution begin at kTaps - W.
constexpr int kTaps = kMaxConvWidth;
constexpr int kPast = kTaps - 1;  // rows before a token

// y = bias + sum_(j >= first) w_j xx_j, oldest first, then y sigmoid(y). Values before `first` may be NaN. The
// compiler may not contract the last product with a sum in the caller.
__device__ inline float convolve(const float (&w)[kTaps], float bias, const float (&xx)[kTaps], int first, bool silu) {
  float y = bias;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) y = j >= first ? fmaf(w[j], xx[j], y) : y;
  return silu ? __fmul_rn(y, sigmoid(y)) : y;
}

// x as it reads back after it was stored.
__device__ inline float rounded(int32_t dtype, float x) {
  if (dtype == KDA_F32) return x;
  return dtype == KDA_BF16 ? __bfloat162float(__float2bfloat16_rn(x)) : __half2float(__float2half_rn(x));
}

// ---- elements of any dtype: one, or four side by side ----

__device__ inline int64_t place_of(const kda_tensor& t, int64_t i, int64_t j, int64_t k) {
  return i * t.stride[0] + j * t.stride[1] + k * t.stride[2];
}

// One element, or four, as they lie in memory. `low` holds all of 16-bit elements, or the first half of f32; `high`
// holds the second half. (Two loads to one register, each under a condition, wait for each other; these do not.)
struct RawElement {
  uint16_t low = 0, high = 0;
};
struct RawFour {
  uint2 low{}, high{};
};
// Loading does not wait: consecutive loads are all in flight before the first value is needed.
__device__ inline void load_raw(const kda_tensor& t, int64_t at, RawElement& raw) {
  const bool wide = t.dtype == KDA_F32;
  const uint16_t* from = static_cast<const uint16_t*>(t.data) + (at << (wide ? 1 : 0));
  raw.low = *from;
  if (wide) raw.high = from[1];
}
__device__ inline void load_raw(const kda_tensor& t, int64_t at, RawFour& raw) {
  const bool wide = t.dtype == KDA_F32;
  const uint2* from = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(t.data) + (at << (wide ? 1 : 0)));
  raw.low = *from;
  if (wide) raw.high = from[1];
}
__device__ inline float value_of(int32_t dtype, const RawElement& raw) {
  return value_of(dtype, dtype == KDA_F32 ? raw.high << 16 | raw.low : raw.low);
}
__device__ inline float4 values_of(int32_t dtype, const uint2& x) {  // four elements of 16 bits
  return {value_of(dtype, x.x & 0xffff), value_of(dtype, x.x >> 16), value_of(dtype, x.y & 0xffff),
          value_of(dtype, x.y >> 16)};
}
__device__ inline float4 values_of(int32_t dtype, const RawFour& raw) {
  const uint2 &low = raw.low, &high = raw.high;
  if (dtype == KDA_F32)
    return {__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(high.x), __uint_as_float(high.y)};
  return values_of(dtype, low);
}
__device__ inline float value_at(const kda_tensor& t, int64_t at) {
  RawElement raw;
  load_raw(t, at, raw);
  return value_of(t.dtype, raw);
}

__device__ inline void store_value(const kda_tensor& t, int64_t at, float x) {
  switch (t.dtype) {
    case KDA_F32: static_cast<float*>(t.data)[at] = x; break;
    case KDA_BF16: static_cast<__nv_bfloat16*>(t.data)[at] = __float2bfloat16_rn(x); break;
    default: static_cast<__half*>(t.data)[at] = __float2half_rn(x); break;
  }
}
__device__ inline void store_four(const kda_tensor& t, int64_t at, const float4& x) {
  if (t.dtype == KDA_F32) return ptx::store_global(static_cast<float*>(t.data) + at, reinterpret_cast<const uint4&>(x));
  uint2 raw;
  if (t.dtype == KDA_BF16) {
    const __nv_bfloat162 lo = __floats2bfloat162_rn(x.x, x.y), hi = __floats2bfloat162_rn(x.z, x.w);
    raw = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
  } else {
    const __half2 lo = __floats2half2_rn(x.x, x.y), hi = __floats2half2_rn(x.z, x.w);
    raw = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
  }
  ptx::store_global(static_cast<uint16_t*>(t.data) + at, raw);
}

// ---- kVector channels from d on: one of any layout, or four where four_wide_rows(), four_wide_weights() and
// four_wide_state() allow it ----

inline bool aligned_to_four(const kda_tensor& t) {
  return !present(t) || reinterpret_cast<uintptr_t>(t.data) % (4 * dtype_size(t.dtype)) == 0;
}
// Do rows of x or y allow accesses of four channels?
inline bool four_wide_rows(const kda_tensor& t) {
  return t.shape[2] % 4 == 0 && t.stride[0] % 4 == 0 && t.stride[1] % 4 == 0 && aligned_to_four(t);
}
// Do weights, or a state, allow them? They need W = 4, with the taps of a channel side by side. In a state, either
// the entries of a channel lie side by side, or the channels of an entry.
inline bool four_wide_weights(const kda_tensor& weight, const kda_tensor& bias) {
  return weight.shape[1] == 4 && weight.stride[0] % 4 == 0 && aligned_to_four(weight) && aligned_to_four(bias);
}
inline bool four_wide_state(const kda_tensor& t) {
  if (!present(t)) return true;
  const bool by_channel = t.stride[1] == 3 && t.stride[2] == 1, by_entry = t.stride[1] == 1 && t.stride[2] % 4 == 0;
  return (by_channel || by_entry) && t.stride[0] % 4 == 0 && aligned_to_four(t);
}

// The channels of a row of x or y, in one access.
template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Channels {
  T x[kVector];
};
template <class T, int kVector>
__device__ Channels<T, kVector>* channels_at(const kda_tensor& t, const Sequence& s, int64_t token, int64_t d) {
  const int64_t at = s.b * t.stride[0] + (s.t0 + token) * t.stride[1] + d;
  return reinterpret_cast<Channels<T, kVector>*>(static_cast<T*>(t.data) + at);
}
template <class T, int kVector>
__device__ void store(Channels<T, kVector>* to, const Channels<T, kVector>& x) {
  if constexpr (sizeof(x) == 16) ptx::store_global(to, reinterpret_cast<const uint4&>(x));
  else if constexpr (sizeof(x) == 8) ptx::store_global(to, reinterpret_cast<const uint2&>(x));
  else *to = x;
}
// Zeroes tokens a .. b-1.
template <class T, int kVector>
__device__ void zero_tokens(const kda_tensor& y, const Sequence& s, int64_t a, int64_t b, int64_t d) {
  for (; a < b; ++a) store(channels_at<T, kVector>(y, s, a, d), {});
}

template <int kVector>
struct ConvWeights;
template <>
struct ConvWeights<1> {
  RawElement raw[kTaps], raw_bias;

  __device__ void fetch(const kda_tensor& weight, const kda_tensor& bias, int64_t d) {
    const int first = kTaps - static_cast<int>(weight.shape[1]);
    const int64_t at = d * weight.stride[0] - first;
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (j >= first) load_raw(weight, at + j, raw[j]);
    if (present(bias)) load_raw(bias, d, raw_bias);
  }
  __device__ void values(const kda_tensor& weight, const kda_tensor& bias, float (&w)[kTaps][1], float (&b)[1]) const {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) w[j][0] = value_of(weight.dtype, raw[j]);
    b[0] = value_of(bias.dtype, raw_bias);
  }
};
template <>
struct ConvWeights<4> {
  RawFour raw[4], raw_bias;  // [channel]

  __device__ void fetch(const kda_tensor& weight, const kda_tensor& bias, int64_t d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_raw(weight, (d + i) * weight.stride[0], raw[i]);
    if (present(bias)) load_raw(bias, d, raw_bias);
  }
  __device__ void values(const kda_tensor& weight, const kda_tensor& bias, float (&w)[kTaps][4], float (&b)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = values_of(weight.dtype, raw[i]);
      w[0][i] = four.x, w[1][i] = four.y, w[2][i] = four.z, w[3][i] = four.w;
    }
    const float4 four = values_of(bias.dtype, raw_bias);
    b[0] = four.x, b[1] = four.y, b[2] = four.z, b[3] = four.w;
  }
};

// The entries of a slot of [slots,D,W-1], as the rows before a sequence's first token; zeros until fetched.
template <int kVector>
struct ConvPast;
template <>
struct ConvPast<1> {
  RawElement raw[kPast];

  __device__ void fetch(const kda_tensor& state, int64_t slot, int64_t d) {
    const int first = kPast - static_cast<int>(state.shape[2]);
    const int64_t at = place_of(state, slot, d, -first);
#pragma unroll
    for (int j = 0; j < kPast; ++j)
      if (j >= first) load_raw(state, at + j * state.stride[2], raw[j]);
  }
  __device__ void values(const kda_tensor& state, float (&past)[kPast][1]) const {
#pragma unroll
    for (int j = 0; j < kPast; ++j) past[j][0] = value_of(state.dtype, raw[j]);
  }
};
// The distance between loads of four: either entries of four channels lie side by side, or four channels of an entry.
KDA_BOTH inline int64_t entry_step(const kda_tensor& state) { return state.stride[1] == 1 ? state.stride[2] : 4; }
// The numbers of four channels as they lie in memory, kPast loads of four, become rows of entries, and the reverse.
template <class X>
__device__ void to_rows(bool by_entry, const X (&x)[kPast * 4], X (&rows)[kPast][4]) {
#pragma unroll
  for (int j = 0; j < kPast; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[j][i] = by_entry ? x[4 * j + i] : x[kPast * i + j];
}
template <class X>
__device__ void from_rows(bool by_entry, const X (&rows)[kPast][4], X (&x)[kPast * 4]) {
#pragma unroll
  for (int j = 0; j < kPast * 4; ++j) x[j] = by_entry ? rows[j / 4][j % 4] : rows[j % kPast][j / kPast];
}
// raw: the kPast loads of four.
template <class Raw>
__device__ void past_of(const kda_tensor& state, const Raw (&raw)[kPast], float (&past)[kPast][4]) {
  float x[kPast * 4];  // as they lie in memory
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    const float4 four = values_of(state.dtype, raw[j]);
    x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
  }
  to_rows(state.stride[1] == 1, x, past);
}
template <>
struct ConvPast<4> {
  RawFour raw[kPast];

  __device__ void fetch(const kda_tensor& state, int64_t slot, int64_t d) {
    const int64_t at = place_of(state, slot, d, 0), step = entry_step(state);
#pragma unroll
    for (int j = 0; j < kPast; ++j) load_raw(state, at + j * step, raw[j]);
  }
  __device__ void values(const kda_tensor& state, float (&past)[kPast][4]) const { past_of(state, raw, past); }
};

// Stores the last W-1 rows of `past` in a slot.
template <int kVector>
__device__ void store_state(const kda_tensor& state, int64_t slot, int64_t d, const float (&past)[kPast][kVector]) {
  if constexpr (kVector == 1) {
    const int first = kPast - static_cast<int>(state.shape[2]);
    const int64_t at = place_of(state, slot, d, -first);
#pragma unroll
    for (int j = 0; j < kPast; ++j)
      if (j >= first) store_value(state, at + j * state.stride[2], past[j][0]);
  } else {
    const int64_t at = place_of(state, slot, d, 0), step = entry_step(state);
    float x[kPast * 4];
    from_rows(state.stride[1] == 1, past, x);
#pragma unroll
    for (int j = 0; j < kPast; ++j)
      store_four(state, at + j * step, {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]});
  }
}

// ---- any rows of one channel ----

struct ConvTaps {
  RawElement raw[kTaps];  // zeros where there is no row
  unsigned stored = 0;    // bit j: raw[j] is an entry of the state

  // slot may be any number: if it is not a slot of `state`, the sequence starts from zeros.
  __device__ void fetch(const kda_tensor& x, const kda_tensor& state, const ConvRows& rows, const Sequence& s,
                        int64_t slot, int64_t d) {
    const bool initial = slot >= 0 && slot < state.shape[0];
    const int64_t at_x = place_of(x, s.b, s.t0, d), at_state = initial ? place_of(state, slot, d, 0) : 0;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int64_t row = rows.at[j], t = row - rows.keep;
      if (t >= 0) load_raw(x, at_x + t * x.stride[1], raw[j]);
      else if (row >= 0 && initial) load_raw(state, at_state + row * state.stride[2], raw[j]), stored |= 1u << j;
    }
  }
  __device__ void values(const kda_tensor& x, const kda_tensor& state, float (&xx)[kTaps]) const {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) xx[j] = value_of(stored >> j & 1 ? state.dtype : x.dtype, raw[j]);
  }
};

// The convolved value of a token in front of decode and verify, as kda_conv stores it.
__device__ inline float convolved(const kda_conv_inputs& in, const ConvWeights<1>& weights, const ConvTaps& taps) {
  float w[kTaps][1], bias[1], xx[kTaps];
  weights.values(in.weight, in.bias, w, bias);
  taps.values(in.x, in.state, xx);
  const float plain[kTaps] = {w[0][0], w[1][0], w[2][0], w[3][0]};
  return rounded(in.x.dtype, convolve(plain, bias[0], xx, kTaps - static_cast<int>(in.weight.shape[1]), true));
}

}  // namespace kda::cuda

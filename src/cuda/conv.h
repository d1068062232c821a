// The causal convolution of one channel of one token, for kda_conv and for kernels that take raw rows (kda_conv_inputs).
// Every output comes from convolve(), whoever asks for it, so a fused convolution has the bits of kda_conv in front.
//
// In front of decode and verify, with the rows of a token the same in all threads:
//   ConvWeights w;   w.fetch(in.weight, in.bias, d);                                     of channel d, for all tokens
//   ConvRows rows = rows_until(parents, W - 1, n, t + W - 1, W);                         of token t of request n
//   ConvTaps x;      x.fetch(in.x, rows, s, d);                                          s: where its tokens are
//   const int64_t slot = slot_of(in.indices, n);                                         no state if it is not one
//   if (slot >= 0 && slot < in.state.shape[0]) x.fetch_state(in.state, rows, slot, d);
//   const float z = convolved(in, w, x, true);
// A state rolls on by m tokens (m > 0) once no thread reads it as it was, with m, slot and the tokens from roll_of():
//   x.fetch(..), x.fetch_state(..) with rows_until(parents, W - 1, n, m - 1 + W - 1, W - 1), then
//   roll(in.x, in.state, x, in.state, slot, d);
#pragma once
#include "convolution.h"
#include "cuda/activations.h"
#include "cuda/device.h"

namespace kda::cuda {

constexpr int kTaps = kMaxConvWidth;  // a narrower convolution has zeros in front

// y = bias + sum_j w_j xx_j, oldest first, then y sigmoid(y). The last product is one that the compiler may not contract
// with a sum of the caller's.
__device__ inline float convolve(const float (&w)[kTaps], float bias, const float (&xx)[kTaps], bool silu) {
  float y = bias;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) y = fmaf(w[j], xx[j], y);
  return silu ? __fmul_rn(y, sigmoid(y)) : y;
}

// As it would be read after it was stored.
__device__ inline float rounded(int32_t dtype, float x) {
  if (dtype == KDA_F32) return x;
  return dtype == KDA_BF16 ? __bfloat162float(__float2bfloat16_rn(x)) : __half2float(__float2half_rn(x));
}

// Like load_raw and value_of: fetch asks, everything else waits.
struct ConvWeights {
  unsigned raw[kTaps], raw_bias;

  __device__ void fetch(const kda_tensor& weight, const kda_tensor& bias, int64_t d) {
    const int first = kTaps - static_cast<int>(weight.shape[1]);
    const int64_t at = d * weight.stride[0];
#pragma unroll
    for (int j = 0; j < kTaps; ++j) raw[j] = j >= first ? load_raw(weight, at + j - first) : 0;
    raw_bias = present(bias) ? load_raw(bias, d) : 0;
  }
};

// A channel of some rows of xx, zeros where there is none.
struct ConvTaps {
  unsigned raw[kTaps];
  unsigned stored;  // bit j: raw[j] is an entry of the state

  // The rows that are tokens.
  __device__ void fetch(const kda_tensor& x, const ConvRows& rows, const Sequence& s, int64_t d) {
    stored = 0;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int64_t t = rows.at[j] - rows.keep;
      raw[j] = t >= 0 ? load_raw(x, offset(x, s.b, s.t0 + t, d)) : 0;
    }
  }
  // The others.
  __device__ void fetch_state(const kda_tensor& state, const ConvRows& rows, int64_t slot, int64_t d) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (rows.at[j] < 0 || rows.at[j] >= rows.keep) continue;
      raw[j] = load_raw(state, offset(state, slot, d, rows.at[j]));
      stored |= 1u << j;
    }
  }
  __device__ float value(const kda_tensor& x, const kda_tensor& state, int j) const {
    return value_of(stored >> j & 1 ? state.dtype : x.dtype, raw[j]);
  }
};

// The token's value, rounded to the dtype of x.
__device__ inline float convolved(const kda_conv_inputs& in, const ConvWeights& weights, const ConvTaps& taps,
                                  bool silu) {
  float w[kTaps], xx[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    w[j] = value_of(in.weight.dtype, weights.raw[j]);
    xx[j] = taps.value(in.x, in.state, j);
  }
  return rounded(in.x.dtype, convolve(w, value_of(in.bias.dtype, weights.raw_bias), xx, silu));
}

// The last W-1 rows of `taps` to a slot of `to`, which may be the one they were fetched from.
__device__ inline void roll(const kda_tensor& x, const kda_tensor& state, const ConvTaps& taps, const kda_tensor& to,
                            int64_t slot, int64_t d) {
  const int first = kTaps - static_cast<int>(to.shape[2]);
#pragma unroll
  for (int j = 1; j < kTaps; ++j)
    if (j >= first) store_element(to, offset(to, slot, d, j - first), taps.value(x, state, j));
}

}  // namespace kda::cuda

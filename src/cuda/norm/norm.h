// The mathematics of the output's norm and gate (math.md 2.4), for kda_norm_gate and for kernels that have rows in
// registers. A row's numbers are spread over lanes of a warp; all lanes come to each function together.
//   n = x rho,  rho = (mean of x^2 + eps)^(-1/2),  y = n w act(z)
//   dn = dy w act(z),  dx = rho (dn - n mean(dn n)),  dz = dy n w act'(z),  dw = sum over rows of dy n act(z)
//
// float x[8] of a row, sum_over_row() over its lanes:
//   const RowNorm norm = norm_row(x, sum_over_row(squares_of(x)), 1.0f / V, eps, sum_over_row);   may scale x
//   y[i] = x[i] * norm.factor * w[i] * gate_of(activation, z[i]).value
#pragma once
#include <cuda_runtime.h>

#include "cuda/call/warp.h"
#include "cuda/gate/activations.h"
#include "cuda/ptx/sm80.h"
#include "kda/kda.h"

namespace kda::cuda {

// n = (x scale) factor, so rho = scale factor. Rows whose mean is beyond f32, or so small that squares were lost, are
// multiplied by a power of two before they are squared. Of all others the scale is 1, so they keep their bits. A row
// with NaN has a factor of NaN. What makes a large row smaller is divided among scale and factor, so that small numbers
// beside large ones are not lost.
struct RowNorm {
  float scale, factor;
  bool zeros;  // the row has no other numbers, but for such whose squares are 0, too
};
constexpr float kLeastMean = 0x1p-90f, kGrow = 0x1p80f, kHalfShrink = 0x1p-40f;

// `squares` is the sum of x^2 over the row; again(scale) makes that of (x scale)^2, in the same order.
template <class Again>
__device__ RowNorm row_norm(float squares, float inverse_size, float eps, const Again& again) {
  const float mean = fmaf(squares, inverse_size, eps);
  RowNorm norm{1, ptx::inverse_root(mean), squares == 0};
  const bool usual = mean >= kLeastMean && mean <= 0x1.fffffep127f;
  if (__any_sync(kAll, !usual)) {
    const float half = usual || mean < kLeastMean ? 1 : kHalfShrink, scale = mean < kLeastMean ? kGrow : half * half;
    norm.factor = ptx::inverse_root(fmaf(again(scale), inverse_size, eps * scale * scale)) * half;
    norm.scale = mean < kLeastMean ? kGrow : half;
  }
  return norm;
}

template <int kCount>
__device__ float squares_of(const float (&x)[kCount]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}

// The same where each lane has all of its numbers: x becomes x scale.
template <int kCount, class SumOverRow>
__device__ RowNorm norm_row(float (&x)[kCount], float squares, float inverse_size, float eps, const SumOverRow& sum) {
  return row_norm(squares, inverse_size, eps, [&](float scale) {
    const float half = scale < 1 ? kHalfShrink : scale;
    float scaled = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] *= half;
      const float y = scale < 1 ? x[i] * kHalfShrink : x[i];
      scaled = fmaf(y, y, scaled);
    }
    return sum(scaled);
  });
}

// act(z) and act'(z). 1 - sigmoid(z) would lose all digits, so the slope is made of e^-|z|. Subnormals on the way count
// as 0, which is right to 2^-126 and saves a sixth of the instructions.
struct GateValue {
  float value, slope;
};
__device__ inline float gate_of(int32_t activation, float z) {
  const float s = ptx::reciprocal(1.0f + ptx::exp2(-kLog2e * z));
  return activation == KDA_NORM_SILU ? z * s : s;
}
__device__ inline GateValue gate_and_slope(int32_t activation, float z) {
  const float e = ptx::exp2(-kLog2e * fabsf(z)), w = ptx::reciprocal(1.0f + e), s = z < 0 ? e * w : w,
              slope = e * w * w;
  if (activation != KDA_NORM_SILU) return {s, slope};
  return {z * s, fmaf(z, slope, s)};
}

}  // namespace kda::cuda

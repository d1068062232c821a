// The nonlinear functions of gates.
#pragma once

namespace kda::cuda {

// __expf and __fdividef: relative errors of a few 2^-22 for |x| < 20, against a gate of 1e-5.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// max(x, 0) + log(1 + e) with e = exp(-|x|), the logarithm as 2 atanh(e / (2 + e)): relative accuracy also for very
// negative x, where models start.
__device__ inline float softplus(float x) {
  const float e = __expf(-fabsf(x)), s = __fdividef(e, 2.0f + e), z = s * s;
  float p = 2.0f / 13;
  p = fmaf(p, z, 2.0f / 11);
  p = fmaf(p, z, 2.0f / 9);
  p = fmaf(p, z, 2.0f / 7);
  p = fmaf(p, z, 2.0f / 5);
  p = fmaf(p, z, 2.0f / 3);
  p = fmaf(p, z, 2.0f);
  return fmaxf(x, 0.0f) + p * s;  // fmaxf drops a NaN, s keeps it
}

}  // namespace kda::cuda

// The nonlinear functions of gates.
//
// exp(A_log) softplus(z) and exp(A_log) z are products in which one factor may overflow f32 while the other is just
// as small. So exp takes only the moderate part of A_log, from -64 to 64, and the rest goes into z. Where there is no
// rest, no bit changes.
#pragma once
#include <cuda_runtime.h>

namespace kda::cuda {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// Uses __expf and __fdividef: relative errors are a few 2^-22 for |x| < 20, against a limit of 1e-5.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// max(x, 0) + log(1 + e) with e = exp(-|x|). The logarithm is computed as 2 atanh(e / (2 + e)), which keeps relative
// accuracy also for very negative x, where models start.
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

constexpr float kMostLog = 64;
__device__ inline float moderate(float A_log) { return fminf(fmaxf(A_log, -kMostLog), kMostLog); }

// e^rest. Beyond e^+-80 it only matters whether the product becomes 0 or infinite. A NaN stays, and only -inf gives 0:
// times an infinite z, that is NaN.
__device__ inline float exp_rest(float rest) {
  return expf(rest > 80 ? 80 : rest < -80 && rest > -INFINITY ? -80 : rest);
}

__device__ inline bool is_moderate(float A_log) { return fabsf(A_log) <= kMostLog; }

// Takes the place of z in sigmoid(exp(moderate(A_log)) z). sigmoid(0) is 1/2 for any A_log.
__device__ inline float bounded_input(float A_log, float z) {
  return is_moderate(A_log) ? z : z * exp_rest(A_log - moderate(A_log));
}

// Takes the place of z in exp(moderate(A_log)) softplus(z), so that the decay made of that is right. With a rest
// above 0, the decay is more than 0 only where softplus is e^z; with a rest below 0, it is less than 1 only where
// softplus is z, and z is above 0.
__device__ inline float softplus_input(float A_log, float z) {
  if (is_moderate(A_log)) return z;
  if (A_log > 0) return z + A_log - kMostLog;  // in this order: they may cancel
  return A_log < 0 && z <= 0 ? z : z * exp_rest(A_log + kMostLog);
}

}  // namespace kda::cuda

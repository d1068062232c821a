// The gate and its gradient (math.md 2.1, 5.2), of one element:
//   softplus     g = -a softplus(z)        dx = -a sigmoid(z) dg          dA_log += dg g
//   lower bound  g = lb sigmoid(a z)       dx = a lb s (1 - s) dg         dA_log += dx z         z = x + dt_bias
// s (1 - s) is computed as e / (1 + e)^2 with e = exp(-|a z|), and dx z as (dx / a) (a z): neither 1 - s nor 0 inf
// loses a gradient that is not 0. A gradient dg of 0 gives gradients of 0, also where g is -inf. Where g is NaN, so are
// its gradients.
//
// Where a factor may leave the range of f32 and the product does not (A_log above 16, or below -64), exponents are
// added before exp, and h = exp(exponent / 2) multiplies twice.
#pragma once
#include "cuda/gate/activations.h"
#include "kda/kda.h"

namespace kda::cuda {

// The first f32 below -126 log(2): where the logarithm of a decay is this or less, the decay is 0 in f32, and so is its
// gradient.
constexpr float kGone = -87.336548f;

struct Gradients {
  float dx, dA_log;
};

// The gate with a = exp(A_log) as a factor.
struct Gate {
  int32_t form;
  float lower_bound, a;
  __device__ float operator()(float z) const {
    return form == KDA_GATE_SOFTPLUS ? -a * softplus(z) : lower_bound * sigmoid(a * z);
  }
  __device__ Gradients backward(float z, float dg) const {
    if (form == KDA_GATE_SOFTPLUS) {
      const float g = (*this)(z);
      return {-a * sigmoid(z) * dg, dg == 0 && isinf(g) ? 0 : dg * g};
    }
    const float y = a * z, e = __expf(-fabsf(y)), w = __fdividef(1.0f, 1.0f + e),
                slope = lower_bound * dg * (e * w * w);
    return {a * slope, fminf(fmaxf(y, -kMostInput), kMostInput) * slope};
  }
  static constexpr float kMostInput = 1000;  // exp(-1000) is 0
  __device__ static bool does_for(float A_log) { return A_log >= -64 && A_log <= 16; }
};

// The gate for any A_log.
struct WideGate {
  int32_t form;
  float lower_bound, A_log;
  __device__ float operator()(float z) const {
    if (form != KDA_GATE_SOFTPLUS) return lower_bound * sigmoid(input(z));
    const bool small = z < kSmall;
    return -multiplied(small ? 1 : softplus(z), 1, small ? A_log + z : A_log);
  }
  __device__ Gradients backward(float z, float dg) const {
    if (const float g = (*this)(z); g != g) return {g, g};
    if (dg == 0) return {0, 0};
    if (form == KDA_GATE_SOFTPLUS) {
      const bool small = z < kSmall;
      const float exponent = small ? A_log + z : A_log;
      return {-multiplied(small ? 1 : sigmoid(z), dg, exponent), -multiplied(small ? 1 : softplus(z), dg, exponent)};
    }
    const float y = input(z), most = fminf(fabsf(y), Gate::kMostInput), e = expf(-fabsf(y));
    const float slope = lower_bound / ((1 + e) * (1 + e));
    // (Any A_log above 1000 acts as 1000 does.)
    return {multiplied(slope, dg, (A_log > 1000 ? 1000 : A_log) - fabsf(y)), slope * dg * (e * copysignf(most, y))};
  }

 private:
  static constexpr float kSmall = -16;  // below, softplus(z) and sigmoid(z) are exp(z) to 6e-8
  // An exponent of at least `least`, so that only -inf has a power of 0: times infinity, that is NaN.
  __device__ static float bounded(float exponent, float least) {
    return exponent < least && exponent > -INFINITY ? least : exponent;
  }
  // x exp(exponent) dg, in an order in which a product on the way overflows only if the result does.
  __device__ static float multiplied(float x, float dg, float exponent) {
    const float h = expf(bounded(exponent, -174) / 2);
    return h < 1 ? x * h * h * dg : x > 1 ? x * dg * h * h : x * h * dg * h;
  }
  // exp(A_log) z. A_log above 176 counts as 176, where any z but 0 gives more than 1e30.
  __device__ float input(float z) const {
    const float h = expf((A_log > 176 ? 176 : bounded(A_log, -176)) / 2);
    return z * h * h;
  }
};

}  // namespace kda::cuda

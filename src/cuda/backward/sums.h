// What the kernels of kda_backward share: the gate of a head, sums over chunks, tokens of no sequence.
#pragma once
#include "cuda/call/token.h"
#include "cuda/gate/gate.h"

namespace kda::cuda {

// The slope of activated_beta: s (1 - s), for any z.
__device__ inline float beta_slope(int32_t form, float z) {
  if (form == KDA_BETA_ACTIVATED) return 1;
  const float e = __expf(-fabsf(z)), w = __fdividef(1.0f, 1.0f + e);
  return e * w * w * (form == KDA_BETA_2SIGMOID ? 2 : 1);
}

// The gate of a head, for two channels.
struct HeadGate {
  GateForm gate_form;
  float lower_bound, A_log, rate, bias[2];

  __device__ HeadGate(const Tokens& x, unsigned hv, unsigned first, unsigned second)
      : gate_form(x.gate_form), lower_bound(x.lower_bound) {
    A_log = x.A_log ? *reinterpret_cast<const float*>(x.A_log + hv * 4) : 0.0f, rate = expf(moderate(A_log));
    const auto of = [&](unsigned c) {
      return x.bias ? *reinterpret_cast<const float*>(x.bias + hv * x.bias_stride + c * 4) : 0.0f;
    };
    bias[0] = of(first), bias[1] = of(second);
  }
  // The log2 of the decay, as forward computes it.
  __device__ float log2(float x, int i) const {
    float g[1] = {x + bias[i]};
    log_decays(*this, A_log, rate, g);
    return g[0] * kLog2e;
  }
  // dg: of the natural logarithm of the decay. It counts as 0 where a token decays to nothing.
  __device__ Gradients gradient(float x, float dg, int i) const {
    if (is_given(gate_form)) return {x <= kGone ? 0 : dg, 0};
    if (log2(x, i) < -126) dg = 0;
    return gradients_of(*this, A_log, rate, x + bias[i], dg);
  }
};

// Zeroes the gradients of tokens of no sequence, of a packed call. Views without data are left out.
struct TokenGradients {
  TypedView dq, dk, dv, dg, dbeta;
};
void launch_zero_tails(const ForwardProblem& p, const TokenGradients& gradients);

// Computes dA_log and d_dt_bias from sums [rows][HV][K + parts]: of each channel, then `parts` of dA_log. Rows are
// added in order. Without rows the results are 0.
void launch_gate_sums(const BackwardProblem& p, const float* sums, int64_t rows, int parts);

}  // namespace kda::cuda

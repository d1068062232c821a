// The causal convolution (math.md 7.6): xx = state ++ x, y_t = bias + sum_j w_j xx_(t+j), z = y sigmoid(y).
#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

struct Span {
  int64_t b, t0, length;
};
Span span_of(const kda_tensor& x, const kda_tensor& cu_seqlens, int64_t n) {
  if (!present(cu_seqlens)) return {n, 0, x.shape[1]};
  const int64_t t0 = int_at(cu_seqlens, n);
  return {0, t0, int_at(cu_seqlens, n + 1) - t0};
}

// Channel c of a sequence with what came before it.
Vector inputs(const kda_tensor& x, const Span& s, int64_t c, const kda_tensor& state, int64_t slot, int64_t keep) {
  Vector xx;
  for (int64_t i = 0; i < keep; ++i) xx.push_back(present(state) ? get(state, slot, c, i) : 0);
  for (int64_t t = 0; t < s.length; ++t) xx.push_back(get(x, s.b, s.t0 + t, c));
  return xx;
}

double convolved(const Vector& xx, int64_t t, int64_t c, const kda_tensor& weight, const kda_tensor& bias) {
  double y = present(bias) ? get(bias, c) : 0;
  for (int64_t j = 0; j < weight.shape[1]; ++j) y += get(weight, c, j) * xx[t + j];
  return y;
}

void zero_rest(const kda_tensor& t, const kda_tensor& cu_seqlens, int64_t N) {
  if (!present(cu_seqlens)) return;
  const int64_t end = int_at(cu_seqlens, N);
  zero_rows(t, 0, end, t.shape[1] - end);
}

}  // namespace

void conv(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  for (int64_t n = 0; n < p.N; ++n) {
    const Span s = span_of(a.x, a.cu_seqlens, n);
    const int64_t slot = present(a.state_indices) ? int_at(a.state_indices, n) : n;
    if (present(a.state_indices) && slot < a.first_valid_slot) {
      zero_rows(a.y, s.b, s.t0, s.length);
      continue;
    }
    const bool initial = !present(a.has_initial_state) || int_at(a.has_initial_state, n);
    for (int64_t c = 0; c < p.D; ++c) {
      const Vector xx = inputs(a.x, s, c, initial ? a.initial_state : kda_tensor{}, slot, p.W - 1);
      for (int64_t t = 0; t < s.length; ++t) {
        const double y = convolved(xx, t, c, a.weight, a.bias);
        set(a.y, a.silu ? y * sigmoid(y) : y, s.b, s.t0 + t, c);
      }
      for (int64_t i = 0; present(a.final_state) && i < p.W - 1; ++i) set(a.final_state, xx[s.length + i], slot, c, i);
    }
  }
  zero_rest(a.y, a.cu_seqlens, p.N);
}

void conv_backward(const ConvBackwardProblem& p) {
  const kda_conv_backward_args& a = p.args;
  const int64_t W = p.W, keep = W - 1;
  for (int64_t c = 0; c < p.D; ++c) {
    Vector dw(W);
    double dbias = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const Span s = span_of(a.x, a.cu_seqlens, n);
      const Vector xx = inputs(a.x, s, c, a.initial_state, n, keep);
      Vector dxx(xx.size());
      for (int64_t i = 0; present(a.d_final_state) && i < keep; ++i) dxx[s.length + i] = get(a.d_final_state, n, c, i);
      for (int64_t t = 0; t < s.length; ++t) {
        const double y = convolved(xx, t, c, a.weight, a.bias), sg = sigmoid(y);
        const double dy = get(a.dy, s.b, s.t0 + t, c) * (a.silu ? sg + y * sg * (1 - sg) : 1);
        for (int64_t j = 0; j < W; ++j) {
          dw[j] += dy * xx[t + j];
          dxx[t + j] += dy * get(a.weight, c, j);
        }
        dbias += dy;
      }
      for (int64_t i = 0; present(a.d_initial_state) && i < keep; ++i) set(a.d_initial_state, dxx[i], n, c, i);
      for (int64_t t = 0; present(a.dx) && t < s.length; ++t) set(a.dx, dxx[keep + t], s.b, s.t0 + t, c);
    }
    for (int64_t j = 0; present(a.dweight) && j < W; ++j) set(a.dweight, dw[j], c, j);
    if (present(a.dbias)) set(a.dbias, dbias, c);
  }
  if (present(a.dx)) zero_rest(a.dx, a.cu_seqlens, p.N);
}

}  // namespace kda::reference

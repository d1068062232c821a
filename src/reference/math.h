// What forward and backward of the oracle share: element access in float64, activations (math.md 2), one head's inputs.
#pragma once
#include <cmath>
#include <vector>

#include "contract/dtype.h"
#include "contract/gate_form.h"
#include "contract/problem.h"

namespace kda::reference {

using Vector = std::vector<double>;

inline int64_t offset(const kda_tensor& t, int64_t i, int64_t j, int64_t k, int64_t l) {
  const int64_t index[4] = {i, j, k, l};
  int64_t sum = 0;
  for (int d = 0; d < t.ndim; ++d) sum += index[d] * t.stride[d];
  return sum;
}

inline double get(const kda_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  const int64_t at = offset(t, i, j, k, l);
  switch (t.dtype) {
    case KDA_F64: return static_cast<const double*>(t.data)[at];
    case KDA_F32: return static_cast<const float*>(t.data)[at];
    case KDA_BF16: return bf16_to_float(static_cast<const uint16_t*>(t.data)[at]);
    default: return f16_to_float(static_cast<const uint16_t*>(t.data)[at]);
  }
}

inline void set(const kda_tensor& t, double x, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  const int64_t at = offset(t, i, j, k, l);
  switch (t.dtype) {
    case KDA_F64: static_cast<double*>(t.data)[at] = x; break;
    case KDA_F32: static_cast<float*>(t.data)[at] = static_cast<float>(x); break;
    case KDA_BF16: static_cast<uint16_t*>(t.data)[at] = float_to_bf16(rounded_to_odd(x)); break;
    default: static_cast<uint16_t*>(t.data)[at] = float_to_f16(rounded_to_odd(x)); break;
  }
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// sigmoid'(x) = s (1 - s), computed without 1 - s, which would lose all digits.
inline double sigmoid_slope(double x) {
  const double e = std::exp(-std::abs(x));
  return e / ((1 + e) * (1 + e));
}
// Logarithms of softplus(x) and sigmoid(x), also where these are 0 in float64.
inline double log_softplus(double x) { return x < -40 ? x : std::log(softplus(x)); }
inline double log_sigmoid(double x) { return -softplus(-x); }

// x exp(y), without overflow on the way. With a gradient x of 0 the result is 0 for any y but NaN.
inline double times_exp(double x, double y) {
  const double half = std::exp(y / 2);
  return x == 0 && !std::isnan(y) ? 0 : x * half * half;
}

// Gate of one element and its gradients: z = x + dt_bias. With a = exp(A_log),
//   softplus     g = -a softplus(z)        dx = -a sigmoid(z) dg          dA_log = g dg
//   lower bound  g = lb sigmoid(y)         dx = a lb sigmoid'(y) dg       dA_log = y lb sigmoid'(y) dg      y = a z
// a may be beyond float64 where the products are not, so exponents are added. Where g is NaN, so are dx and dA_log.
struct Gate {
  GateForm form;
  double lower_bound;
  double operator()(double A_log, double z) const {
    switch (form) {
      case GateForm::kLog: return z;
      case GateForm::kSoftplus: return -times_exp(1, A_log + log_softplus(z));
      case GateForm::kLowerBound: break;
    }
    return lower_bound * sigmoid(y(A_log, z));
  }
  double dx(double A_log, double z, double dg) const {
    if (const double g = (*this)(A_log, z); std::isnan(g) && !is_given(form)) return g;
    switch (form) {
      case GateForm::kLog: return dg;
      case GateForm::kSoftplus: return -times_exp(dg, A_log + log_sigmoid(z));
      case GateForm::kLowerBound: break;
    }
    const double size = std::abs(y(A_log, z)), e = std::exp(-size);
    return std::isinf(size) ? 0 : lower_bound / ((1 + e) * (1 + e)) * times_exp(dg, A_log - size);
  }
  // There is no A_log where g is given.
  double dA_log(double A_log, double z, double dg) const {
    if (const double g = (*this)(A_log, z); std::isnan(g)) return g;
    switch (form) {
      case GateForm::kLog: return 0;
      case GateForm::kSoftplus: return -times_exp(dg, A_log + log_softplus(z));
      case GateForm::kLowerBound: break;
    }
    const double y = this->y(A_log, z);
    return std::isinf(y) ? 0 : y * lower_bound * sigmoid_slope(y) * dg;
  }

 private:
  static double y(double A_log, double z) {
    return z == 0 && !std::isnan(A_log) ? 0 : std::copysign(times_exp(1, A_log + std::log(std::abs(z))), z);
  }
};

inline double get_A_log(const kda_tensor& A_log, int64_t hv) { return present(A_log) ? get(A_log, hv) : 0; }

// Activated inputs of one (sequence, value head): row t of q, k, g has K numbers, row t of v has V.
struct Head {
  int64_t T, K, V;
  double scale;
  Vector q, k, v, g, beta;  // q and k normalised if wanted
  Vector q_norm, k_norm;    // 1 / sqrt(sum of squares + eps), or 1

  Head(const Dims& d, const kda_inputs& in, const Sequence& s, int64_t hv)
      : T(s.length),
        K(d.K),
        V(d.V),
        scale(in.scale),
        q(T * K),
        k(T * K),
        v(T * V),
        g(T * K),
        beta(T),
        q_norm(T),
        k_norm(T) {
    const int64_t h = hv / d.group();
    const Gate gate{form_of(in), in.lower_bound};
    const double A_log = get_A_log(in.A_log, hv);
    for (int64_t t = 0; t < T; ++t) {
      q_norm[t] = load_row(in.q, s.b, s.t0 + t, h, in.qk_l2norm, &q[t * K]);
      k_norm[t] = load_row(in.k, s.b, s.t0 + t, h, in.qk_l2norm, &k[t * K]);
      for (int64_t i = 0; i < V; ++i) v[t * V + i] = get(in.v, s.b, s.t0 + t, hv, i);
      for (int64_t i = 0; i < K; ++i)
        g[t * K + i] =
            gate(A_log, get(in.g, s.b, s.t0 + t, hv, i) + (present(in.dt_bias) ? get(in.dt_bias, hv, i) : 0));
      const double b = get(in.beta, s.b, s.t0 + t, hv);
      beta[t] = in.beta_form == KDA_BETA_ACTIVATED ? b : (in.beta_form == KDA_BETA_2SIGMOID ? 2 : 1) * sigmoid(b);
    }
  }

  double load_row(const kda_tensor& x, int64_t b, int64_t t, int64_t h, bool normalise, double* row) const {
    for (int64_t i = 0; i < K; ++i) row[i] = get(x, b, t, h, i);
    const double r = normalise ? inverse_norm(row) : 1;
    for (int64_t i = 0; i < K; ++i) row[i] *= r;
    return r;
  }
  double inverse_norm(const double* row) const {
    const auto squares = [&](double shrink) {
      double sum = 0;
      for (int64_t i = 0; i < K; ++i) sum += shrink * row[i] * (shrink * row[i]);
      return sum;
    };
    const double sum = squares(1), shrink = 0x1p-600;
    return sum < INFINITY ? 1 / std::sqrt(sum + 1e-6) : shrink / std::sqrt(squares(shrink));  // eps is negligible
  }

  // One token (math.md 3). S is [K][V]; u gets the correction, o the output (either may be null).
  void step(int64_t t, double* S, double* u, double* o) const {
    const double *kt = &k[t * K], *qt = &q[t * K], *gt = &g[t * K], *vt = &v[t * V];
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) S[i * V + j] *= std::exp(gt[i]);
    for (int64_t j = 0; j < V; ++j) {
      double e = vt[j];
      for (int64_t i = 0; i < K; ++i) e -= S[i * V + j] * kt[i];
      const double correction = beta[t] * e;
      double sum = 0;
      for (int64_t i = 0; i < K; ++i) S[i * V + j] += kt[i] * correction, sum += S[i * V + j] * qt[i];
      if (u) u[j] = correction;
      if (o) o[j] = scale * sum;
    }
  }
};

// The inputs of a call. If it has raw rows, q, k and v are convolved first, and rounded to their dtype (math.md 7.6).
struct Convolved {
  kda_inputs inputs;
  std::vector<char> rows;
  Convolved(const kda_inputs& in, const kda_conv_inputs& conv, const kda_tensor& parents);
};
// Advances slot `slot` of a convolution's state by the first m tokens of s, or by the path that ends in token m - 1.
void conv_roll(const kda_tensor& x, const kda_tensor& state, int64_t slot, int64_t n, const Sequence& s,
               const kda_tensor& parents, int64_t m);

// State element (k, v) of a head in either layout.
inline double get_state(const kda_tensor& t, int32_t layout, int64_t row, int64_t hv, int64_t k, int64_t v) {
  return layout == KDA_STATE_V_FIRST ? get(t, row, hv, v, k) : get(t, row, hv, k, v);
}
inline void set_state(const kda_tensor& t, int32_t layout, double x, int64_t row, int64_t hv, int64_t k, int64_t v) {
  layout == KDA_STATE_V_FIRST ? set(t, x, row, hv, v, k) : set(t, x, row, hv, k, v);
}
inline Vector load_state(const Dims& d, const kda_tensor& t, int32_t layout, int64_t row, int64_t hv, bool wanted) {
  Vector S(d.K * d.V, 0.0);
  for (int64_t k = 0; wanted && k < d.K; ++k)
    for (int64_t v = 0; v < d.V; ++v) S[k * d.V + v] = get_state(t, layout, row, hv, k, v);
  return S;
}
inline void store_state(const Dims& d, const Vector& S, const kda_tensor& t, int32_t layout, int64_t row, int64_t hv) {
  for (int64_t k = 0; k < d.K; ++k)
    for (int64_t v = 0; v < d.V; ++v) set_state(t, layout, S[k * d.V + v], row, hv, k, v);
}

// Zeroes the rows of a [B,T,heads,size] output from token `first` of row b on.
inline void zero_rows(const kda_tensor& t, int64_t b, int64_t first, int64_t count) {
  for (int64_t i = first; i < first + count; ++i)
    for (int64_t j = 0; j < t.shape[2]; ++j)
      for (int64_t l = 0; l < (t.ndim > 3 ? t.shape[3] : 1); ++l) set(t, 0, b, i, j, l);
}

}  // namespace kda::reference

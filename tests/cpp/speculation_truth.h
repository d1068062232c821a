// Plain decode in float64, token by token: what every speculative operator must agree with.
#pragma once
#include "speculation_calls.h"

namespace kda::test {

// Implementations that work together, and how close to the truth they are.
struct Backend {
  const char *name, *forward, *verify, *flush, *flush_verify;
  int32_t dtype, state_dtype;
  double budget;
};
inline void PrintTo(const Backend& b, std::ostream* out) { *out << b.name; }
inline std::vector<Backend> backends() {
  return {{"reference", "reference", "reference", "reference", "reference", KDA_F64, KDA_F64, 1e-12},
          {"cpu", "cpu_chunk", "cpu_verify", "cpu_flush", "cpu_flush_verify", KDA_F32, KDA_F32, 1e-5}};
}
inline Case in_dtype(Case c, const Backend& b) {
  c.dtype = c.g_dtype = c.beta_dtype = b.dtype, c.state_dtype = b.state_dtype;
  return c;
}

// Tokens `path` of request n as a request of its own.
inline Inputs along(const Inputs& in, int64_t n, const std::vector<int64_t>& path) {
  Case c = in.c;
  c.B = 1, c.T = static_cast<int64_t>(path.size()), c.lengths.clear(), c.tail = 0, c.layout = Layout::kDense;
  Inputs one(c);
  const auto gather = [&](Tensor& to, const Tensor& from) {
    const int64_t row = from.size() / std::max<int64_t>(1, in.B * in.T);
    const int64_t first = in.cu_seqlens ? in.begin(n) : n * in.T;
    for (int64_t i = 0; i < to.size(); ++i) to.set(i, from.get((first + path[i / row]) * row + i % row));
  };
  gather(one.q, in.q), gather(one.k, in.k), gather(one.v, in.v), gather(one.g, in.g), gather(one.beta, in.beta);
  one.A_log = in.A_log.clone(), one.dt_bias = in.dt_bias.clone();
  return one;
}

// A state in float64 that advances by plain decode.
struct Truth {
  Tensor state;
  Truth(const Inputs& in) : state(KDA_F64, in.state_shape(1)) { state.fill(0); }
  Truth(const Inputs& in, const Tensor& pool, int64_t slot) : Truth(in) {
    for (int64_t i = 0; i < state.size(); ++i) state.set(i, pool.get(slot * state.size() + i));
  }
  Truth clone() const { return Truth(state.clone()); }
  // The outputs [T,HV,V] of tokens `path` of request n.
  std::vector<double> decode(const Inputs& in, int64_t n, const std::vector<int64_t>& path) {
    if (path.empty()) return {};
    const Inputs one = along(in, n, path);
    const Tensor o(KDA_F64, {1, one.T, one.c.HV, one.c.V});
    kda_decode_args a = KDA_DECODE_ARGS_INIT;
    a.in = one.view(), a.states.h0 = a.states.hT = state, a.o = o;
    run(a, {.impl = "reference"});
    return o.values();
  }

 private:
  explicit Truth(Tensor&& state) : state(std::move(state)) {}
};

// Elements first .. first+n-1 in row-major order.
inline std::vector<double> part(const Tensor& t, int64_t first, int64_t n) {
  std::vector<double> all(n);
  for (int64_t i = 0; i < n; ++i) all[i] = t.get(first + i);
  return all;
}
inline std::vector<double> slot_values(const Tensor& pool, int64_t slot) {
  const int64_t size = pool.size() / pool.shape()[0];
  return part(pool, slot * size, size);
}
// The output of draft t of request n.
inline std::vector<double> output_of(const Tensor& o, const Inputs& in, int64_t n, int64_t t) {
  const int64_t row = in.c.HV * in.c.V;
  return part(o, ((in.cu_seqlens ? in.begin(n) : n * in.T) + t) * row, row);
}

// Whether the error is within the budget relative to the whole, or within a tenth of it in every element (math.md 8:
// 1e-6).
inline testing::AssertionResult near(const std::vector<double>& expected, const std::vector<double>& got,
                                     double budget) {
  const Error e = compare(expected, got);
  const bool small = e.relative_rmse <= budget && e.max <= 8 * budget * (e.rms_ref + 1e-8);
  if (e.finite_alike && (small || e.max <= budget / 10)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "relative RMSE " << e.relative_rmse << ", budget " << budget << "; at element "
                                     << e.worst << " off by " << e.max << (e.finite_alike ? "" : " (NaN or infinity)");
}

}  // namespace kda::test

#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

// dL/dS before the first token, with no gradient after the last one (math.md 3 with dhT = 0). Needs no states.
Vector reverse_scan(const Head& x, const kda_tensor& d_o, const Sequence& s, int64_t hv) {
  Vector dS(x.K * x.V), du(x.V);
  for (int64_t t = x.T - 1; t >= 0; --t) {
    const double *q = &x.q[t * x.K], *k = &x.k[t * x.K], *g = &x.g[t * x.K];
    for (int64_t j = 0; j < x.V; ++j) {
      du[j] = 0;
      for (int64_t i = 0; i < x.K; ++i) {
        dS[i * x.V + j] += x.scale * q[i] * get(d_o, s.b, s.t0 + t, hv, j);
        du[j] += dS[i * x.V + j] * k[i];
      }
    }
    for (int64_t i = 0; i < x.K; ++i)
      for (int64_t j = 0; j < x.V; ++j) dS[i * x.V + j] = std::exp(g[i]) * (dS[i * x.V + j] - k[i] * x.beta[t] * du[j]);
  }
  return dS;
}

Vector scan(const Head& x, Vector S) {
  for (int64_t t = 0; t < x.T; ++t) x.step(t, S.data(), nullptr, nullptr);
  return S;
}

}  // namespace

// The recurrence without values takes the unit matrix to M. With values it takes zeros to b.
void segment_map(const SegmentMapProblem& p) {
  const kda_segment_map_args& a = p.args;
  const int32_t layout = a.in.state_layout;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, a.in, n);
    for (int64_t hv = 0; hv < p.HV; ++hv) {
      Head x(p, a.in, s, hv);
      if (present(a.b)) store_state(p, scan(x, Vector(p.K * p.V)), a.b, layout, n, hv);
      if (present(a.d)) store_state(p, reverse_scan(x, a.d_o, s, hv), a.d, layout, n, hv);
      if (!present(a.M)) continue;
      x.V = p.K, x.v.assign(x.T * x.V, 0);
      Vector unit(p.K * p.K);
      for (int64_t i = 0; i < p.K; ++i) unit[i * p.K + i] = 1;
      const Vector M = scan(x, std::move(unit));
      for (int64_t i = 0; i < p.K; ++i)
        for (int64_t j = 0; j < p.K; ++j) set(a.M, M[i * p.K + j], n, hv, i, j);
    }
  }
}

void segment_merge(const SegmentMergeProblem& p) {
  const kda_segment_merge_args& a = p.args;
  const int32_t layout = a.state_layout;
  for (int64_t hv = 0; hv < p.HV; ++hv) {
    Vector S = load_state(p, a.h0, layout, 0, hv, present(a.h0));
    store_state(p, S, a.states, layout, a.reverse ? p.N : 0, hv);
    for (int64_t i = 0; i < p.N; ++i) {
      const int64_t n = a.reverse ? p.N - 1 - i : i;
      Vector next = load_state(p, a.b, layout, n, hv, true);
      for (int64_t k = 0; k < p.K; ++k)
        for (int64_t l = 0; l < p.K; ++l)
          for (int64_t v = 0; v < p.V; ++v)
            next[k * p.V + v] += (a.reverse ? get(a.M, n, hv, l, k) : get(a.M, n, hv, k, l)) * S[l * p.V + v];
      S = std::move(next);
      store_state(p, S, a.states, layout, a.reverse ? n : n + 1, hv);
    }
  }
}

}  // namespace kda::reference

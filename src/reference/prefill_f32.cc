// kda_prefill_f32 in float64: the token recurrence, and w and u row by row from (I + Akk) X = beta Y.
#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

// Solves (I + Akk) X = beta Y for one chunk and stores X as chunk n of a buffer. y(i, d) belongs to token i of the
// chunk.
template <class F>
void store_solved(const Head& x, const kda_tensor& buffer, int64_t n, int64_t first, int64_t L, int64_t columns,
                  const F& y) {
  Vector X(L * columns);
  for (int64_t i = 0; i < L; ++i) {
    for (int64_t d = 0; d < columns; ++d) X[i * columns + d] = x.beta[first + i] * y(i, d);
    Vector decay(x.K);  // from token j to token i
    for (int64_t j = i - 1; j >= 0; --j) {
      double Akk = 0;
      for (int64_t c = 0; c < x.K; ++c) {
        decay[c] += x.g[(first + j + 1) * x.K + c];
        Akk += x.beta[first + i] * x.k[(first + i) * x.K + c] * x.k[(first + j) * x.K + c] * std::exp(decay[c]);
      }
      for (int64_t d = 0; d < columns; ++d) X[i * columns + d] -= Akk * X[j * columns + d];
    }
  }
  for (int64_t i = 0; i < buffer.shape[1]; ++i)
    for (int64_t d = 0; d < columns; ++d) set(buffer, i < L ? X[i * columns + d] : 0, n, i, d);
}

void run_head(const PrefillF32Problem& p, int64_t b, int64_t hv) {
  const kda_prefill_f32_args& a = p.args;
  const Head x(p, p.in, sequence_at(p, p.in, b), hv);
  Vector S = load_state(p, a.h0, a.state_layout, b, hv, present(a.h0)), o(p.V);
  for (int64_t t = 0; t < p.T; ++t) {
    x.step(t, S.data(), nullptr, o.data());
    for (int64_t v = 0; v < p.V; ++v) set(p.o, o[v], b, t, hv, v);
  }
  if (present(a.hT)) store_state(p, S, a.hT, a.state_layout, b, hv);

  for (int64_t t = 0, n = 0; t < p.T; t += a.chunk, ++n) {
    const int64_t L = std::min<int64_t>(a.chunk, p.T - t);
    if (present(a.u))
      store_solved(x, chunk_buffer(a.u, b, hv), n, t, L, p.V,
                   [&](int64_t i, int64_t d) { return x.v[(t + i) * p.V + d]; });
    if (!present(a.w)) continue;
    Vector G(L * p.K);
    for (int64_t i = 0; i < L * p.K; ++i) G[i] = x.g[t * p.K + i] + (i < p.K ? 0 : G[i - p.K]);
    store_solved(x, chunk_buffer(a.w, b, hv), n, t, L, p.K,
                 [&](int64_t i, int64_t d) { return x.k[(t + i) * p.K + d] * std::exp(G[i * p.K + d]); });
  }
}

}  // namespace

void prefill_f32(const PrefillF32Problem& p) {
  for (int64_t b = 0; b < p.B; ++b)
    for (int64_t hv = 0; hv < p.HV; ++hv) run_head(p, b, hv);
}

}  // namespace kda::reference

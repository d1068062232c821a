// The stages in float64, chunk by chunk, as kda.h and math.md 4 and 5 write them.
#include "reference/stages.h"

#include <functional>

#include "contract/tables_stages.h"
#include "reference/math.h"

namespace kda::reference {
namespace {

// ---- small dense matrices ----

struct Mat {
  int64_t rows = 0, columns = 0;
  Vector x = {};

  Mat(int64_t rows, int64_t columns) : rows(rows), columns(columns), x(rows * columns) {}
  Mat(int64_t rows, int64_t columns, const std::function<double(int64_t, int64_t)>& f) : Mat(rows, columns) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) (*this)(i, j) = f(i, j);
  }
  double& operator()(int64_t i, int64_t j) { return x[i * columns + j]; }
  double operator()(int64_t i, int64_t j) const { return x[i * columns + j]; }
};

// All operators work element by element, except the product of matrices.
Mat map(const Mat& a, const std::function<double(int64_t, int64_t)>& f) { return Mat(a.rows, a.columns, f); }
Mat operator+(const Mat& a, const Mat& b) {
  return map(a, [&](int64_t i, int64_t j) { return a(i, j) + b(i, j); });
}
Mat operator-(const Mat& a, const Mat& b) {
  return map(a, [&](int64_t i, int64_t j) { return a(i, j) - b(i, j); });
}
Mat operator*(double s, const Mat& a) {
  return map(a, [&](int64_t i, int64_t j) { return s * a(i, j); });
}
Mat times(const Mat& a, const Mat& b) {
  return map(a, [&](int64_t i, int64_t j) { return a(i, j) * b(i, j); });
}
Mat rows_times(const Vector& s, const Mat& a) {  // Diag(s) a
  return map(a, [&](int64_t i, int64_t j) { return s[i] * a(i, j); });
}
Mat T(const Mat& a) {
  return Mat(a.columns, a.rows, [&](int64_t i, int64_t j) { return a(j, i); });
}
Mat operator*(const Mat& a, const Mat& b) {
  Mat c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t k = 0; k < a.columns; ++k)
      for (int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, k) * b(k, j);
  return c;
}
// Selects the triangle that counts: a factor of 0 would let NaN through.
Mat lower(const Mat& a, bool strict = false) {
  return map(a, [&](int64_t i, int64_t j) { return j < i + !strict ? a(i, j) : 0; });
}
Vector row_sums(const Mat& a) {
  Vector sums(a.rows);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < a.columns; ++j) sums[i] += a(i, j);
  return sums;
}

// ---- one chunk of one value head ----

struct At {
  const Dims& d;
  int32_t layout;
  Sequence seq;
  int64_t hv, t0, L, row;  // tokens t0 .. t0+L-1; row of h and dh

  Mat load(const kda_tensor& t, int64_t columns, int64_t head) const {
    return Mat(L, columns, [&](int64_t i, int64_t j) { return get(t, seq.b, t0 + i, head, j); });
  }
  Mat keys(const kda_tensor& t) const { return load(t, d.K, hv / d.group()); }
  Mat gates(const kda_tensor& t) const { return load(t, d.K, hv); }
  Mat values(const kda_tensor& t) const { return load(t, d.V, hv); }
  Mat scores(const kda_tensor& t) const { return lower(load(t, L, hv)); }
  Vector column(const kda_tensor& t) const {
    Vector x(L);
    for (int64_t i = 0; i < L; ++i) x[i] = get(t, seq.b, t0 + i, hv);
    return x;
  }
  Mat state(const kda_tensor& t, int64_t at) const {
    return Mat(d.K, d.V, [&](int64_t k, int64_t v) { return get_state(t, layout, at, hv, k, v); });
  }
  void store(const kda_tensor& t, const Mat& m) const {
    for (int64_t i = 0; present(t) && i < L; ++i)
      for (int64_t j = 0; j < m.columns; ++j) set(t, m(i, j), seq.b, t0 + i, hv, j);
  }
  void store_scores(const kda_tensor& t, const Mat& m) const {
    store(t, Mat(L, kChunk, [&](int64_t i, int64_t j) { return j < L ? m(i, j) : 0; }));
  }
  void store_column(const kda_tensor& t, const Vector& x) const {
    for (int64_t i = 0; i < L; ++i) set(t, x[i], seq.b, t0 + i, hv);
  }
  void store_state(const kda_tensor& t, int64_t at, const Mat& S) const {
    for (int64_t k = 0; present(t) && k < d.K; ++k)
      for (int64_t v = 0; v < d.V; ++v) set_state(t, layout, S(k, v), at, hv, k, v);
  }
};

// Decays of one chunk from its G.
struct Decays {
  Mat G;
  int64_t last;
  Mat E, F;    // from the chunk's start, to its end
  Vector ell;  // of the whole chunk

  explicit Decays(const Mat& g) : G(g), last(g.rows - 1), E(g), F(g), ell(g.columns) {
    E = map(G, [&](int64_t i, int64_t d) { return std::exp2(G(i, d)); });
    F = map(G, [&](int64_t i, int64_t d) { return std::exp2(G(last, d) - G(i, d)); });
    for (int64_t d = 0; d < G.columns; ++d) ell[d] = std::exp2(G(last, d));
  }
  double R(int64_t i, int64_t j, int64_t d) const { return std::exp2(G(i, d) - G(j, d)); }

  // sum_d x_id y_jd R_ijd, j <= i
  Mat scores(const Mat& x, const Mat& y) const {
    return Mat(G.rows, G.rows, [&](int64_t i, int64_t j) {
      double sum = 0;
      for (int64_t d = 0; j <= i && d < G.columns; ++d) sum += x(i, d) * y(j, d) * R(i, j, d);
      return sum;
    });
  }
  // sum_j A_ij y_jd R_ijd and sum_i A_ij x_id R_ijd, both over the lower triangle A
  Mat from_columns(const Mat& A, const Mat& y) const {
    return map(G, [&](int64_t i, int64_t d) {
      double sum = 0;
      for (int64_t j = 0; j <= i; ++j) sum += A(i, j) * y(j, d) * R(i, j, d);
      return sum;
    });
  }
  Mat from_rows(const Mat& A, const Mat& x) const {
    return map(G, [&](int64_t j, int64_t d) {
      double sum = 0;
      for (int64_t i = j; i < G.rows; ++i) sum += A(i, j) * x(i, d) * R(i, j, d);
      return sum;
    });
  }
};

// Calls fn(at) for every sequence, head and chunk, with chunks from first to last or from last to first. Then zeroes
// the tails.
template <class P, class F>
void for_each_chunk(const P& p, const F& fn, bool reverse = false) {
  int64_t first_row = 0, end = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, p.in, n);
    const int64_t chunks = h_rows(s.length, 1);
    for (int64_t hv = 0; hv < p.HV; ++hv)
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t c = reverse ? chunks - 1 - i : i, t = c * kChunk;
        fn(At{p, p.in.state_layout, s, hv, s.t0 + t, std::min(kChunk, s.length - t), first_row + c});
      }
    first_row += chunks;
    end = s.t0 + s.length;
  }
  for_each_tail(p, [&](const kda_tensor& t) { zero_rows(t, 0, end, p.T - end); });
}

// Carries the state of each (sequence, head) along the chunks, from `initial` to `final`.
template <class P, class F>
void scan(const P& p, const kda_tensor& initial, const kda_tensor& final, bool reverse, const F& fn) {
  std::vector<Mat> states;
  for (int64_t n = 0; n < p.N; ++n)
    for (int64_t hv = 0; hv < p.HV; ++hv) {
      const At at{p, p.in.state_layout, {}, hv, 0, 0, 0};
      states.push_back(present(initial) ? at.state(initial, n) : Mat(p.K, p.V));
    }
  for_each_chunk(
      p, [&](const At& at) { fn(at, states[at.seq.n * p.HV + at.hv]); }, reverse);
  for (int64_t n = 0; n < p.N; ++n)
    for (int64_t hv = 0; hv < p.HV; ++hv)
      At{p, p.in.state_layout, {}, hv, 0, 0, 0}.store_state(final, n, states[n * p.HV + hv]);
}

template <class Args>
void store_w_u(const Args& a, const At& c, const Decays& d, const Mat& k, const Vector& beta) {
  const Mat inverse = c.scores(a.Akk_inv);
  c.store(a.w, inverse * rows_times(beta, times(k, d.E)));
  c.store(a.u, inverse * rows_times(beta, c.values(a.v)));
  if (present(a.qG)) c.store(a.qG, times(c.keys(a.q), d.E));
  c.store(a.kg, times(k, d.F));
}

}  // namespace

void stage(const StageProblem<kda_stage_cumsum_args>& p) {
  for_each_chunk(p, [&](const At& c) {
    Mat G = c.gates(p.args.g);
    for (int64_t i = 0; i < c.L; ++i)
      for (int64_t d = 0; d < p.K; ++d) {
        const double step = G(i, d) / std::log(2.0);
        G(i, d) = (step < -160 ? -160 : step) + (i ? G(i - 1, d) : 0);
      }
    c.store(p.args.G, G);
  });
}

void stage(const StageProblem<kda_stage_chunk_intra_args>& p) {
  const kda_stage_chunk_intra_args& a = p.args;
  for_each_chunk(p, [&](const At& c) {
    const Decays d(c.gates(a.G));
    const Mat q = c.keys(a.q), k = c.keys(a.k);
    const Vector beta = c.column(a.beta);
    const Mat Akk = lower(rows_times(beta, d.scores(k, k)), true);
    Mat inverse(c.L, c.L);  // row i of (I + Akk) X = I
    for (int64_t i = 0; i < c.L; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        inverse(i, j) = i == j;
        for (int64_t m = j; m < i; ++m) inverse(i, j) -= Akk(i, m) * inverse(m, j);
      }
    c.store_scores(a.Aqk, p.in.scale * d.scores(q, k));
    c.store_scores(a.Akk_inv, inverse);
    store_w_u(a, c, d, k, beta);
  });
}

void stage(const StageProblem<kda_stage_recompute_w_u_args>& p) {
  const kda_stage_recompute_w_u_args& a = p.args;
  for_each_chunk(p, [&](const At& c) { store_w_u(a, c, Decays(c.gates(a.G)), c.keys(a.k), c.column(a.beta)); });
}

void stage(const StageProblem<kda_stage_delta_h_args>& p) {
  const kda_stage_delta_h_args& a = p.args;
  scan(p, a.h0, a.hT, false, [&](const At& c, Mat& S) {
    c.store_state(a.h, c.row, S);
    const Mat v_new = c.values(a.u) - c.gates(a.w) * S;
    c.store(a.v_new, v_new);
    S = rows_times(Decays(c.gates(a.G)).ell, S) + T(c.gates(a.kg)) * v_new;
  });
}

void stage(const StageProblem<kda_stage_fwd_o_args>& p) {
  const kda_stage_fwd_o_args& a = p.args;
  for_each_chunk(p, [&](const At& c) {
    const Mat qG = times(c.keys(a.q), Decays(c.gates(a.G)).E);
    c.store(a.o, p.in.scale * (qG * c.state(a.h, c.row)) + c.scores(a.Aqk) * c.values(a.v_new));
  });
}

void stage(const StageProblem<kda_stage_bwd_local_args>& p) {
  const kda_stage_bwd_local_args& a = p.args;
  for_each_chunk(p, [&](const At& c) {
    const Mat d_o = c.values(a.d_o);
    c.store_scores(a.dAqk, p.in.scale * lower(d_o * T(c.values(a.v_new))));
    c.store(a.dv_local, T(c.scores(a.Aqk)) * d_o);
  });
}

void stage(const StageProblem<kda_stage_bwd_delta_h_args>& p) {
  const kda_stage_bwd_delta_h_args& a = p.args;
  scan(p, a.dhT, a.dh0, true, [&](const At& c, Mat& dS) {
    c.store_state(a.dh, c.row, dS);
    const Mat dv_new = c.values(a.dv_local) + c.gates(a.kg) * dS;
    c.store(a.dv_new, dv_new);
    dS = rows_times(Decays(c.gates(a.G)).ell, dS) + p.in.scale * (T(c.gates(a.qG)) * c.values(a.d_o)) -
         T(c.gates(a.w)) * dv_new;
  });
}

void stage(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  for_each_chunk(p, [&](const At& c) {
    const Decays d(c.gates(a.G));
    const Mat q = c.keys(a.q), k = c.keys(a.k), v_new = c.values(a.v_new), kG = times(k, d.E);
    const Mat S = c.state(a.h, c.row), dS = c.state(a.dh, c.row);
    const Vector beta = c.column(a.beta);
    const Mat x = T(c.scores(a.Akk_inv)) * c.values(a.dv_new), y = x * T(S);
    const Mat dq = p.in.scale * times(c.values(a.d_o) * T(S), d.E);
    const Mat written = times(v_new * T(dS), d.F), read = rows_times(beta, y);
    Vector dbeta = row_sums(times(x, c.values(a.v)));
    const Vector predicted = row_sums(times(kG, y)), SdS = row_sums(times(S, dS));
    for (int64_t i = 0; i < c.L; ++i) dbeta[i] -= predicted[i];
    Mat dG = times(q, dq) - times(k, written) - times(kG, read);
    for (int64_t m = 0; m < p.K; ++m) {
      dG(c.L - 1, m) += d.ell[m] * SdS[m];
      for (int64_t i = 0; i < c.L; ++i) dG(c.L - 1, m) += k(i, m) * written(i, m);
    }
    c.store(a.dq, dq);
    c.store(a.dk, written - times(read, d.E));
    c.store(a.dv, rows_times(beta, x));
    c.store_column(a.dbeta, dbeta);
    c.store(a.dG, dG);
    c.store_scores(a.dAkk, -1.0 * lower(x * T(v_new), true));
  });
}

void stage(const StageProblem<kda_stage_bwd_intra_args>& p) {
  const kda_stage_bwd_intra_args& a = p.args;
  for_each_chunk(p, [&](const At& c) {
    const Decays d(c.gates(a.G));
    const Mat q = c.keys(a.q), k = c.keys(a.k), dAqk = c.scores(a.dAqk), dAkk = lower(c.scores(a.dAkk), true);
    const Vector beta = c.column(a.beta);
    const Mat beta_k = rows_times(beta, k);
    const Mat pair = d.from_columns(dAqk, k), r = d.from_columns(dAkk, k), beta_r = rows_times(beta, r);
    const Mat column = d.from_rows(dAqk, q) + d.from_rows(dAkk, beta_k);
    Vector dbeta = c.column(a.dbeta);
    const Vector kr = row_sums(times(k, r));
    for (int64_t i = 0; i < c.L; ++i) dbeta[i] += kr[i];
    c.store(a.dq, c.gates(a.dq) + pair);
    c.store(a.dk, c.gates(a.dk) + beta_r + column);
    c.store_column(a.dbeta, dbeta);
    c.store(a.dG, c.gates(a.dG) + times(q, pair) + times(k, beta_r - column));
  });
}

void stage(const StageProblem<kda_stage_cumsum_backward_args>& p) {
  const kda_stage_cumsum_backward_args& a = p.args;
  for_each_chunk(p, [&](const At& c) {
    Mat sum = c.gates(a.dG);
    for (int64_t i = c.L - 2; i >= 0; --i)
      for (int64_t d = 0; d < p.K; ++d) sum(i, d) += sum(i + 1, d);
    if (present(a.g)) {
      const Mat g = c.gates(a.g);
      const double least = -126 * std::log(2.0);  // below it e^g is 0 in f32
      sum = map(sum, [&](int64_t i, int64_t d) { return g(i, d) < least ? 0 : sum(i, d); });
    }
    c.store(a.dg, sum);
  });
}

}  // namespace kda::reference

#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

// Gradients of one (sequence, value head) with respect to its activated inputs.
struct HeadGradients {
  Vector dq, dk, dv, dg, dbeta, dS;

  // Reverse mode of math.md 3. States are stored every 64 tokens and recomputed in between.
  HeadGradients(const Head& x, const Vector& h0, Vector dhT, const kda_tensor& d_o, const Sequence& s, int64_t hv)
      : dq(x.T * x.K), dk(x.T * x.K), dv(x.T * x.V), dg(x.T * x.K), dbeta(x.T), dS(std::move(dhT)) {
    std::vector<Vector> starts;
    Vector S = h0;
    for (int64_t t = 0; t < x.T; ++t) {
      if (t % kChunk == 0) starts.push_back(S);
      x.step(t, S.data(), nullptr, nullptr);
    }
    for (int64_t c = static_cast<int64_t>(starts.size()) - 1; c >= 0; --c) {
      const int64_t first = c * kChunk, rows = std::min(kChunk, x.T - first);
      std::vector<Vector> before(rows, starts[c]);  // before[i] = state before token first + i
      for (int64_t i = 0; i + 1 < rows; ++i) {
        before[i + 1] = before[i];
        x.step(first + i, before[i + 1].data(), nullptr, nullptr);
      }
      for (int64_t i = rows - 1; i >= 0; --i) token(x, first + i, before[i], d_o, s, hv);
    }
  }

 private:
  void token(const Head& x, int64_t t, const Vector& before, const kda_tensor& d_o, const Sequence& s, int64_t hv) {
    const int64_t K = x.K, V = x.V;
    const double *q = &x.q[t * K], *k = &x.k[t * K], *v = &x.v[t * V], *g = &x.g[t * K];
    Vector St = before, e(V), u(V), d_out(V), du(V);
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) St[i * V + j] *= std::exp(g[i]);
    for (int64_t j = 0; j < V; ++j) {
      e[j] = v[j];
      for (int64_t i = 0; i < K; ++i) e[j] -= St[i * V + j] * k[i];
      u[j] = x.beta[t] * e[j];
      d_out[j] = get(d_o, s.b, s.t0 + t, hv, j);
    }
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) {
        dq[t * K + i] += x.scale * (St[i * V + j] + k[i] * u[j]) * d_out[j];  // S = St + k u^T
        dS[i * V + j] += x.scale * q[i] * d_out[j];
      }
    for (int64_t j = 0; j < V; ++j) {
      for (int64_t i = 0; i < K; ++i) du[j] += dS[i * V + j] * k[i];
      dbeta[t] += du[j] * e[j];
      dv[t * V + j] = x.beta[t] * du[j];
    }
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) {
        dk[t * K + i] += dS[i * V + j] * u[j] - St[i * V + j] * dv[t * V + j];
        const double dSt = dS[i * V + j] - k[i] * dv[t * V + j];
        dg[t * K + i] += dSt * St[i * V + j];
        dS[i * V + j] = std::exp(g[i]) * dSt;
      }
  }
};

// dx = r (dy - y (y . dy)) with y = r x; without a norm r = 1 and dx = dy.
void store_qk(const kda_tensor& out, const Vector& dy, const Vector& y, const Vector& r, bool normalised,
              const Sequence& s, int64_t h, int64_t K) {
  if (!present(out)) return;
  for (int64_t t = 0; t < s.length; ++t) {
    double dot = 0;
    for (int64_t i = 0; normalised && i < K; ++i) dot += y[t * K + i] * dy[t * K + i];
    for (int64_t i = 0; i < K; ++i) set(out, r[t] * (dy[t * K + i] - y[t * K + i] * dot), s.b, s.t0 + t, h, i);
  }
}

// One element of the gate's backward; adds to the sums of the head.
double gate_dx(const Gate& gate, double A_log, double x, const kda_tensor& dt_bias, int64_t hv, int64_t k, double dg,
               Vector& dA_log, Vector& d_dt_bias, int64_t K) {
  const double z = x + (present(dt_bias) ? get(dt_bias, hv, k) : 0), dx = gate.dx(A_log, z, dg);
  dA_log[hv] += gate.dA_log(A_log, z, dg);
  d_dt_bias[hv * K + k] += dx;
  return dx;
}

void store_gate_sums(const kda_tensor& dA_log, const kda_tensor& d_dt_bias, const Vector& A_sum, const Vector& bias_sum,
                     int64_t K) {
  for (int64_t hv = 0; hv < static_cast<int64_t>(A_sum.size()); ++hv) {
    if (present(dA_log)) set(dA_log, A_sum[hv], hv);
    for (int64_t k = 0; present(d_dt_bias) && k < K; ++k) set(d_dt_bias, bias_sum[hv * K + k], hv, k);
  }
}

}  // namespace

void backward(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  const kda_inputs& in = a.in;
  const Gate gate{form_of(in), in.lower_bound};
  Vector A_sum(p.HV), bias_sum(p.HV * p.K);
  int64_t end = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, in, n);
    end = s.t0 + s.length;
    for (int64_t h = 0; h < p.H; ++h) {
      Vector dq(s.length * p.K), dk(s.length * p.K);  // summed over the value heads of h, before the norm's backward
      for (int64_t hv = h * p.group(); hv < (h + 1) * p.group(); ++hv) {
        const Head x(p, in, s, hv);
        const Vector h0 = load_state(p, a.h0, in.state_layout, n, hv, present(a.h0));
        const HeadGradients d(x, h0, load_state(p, a.dhT, in.state_layout, n, hv, present(a.dhT)), a.d_o, s, hv);
        const double A_log = get_A_log(in.A_log, hv);
        for (int64_t t = 0; t < s.length; ++t) {
          for (int64_t i = 0; i < p.K; ++i) {
            dq[t * p.K + i] += d.dq[t * p.K + i];
            dk[t * p.K + i] += d.dk[t * p.K + i];
            const double dx = gate_dx(gate, A_log, get(in.g, s.b, s.t0 + t, hv, i), in.dt_bias, hv, i,
                                      d.dg[t * p.K + i], A_sum, bias_sum, p.K);
            if (present(a.dg)) set(a.dg, dx, s.b, s.t0 + t, hv, i);
          }
          for (int64_t j = 0; present(a.dv) && j < p.V; ++j) set(a.dv, d.dv[t * p.V + j], s.b, s.t0 + t, hv, j);
          if (present(a.dbeta)) {
            const double factor = in.beta_form == KDA_BETA_2SIGMOID ? 2 : 1,
                         slope = factor * sigmoid_slope(get(in.beta, s.b, s.t0 + t, hv));
            set(a.dbeta, d.dbeta[t] * (in.beta_form == KDA_BETA_ACTIVATED ? 1 : slope), s.b, s.t0 + t, hv);
          }
        }
        if (present(a.dh0)) store_state(p, d.dS, a.dh0, in.state_layout, n, hv);
        if (hv + 1 == (h + 1) * p.group()) {
          store_qk(a.dq, dq, x.q, x.q_norm, in.qk_l2norm, s, h, p.K);
          store_qk(a.dk, dk, x.k, x.k_norm, in.qk_l2norm, s, h, p.K);
        }
      }
    }
  }
  store_gate_sums(a.dA_log, a.d_dt_bias, A_sum, bias_sum, p.K);
  for (const kda_tensor* t : {&a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta})
    if (p.varlen && present(*t)) zero_rows(*t, 0, end, p.T - end);
}

void gate_backward(const GateBackwardProblem& p) {
  const kda_gate_backward_args& a = p.args;
  const Gate gate{form_of(a), a.lower_bound};
  const int64_t HV = a.x.shape[1], K = a.x.shape[2];
  Vector A_sum(HV), bias_sum(HV * K);
  for (int64_t m = 0; m < a.x.shape[0]; ++m)
    for (int64_t hv = 0; hv < HV; ++hv)
      for (int64_t k = 0; k < K; ++k)
        set(a.dx,
            gate_dx(gate, get_A_log(a.A_log, hv), get(a.x, m, hv, k), a.dt_bias, hv, k, get(a.dg, m, hv, k), A_sum,
                    bias_sum, K),
            m, hv, k);
  store_gate_sums(a.dA_log, a.d_dt_bias, A_sum, bias_sum, K);
}

}  // namespace kda::reference

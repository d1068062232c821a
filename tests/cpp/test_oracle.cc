// The oracle itself: two tokens by hand, the chunk form of math.md 4 against the token recurrence, and every gradient
// against central differences in float64.
#include <algorithm>
#include <cmath>

#include "calls.h"

namespace kda::test {
namespace {

Case f64(Case c) {
  c.dtype = c.g_dtype = c.beta_dtype = c.state_dtype = KDA_F64;
  return c;
}

void forward(const Inputs& in, const ForwardOutputs& out) { run(forward_args(in, out), {.impl = "reference"}); }

// ---- forward ----

// K = V = 1, alpha = 1/2: the state decays, then is corrected, then read.
TEST(Oracle, TwoTokensByHand) {
  Inputs in(f64({.name = "hand", .T = 2, .K = 1, .V = 1, .scale = 10}));
  for (const int t : {0, 1}) in.g.set(t, std::log(0.5));
  in.q.set(0, 2), in.k.set(0, 1), in.v.set(0, 3), in.beta.set(0, 1);
  in.q.set(1, 1), in.k.set(1, 0.5), in.v.set(1, 1), in.beta.set(1, 0.5);
  in.h0.set(0, 4);
  const ForwardOutputs out(in, true, true);
  forward(in, out);
  // S = 4/2 = 2, u = 1 (3 - 2 1) = 1, S = 3, o = 10 3 2 | S = 1.5, u = 0.5 (1 - 1.5 0.5) = 0.125, S = 1.5625
  EXPECT_DOUBLE_EQ(out.o.get(0), 60);
  EXPECT_DOUBLE_EQ(out.o.get(1), 15.625);
  EXPECT_DOUBLE_EQ(out.v_new.get(0), 1);
  EXPECT_DOUBLE_EQ(out.v_new.get(1), 0.125);
  EXPECT_DOUBLE_EQ(out.hT.get(0), 1.5625);
  EXPECT_DOUBLE_EQ(out.h.get(0), 4);
  EXPECT_DOUBLE_EQ(out.Aqk.get(0), 20);             // scale q_0 k_0
  EXPECT_DOUBLE_EQ(out.Aqk.get(64), 10 * 1 * 0.5);  // scale q_1 k_0 alpha_1
  EXPECT_DOUBLE_EQ(out.Akk.get(0), 0);              // strict
  EXPECT_DOUBLE_EQ(out.Akk.get(64), 0.5 * 0.5 * 1 * 0.5);
}

TEST(Oracle, ActivationsByHand) {
  Inputs in(f64({.name = "activations",
                 .T = 1,
                 .K = 2,
                 .V = 1,
                 .gate_form = KDA_GATE_SOFTPLUS,
                 .gates = Gates::kRaw,
                 .A_log = true,
                 .dt_bias = true,
                 .beta_form = KDA_BETA_2SIGMOID,
                 .qk_l2norm = true,
                 .scale = 1}));
  in.k.set(0, 3), in.k.set(1, 4), in.q.set(0, 0), in.q.set(1, 2);
  in.v.set(0, 1), in.beta.set(0, 0.3);
  in.g.set(0, 0.1), in.g.set(1, -2), in.dt_bias.set(0, 0.5), in.dt_bias.set(1, 0), in.A_log.set(0, 0.7);
  in.h0.set(0, 5), in.h0.set(1, -6);
  const ForwardOutputs out(in, false, true);
  forward(in, out);
  const double a = std::exp(0.7), k0 = 3 / std::sqrt(25 + 1e-6), k1 = 4 / std::sqrt(25 + 1e-6);
  const double S0 = 5 * std::exp(-a * std::log(1 + std::exp(0.6))), S1 = -6 * std::exp(-a * std::log(1 + std::exp(-2)));
  const double u = 2 / (1 + std::exp(-0.3)) * (1 - S0 * k0 - S1 * k1);
  EXPECT_NEAR(out.hT.get(0), S0 + k0 * u, 1e-14);
  EXPECT_NEAR(out.hT.get(1), S1 + k1 * u, 1e-14);
  EXPECT_NEAR(out.o.get(0), (S1 + k1 * u) * 2 / std::sqrt(4 + 1e-6), 1e-14);
}

TEST(Oracle, DefaultScale) {
  const Inputs in(f64({.name = "scale", .T = 3, .K = 16})),
      scaled(f64({.name = "scale", .T = 3, .K = 16, .scale = 0.25}));
  const ForwardOutputs a(in, false, true), b(scaled, false, true);
  forward(in, a), forward(scaled, b);
  EXPECT_EQ(a.o.bits(), b.o.bits());
}

// One chunk from its scores: v_new = (I + Akk)^-1 diag(beta) (v - kG S), o = scale qG S + Aqk v_new,
// S' = Diag(ell) S + kg^T v_new.
TEST(Oracle, ChunkFormAgrees) {
  const int64_t L = 40, K = 6, V = 5;
  const Inputs in(f64({.name = "chunk", .T = L, .K = K, .V = V, .state_layout = KDA_STATE_K_FIRST, .scale = 0.3f}));
  const ForwardOutputs out(in, true, true);
  forward(in, out);
  const std::vector<double> Aqk = out.Aqk.values(), Akk = out.Akk.values();
  std::vector<double> S = in.h0.values(), E(L * K), v_new(L * V), o(L * V);
  for (int64_t i = 0; i < L; ++i)
    for (int64_t d = 0; d < K; ++d) E[i * K + d] = std::exp(in.g.get(i * K + d)) * (i ? E[(i - 1) * K + d] : 1);
  for (int64_t i = 0; i < L; ++i)
    for (int64_t c = 0; c < V; ++c) {
      double x = in.v.get(i * V + c), y = 0;
      for (int64_t d = 0; d < K; ++d) {
        x -= in.k.get(i * K + d) * E[i * K + d] * S[d * V + c];
        y += 0.3f * in.q.get(i * K + d) * E[i * K + d] * S[d * V + c];
      }
      x *= in.beta.get(i);
      for (int64_t j = 0; j < i; ++j) x -= Akk[i * 64 + j] * v_new[j * V + c];
      v_new[i * V + c] = x;
      for (int64_t j = 0; j <= i; ++j) y += Aqk[i * 64 + j] * v_new[j * V + c];
      o[i * V + c] = y;
    }
  for (int64_t d = 0; d < K; ++d)
    for (int64_t c = 0; c < V; ++c) {
      S[d * V + c] *= E[(L - 1) * K + d];
      for (int64_t j = 0; j < L; ++j)
        S[d * V + c] += in.k.get(j * K + d) * E[(L - 1) * K + d] / E[j * K + d] * v_new[j * V + c];
    }
  EXPECT_LT(compare(v_new, out.v_new.values()).relative_rmse, 1e-13);
  EXPECT_LT(compare(o, out.o.values()).relative_rmse, 1e-13);
  EXPECT_LT(compare(S, out.hT.values()).relative_rmse, 1e-13);
  for (int64_t i = 0; i < L; ++i)
    for (int64_t j = 0; j < 64; ++j) {
      EXPECT_TRUE(j <= i || Aqk[i * 64 + j] == 0) << i << "," << j;
      EXPECT_TRUE(j < i || Akk[i * 64 + j] == 0) << i << "," << j;
    }
}

// ---- gradients ----

// L = sum o d_o + sum hT dhT.
double loss(const Inputs& in, const ForwardOutputs& out) {
  forward(in, out);
  double sum = 0;
  for (int64_t i = 0; i < out.o.size(); ++i) sum += out.o.get(i) * in.d_o.get(i);
  for (int64_t i = 0; in.dhT && i < out.hT.size(); ++i) sum += out.hT.get(i) * in.dhT.get(i);
  return sum;
}

std::vector<Case> gradient_cases() {
  std::vector<Case> all = {
      {.name = "plain", .T = 5},
      {.name = "lengths", .HV = 2, .lengths = {3, 0, 1, 4}, .tail = 2},
      {.name = "batch", .B = 2, .T = 4, .H = 2, .HV = 2, .state_layout = KDA_STATE_K_FIRST},
      {.name = "gva_l2norm", .T = 5, .H = 2, .HV = 4, .qk_l2norm = true},
      {.name = "softplus", .T = 5, .HV = 2, .gate_form = KDA_GATE_SOFTPLUS, .gates = Gates::kRaw, .A_log = true},
      {.name = "softplus_bias",
       .B = 2,
       .T = 4,
       .HV = 2,
       .gate_form = KDA_GATE_SOFTPLUS,
       .gates = Gates::kRaw,
       .A_log = true,
       .dt_bias = true,
       .beta_form = KDA_BETA_SIGMOID,
       .qk_l2norm = true},
      {.name = "lower_bound",
       .T = 5,
       .HV = 2,
       .gate_form = KDA_GATE_LOWER_BOUND,
       .gates = Gates::kRaw,
       .lower_bound = -2,
       .A_log = true,
       .dt_bias = true,
       .beta_form = KDA_BETA_2SIGMOID},
      {.name = "lower_bound_no_A_log",
       .T = 5,
       .gate_form = KDA_GATE_LOWER_BOUND,
       .gates = Gates::kRaw,
       .lower_bound = -5,
       .dt_bias = true},
      {.name = "no_states", .T = 5, .scale = -2, .h0 = false, .dhT = false},
      {.name = "two_chunks", .T = 67, .gate_divisor = 10, .keys = Keys::kPositive},
  };
  for (Case& c : all) {
    c = f64(c);
    c.K = 3, c.V = 2;
  }
  return all;
}

class Gradients : public testing::TestWithParam<Case> {};

TEST_P(Gradients, EqualCentralDifferences) {
  Inputs in(GetParam());
  const ForwardOutputs out(in, false, true);
  BackwardOutputs gradients(in, true);
  run(backward_args(in, gradients), {.impl = "reference"});
  // dh0 may be wanted without h0: then it is the gradient at a state of zeros.
  if (!in.h0) in.h0 = Tensor(KDA_F64, in.state_shape(in.N), std::vector<double>(out.hT.size(), 0));

  const std::vector<std::pair<Tensor*, Tensor*>> pairs = {
      {&in.q, &gradients.dq},       {&in.k, &gradients.dk},
      {&in.v, &gradients.dv},       {&in.g, &gradients.dg},
      {&in.beta, &gradients.dbeta}, {&in.A_log, &gradients.dA_log},
      {&in.h0, &gradients.dh0},     {&in.dt_bias, &gradients.d_dt_bias}};
  const char* const names[] = {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "dh0", "d_dt_bias"};
  constexpr double h = 1e-5;
  Random random(7);
  for (size_t p = 0; p < pairs.size(); ++p) {
    const auto& [x, dx] = pairs[p];
    if (!*x) continue;
    double largest = 0;
    for (int64_t i = 0; i < dx->size(); ++i) largest = std::max(largest, std::abs(dx->get(i)));
    ASSERT_GT(largest, 0) << names[p];
    const bool all = x->size() <= 64;
    for (int64_t n = 0; n < std::min<int64_t>(64, x->size()); ++n) {
      const int64_t i = all ? n : random.below(x->size());
      const double at = x->get(i);
      x->set(i, at + h);
      const double above = loss(in, out);
      x->set(i, at - h);
      const double below = loss(in, out);
      x->set(i, at);
      ASSERT_NEAR(dx->get(i), (above - below) / (2 * h), 1e-7 * largest + 1e-9) << names[p] << "[" << i << "]";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Gradients, testing::ValuesIn(gradient_cases()),
                         [](const auto& info) { return info.param.name; });

// The gate alone, both forms, with sums over rows.
TEST(GateGradients, EqualCentralDifferences) {
  for (const int32_t form : {KDA_GATE_SOFTPLUS, KDA_GATE_LOWER_BOUND})
    for (const bool bias : {false, true}) {
      const Inputs in(f64({.name = "gate",
                           .T = 6,
                           .HV = 2,
                           .K = 3,
                           .gate_form = form,
                           .gates = Gates::kRaw,
                           .lower_bound = -5,
                           .A_log = true,
                           .dt_bias = bias}));
      GateTensors t(in, KDA_F64);
      run(gate_backward_args(in, t), {.impl = "reference"});
      const auto sum = [&] {
        run(gate_args(in, t), {.impl = "reference"});
        double s = 0;
        for (int64_t i = 0; i < t.g.size(); ++i) s += t.g.get(i) * t.dg.get(i);
        return s;
      };
      for (const auto& [x, dx] : {std::pair{&t.x, &t.dx}, {&t.A_log, &t.dA_log}, {&t.dt_bias, &t.d_dt_bias}})
        for (int64_t i = 0; i < x->size(); ++i) {
          const double at = x->get(i);
          x->set(i, at + 1e-5);
          const double above = sum();
          x->set(i, at - 1e-5);
          const double below = sum();
          x->set(i, at);
          ASSERT_NEAR(dx->get(i), (above - below) / 2e-5, 1e-7) << "form " << form << ", element " << i;
        }
    }
}

}  // namespace
}  // namespace kda::test

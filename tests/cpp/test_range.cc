// All of float32's range: gates by themselves, element by element; norms; whole calls with both.
#include <algorithm>

#include "calls.h"
#include "gate_corner_calls.h"

namespace kda::test {
namespace {

constexpr float kBounds[] = {-5, -0.01f};

template <class Call>
void for_each_form(const Call& call) {
  call(KDA_GATE_SOFTPLUS, 0.0f);
  for (const float bound : kBounds) call(KDA_GATE_LOWER_BOUND, bound);
}

std::vector<std::string> everyone(const char* op) {
  std::vector<std::string> names = cpu_implementations(op);
  if (std::find(names.begin(), names.end(), "reference") == names.end()) names.push_back("reference");
  return names;
}

// ---- gates ----

// K: whole vectors, and fewer channels.
TEST(Gates, AreExactForAnyParameters) {
  for (const int64_t K : {1, 16})
    for (const std::string& impl : everyone("gate"))
      for_each_form([&](int32_t form, float bound) {
        SCOPED_TRACE(impl + (form == KDA_GATE_SOFTPLUS ? " softplus" : " bound"));
        for (const auto& elements : {gate_elements(), gate_corners()}) {
          const GateEdges edges(elements, K, KDA_F32);
          run(edges.forward(form, bound), {.impl = impl.c_str()});
          edges.expect_forward(form, bound);
        }
      });
}

TEST(Gates, AreSoBackward) {
  for (const int64_t K : {1, 16})
    for (const std::string& impl : everyone("gate_backward"))
      for_each_form([&](int32_t form, float bound) {
        SCOPED_TRACE(impl + (form == KDA_GATE_SOFTPLUS ? " softplus" : " bound"));
        for (const auto& elements : {gate_elements(), gate_corners()}) {
          const GateEdges edges(elements, K, KDA_F32);
          run(edges.backward(form, bound), {.impl = impl.c_str()});
          edges.expect_backward(form, bound);
        }
      });
}

// The same rule inside of whole calls.
TEST(Gates, OfWholeCallsAtCorners) {
  for (const int32_t form : {KDA_GATE_SOFTPLUS, KDA_GATE_LOWER_BOUND}) {
    const CornerCalls calls(form, 16, KDA_F32);
    const auto on_each = [&](const char* op) {
      return [=](const auto& args, const auto& check) {
        for (const std::string& impl : everyone(op)) {
          SCOPED_TRACE(impl + (form == KDA_GATE_SOFTPLUS ? " softplus" : " bound"));
          run(args, {.impl = impl.c_str()}), check();
        }
      };
    };
    calls.forward(on_each("forward")), calls.decode(on_each("decode"));
    calls.segment_map(on_each("segment_map")), calls.backward(on_each("backward"));
  }
}

// Raw gates beyond float16's range, in float16: the gradient of A_log is that of the other channels.
TEST(Gates, OfInfinityLeaveTheGradientOfALogAlone) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const std::string& impl : everyone("gate_backward"))
    for_each_form([&](int32_t form, float bound) {
      const Tensor x(KDA_F16, {1, 1, 4}, {0.5, kInf, -kInf, -1}), A(KDA_F32, {1}, {0.7});
      const Tensor dg(KDA_F32, {1, 1, 4}, {1, 0, 1, 2}), dx(KDA_F32, {1, 1, 4}), dA(KDA_F32, {1});
      kda_gate_backward_args a = KDA_GATE_BACKWARD_ARGS_INIT;
      a.x = x, a.A_log = A, a.dg = dg, a.dx = dx, a.dA_log = dA, a.gate_form = form, a.lower_bound = bound;
      run(a, {.impl = impl.c_str()});
      long double expected = 0;
      for (const auto& [raw, gradient] : {std::pair{0.5f, 1.0f}, {-1.0f, 2.0f}})
        expected += GateElement{0.7f, raw, 0, gradient}.values(form, bound).dA_log;
      EXPECT_NEAR(dA.get(0), static_cast<double>(expected), 1e-5 * std::abs(static_cast<double>(expected))) << impl;
      EXPECT_EQ(dx.get(1), 0) << impl;
      EXPECT_EQ(dx.get(2), 0) << impl;
    });
}

// ---- beta ----

// dbeta of logits against s (1 - s) in float64, where 1 - s has no digits left.
TEST(Beta, OfLargeLogitsHasAGradient) {
  for (const int32_t form : {KDA_BETA_SIGMOID, KDA_BETA_2SIGMOID})
    for (const std::string& impl : everyone("backward"))
      for (const double logit : {-40.0, -17.0, -12.0, 0.0, 5.0, 12.0, 17.0, 40.0, 80.0}) {
        Case c{.name = "beta", .T = 1, .K = 8, .V = 4, .h0 = false, .dhT = false};
        c.beta_form = form;
        Inputs in(c);
        in.beta.set(0, logit);
        const BackwardOutputs out(in);
        run(backward_args(in, out), {.impl = impl.c_str()});
        // o = scale beta (q.k) v: dbeta = scale (q.k) (v.d_o) beta'.
        double qk = 0, v_do = 0;
        for (int64_t i = 0; i < 8; ++i) qk += in.q.get(i) * in.k.get(i);
        for (int64_t j = 0; j < 4; ++j) v_do += in.v.get(j) * in.d_o.get(j);
        const double e = std::exp(-std::abs(logit)),
                     slope = (form == KDA_BETA_SIGMOID ? 1 : 2) * e / ((1 + e) * (1 + e));
        const double expected = qk * v_do * slope / std::sqrt(8.0);
        EXPECT_NEAR(out.dbeta.get(0), expected, 1e-4 * std::abs(expected)) << impl << " " << logit;
      }
}

// ---- one rounding ----

// 1 + 2^-11 lies in the middle of two numbers of float16. A number 2^-34 above it rounds to the upper one, and a
// float cannot hold that difference.
TEST(Range, TheOracleRoundsOnce) {
  for (const double side : {1.0, -1.0}) {
    const Tensor x(KDA_F16, {1, 1, 1}, {side * 0x1p-14}), weight(KDA_F32, {1, 2}, {0, 0x1p-20}), y(KDA_F16, {1, 1, 1});
    const Tensor bias(KDA_F32, {1}, {side < 0 ? 1 + 3 * 0x1p-11 : 1 + 0x1p-11});
    kda_conv_args a = KDA_CONV_ARGS_INIT;
    a.x = x, a.weight = weight, a.bias = bias, a.y = y;
    run(a, {.impl = "reference"});
    EXPECT_EQ(y.get(0), 1 + 0x1p-10);
  }
}

// float64 has its own range: rates beyond e^709, rows whose squares are beyond 1e308.
TEST(Range, TheOracleInFloat64) {
  for (const double A : {750.0, 1000.0, -800.0}) {
    const Tensor x(KDA_F64, {1, 1, 3}, {1 - A, -3 - A, 0}), A_log(KDA_F64, {1}, {A}), g(KDA_F64, {1, 1, 3});
    kda_gate_args a = KDA_GATE_ARGS_INIT;
    a.x = x, a.A_log = A_log, a.g = g, a.gate_form = KDA_GATE_LOWER_BOUND, a.lower_bound = -5;
    run(a, {.impl = "reference"});
    EXPECT_EQ(g.get(2), -2.5) << A;
    a.gate_form = KDA_GATE_SOFTPLUS, a.lower_bound = 0;
    run(a, {.impl = "reference"});
    for (int64_t i = 0; i < 2 && A > 0; ++i) EXPECT_NEAR(g.get(i) / -std::exp(A + x.get(i)), 1, 1e-12) << A;
  }
  Case c{.name = "huge", .T = 1, .K = 4, .V = 1, .dtype = KDA_F64, .g_dtype = KDA_F64, .beta_dtype = KDA_F64};
  c.state_dtype = KDA_F64, c.qk_l2norm = true, c.scale = 1, c.h0 = c.dhT = false;
  Inputs in(c);
  in.q.fill(1e200), in.k.fill(1e300);
  const ForwardOutputs out(in, false, true);
  run(forward_args(in, out), {.impl = "reference"});
  EXPECT_NEAR(out.o.get(0), in.beta.get(0) * in.v.get(0), 1e-12);
}

// ---- decays of nearly 0 ----

// Gradients of strong gates are small beside what goes from a key to the state behind it, which is no part of them.
TEST(StrongGates, HaveExactGradients) {
  for (const int64_t T : {1, 2, 3, 64, 66})
    for (const double decay : {-5.0, -12.0, -25.0})
      for (const std::string& impl : everyone("backward")) {
        const Case c{.name = "strong", .T = T, .K = 16, .V = 16};
        Inputs in(c);
        in.g.fill(decay);
        const BackwardOutputs exact(in, true), got(in);
        run(backward_args(in, exact), {.impl = "reference"});
        run(backward_args(in, got), {.impl = impl.c_str()});
        double error = 0, all = 0;
        for (int64_t i = 0; i < got.dg.size(); ++i)
          error += std::pow(got.dg.get(i) - exact.dg.get(i), 2), all += std::pow(exact.dg.get(i), 2);
        EXPECT_LT(std::sqrt(error / all), 5e-6) << impl << ", T " << T << ", g " << decay;
      }
}

// docs/numerics.md, Limits: dg is what is left of terms q dq and k dk of later tokens, and is rounded as these are.
TEST(GatesGradient, IsRoundedAsTheTermsThatCancelInIt) {
  for (const double divisor : {0.05, 1.0, 20.0})
    for (const Keys keys : {Keys::kNormal, Keys::kIdentical})
      for (const double states : {1.0, 1e3, 1e6}) {
        Case c{.name = "cancels", .T = 130, .H = 2, .HV = 2, .gate_divisor = divisor, .keys = keys};
        c.betas = Betas::kNearOne;
        Inputs in(c);
        for (int64_t i = 0; i < in.h0.size(); ++i) in.h0.set(i, states * in.h0.get(i));
        for (int64_t i = 0; i < in.dhT.size(); ++i) in.dhT.set(i, 1e3 * in.dhT.get(i));
        const BackwardOutputs exact(in, true), got(in);
        run(backward_args(in, exact), {.impl = "reference"});
        run(backward_args(in, got), {.impl = "cpu_chunk"});
        std::vector<double> terms(c.HV, 0);  // the largest of a head, from the end of the sequence to here
        for (int64_t chunk = (c.T - 1) / 64; chunk >= 0; --chunk)
          for (const bool compares : {false, true})
            for (int64_t i = chunk * 64 * c.HV * c.K; i < std::min(c.T, (chunk + 1) * 64) * c.HV * c.K; ++i) {
              double& most = terms[i / c.K % c.HV];
              const double q = in.q.get(i) * exact.dq.get(i), k = in.k.get(i) * exact.dk.get(i);
              if (!compares) most = std::max(most, std::abs(q) + std::abs(k));
              else
                ASSERT_LE(std::abs(got.dg.get(i) - exact.dg.get(i)), 1e-5 * most)
                    << "divisor " << divisor << ", states " << states << ", element " << i;
            }
      }
}

// The same page: what later tokens erase leaves a rounding of its own size in a chunk, and none token by token. Here
// each token's key is an axis, and erases what the state has there.
TEST(ErasedStates, LeaveARoundingOfTheLargestState) {
  constexpr double kState = 1e6;
  Case c{.name = "erased", .T = 64, .H = 1, .HV = 1, .K = 16, .V = 16, .gates = Gates::kZero, .dhT = false};
  Inputs in(c);
  in.beta.fill(1), in.k.fill(0);
  for (int64_t t = 0; t < c.T; ++t) in.k.set(t * c.K + t % c.K, 1);
  for (int64_t i = 0; i < in.h0.size(); ++i) in.h0.set(i, kState * in.h0.get(i));
  const ForwardOutputs exact(in, false, true);
  run(forward_args(in, exact), {.impl = "reference"});
  for (const auto& [impl, state] : {std::pair{"cpu_chunk", kState}, {"cpu_recurrent", 1.0}}) {
    const ForwardOutputs got(in, false);
    run(forward_args(in, got), {.impl = impl});
    for (int64_t i = 0; i < got.hT.size(); ++i)
      ASSERT_NEAR(got.hT.get(i), exact.hT.get(i), 1e-6 * state) << impl << " " << i;
  }
}

// ---- norms ----

// One token without a state: o = scale (q.k / |q| |k|) beta v, and dq = scale beta (v.d_o) (k^ - q^ (q^.k^)) / |q|.
class Norms : public testing::TestWithParam<double> {};

TEST_P(Norms, OfRowsOfAnyLength) {
  const double size = GetParam();
  for (const int64_t K : {5, 64, 256})
    for (const std::string& impl : everyone("forward")) {
      Case c{.name = "norm", .T = 1, .K = K, .V = 4, .qk_l2norm = true, .scale = 1, .h0 = false, .dhT = false};
      Inputs in(c);
      double qq = 1e-6, kk = 1e-6, qk = 0, v_do = 0;
      for (int64_t i = 0; i < K; ++i) {
        in.q.set(i, size * (1 + 0.01 * static_cast<double>(i % 7))), in.k.set(i, size * (i % 3 ? 1 : -0.3));
        const double q = in.q.get(i), k = in.k.get(i);
        qq += q * q, kk += k * k, qk += q * k;
      }
      for (int64_t j = 0; j < 4; ++j) v_do += in.v.get(j) * in.d_o.get(j);
      const double cosine = qk / std::sqrt(qq) / std::sqrt(kk), beta = in.beta.get(0);
      const ForwardOutputs out(in, false);
      run(forward_args(in, out), {.impl = impl.c_str()});
      for (int64_t j = 0; j < 4; ++j) {
        const double expected = cosine * beta * in.v.get(j);
        EXPECT_NEAR(out.o.get(j), expected, 1e-5 * std::abs(expected) + 1e-36) << impl << " K " << K;
      }
      const BackwardOutputs gradients(in);
      run(backward_args(in, gradients), {.impl = impl == "reference" ? "reference" : nullptr});
      for (int64_t i = 0; i < K; ++i) {
        const double q_hat = in.q.get(i) / std::sqrt(qq), k_hat = in.k.get(i) / std::sqrt(kk);
        const double expected = beta * v_do * (k_hat - q_hat * cosine) / std::sqrt(qq);
        const double all = std::abs(beta * v_do) / std::sqrt(qq);
        EXPECT_NEAR(gradients.dq.get(i), expected, 1e-5 * all + 1e-37) << impl << " K " << K << " channel " << i;
      }
    }
}
INSTANTIATE_TEST_SUITE_P(Sizes, Norms,
                         testing::Values(1e-40, 1e-30, 1e-20, 1e-10, 1e-6, 1e-3, 1.0, 1e3, 1e10, 1e18, 1e19, 5e19, 1e25,
                                         1e30, 1e37, 3e38));

// ---- whole calls ----

std::vector<std::string> edge_names() {
  std::vector<std::string> names;
  for (const Case& c : edge_cases()) names.push_back(c.name);
  return names;
}

class Edges : public testing::TestWithParam<std::string> {
 protected:
  Case the_case() const {
    for (const Case& c : edge_cases())
      if (c.name == GetParam()) return c;
    return {};
  }
  static double budget(int32_t dtype) { return dtype == KDA_F32 ? 1e-5 : 5e-3; }
};

TEST_P(Edges, Forward) {
  const Inputs in(the_case());
  const ForwardOutputs exact(in, false, true);
  run(forward_args(in, exact), {.impl = "reference"});
  for (const std::string& impl : cpu_implementations("forward")) {
    const ForwardOutputs got(in, false);
    run(forward_args(in, got), {.impl = impl.c_str()});
    EXPECT_TRUE(close(exact.o, got.o, budget(got.o.dtype()))) << impl;
    EXPECT_TRUE(close(exact.hT, got.hT, budget(got.hT.dtype()))) << impl;
  }
}

TEST_P(Edges, Decode) {
  Case c = the_case();
  c.T = 3;
  const Inputs in(c);
  const std::vector<int64_t> shape = {in.B, in.T, c.HV, c.V};
  const Pool exact(in, KDA_F64);
  const Tensor exact_o(KDA_F64, shape);
  run(decode_args(in, exact, exact, exact_o), {.impl = "reference"});
  for (const std::string& impl : cpu_implementations("decode")) {
    const Pool got(in, c.state_dtype);
    const Tensor o(c.dtype, shape);
    run(decode_args(in, got, got, o), {.impl = impl.c_str()});
    EXPECT_TRUE(close(exact_o, o, budget(o.dtype()))) << impl;
    EXPECT_TRUE(close(exact.h, got.h, budget(got.h.dtype()))) << impl;
  }
}
// The gate's own gradient may be any number; the gradient that comes to the gate is right to 1e-5 beside others of
// its chunk. Compared head by head: each has a rate of its own.
TEST_P(Edges, Backward) {
  Case c = the_case();
  if (c.gates != Gates::kEdges) GTEST_SKIP() << "Norms has the gradients of rows";
  c.T = 3, c.dtype = c.g_dtype = c.beta_dtype = KDA_F32;
  const Inputs in(c);
  const BackwardOutputs exact(in, true);
  run(backward_args(in, exact), {.impl = "reference"});
  const auto near = [](double got, double want, double slopes) {
    const double budget = 1e-5 * slopes + 1e-3 * std::abs(want) + 1e-30;
    return budget < 3e38 && std::abs(want) < 3e38 ? std::abs(got - want) <= budget : !std::isnan(got);
  };
  for (const std::string& impl : cpu_implementations("backward")) {
    const BackwardOutputs got(in);
    run(backward_args(in, got), {.impl = impl.c_str()});
    for (int64_t hv = 0; hv < c.HV; ++hv) {
      SCOPED_TRACE(impl + ", A_log " + std::to_string(in.A_log.get(hv)));
      double slopes = 0;  // of A_log
      for (int64_t t = 0; t < in.T; ++t)
        for (int64_t k = 0; k < c.K; ++k) {
          const int64_t i = (t * c.HV + hv) * c.K + k;
          const auto number = [](double x) { return static_cast<float>(x); };
          const GateElement e{number(std::min(in.A_log.get(hv), 10000.0)), number(in.g.get(i)),
                              number(in.dt_bias.get(hv * c.K + k)), 1};
          const GateElement::Values of_one = e.values(c.gate_form, c.lower_bound);
          const bool gone = of_one.g < -110;  // the decay is 0, and so is its gradient
          if (!gone) slopes += static_cast<double>(std::abs(of_one.dA_log));
          const double slope = gone ? 0 : static_cast<double>(std::abs(of_one.dx));
          EXPECT_TRUE(near(got.dg.get(i), exact.dg.get(i), slope))
              << got.dg.get(i) << ", expected " << exact.dg.get(i) << "; x " << e.x << ", dt_bias " << e.bias;
        }
      EXPECT_TRUE(near(got.dA_log.get(hv), exact.dA_log.get(hv), slopes))
          << got.dA_log.get(hv) << ", expected " << exact.dA_log.get(hv) << ", slopes " << slopes;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, Edges, testing::ValuesIn(edge_names()), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kda::test

// The gate alone, element by element, over all of float32's range of A_log, x and dt_bias. The right values come from
// formulas in long double, whose exponents reach far beyond.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "support.h"

namespace kda::test {

constexpr float kInf = std::numeric_limits<float>::infinity();

// One element: its inputs, and the right results.
struct GateElement {
  float A_log, x, bias, dg;

  struct Values {
    long double g, dx, dA_log;
  };
  // z is rounded to float32, as in every kernel: the gate of what remains after +-3e38 is not tested here. NaN comes
  // from NaN and from 0 times infinity, but a bounded gate at z = 0 has half of its bound with any a.
  Values values(int32_t form, long double lower_bound) const {
    const long double z = x + bias, a = std::exp(static_cast<long double>(A_log));
    if (form == KDA_GATE_SOFTPLUS) {
      const long double softplus = z > 11000 ? z : std::log1p(std::exp(z)), g = -a * softplus;
      if (dg == 0 || std::isnan(g)) return {g, std::isnan(g) ? g : 0, std::isnan(g) ? g : 0};
      return {g, -a / (1 + std::exp(-z)) * dg, g * dg};
    }
    const long double y = z == 0 && !std::isnan(a) ? 0 : a * z, e = std::exp(-std::abs(y));
    const long double slope = lower_bound * e / ((1 + e) * (1 + e)) * dg;
    return {lower_bound / (1 + std::exp(-y)), slope == 0 ? 0 : a * slope, slope == 0 ? 0 : y * slope};
  }
};

inline std::vector<GateElement> gate_elements() {
  std::vector<float> sizes = {1e-45f, 1e-40f, 1.2e-38f, 1e-37f, 1e-30f, 1e-20f, 1e-10f,  1e-5f, 0.01f, 0.5f,
                              1,      3,      10,       15.9f,  16.1f,  17,     20,      40,    64,    80,
                              87,     88,     89,       95,     100,    104,    110,     150,   200,   300,
                              1000,   1e4f,   1e10f,    1e20f,  1e30f,  1e38f,  3.4e38f, kInf};
  std::vector<GateElement> all;
  for (const float A :
       {-1000.0f, -300.0f, -177.0f, -120.0f, -100.0f, -90.0f, -88.0f, -80.0f, -64.1f, -64.0f, -20.0f,
        -5.0f,    0.0f,    1.0f,    5.0f,    15.9f,   16.0f,  16.1f,  40.0f,  63.0f,  64.1f,  80.0f,
        88.0f,    89.0f,   95.0f,   100.0f,  110.0f,  150.0f, 170.0f, 177.0f, 200.0f, 300.0f, 1000.0f}) {
    for (const float dg : {0.7f, 0.0f, -1e-30f, 1e30f}) {
      for (const float x : sizes) all.push_back({A, x, 0, dg}), all.push_back({A, -x, 0, dg});
      for (const float d : {-10.0f, -1.0f, 0.0f, 1.0f, 10.0f}) all.push_back({A, d - A, 0, dg});
      for (const float bias : {5.0f, -96.0f, 1e10f, -1e30f, 3e38f}) all.push_back({A, -bias, bias, dg});
    }
  }
  return all;
}

// Where factors are 0, infinite or NaN.
inline std::vector<GateElement> gate_corners() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kEnds[] = {-kInf, -1000, 0, 1000, kInf, kNan};
  std::vector<GateElement> all;
  for (const float A : kEnds)
    for (const float x : kEnds)
      for (const float bias : {0.0f, -kInf, kNan})
        for (const float dg : {0.7f, 0.0f}) all.push_back({A, x, bias, dg});
  return all;
}

// The tensors of a call: a head for each element, which its K channels share.
struct GateEdges {
  std::vector<GateElement> elements;
  int64_t K;
  Tensor x, A_log, dt_bias, dg, g, dx, dA_log, d_dt_bias;

  GateEdges(std::vector<GateElement> all, int64_t K, int32_t dtype) : elements(std::move(all)), K(K) {
    const auto heads = static_cast<int64_t>(elements.size());
    for (Tensor* t : {&x, &dg, &g, &dx}) *t = Tensor(dtype, {1, heads, K});
    for (Tensor* t : {&A_log, &dA_log}) *t = Tensor(dtype, {heads});
    for (Tensor* t : {&dt_bias, &d_dt_bias}) *t = Tensor(dtype, {heads, K});
    for (int64_t i = 0; i < heads; ++i) {
      A_log.set(i, elements[i].A_log);
      for (int64_t k = i * K; k < (i + 1) * K; ++k)
        x.set(k, elements[i].x), dt_bias.set(k, elements[i].bias), dg.set(k, elements[i].dg);
    }
  }

  kda_gate_args forward(int32_t form, float lower_bound) const {
    kda_gate_args a = KDA_GATE_ARGS_INIT;
    a.x = x, a.A_log = A_log, a.dt_bias = dt_bias, a.g = g;
    a.gate_form = form, a.lower_bound = lower_bound;
    return a;
  }
  kda_gate_backward_args backward(int32_t form, float lower_bound) const {
    kda_gate_backward_args a = KDA_GATE_BACKWARD_ARGS_INIT;
    a.x = x, a.A_log = A_log, a.dt_bias = dt_bias, a.dg = dg, a.dx = dx, a.dA_log = dA_log, a.d_dt_bias = d_dt_bias;
    a.gate_form = form, a.lower_bound = lower_bound;
    return a;
  }

  // The tolerance: 1e-4 of each number, plus the rounding of a subnormal factor (a slope, which dA_log multiplies
  // with lb a z < 500). A number beyond float32 is infinity.
  static bool near(double got, long double expected, const GateElement& e, double parts = 1) {
    constexpr double kMost = std::numeric_limits<float>::max(), kLeast = 1e-37;
    const double want = static_cast<double>(expected);
    if (std::isnan(want)) return std::isnan(got);
    if (std::abs(want) > kMost * (1 - 1e-4))
      return std::signbit(got) == std::signbit(want) && std::abs(got) > kMost * (1 - 1e-4);
    const double factors = std::exp(std::clamp<double>(e.A_log, 0, 16)) * std::max<double>(1, std::abs(e.dg)) * parts;
    return std::abs(got - want) <= 1e-4 * std::abs(want) + kLeast * factors;
  }
  void expect_forward(int32_t form, float lower_bound) const {
    expect(
        "g", [&](int64_t i) { return g.get(i * K); }, [&](const auto& e) { return e.values(form, lower_bound).g; });
    for (int64_t i = 0; i < g.size(); ++i) {
      const double first = g.get(i / K * K);
      ASSERT_TRUE(g.get(i) == first || std::isnan(first)) << "channels that are alike";
    }
  }
  void expect_backward(int32_t form, float lower_bound) const {
    const auto of = [&](const GateElement& e) { return e.values(form, lower_bound); };
    expect(
        "dx", [&](int64_t i) { return dx.get(i * K + K - 1); }, [&](const auto& e) { return of(e).dx; });
    expect(
        "d_dt_bias", [&](int64_t i) { return d_dt_bias.get(i * K); }, [&](const auto& e) { return of(e).dx; });
    expect(
        "dA_log", [&](int64_t i) { return dA_log.get(i); }, [&](const auto& e) { return K * of(e).dA_log; }, 500.0 * K,
        // If its gate is infinite in float32, the product may be, too.
        [&](const GateElement& e, double got) {
          return std::isinf(static_cast<float>(of(e).g)) && got == -e.dg * kInf;
        });
  }

 private:
  static bool never(const GateElement&, double) { return false; }
  template <class Got, class Want, class Also = decltype(never)>
  void expect(const char* name, const Got& got, const Want& want, double parts = 1, const Also& also = never) const {
    int wrong = 0;
    for (size_t i = 0; i < elements.size() && wrong < 20; ++i) {
      const GateElement& e = elements[i];
      const double value = got(static_cast<int64_t>(i));
      const long double expected = want(e);
      if (near(value, expected, e, parts) || also(e, value)) continue;
      ++wrong;
      ADD_FAILURE() << name << ": expected " << expected << ", got " << value << "; A_log " << e.A_log << ", x " << e.x
                    << ", dt_bias " << e.bias << ", dg " << e.dg;
    }
  }
};

}  // namespace kda::test

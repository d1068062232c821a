// The causal convolution: numbers against the float64 oracle, the oracle against its definition, and the promises.
#include <cmath>
#include <limits>

#include "conv_calls.h"

namespace kda::test {
namespace {

// Everything is computed in f32; what is kept in 16 bits is rounded once (math.md 8, the gate's row).
// A `large` x loses as many digits again where products cancel.
double budget(const ConvCase& c, int32_t dtype) { return dtype == KDA_F32 ? (c.scale > 1 ? 1e-5 : 1e-6) : 0.003; }
double sum_budget() { return 1e-5; }  // dweight, dbias: up to 300 terms of either sign

class Conv : public testing::TestWithParam<ConvCase> {
 protected:
  Conv() : c(GetParam()), in(c) {}
  void expect_close(const std::vector<Named>& reference, const std::vector<Named>& got) {
    for (size_t i = 0; i < got.size(); ++i) {
      const Tensor& t = *got[i].tensor;
      if (!t) continue;
      const bool sum = std::string(got[i].name) == "dweight" || std::string(got[i].name) == "dbias";
      EXPECT_TRUE(close(*reference[i].tensor, t, sum ? sum_budget() : budget(c, t.dtype()))) << got[i].name;
      EXPECT_EQ(t.unwritten(), 0) << got[i].name;
      EXPECT_TRUE(t.margins_intact()) << got[i].name;
    }
  }
  const ConvCase c;
  const ConvInputs in;
};

TEST_P(Conv, Forward) {
  ConvOutputs reference(in, true), out(in);
  run(conv_args(in, reference), {.impl = "reference"});
  run(conv_args(in, out), {.impl = "cpu_conv"});
  if (!HasFatalFailure()) expect_close(reference.tensors(), out.tensors());
}

TEST_P(Conv, Backward) {
  ConvGradientOutputs reference(in, true), out(in);
  run(conv_backward_args(in, reference), {.impl = "reference"});
  run(conv_backward_args(in, out), {.impl = "cpu_conv"});
  if (!HasFatalFailure()) expect_close(reference.tensors(), out.tensors());
}

// Each gradient alone is the one of all together.
TEST_P(Conv, OneGradientAtATime) {
  ConvGradientOutputs all(in);
  run(conv_backward_args(in, all), {.impl = "cpu_conv"});
  const std::vector<Named> expected = all.tensors();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!*expected[i].tensor) continue;
    ConvGradientOutputs one(in);
    const std::vector<Named> got = one.tensors();
    for (size_t j = 0; j < got.size(); ++j)
      if (j != i) *got[j].tensor = Tensor();
    run(conv_backward_args(in, one), {.impl = "cpu_conv"});
    EXPECT_EQ(got[i].tensor->bits(), expected[i].tensor->bits()) << expected[i].name;
  }
}

// The final state is the last rows of state ++ x, to the bit where the dtypes are the same.
TEST_P(Conv, FinalState) {
  if (c.dtype != c.state_dtype) GTEST_SKIP();
  ConvOutputs out(in);
  run(conv_args(in, out), {.impl = "cpu_conv"});
  const int64_t keep = c.W - 1;
  for (int64_t n = 0; n < in.N; ++n)
    for (int64_t d = 0; d < c.D; ++d)
      for (int64_t i = 0; i < keep; ++i) {
        const int64_t t = in.length(n) + i - keep, row = in.cu_seqlens ? in.begin(n) : n * in.T;
        const double old = c.state && t < 0 ? in.state.get((n * c.D + d) * keep + keep + t) : 0;
        ASSERT_EQ(out.final_state.get((n * c.D + d) * keep + i), t < 0 ? old : in.x.get((row + t) * c.D + d))
            << n << " " << d << " " << i;
      }
}

std::string conv_name(const testing::TestParamInfo<ConvCase>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(All, Conv, testing::ValuesIn(conv_cases()), conv_name);

// ---- the oracle ----

TEST(ConvOracle, OneChannelByHand) {  // xx = 1 2 | 3 4,  y = 0.5 + (1, 10, 100) . (xx_t, xx_(t+1), xx_(t+2))
  const Tensor x(KDA_F64, {1, 2, 1}, {3, 4}), weight(KDA_F64, {1, 3}, {1, 10, 100}), bias(KDA_F64, {1}, {0.5});
  const Tensor state(KDA_F64, {1, 1, 2}, {1, 2}), y(KDA_F64, {1, 2, 1}), last(KDA_F64, {1, 1, 2});
  kda_conv_args a = KDA_CONV_ARGS_INIT;
  a.x = x, a.weight = weight, a.bias = bias, a.initial_state = state, a.final_state = last, a.y = y;
  run(a, {.impl = "reference"});
  EXPECT_EQ(y.values(), (std::vector<double>{321.5, 432.5}));
  EXPECT_EQ(last.values(), (std::vector<double>{3, 4}));
  a.silu = 1, a.x.shape[1] = a.y.shape[1] = 1;
  const_cast<Tensor&>(bias).set(0, -321 + 0.7);
  run(a, {.impl = "reference"});
  EXPECT_NEAR(y.get(0), 0.7 / (1 + std::exp(-0.7)), 1e-12);
  EXPECT_EQ(last.values(), (std::vector<double>{2, 3}));
}

// Gradients are differences of the loss sum(dy y) + sum(d_final final).
TEST(ConvOracle, GradientsAreDifferences) {
  for (const char* name : {"packed_W2", "packed_W3", "packed_W4", "no_silu"}) {
    ConvCase c = find_conv_case(name);
    c.D = 2, c.dtype = c.weight_dtype = c.state_dtype = KDA_F64;
    ConvInputs in(c);
    const auto loss = [&] {
      ConvOutputs out(in, true);
      run(conv_args(in, out), {.impl = "reference"});
      const int64_t owned = (in.cu_seqlens ? in.T - c.tail : in.B * in.T) * c.D;
      double sum = 0;
      for (int64_t i = 0; i < owned; ++i) sum += in.dy.get(i) * out.y.get(i);
      for (int64_t i = 0; i < in.d_final.size(); ++i) sum += in.d_final.get(i) * out.final_state.get(i);
      return sum;
    };
    ConvGradientOutputs out(in, true);
    run(conv_backward_args(in, out), {.impl = "reference"});
    for (const auto& [input, gradient] :
         {std::pair{&in.x, &out.dx}, {&in.weight, &out.dweight}, {&in.bias, &out.dbias}, {&in.state, &out.d_initial}})
      for (int64_t i = 0; i < input->size(); i += std::max<int64_t>(1, input->size() / 60)) {
        const double x = input->get(i), h = 1e-5;
        input->set(i, x + h);
        const double above = loss();
        input->set(i, x - h);
        const double below = loss();
        input->set(i, x);
        EXPECT_NEAR(gradient->get(i), (above - below) / (2 * h), 1e-7) << name << " " << i;
      }
  }
}

}  // namespace
}  // namespace kda::test

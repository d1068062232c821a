// A long decode: the state of 100,000 tokens against the float64 oracle that saw the same inputs. Rounding must not add
// up: even with a memory of thousands of tokens (slow gates, small beta) the error at the end is what it was early on.
#include <cmath>

#include "calls.h"

namespace kda::test {
namespace {

constexpr int64_t kTokens = 100000, K = 16, V = 16;

struct Param {
  std::string impl;
  int64_t tokens_per_call;
  int32_t state_dtype;
  double beta;    // small: a long memory
  double budget;  // math.md 10: f32 about 1e-6; bf16 rounds the state every call, 6.5e-3 in 64 rounds
};

class Drift : public testing::TestWithParam<Param> {};

TEST_P(Drift, StaysWhereItIs) {
  const Param& p = GetParam();
  Inputs in({.name = "drift", .T = p.tokens_per_call, .K = K, .V = V, .qk_l2norm = true});
  Tensor o(KDA_F32, {1, in.T, 1, V}), exact_o(KDA_F64, {1, in.T, 1, V});
  Tensor state(p.state_dtype, {1, 1, V, K}), exact(KDA_F64, {1, 1, V, K});
  state.fill(0), exact.fill(0);
  kda_decode_args a = KDA_DECODE_ARGS_INIT;
  a.in = in.view(), a.o = o, a.states.h0 = a.states.hT = state;
  a.exec.impl = p.impl.c_str(), a.exec.num_threads = 1;
  kda_decode_args r = a;
  r.o = exact_o, r.states.h0 = r.states.hT = exact, r.exec.impl = "reference";

  Random random(11);
  double early = 0;
  for (int64_t t = 0; t < kTokens; t += in.T) {
    for (Tensor* x : {&in.q, &in.k, &in.v})
      for (int64_t i = 0; i < x->size(); ++i) x->set(i, random.uniform(-1, 1));
    for (int64_t i = 0; i < in.g.size(); ++i) in.g.set(i, -2e-4 * random.uniform());
    for (int64_t i = 0; i < in.T; ++i) in.beta.set(i, p.beta * random.uniform());
    ASSERT_EQ(call(a), KDA_OK) << kda_last_error();
    ASSERT_EQ(call(r), KDA_OK) << kda_last_error();
    const int64_t done = t + in.T;
    if (done != 1600 && done != 16000 && done != kTokens) continue;
    const double error = compare(exact.values(), state.values()).relative_rmse;
    EXPECT_LE(error, p.budget) << "after " << done << " tokens";
    EXPECT_LE(compare(exact_o.values(), o.values()).relative_rmse, 3 * p.budget) << "after " << done << " tokens";
    if (done == 1600) early = error;
    EXPECT_LE(error, 4 * early) << "after " << done << " tokens";
  }
  EXPECT_GT(early, 0);  // two different computations
}

std::vector<Param> params() {
  std::vector<Param> all;
  for (const std::string& impl : cpu_implementations("decode")) {
    all.push_back({impl, 1, KDA_F32, 2e-3, 1e-5});
    all.push_back({impl, 16, KDA_F32, 2e-3, 1e-5});
    all.push_back({impl, 16, KDA_F32, 1, 1e-5});
    all.push_back({impl, 16, KDA_BF16, 1, 0.02});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Drift, testing::ValuesIn(params()), [](const auto& info) {
  const Param& p = info.param;
  return p.impl + "_" + std::to_string(p.tokens_per_call) + (p.state_dtype == KDA_F32 ? "_f32" : "_bf16") +
         (p.beta < 1 ? "_slow" : "");
});

}  // namespace
}  // namespace kda::test

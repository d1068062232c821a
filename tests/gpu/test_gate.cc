// kda_gate and kda_gate_backward on the GPU through the C ABI, against the float64 oracle on the CPU.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "gate_twin.h"

namespace kda::test {
namespace {

struct Case {
  std::string name;
  int32_t x, g;  // dtypes
  int64_t M, HV, K, pad;
  int32_t form;
  bool A_log, dt_bias;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class GateOnCuda : public ::testing::TestWithParam<Case> {};

TEST_P(GateOnCuda, MatchesTheOracle) {
  const Case c = GetParam();
  std::mt19937 random(7);
  Twin x(c.x, {c.M, c.HV, c.K}, c.pad), A(KDA_F32, {c.HV}), bias(KDA_F32, {c.HV, c.K});
  Twin g(c.g, {c.M, c.HV, c.K}, c.pad), dg(c.g, {c.M, c.HV, c.K}, c.pad), dx(c.x, {c.M, c.HV, c.K}, c.pad);
  Twin dA(KDA_F32, {c.HV}), d_bias(KDA_F32, {c.HV, c.K});
  Twin g64(KDA_F64, {c.M, c.HV, c.K}), dx64(KDA_F64, {c.M, c.HV, c.K}), dA64(KDA_F64, {c.HV});
  Twin d_bias64(KDA_F64, {c.HV, c.K});
  x.fill(random, -2, 3), A.fill(random, 0, 0.5f), bias.fill(random, 0, 1), dg.fill(random, 0.5f, 1);
  const kda_tensor none{};

  kda_gate_args forward = KDA_GATE_ARGS_INIT;
  forward.gate_form = c.form, forward.lower_bound = -5;
  kda_gate_args oracle = forward;
  forward.exec.device = KDA_CUDA;
  forward.x = x.device, forward.g = g.device;
  forward.A_log = c.A_log ? A.device : none, forward.dt_bias = c.dt_bias ? bias.device : none;
  ASSERT_EQ(on_gpu(forward), KDA_OK) << kda_last_error();
  CUDA_OK(cudaDeviceSynchronize());
  g.download();
  oracle.exec.impl = "reference";
  oracle.x = x.host, oracle.g = g64.host;
  oracle.A_log = c.A_log ? A.host : none, oracle.dt_bias = c.dt_bias ? bias.host : none;
  ASSERT_EQ(kda_gate(&oracle), KDA_OK) << kda_last_error();
  const double store = c.g == KDA_F32 ? 0 : c.g == KDA_BF16 ? 3e-3 : 4e-4;  // rounding of the result itself
  EXPECT_LT(g.error(g64), 1e-5 + store);
  EXPECT_TRUE(g.padding_intact());

  kda_gate_backward_args backward = KDA_GATE_BACKWARD_ARGS_INIT;
  backward.gate_form = c.form, backward.lower_bound = -5;
  kda_gate_backward_args oracle_backward = backward;
  backward.exec.device = KDA_CUDA;
  backward.x = x.device, backward.dg = dg.device, backward.dx = dx.device;
  backward.A_log = forward.A_log, backward.dt_bias = forward.dt_bias;
  if (c.A_log) backward.dA_log = dA.device;
  if (c.dt_bias) backward.d_dt_bias = d_bias.device;
  uint64_t bytes = 0;
  ASSERT_EQ(kda_gate_backward_workspace(&backward, &bytes), KDA_OK) << kda_last_error();
  ASSERT_GT(bytes, 0u);
  CUDA_OK(cudaMalloc(&backward.exec.workspace, bytes));
  CUDA_OK(cudaMemset(backward.exec.workspace, 0xff, bytes));  // NaN: a sum that reads what it did not write shows
  backward.exec.workspace_bytes = bytes - 1;
  EXPECT_EQ(kda_gate_backward(&backward), KDA_INVALID_ARGUMENT);
  backward.exec.workspace_bytes = bytes;
  ASSERT_EQ(on_gpu(backward), KDA_OK) << kda_last_error();
  CUDA_OK(cudaDeviceSynchronize());
  dx.download(), dA.download(), d_bias.download();
  oracle_backward.exec.impl = "reference";
  oracle_backward.x = x.host, oracle_backward.dg = dg.host, oracle_backward.dx = dx64.host;
  oracle_backward.A_log = oracle.A_log, oracle_backward.dt_bias = oracle.dt_bias;
  if (c.A_log) oracle_backward.dA_log = dA64.host;
  if (c.dt_bias) oracle_backward.d_dt_bias = d_bias64.host;
  ASSERT_EQ(kda_gate_backward(&oracle_backward), KDA_OK) << kda_last_error();
  const double store_x = c.x == KDA_F32 ? 0 : c.x == KDA_BF16 ? 3e-3 : 4e-4;
  EXPECT_LT(dx.error(dx64), 1e-4 + store_x);
  if (c.A_log) {
    EXPECT_LT(dA.error(dA64), 1e-4);
  }
  if (c.dt_bias) {
    EXPECT_LT(d_bias.error(d_bias64), 1e-4);
  }
  EXPECT_TRUE(dx.padding_intact());

  // Two runs, the same bits.
  const std::vector<char> first_dx = dx.data, first_dA = dA.data, first_bias = d_bias.data;
  ASSERT_EQ(on_gpu(backward), KDA_OK);
  CUDA_OK(cudaDeviceSynchronize());
  dx.download(), dA.download(), d_bias.download();
  EXPECT_TRUE(dx.data == first_dx && dA.data == first_dA && d_bias.data == first_bias);
  CUDA_OK(cudaFree(backward.exec.workspace));
}

INSTANTIATE_TEST_SUITE_P(
    All, GateOnCuda,
    ::testing::Values(Case{"softplus_f32", KDA_F32, KDA_F32, 1000, 3, 128, 0, KDA_GATE_SOFTPLUS, true, true},
                      Case{"softplus_bf16_to_f32", KDA_BF16, KDA_F32, 4097, 2, 128, 0, KDA_GATE_SOFTPLUS, true, true},
                      Case{"softplus_f16_odd_strided", KDA_F16, KDA_F16, 65, 5, 60, 7, KDA_GATE_SOFTPLUS, true, false},
                      Case{"bound_bf16", KDA_BF16, KDA_BF16, 129, 4, 256, 3, KDA_GATE_LOWER_BOUND, true, true},
                      Case{"bound_without_A_log", KDA_F32, KDA_F32, 64, 1, 1, 0, KDA_GATE_LOWER_BOUND, false, true},
                      Case{"many_rows", KDA_BF16, KDA_F32, 70000, 1, 64, 0, KDA_GATE_SOFTPLUS, true, true}),
    [](const auto& info) { return info.param.name; });

TEST(GateOnCudaRuntime, KeepsNaNAndInfinityInTheirPlace) {
  Twin x(KDA_F32, {3, 1, 32}), A(KDA_F32, {1}), g(KDA_F32, {3, 1, 32});
  auto* values = reinterpret_cast<float*>(x.data.data());
  for (int i = 0; i < 96; ++i) values[i] = 0.5f;
  values[33] = std::numeric_limits<float>::quiet_NaN();
  values[34] = std::numeric_limits<float>::infinity();
  values[35] = -std::numeric_limits<float>::infinity();
  x.upload();
  std::memset(A.data.data(), 0, A.data.size());
  A.upload();
  kda_gate_args args = simple_call(x, A, g);
  ASSERT_EQ(kda_gate(&args), KDA_OK) << kda_last_error();
  CUDA_OK(cudaDeviceSynchronize());
  g.download();
  const auto* out = reinterpret_cast<const float*>(g.data.data());
  for (int i = 0; i < 96; ++i) {
    if (i == 33) EXPECT_TRUE(std::isnan(out[i]));
    else if (i == 34) EXPECT_EQ(out[i], -std::numeric_limits<float>::infinity());
    else if (i == 35) EXPECT_EQ(out[i], 0);
    else EXPECT_NEAR(out[i], -std::log1p(std::exp(0.5f)), 1e-6f);
  }
}

TEST(GateOnCudaRuntime, RefusesADeviceThatIsNotThere) {
  Twin x(KDA_F32, {1, 1, 8}), A(KDA_F32, {1}), g(KDA_F32, {1, 1, 8});
  kda_gate_args args = simple_call(x, A, g);
  args.exec.device_id = 1000;
  EXPECT_EQ(kda_gate(&args), KDA_UNSUPPORTED);
  EXPECT_NE(std::string(kda_last_error()).find("device"), std::string::npos) << kda_last_error();
}

TEST(GateOnCudaRuntime, EmptyInputsAreLegal) {
  Twin x(KDA_F32, {0, 2, 8}), A(KDA_F32, {2}), g(KDA_F32, {0, 2, 8});
  kda_gate_args args = simple_call(x, A, g);
  EXPECT_EQ(kda_gate(&args), KDA_OK) << kda_last_error();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace kda::test

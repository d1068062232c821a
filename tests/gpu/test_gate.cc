// kda_gate and kda_gate_backward on the GPU through the C ABI, against the float64 oracle on the CPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <kda/kda.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "dtype.h"

namespace {

#define CUDA_OK(call) ASSERT_EQ(call, cudaSuccess) << #call

int64_t bytes_of(int32_t dtype, int64_t count) { return kda::dtype_size(dtype) * count; }

double element(const std::vector<char>& data, int32_t dtype, int64_t i) {
  switch (dtype) {
    case KDA_F64: return reinterpret_cast<const double*>(data.data())[i];
    case KDA_F32: return reinterpret_cast<const float*>(data.data())[i];
    case KDA_BF16: return kda::bf16_to_float(reinterpret_cast<const uint16_t*>(data.data())[i]);
    default: return kda::f16_to_float(reinterpret_cast<const uint16_t*>(data.data())[i]);
  }
}

void set_element(std::vector<char>& data, int32_t dtype, int64_t i, float x) {
  switch (dtype) {
    case KDA_F32: reinterpret_cast<float*>(data.data())[i] = x; break;
    case KDA_BF16: reinterpret_cast<uint16_t*>(data.data())[i] = kda::float_to_bf16(x); break;
    default: reinterpret_cast<uint16_t*>(data.data())[i] = kda::float_to_f16(x); break;
  }
}

// A tensor on the host and its twin on the device, rows of heads `pad` elements longer than K; canaries in the padding.
struct Twin {
  kda_tensor host{}, device{};
  std::vector<char> data;
  std::vector<char> before;

  Twin(int32_t dtype, std::vector<int64_t> shape, int64_t pad = 0) : dtype_(dtype) {
    host.dtype = dtype;
    host.ndim = static_cast<int32_t>(shape.size());
    int64_t count = 1;
    for (int i = host.ndim - 1; i >= 0; --i) {
      host.shape[i] = shape[i];
      host.stride[i] = count;
      count *= shape[i] + (i == host.ndim - 1 ? pad : 0);
    }
    data.assign(bytes_of(dtype, count), static_cast<char>(0xA5));
    host.data = data.data();
    device = host;
    EXPECT_EQ(cudaMalloc(&device.data, data.size() + 1), cudaSuccess);
    upload();
  }
  ~Twin() { cudaFree(device.data); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  void fill(std::mt19937& random, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    for_each([&](int64_t at) { set_element(data, dtype_, at, normal(random)); });
    upload();
  }
  void upload() {
    before = data;
    EXPECT_EQ(cudaMemcpy(device.data, data.data(), data.size(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  void download() { EXPECT_EQ(cudaMemcpy(data.data(), device.data, data.size(), cudaMemcpyDeviceToHost), cudaSuccess); }

  template <class F>
  void for_each(const F& f) const {
    const int64_t rows = host.ndim == 3 ? host.shape[0] : 1, heads = host.ndim >= 2 ? host.shape[host.ndim - 2] : 1;
    const int64_t K = host.shape[host.ndim - 1];
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t k = 0; k < K; ++k)
          f((host.ndim == 3 ? m * host.stride[0] : 0) + (host.ndim >= 2 ? h * host.stride[host.ndim - 2] : 0) + k);
  }

  // Relative RMSE against a contiguous float64 tensor of the same shape.
  double error(const Twin& reference) const {
    double difference = 0, norm = 0;
    int64_t i = 0, count = 0;
    for_each([&](int64_t at) {
      const double expected = element(reference.data, KDA_F64, i++), got = element(data, dtype_, at);
      difference += (expected - got) * (expected - got), norm += expected * expected, ++count;
    });
    return std::sqrt(difference / count) / (std::sqrt(norm / count) + 1e-8);
  }
  // Whether nothing but the elements changed: padding still holds what was there.
  bool padding_intact() const {
    std::vector<char> restored = data;
    const int64_t size = kda::dtype_size(dtype_);
    for_each([&](int64_t at) { std::memcpy(&restored[at * size], &before[at * size], size); });
    return restored == before;
  }

 private:
  int32_t dtype_;
};

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
  ASSERT_EQ(kda_gate(&forward), KDA_OK) << kda_last_error();
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
  ASSERT_EQ(kda_gate_backward(&backward), KDA_OK) << kda_last_error();
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
  ASSERT_EQ(kda_gate_backward(&backward), KDA_OK);
  CUDA_OK(cudaDeviceSynchronize());
  dx.download(), dA.download(), d_bias.download();
  EXPECT_TRUE(dx.data == first_dx && dA.data == first_dA && d_bias.data == first_bias);
  CUDA_OK(cudaFree(backward.exec.workspace));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GateOnCuda,
    ::testing::Values(Case{"softplus_f32", KDA_F32, KDA_F32, 1000, 3, 128, 0, KDA_GATE_SOFTPLUS, true, true},
                      Case{"softplus_bf16_to_f32", KDA_BF16, KDA_F32, 4097, 2, 128, 0, KDA_GATE_SOFTPLUS, true, true},
                      Case{"softplus_f16_odd_strided", KDA_F16, KDA_F16, 65, 5, 60, 7, KDA_GATE_SOFTPLUS, true, false},
                      Case{"bound_bf16", KDA_BF16, KDA_BF16, 129, 4, 256, 3, KDA_GATE_LOWER_BOUND, true, true},
                      Case{"bound_without_A_log", KDA_F32, KDA_F32, 64, 1, 1, 0, KDA_GATE_LOWER_BOUND, false, true},
                      Case{"many_rows", KDA_BF16, KDA_F32, 70000, 1, 64, 0, KDA_GATE_SOFTPLUS, true, true}),
    [](const auto& info) { return info.param.name; });

kda_gate_args simple_call(const Twin& x, const Twin& A, const Twin& g) {
  kda_gate_args args = KDA_GATE_ARGS_INIT;
  args.exec.device = KDA_CUDA;
  args.gate_form = KDA_GATE_SOFTPLUS;
  args.x = x.device, args.A_log = A.device, args.g = g.device;
  return args;
}

TEST(GateOnCudaRuntime, RunsOnTheStreamItIsGiven) {
  std::mt19937 random(1);
  Twin x(KDA_F32, {100000, 4, 128}), A(KDA_F32, {4}), g1(KDA_F32, {100000, 4, 128}), g2(KDA_F32, {100000, 4, 128});
  x.fill(random, 0, 1), A.fill(random, 0, 1);
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams) CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  kda_gate_args one = simple_call(x, A, g1), two = simple_call(x, A, g2);
  one.exec.stream = streams[0], two.exec.stream = streams[1];
  ASSERT_EQ(kda_gate(&one), KDA_OK) << kda_last_error();
  ASSERT_EQ(kda_gate(&two), KDA_OK) << kda_last_error();
  for (cudaStream_t& s : streams) CUDA_OK(cudaStreamSynchronize(s));
  g1.download(), g2.download();
  EXPECT_TRUE(g1.data == g2.data);
  for (cudaStream_t& s : streams) CUDA_OK(cudaStreamDestroy(s));
}

TEST(GateOnCudaRuntime, IsCapturedIntoAGraphAndReplaysWithNewData) {
  std::mt19937 random(2);
  Twin x(KDA_F32, {64, 2, 128}), A(KDA_F32, {2}), g(KDA_F32, {64, 2, 128}), expected(KDA_F32, {64, 2, 128});
  x.fill(random, 0, 1), A.fill(random, 0, 1);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CUDA_OK(cudaStreamCreate(&stream));
  kda_gate_args args = simple_call(x, A, g);
  args.exec.stream = stream;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_EQ(kda_gate(&args), KDA_OK) << kda_last_error();
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (int round = 0; round < 100; ++round) {
    x.fill(random, 0, 1);
    CUDA_OK(cudaGraphLaunch(replay, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    g.download();
    kda_gate_args eager = simple_call(x, A, expected);
    ASSERT_EQ(kda_gate(&eager), KDA_OK);
    CUDA_OK(cudaDeviceSynchronize());
    expected.download();
    ASSERT_TRUE(g.data == expected.data) << "round " << round;
  }
  CUDA_OK(cudaGraphExecDestroy(replay));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

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

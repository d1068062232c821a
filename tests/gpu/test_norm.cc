// kda_norm_gate and kda_norm_gate_backward on the GPU through the C ABI, against the float64 oracle on the CPU, and
// what is promised to the bit. Small shapes, every path through the kernels: compute-sanitizer runs them as well.
#include <cmath>
#include <limits>

#include "norm_calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

constexpr char kImpl[] = "cuda_norm_gate";

// The cases of the CPU, and rows in registers in each dtype: enough of them for several blocks, the last of which has
// rows to spare.
std::vector<NormCase> cuda_cases() {
  std::vector<NormCase> all = norm_cases();
  for (const int32_t dtype : {KDA_F32, KDA_BF16, KDA_F16})
    for (const int64_t V : {8, 32, 64, 128, 256})
      all.push_back({.name = "dtype_" + std::to_string(dtype) + "_V_" + std::to_string(V),
                     .B = 1,
                     .T = 47,
                     .HV = 3,
                     .V = V,
                     .dtype = dtype,
                     .gate_dtype = dtype,
                     .weight_dtype = dtype,
                     .out_dtype = dtype,
                     .activation = V == 64 ? KDA_NORM_SILU : KDA_NORM_SIGMOID});
  for (const int32_t dtype : {KDA_F32, KDA_BF16})  // more than all SMs have in flight
    all.push_back({.name = "many_" + std::to_string(dtype),
                   .T = 2500,
                   .HV = 8,
                   .V = 64,
                   .dtype = dtype,
                   .gate_dtype = dtype,
                   .out_dtype = dtype});
  all.push_back({.name = "many_V_20", .T = 2500, .HV = 8, .V = 20});
  return all;
}

const auto on_gpu = [](const auto& a) { run_on_cuda(a, kImpl); };
const auto on_gpu_shifted = [](const auto& a) { run_on_cuda(a, kImpl, 1); };

class NormOnCuda : public OnCuda, public testing::WithParamInterface<NormCase> {
 protected:
  NormOnCuda() : c(GetParam()), in(c) {}
  const NormCase c;
  const NormInputs in;
};

// At addresses that fit any access, and at others. A row's bits are the same, also where another kernel makes them.
TEST_P(NormOnCuda, IsTheOracle) {
  NormOutputs reference(in, true), out(in), again(in), shifted(in);
  run(norm_gate_args(in, reference), {.impl = "reference"});
  run(norm_gate_backward_args(in, reference), {.impl = "reference"});
  run_norm(in, out, on_gpu), run_norm(in, again, on_gpu), run_norm(in, shifted, on_gpu_shifted);
  if (HasFatalFailure()) return;
  const std::vector<Named> expected = reference.tensors();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!*expected[i].tensor) continue;
    const Named got = out.tensors()[i], other = shifted.tensors()[i];
    for (const Named& n : {got, other}) {
      EXPECT_TRUE(close(*expected[i].tensor, *n.tensor, norm_budget(c, n))) << n.name;
      EXPECT_EQ(n.tensor->unwritten(), 0) << n.name;
      EXPECT_TRUE(n.tensor->margins_intact()) << n.name;
    }
    EXPECT_EQ(got.tensor->bits(), again.tensors()[i].tensor->bits()) << got.name;
    if (std::strcmp(got.name, "dweight")) {
      EXPECT_EQ(got.tensor->bits(), other.tensor->bits()) << got.name;
    }
  }
}

TEST_P(NormOnCuda, OneGradientAtATime) {
  expect_each_alone([&] { return NormOutputs(in); },
                    [&](const auto& out) { run_on_cuda(norm_gate_backward_args(in, out), kImpl); }, 1);
}

INSTANTIATE_TEST_SUITE_P(All, NormOnCuda, testing::ValuesIn(cuda_cases()),
                         [](const auto& info) { return info.param.name; });

using NormPromiseOnCuda = OnCuda;

TEST_F(NormPromiseOnCuda, ARowAlone) {
  for (const char* name : {"V_128", "V_300", "bf16", "huge", "minute"}) expect_rows_alone(find_norm_case(name), on_gpu);
}

TEST_F(NormPromiseOnCuda, SmallNumbersBesideHugeOnes) { expect_small_beside_huge(on_gpu); }

TEST_F(NormPromiseOnCuda, InPlace) {
  for (const char* name : {"V_128", "V_300", "rows_apart", "silu", "huge_V_300"})
    expect_norm_in_place(find_norm_case(name), on_gpu);
}

TEST_F(NormPromiseOnCuda, NotFiniteStaysInItsRow) {
  for (const char* name : {"V_128", "V_300", "V_64"}) expect_not_finite_stays(find_norm_case(name), on_gpu);
}

TEST_F(NormPromiseOnCuda, WorkspaceIsChecked) {
  for (const char* name : {"V_128", "V_300"}) {
    const NormInputs in(find_norm_case(name));
    const NormOutputs out(in);
    expect_workspace_is_checked(norm_gate_backward_args(in, out), kImpl);
  }
}

TEST_F(NormPromiseOnCuda, NoRows) { expect_no_rows_of_norm(on_gpu); }

// The sum over rows has one order on every GPU: its workspace follows from the number of rows alone.
TEST_F(NormPromiseOnCuda, WorkspaceOfAnyGpu) {
  const NormInputs in(find_norm_case("many_rows"));
  const NormOutputs out(in);
  uint64_t expected = 0;
  for (const int32_t SMs : {1, 108, 132}) {
    ASSERT_EQ(kda_assume_gpu(SMs == 108 ? 80 : 90, SMs), KDA_OK) << kda_last_error();
    uint64_t bytes = 0;
    const int32_t status = query(on_device(norm_gate_backward_args(in, out)), &bytes);
    kda_assume_gpu(0, 0);
    ASSERT_EQ(status, KDA_OK) << kda_last_error();
    EXPECT_EQ(bytes, expected ? expected : bytes) << SMs;
    expected = bytes;
  }
}

}  // namespace
}  // namespace kda::test

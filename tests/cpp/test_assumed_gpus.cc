// What explain and workspace say of a GPU that nobody has: kda_assume_gpu. A library without CUDA says the same.
#include <string>
#include <type_traits>

#include "contract.h"

namespace kda::test {
namespace {

struct Gpu {
  int32_t capability, multiprocessors;
};
constexpr Gpu kGpus[] = {{80, 108}, {86, 84}, {89, 128}, {90, 132}, {100, 148}, {103, 148}, {120, 170}};

// For one scope.
class Assumed {
 public:
  explicit Assumed(const Gpu& gpu) {
    EXPECT_EQ(kda_assume_gpu(gpu.capability, gpu.multiprocessors), KDA_OK) << kda_last_error();
  }
  ~Assumed() { kda_assume_gpu(0, 0); }
};

// No kernel on GPUs saves a forward's scores of 64 tokens.
template <class Args>
void put_on_gpu(Args& args) {
  args.exec.device = KDA_CUDA;
  if constexpr (std::is_same_v<Args, kda_forward_args>) args.Aqk = args.Akk = {};
}

template <class Args>
struct AssumedGpus : testing::Test {};
TYPED_TEST_SUITE(AssumedGpus, AllArgs, OperatorNames);

TYPED_TEST(AssumedGpus, HaveKernelsForEveryOperator) {
  Legal<TypeParam> x;
  put_on_gpu(x.args);
  for (const Gpu& gpu : kGpus) {
    const Assumed assumed(gpu);
    const std::string text = explanation(x.args);
    EXPECT_TRUE(chosen(text).starts_with("cuda_")) << gpu.capability << "\n" << text;
    EXPECT_NE(text.find("- reference: runs on the CPU only [src/reference/"), std::string::npos) << text;
    uint64_t bytes = 0;
    EXPECT_EQ(query(x.args, &bytes), KDA_OK) << kda_last_error();
  }
}

TYPED_TEST(AssumedGpus, LeaveCallsOnTheCpuAlone) {
  Legal<TypeParam> x;
  const std::string before = explanation(x.args);
  const Workspace workspace = workspace_for(x.args);
  const Assumed assumed(kGpus[0]);
  EXPECT_EQ(explanation(x.args), before);
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
}

TYPED_TEST(AssumedGpus, RunNothing) {
  const Assumed assumed(kGpus[0]);
  refuses<TypeParam>("exec.device: expected no call on CUDA while kda_assume_gpu() is in force",
                     [](auto& x) { put_on_gpu(x.args); });
}

TEST(AssumedGpu, IsOneOfThese) {
  for (const int32_t capability : {-1, 1, 70, 75, 81, 110})
    EXPECT_EQ(kda_assume_gpu(capability, 132), KDA_INVALID_ARGUMENT) << capability;
  EXPECT_STREQ(kda_last_error(), "capability: expected 0 or one of 80, 86, 89, 90, 100, 103, 120, got 110");
  EXPECT_EQ(kda_assume_gpu(90, 0), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "multiprocessors: expected at least 1, got 0");
}

}  // namespace
}  // namespace kda::test

// run_on_cuda() puts every call of these tests behind a kernel that lets it start early and writes its tensors late.
// Here: that this finds a kernel which does not wait. python -m bench record runs all tests so once more from the PTX
// for sm_80, where kernels cannot wait and must not be launched early.
#include "late_inputs.h"

#include <vector>

#include "on_cuda.h"

namespace kda::test {
namespace {

class LateInputs : public OnCuda {};

TEST_F(LateInputs, FindAKernelThatDoesNotWait) {
  if (dry_run || !can_write_late()) GTEST_SKIP() << "this device launches no kernel early";
  EXPECT_GE(ptx_of_late_writer(), 90) << "it does not let the next kernel start";
  constexpr int kCount = 1024;
  DeviceMemory old, written, read;
  const std::vector<unsigned> ones(kCount, 1);
  for (DeviceMemory* m : {&old, &written, &read}) ASSERT_NO_FATAL_FAILURE(m->allocate(kCount * sizeof(unsigned)));
  ASSERT_NO_FATAL_FAILURE(written.fill(ones.data()));
  int early = 0;
  for (int round = 0; round < 10; ++round) {
    old.poison();
    LateWrites writes;
    writes.all[writes.count++] = {old.begin(), written.begin(), kCount * sizeof(unsigned)};
    ASSERT_EQ(write_late(writes), cudaSuccess);
    ASSERT_EQ(read_early(reinterpret_cast<unsigned*>(read.begin()), reinterpret_cast<unsigned*>(old.begin()), kCount),
              cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<unsigned> got(kCount);
    ASSERT_NO_FATAL_FAILURE(read.back(got.data()));
    early += got != ones;
    ASSERT_NO_FATAL_FAILURE(old.back(got.data()));
    EXPECT_EQ(got, ones) << "what is written late is written";
  }
  EXPECT_GE(early, 5) << "of 10 rounds: calls behind the writer prove nothing";
}

}  // namespace
}  // namespace kda::test

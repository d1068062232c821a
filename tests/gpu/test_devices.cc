// Calls of threads that have done nothing with CUDA, and on a device that is not the thread's current one. The latter
// need two devices, one of which must not have been used: so they are run alone, by a filter.
#include <cuda.h>

#include <cmath>
#include <map>
#include <thread>
#include <vector>

#include "calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

// Has anything been done with the device in this process?
bool has_context(int device) {
  using StateOf = CUresult (*)(CUdevice, unsigned*, int*);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000, cudaEnableDefault, &result),
            cudaSuccess);
  unsigned flags = 0;
  int active = -1;
  EXPECT_EQ(reinterpret_cast<StateOf>(entry)(device, &flags, &active), CUDA_SUCCESS);
  return active;
}
int current_device() {
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  return device;
}

// Calls in a new thread, for which everything lies on the device already. Nothing binds the device's context to the
// thread before.
template <class Args>
void call_first(Args args, const char* impl) {
  std::map<void*, DeviceMemory> copies;
  for (const Field& f : given(args)) {
    DeviceMemory& copy = copies[f.t->data];
    if (!copy.bytes()) ASSERT_NO_FATAL_FAILURE(copy.allocate(bytes_of(*f.t)));
    copy.fill(f.t->data);
  }
  for (const Field& f : given(args)) f.t->data = copies.at(f.t->data).begin();
  args.exec.device = KDA_CUDA, args.exec.impl = impl;
  DeviceMemory workspace;
  ASSERT_EQ(query(args, &args.exec.workspace_bytes), KDA_OK) << kda_last_error();
  ASSERT_NO_FATAL_FAILURE(workspace.allocate(static_cast<int64_t>(args.exec.workspace_bytes)));
  args.exec.workspace = workspace.begin();
  std::thread([&] { EXPECT_EQ(call(args), KDA_OK) << kda_last_error(); }).join();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// As torch's threads for backward do, where the first operator is ours.
TEST_F(OnCuda, CallsMayBeTheFirstOfTheirThread) {
  const Inputs in({.name = "first",
                   .T = 40,
                   .K = 64,
                   .V = 64,
                   .dtype = KDA_BF16,
                   .g_dtype = KDA_BF16,
                   .gate_form = KDA_GATE_LOWER_BOUND,
                   .gates = Gates::kRaw,
                   .lower_bound = -5,
                   .qk_l2norm = true});
  const ForwardOutputs out(in, false);
  for (const char* impl : takers("forward", forward_args(in, out))) call_first(forward_args(in, out), impl);
  const BackwardOutputs gradients(in);
  for (const char* impl : takers("backward", backward_args(in, gradients)))
    call_first(backward_args(in, gradients), impl);
}

class DevicesOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) GTEST_SKIP() << "there are no two CUDA devices";
    if (has_context(0)) GTEST_SKIP() << "device 0 has been used: run this test alone";
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    ASSERT_NO_FATAL_FAILURE(x_.allocate(sizeof(float) * kSize));
    ASSERT_NO_FATAL_FAILURE(g_.allocate(sizeof(float) * kSize));
    x_.fill(std::vector<float>(kSize, -0.5f).data());
  }
  // A gate on device 1, by the library alone: whatever else the thread asks of CUDA may make a context.
  void call() const {
    kda_gate_args a = KDA_GATE_ARGS_INIT;
    a.exec.device = KDA_CUDA, a.exec.device_id = 1, a.gate_form = KDA_GATE_LOWER_BOUND, a.lower_bound = -2;
    a.x.data = x_.begin(), a.x.dtype = KDA_F32, a.x.ndim = 3;
    for (int i = 0; i < 3; ++i) a.x.shape[i] = i < 2 ? 1 : kSize, a.x.stride[i] = i < 2 ? kSize : 1;
    a.g = a.x, a.g.data = g_.begin();
    EXPECT_EQ(kda_gate(&a), KDA_OK) << kda_last_error();
  }
  void expect_result() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<float> got(kSize);
    g_.back(got.data());
    for (const float one : got) EXPECT_NEAR(one, -2 / (1 + std::exp(0.5)), 1e-6);
  }

 private:
  static constexpr int64_t kSize = 64;
  DeviceMemory x_, g_;
};

// A rank's thread whose current device is 0, as that of every new thread, has tensors on device 1.
TEST_F(DevicesOnCuda, CallsMakeNoContextOnOthers) {
  std::thread([&] {
    EXPECT_EQ(current_device(), 0);
    call();
    EXPECT_FALSE(has_context(0)) << "which takes half a gigabyte";
    EXPECT_EQ(current_device(), 1) << "0 cannot be current without a context";
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_TRUE(has_context(0));
    call();
    EXPECT_EQ(current_device(), 0) << "the caller's device is current again";
  }).join();
  EXPECT_EQ(current_device(), 1);
  expect_result();
}

}  // namespace
}  // namespace kda::test

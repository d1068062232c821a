// What src/cuda/runtime.cc makes of devices that are not here: too old, too few, none, without a driver, with code made
// from older PTX. The functions of the CUDA runtime that it calls are those below.
#include "cuda/runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda.h"
#include "environment.h"

namespace {

struct Device {
  int major, minor;
  cudaFuncAttributes code{};  // of its kernels
  int asked = 0;              // how often for that
  int allowed = 0;            // dynamic shared memory that a kernel may have; 0: nobody has asked for more than usual
  bool has_context = false;
};
struct Machine {
  int driver = 13000;                // the CUDA that it is for; 0: there is none
  bool lost = false;                 // in a fork
  cudaError_t answer = cudaSuccess;  // of whatever else a driver may say
  std::vector<Device> devices;
  int current = 0;
  cudaError_t last = cudaSuccess;  // what the next launch would be blamed for
} machine;

cudaError_t fail(cudaError_t error) { return machine.last = error; }

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  if (machine.driver < CUDART_VERSION / 1000 * 1000) return fail(cudaErrorInsufficientDriver);  // also without one
  if (machine.lost) return fail(cudaErrorInitializationError);
  if (machine.answer != cudaSuccess) return fail(machine.answer);
  *count = static_cast<int>(machine.devices.size());
  return machine.devices.empty() ? fail(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(machine.last, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine.driver;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (machine.lost) return fail(cudaErrorInitializationError);
  if (device < 0 || device >= static_cast<int>(machine.devices.size())) return fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = machine.devices[device].major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = machine.devices[device].minor; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = 100 + device; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 99 << 10; return cudaSuccess;
    default: return fail(cudaErrorInvalidValue);
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = machine.current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  machine.current = device, machine.devices[device].has_context = true;
  return cudaSuccess;
}

static CUresult state_of(CUdevice device, unsigned*, int* active) {
  *active = machine.devices[device].has_context;
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  if (std::string(name) != "cuDevicePrimaryCtxGetState") return fail(cudaErrorInvalidValue);
  *function = reinterpret_cast<void*>(&state_of);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (machine.lost) return fail(cudaErrorInitializationError);
  Device& device = machine.devices[machine.current];
  *attributes = device.code, ++device.asked;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  machine.devices[machine.current].allowed = bytes;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "GPU %d", device);
  properties->major = machine.devices[device].major, properties->minor = machine.devices[device].minor;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "a sentence of CUDA's"; }

}  // extern "C"

namespace kda::cuda {
namespace {

// Each test has a machine of its own.
class Runtime : public testing::Test {
  void SetUp() override { machine = {}, forget_facts(); }
};

std::string reason(int32_t device, int32_t device_id = 0) {
  kda_exec exec{};
  exec.device = device, exec.device_id = device_id;
  const char* text = device_why_not(exec);
  return text ? text : "";
}

TEST_F(Runtime, WhyADeviceRunsNoKernel) {
  machine = {.devices = {{7, 5}, {8, 0}, {8, 9}, {9, 0}, {10, 0}, {12, 0}, {7, 0}}};
  for (int i : {1, 2, 3, 4, 5}) EXPECT_EQ(reason(KDA_CUDA, i), "") << i;
  for (int i : {0, 6}) EXPECT_EQ(reason(KDA_CUDA, i), "needs compute capability 8.0 or newer") << i;
  EXPECT_EQ(reason(KDA_CUDA, 7), "found fewer CUDA devices than exec.device_id asks for");
  EXPECT_EQ(reason(KDA_CPU), "runs on CUDA tensors only");
  EXPECT_EQ(machine.last, cudaSuccess);
}

TEST_F(Runtime, WhyThereIsNoDevice) {
  const int major = CUDART_VERSION / 1000;
  const std::string branch = major == 13 ? " (R580)" : major == 12 ? " (R525)" : "";
  const std::string needed = str("needs a driver for CUDA ", major, ".0 or newer", branch, ", got one for CUDA ");
  const struct {
    Machine machine;
    std::string wanted;
  } cases[] = {
      {{.driver = 0}, "found no CUDA driver"},
      {{.driver = 11080}, needed + "11.8"},
      {{.driver = major * 1000 - 910}, needed + str(major - 1, ".9")},
      {{}, "found a CUDA driver, but no device"},
      {{.driver = major * 1000, .answer = cudaErrorSystemNotReady},
       "asked CUDA for its devices and got: a sentence of CUDA's (802)"},
  };
  for (const auto& [there, wanted] : cases) {
    machine = there;
    EXPECT_EQ(reason(KDA_CUDA), wanted);
    EXPECT_EQ(machine.last, cudaSuccess) << "a later launch would fail for it";
    EXPECT_TRUE(info().ends_with("kernels for some; " + wanted)) << info();
    EXPECT_EQ(machine.last, cudaSuccess);
  }
}

TEST_F(Runtime, NamesItsDevices) {
  machine = {.devices = {{9, 0}, {7, 5}, {9, 1}}};
  EXPECT_NE(info().find("; driver for CUDA 13.0; device 0: GPU 0 (sm_90); device 1: GPU 1 (sm_75)"), std::string::npos)
      << info();
  EXPECT_EQ(hopper_why_not(0), nullptr);
  for (const int other : {1, 2}) EXPECT_STREQ(hopper_why_not(other), "needs compute capability 9.0 (Hopper)");
  EXPECT_EQ(multiprocessors(2), 102);
}

TEST_F(Runtime, HopperHasNoPtx) {
  machine = {.devices = {{9, 0}}};
  setenv("CUDA_FORCE_PTX_JIT", "1", 1), read_environment();
  EXPECT_STREQ(hopper_why_not(0), "has no PTX, which CUDA_FORCE_PTX_JIT asks for");
  setenv("CUDA_FORCE_PTX_JIT", "0", 1), read_environment();
  EXPECT_EQ(hopper_why_not(0), nullptr);
  unsetenv("CUDA_FORCE_PTX_JIT"), read_environment();
}

cudaFuncAttributes code_of(int ptx, int binary, size_t static_bytes = 0) {
  cudaFuncAttributes code{};
  code.ptxVersion = ptx, code.binaryVersion = binary, code.sharedSizeBytes = static_bytes;
  return code;
}
bool prepare(KernelCode& kernel, int device, int shared_bytes = 0) {
  machine.current = device;
  return kernel.prepare(&machine, device, shared_bytes);
}

// The binary's version is the GPU's, also where the driver has made it from the PTX of compute_80.
TEST_F(Runtime, KernelsStartEarlyWhereTheirCodeWaits) {
  machine = {.devices = {{8, 0, code_of(80, 80)},
                         {9, 0, code_of(90, 90)},
                         {9, 0, code_of(80, 90)},
                         {10, 0, code_of(90, 100)},
                         {10, 0, code_of(100, 100)},
                         {12, 0, code_of(80, 120)}}};
  KernelCode one, other;
  for (int round = 0; round < 3; ++round)
    for (const int device : {0, 1, 2, 3, 4, 5}) {
      EXPECT_EQ(prepare(one, device), device == 1 || device == 3 || device == 4) << device;
      EXPECT_EQ(machine.devices[device].asked, 1) << device;
    }
  EXPECT_TRUE(prepare(other, 1));
  EXPECT_EQ(machine.devices[1].asked, 2) << "once for each kernel";
  machine.devices.resize(80, {9, 0, code_of(80, 90)});
  for (int round = 1; round <= 2; ++round) {
    EXPECT_FALSE(prepare(one, 1 + 64)) << "not what device 1 says";
    EXPECT_EQ(machine.devices[65].asked, round) << "for devices from 64 on there is no table";
  }
  machine.lost = true;
  EXPECT_TRUE(prepare(one, 1)) << "nobody is asked";
  EXPECT_THROW(prepare(other, 2), Error);
}

// Static and dynamic shared memory together must not be more than a kernel has been allowed to have.
TEST_F(Runtime, StaticSharedMemoryCounts) {
  constexpr int kStatic = 10 << 10, kRoom = (48 << 10) - kStatic, kAll = (99 << 10) - kStatic;
  machine = {.devices = {{9, 0, code_of(90, 90, kStatic)}, {9, 0, code_of(90, 90, kStatic)}}};
  KernelCode kernel;
  for (const int bytes : {0, kRoom}) EXPECT_TRUE(prepare(kernel, 0, bytes));
  EXPECT_EQ(machine.devices[0].allowed, 0) << "as much as all kernels may have";
  EXPECT_EQ(machine.devices[0].asked, 1);
  for (const int bytes : {kRoom + 1, kAll, kRoom}) {
    EXPECT_TRUE(prepare(kernel, 0, bytes));
    EXPECT_EQ(machine.devices[0].allowed, kAll);
    EXPECT_EQ(machine.devices[0].asked, 2) << "once more, for the larger launch";
  }
  EXPECT_TRUE(prepare(kernel, 1, kRoom + 1)) << "the first launch on another device";
  EXPECT_EQ(machine.devices[1].allowed, kAll);
}

// Since CUDA 12 cudaSetDevice() makes a context.
TEST_F(Runtime, OnlyDevicesWithAContextAreCurrentAgain) {
  machine = {.devices = {{9, 0}, {9, 0}}};
  { const DeviceGuard guard(0); }
  EXPECT_FALSE(machine.devices[0].has_context) << "it was current already";
  {
    const DeviceGuard guard(1);
    EXPECT_EQ(machine.current, 1);
  }
  EXPECT_FALSE(machine.devices[0].has_context);
  EXPECT_EQ(machine.current, 1);
  machine.current = 0, machine.devices[0].has_context = true;
  { const DeviceGuard guard(1); }
  EXPECT_EQ(machine.current, 0);
}

TEST_F(Runtime, DevicesAreAskedOnce) {
  machine = {.devices = {{9, 0}, {8, 6}}};
  EXPECT_EQ(reason(KDA_CUDA, 1), "");
  machine.lost = true;
  EXPECT_EQ(reason(KDA_CUDA, 1), "");
  const DeviceFacts facts = facts_of(1);
  EXPECT_EQ(facts.capability, 86);
  EXPECT_EQ(facts.multiprocessors, 101);
  EXPECT_EQ(facts.shared_memory, 99 << 10);
  EXPECT_NE(reason(KDA_CUDA, 0), "") << "which nobody has asked about";
}

TEST_F(Runtime, FailuresAreSentences) {
  machine = {.devices = {{9, 0}}};
  try {
    multiprocessors(1);
    FAIL() << "there is no such device";
  } catch (const Error& e) {
    EXPECT_EQ(e.status, KDA_CUDA_ERROR);
    EXPECT_NE(std::string(e.what()).find("failed: a sentence of CUDA's (101)"), std::string::npos) << e.what();
  }
}

// CUDA fails in a fork of a process that has used it, and its own message does not say why.
TEST_F(Runtime, ForkedProcessesAreTold) {
  machine = {.lost = true, .devices = {{9, 0}}};
  EXPECT_EQ(reason(KDA_CUDA), "asked CUDA for its devices and got: a sentence of CUDA's (3)")
      << "this process is no fork";
  const pid_t child = fork();
  if (child == 0) {
    const bool declines = reason(KDA_CUDA).find("forked from one that used CUDA") != std::string::npos;
    std::string text;
    try {
      multiprocessors(0);
    } catch (const Error& e) {
      text = e.what();
    }
    _exit(declines && text.find("does not survive a fork") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace kda::cuda

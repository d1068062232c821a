// Thin checks around the CUDA runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "error.h"
#include "fork.h"
#include "kda/kda.h"

namespace kda::cuda {

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw Error(KDA_CUDA_ERROR,
                str("CUDA: ", call, " failed: ", cudaGetErrorString(error), " (", static_cast<int>(error), ")",
                    forked() ? "; this process was forked, and CUDA does not survive a fork: spawn it instead" : ""));
}
#define KDA_CUDA(call) ::kda::cuda::check(call, #call)

// Makes the call's device current, and the caller's again at the end, if that one has a context. Since CUDA 12
// cudaSetDevice() makes a context where there is none, which is half a gigabyte of a GPU that nobody uses.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    KDA_CUDA(cudaGetDevice(&previous_));
    if (device == previous_) return;
    KDA_CUDA(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_ && has_context(previous_)) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  static bool has_context(int device);

  int previous_ = 0;
  bool changed_ = false;
};

inline cudaStream_t stream_of(const kda_exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

// What is asked of a device, once in a process: nothing of it changes.
struct DeviceFacts {
  int capability;       // 10 * major + minor
  int multiprocessors;  // SMs
  int shared_memory;    // bytes that a block may have, at most
};
// Of the device, or of the GPU that this thread assumes.
DeviceFacts facts_of(int device);
void forget_facts();  // for tests, whose devices change
inline int multiprocessors(int device) { return facts_of(device).multiprocessors; }
inline int shared_memory_of_block(int device) { return facts_of(device).shared_memory; }

// What the driver says of a kernel's code on each device. It is asked once; later launches read a number.
class KernelCode {
 public:
  // To be called before a launch with so many bytes of dynamic shared memory, on the current device: lets the kernel
  // have them. Returns whether the code begins with a wait for the kernel in front, so that it may start early. Code
  // made from the PTX of compute_80 does not, whatever GPU runs it: there the wait is compiled out.
  bool prepare(const void* kernel, int device, int shared_bytes) {
    const uint32_t known = device < kDevices ? known_[device].load(std::memory_order_acquire) : 0;
    const bool enough = known & kMayHaveAll || (known & kStaticBytes) + static_cast<uint32_t>(shared_bytes) <= kUsual;
    return known & kAsked && enough ? known & kWaits : ask(kernel, device, shared_bytes);
  }

 private:
  static constexpr int kDevices = 64;                // those beyond are asked at each launch
  static constexpr uint32_t kUsual = 48 << 10;       // shared memory, static and dynamic, that all kernels may have
  static constexpr uint32_t kAsked = 1u << 31;       // the other bits are known
  static constexpr uint32_t kWaits = 1u << 30;       // the code waits for the kernel in front
  static constexpr uint32_t kMayHaveAll = 1u << 29;  // may have all shared memory of the device
  static constexpr uint32_t kStaticBytes = kMayHaveAll - 1;

  bool ask(const void* kernel, int device, int shared_bytes);

  std::atomic<uint32_t> known_[kDevices]{};
};

// Why a device does not run code for sm_90a, or for sm_100a; or nullptr.
const char* hopper_why_not(int device);
const char* blackwell_why_not(int device);

// Why no kernel of this library runs on the call's device, or nullptr.
const char* device_why_not(const kda_exec& exec);

}  // namespace kda::cuda

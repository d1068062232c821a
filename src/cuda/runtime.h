// Thin checks around the CUDA runtime.
#pragma once
#include <cuda_runtime_api.h>

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

// Makes the call's device current, and the caller's again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    KDA_CUDA(cudaGetDevice(&previous_));
    if (device != previous_) KDA_CUDA(cudaSetDevice(device));
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline cudaStream_t stream_of(const kda_exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

// SMs of a device.
int multiprocessors(int device);

// Bytes of shared memory that a block may have, at most.
int shared_memory_of_block(int device);

// Why a device does not run code for sm_90a, or for sm_100a; or nullptr.
const char* hopper_why_not(int device);
const char* blackwell_why_not(int device);

// Why no kernel of this library runs on the call's device, or nullptr.
const char* device_why_not(const kda_exec& exec);

}  // namespace kda::cuda

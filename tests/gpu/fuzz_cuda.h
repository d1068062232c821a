// Calls of the fuzzer on the GPU: its arena, where all tensors lie, is copied to the device and back as a whole.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "fuzz_calls.h"

namespace kda::test {

inline void expect_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(error));
}

// Memory that grows and is poison.
class DeviceRoom {
 public:
  char* poisoned(int64_t bytes) {
    if (bytes > size_) {
      expect_cuda(cudaFree(data_), "cudaFree");
      data_ = nullptr, size_ = 0;
      expect_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
      size_ = bytes;
    }
    expect_cuda(cudaMemset(data_, 0xff, bytes), "cudaMemset");
    return static_cast<char*>(data_);
  }

 private:
  void* data_ = nullptr;  // until the process ends
  int64_t size_ = 0;
};

template <class Args>
kda_status run_on_cuda(Args a, Arena& arena, uint64_t workspace_bytes) {
  constexpr int64_t kBehind = 4096;  // bytes behind the workspace, which must stay poison
  static DeviceRoom tensors, room;
  // On the device tensors are aligned as they are here, to 16 bytes at most.
  char* copy = tensors.poisoned(arena.used + 16) + reinterpret_cast<uintptr_t>(arena.bytes.data()) % 16;
  expect_cuda(cudaMemcpy(copy, arena.bytes.data(), arena.used, cudaMemcpyHostToDevice), "to the device");
  for (const Field& f : fields(a))
    if (f.t->data) f.t->data = copy + (static_cast<char*>(f.t->data) - arena.bytes.data());
  char* workspace = room.poisoned(static_cast<int64_t>(workspace_bytes) + kBehind);
  a.exec.workspace = workspace_bytes ? workspace : nullptr, a.exec.workspace_bytes = workspace_bytes;
  const kda_status status = call(a);
  expect_cuda(cudaDeviceSynchronize(), "the call");
  expect_cuda(cudaMemcpy(arena.bytes.data(), copy, arena.used, cudaMemcpyDeviceToHost), "from the device");
  std::string behind(kBehind, 0);
  expect_cuda(cudaMemcpy(behind.data(), workspace + workspace_bytes, kBehind, cudaMemcpyDeviceToHost),
              "from the device");
  if (behind.find_first_not_of('\xff') != std::string::npos) fail("wrote behind its workspace");
  return status;
}

}  // namespace kda::test

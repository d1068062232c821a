// How a kernel is launched. A library without CUDA has another version of this file, in src/cuda_host.
#pragma once
#include <cuda_runtime.h>

#include "cuda/runtime.h"

namespace kda::cuda {

// Starts a kernel when the one in front of it has ended.
template <auto kKernel, class... Args>
void start(const kda_exec& exec, dim3 grid, dim3 block, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.stream = stream_of(exec);
  KDA_CUDA(cudaLaunchKernelEx(&config, kKernel, args...));
}

// Launches a kernel that begins with wait_for_stream(): early, where its code has that wait.
template <auto kKernel, class... Args>
void launch(const kda_exec& exec, dim3 grid, int threads, int shared_bytes, Args... args) {
  static KernelCode code;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads)), config.stream = stream_of(exec);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &early;
  config.numAttrs = code.prepare(reinterpret_cast<const void*>(kKernel), exec.device_id, shared_bytes) ? 1 : 0;
  KDA_CUDA(cudaLaunchKernelEx(&config, kKernel, args...));
}

}  // namespace kda::cuda

// Launches of test kernels. Not by <<<>>>, which only nvcc reads: these kernels run in tests/emulator, too.
#pragma once
#include <cuda_runtime.h>

namespace kda::test {

struct Shape {
  int blocks, threads;
  size_t shared_bytes = 0;
};

// cudaGetLastError() tells of a failure.
template <class... Params, class... Args>
void launch(const Shape& shape, void (*kernel)(Params...), Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks)),
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace kda::test

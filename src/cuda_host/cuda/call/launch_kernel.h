// In place of src/cuda/call/launch_kernel.h in a library without CUDA. Kernels are template arguments that nothing
// uses, so the compiler makes no code of them.
#pragma once
#include <cuda_runtime.h>

#include "cuda/runtime.h"

namespace kda::cuda {

[[noreturn]] void refuse_launch();

template <auto, class... Args>
void start(const kda_exec&, dim3, dim3, const Args&...) {
  refuse_launch();
}
template <auto, class... Args>
void launch(const kda_exec&, dim3, int, int, const Args&...) {
  refuse_launch();
}

}  // namespace kda::cuda

#include "late_inputs.h"

#include <cuda_runtime.h>

#include <cstdlib>

namespace kda::test {
namespace {

__global__ void write_kernel(const __grid_constant__ LateWrites writes, int64_t cycles) {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  for (const int64_t start = clock64(); clock64() - start < cycles;) {
  }
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  for (int w = 0; w < writes.count; ++w) {
    const LateWrite& x = writes.all[w];
    const bool wide = (reinterpret_cast<uintptr_t>(x.to) | reinterpret_cast<uintptr_t>(x.from)) % sizeof(uint4) == 0;
    const int64_t words = wide ? x.bytes / static_cast<int64_t>(sizeof(uint4)) : 0;
    for (int64_t i = first; i < words; i += step) static_cast<uint4*>(x.to)[i] = static_cast<const uint4*>(x.from)[i];
    for (int64_t i = words * sizeof(uint4) + first; i < x.bytes; i += step)
      static_cast<char*>(x.to)[i] = static_cast<const char*>(x.from)[i];
  }
}

__global__ void read_kernel(unsigned* to, const unsigned* from, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

}  // namespace

bool can_write_late() {
  int device = 0, major = 0;
  if (std::getenv("KDA_TEST_SHORT_LIST") || cudaGetDevice(&device) != cudaSuccess) return false;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

cudaStream_t late_stream() {
  static const cudaStream_t own = [] {
    cudaStream_t stream = nullptr;
    cudaStreamCreate(&stream);
    return stream;
  }();
  return own;
}

cudaError_t write_late(const LateWrites& writes) {
  constexpr int64_t kCycles =
      500'000;  // a quarter of a millisecond; few blocks leave room for those of the next kernel
  write_kernel<<<8, 256, 0, late_stream()>>>(writes, kCycles);
  return cudaGetLastError();
}

cudaError_t read_early(unsigned* to, const unsigned* from, int count) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = 1, config.blockDim = 256, config.stream = late_stream();
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, read_kernel, to, from, count);
}

int ptx_of_late_writer() {
  cudaFuncAttributes code{};
  cudaFuncGetAttributes(&code, write_kernel);
  return code.ptxVersion;
}

}  // namespace kda::test

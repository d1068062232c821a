// The CUDA runtime of the emulated GPU.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "cuda.h"
#include "cuda_runtime.h"
#include "global_memory.h"

namespace {

using kda::emulator::gpu;

cudaError_t last = cudaSuccess;
std::string last_failure;
std::map<const void*, size_t> allowed;  // shared memory of kernels that asked for more than all have

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = gpu().multiprocessors; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = gpu().major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = gpu().minor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu().shared_memory_of_block; return cudaSuccess;
  }
  return result(cudaErrorInvalidValue);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice);
  *properties = {
      .name = "emulated", .major = gpu().major, .minor = gpu().minor, .multiProcessorCount = gpu().multiprocessors};
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  const bool known = std::string(name) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {.sharedSizeBytes = 0, .ptxVersion = gpu().ptx, .binaryVersion = 10 * gpu().major + gpu().minor};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || bytes > gpu().shared_memory_of_block) return result(cudaErrorInvalidValue);
  allowed[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = kda::emulator::allocate(bytes);
  return result(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* memory) {
  return result(kda::emulator::release(memory) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorLaunchFailure: return last_failure.c_str();
    case cudaErrorInvalidConfiguration: return "the grid or its blocks are larger than a GPU takes, or empty";
    case cudaErrorInvalidDevice: return "there is no such device";
    case cudaErrorMemoryAllocation: return "out of memory";
    default: return "a value that the emulator does not know";
  }
}

namespace kda::emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread) {
  const dim3 &g = config.gridDim, &b = config.blockDim;
  const auto known = allowed.find(kernel);
  const size_t most = known == allowed.end() ? 48 << 10 : std::max<size_t>(known->second, 48 << 10);
  const bool fits = g.x && g.y && g.z && g.x < 1u << 31 && g.y < 1u << 16 && g.z < 1u << 16 && b.x && b.y && b.z &&
                    uint64_t{b.x} * b.y * b.z <= 1024 && config.dynamicSmemBytes <= most;
  if (!fits) return result(cudaErrorInvalidConfiguration);
  unsigned cluster = 0;
  bool early = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const auto& [id, val] = config.attrs[i];
    early |= id == cudaLaunchAttributeProgrammaticStreamSerialization && val.programmaticStreamSerializationAllowed;
    if (id != cudaLaunchAttributeClusterDimension) continue;
    const auto& of = val.clusterDim;
    if (!of.x || of.x > 8 || of.y != 1 || of.z != 1 || g.x % of.x) return result(cudaErrorInvalidConfiguration);
    cluster = of.x;
  }
  const bool waits = gpu().ptx >= 90;  // older code has no instruction to wait with
  const std::string failure =
      early && !waits
          ? "is launched before the kernel in front has ended, and its code does not wait for that"
          : run({.grid = g, .block = b, .shared_bytes = config.dynamicSmemBytes, .cluster = cluster, .early = early},
                thread);
  if (failure.empty()) return cudaSuccess;
  last_failure = failure;
  return result(cudaErrorLaunchFailure);
}

}  // namespace kda::emulator

// The CUDA runtime of the emulated GPU.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"
#include "global_memory.h"

namespace {

using kda::emulator::gpu;

cudaError_t last = cudaSuccess;
std::string last_failure;

struct Device {
  std::map<const void*, size_t> allowed;  // dynamic shared memory of kernels that asked for more than all have
  bool has_context = false;
};
std::vector<Device> devices(static_cast<size_t>(gpu().devices));
thread_local int current = 0;
thread_local bool bound = false;  // to the current device's context

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}
bool exists(int device) { return device >= 0 && device < gpu().devices; }
// The current device, of which something is asked that makes a context.
Device& in_use() {
  Device& device = devices[static_cast<size_t>(current)];
  device.has_context = bound = true;
  return device;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpu().devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
  current = device, in_use();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = gpu().multiprocessors; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = gpu().major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = gpu().minor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu().shared_memory_of_block; return cudaSuccess;
  }
  return result(cudaErrorInvalidValue);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
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
  const std::string wanted = name;
  *function = wanted == "cuTensorMapEncodeTiled"       ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled)
              : wanted == "cuDevicePrimaryCtxGetState" ? reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState)
                                                       : nullptr;
  return cudaSuccess;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!exists(device)) return CUDA_ERROR_INVALID_VALUE;
  *flags = 0, *active = devices[static_cast<size_t>(device)].has_context;
  return CUDA_SUCCESS;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  in_use();
  *attributes = {.sharedSizeBytes = kda::emulator::static_bytes_of(kernel),
                 .ptxVersion = gpu().ptx,
                 .binaryVersion = 10 * gpu().major + gpu().minor};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  const int all = bytes + static_cast<int>(kda::emulator::static_bytes_of(kernel));
  if (bytes < 0 || all > gpu().shared_memory_of_block) return result(cudaErrorInvalidValue);
  in_use().allowed[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  in_use();
  *memory = kda::emulator::allocate(bytes);
  return result(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* memory) {
  return result(kda::emulator::release(memory) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  in_use();
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  in_use();
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  in_use();
  return cudaSuccess;
}

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

bool thread_has_context() { return bound; }

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread) {
  const dim3 &g = config.gridDim, &b = config.blockDim;
  Device& device = in_use();
  const size_t usual = (48 << 10) - std::min<size_t>(static_bytes_of(kernel), 48 << 10);
  const auto known = device.allowed.find(kernel);
  const size_t most = known == device.allowed.end() ? usual : std::max(known->second, usual);
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

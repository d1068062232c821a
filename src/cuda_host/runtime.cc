// The CUDA runtime of a library without it. No call comes here: implementations on CUDA decline before (src/cuda/
// runtime.cc), unless a GPU is assumed, and then only explain and workspace are answered.
#include <cuda_runtime_api.h>

#include "cuda/call/launch_kernel.h"
#include "error.h"

static constexpr const char* kWithout = "this library was built without CUDA";

void kda::cuda::refuse_launch() { throw Error(KDA_UNSUPPORTED, str("CUDA: ", kWithout)); }

cudaError_t cudaGetDeviceCount(int*) { return cudaErrorNotSupported; }
cudaError_t cudaGetDevice(int*) { return cudaErrorNotSupported; }
cudaError_t cudaSetDevice(int) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNotSupported; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaErrorNotSupported; }
cudaError_t cudaDriverGetVersion(int*) { return cudaErrorNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaErrorNotSupported; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaErrorNotSupported; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGetLastError() { return cudaErrorNotSupported; }
const char* cudaGetErrorString(cudaError_t) { return kWithout; }

// Runs kernels of the emulator's own tests, and looks at what went wrong. Each unit that includes this has shared
// memory of its own.
#pragma once
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cuda/ptx/sm80.h"

namespace kda::test {
namespace {

KDA_EMULATED_SHARED_MEMORY
float4* memory() {
  extern __shared__ float4 dynamic[];
  return dynamic;
}
[[maybe_unused]] unsigned shared() { return cuda::ptx::shared_address(memory()); }

// Launches two blocks and returns what went wrong in one of them.
template <class... Params, class... Args>
std::string run(unsigned threads, unsigned bytes, void (*kernel)(Params...), Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = 2, config.blockDim = threads, config.dynamicSmemBytes = bytes;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  return error == cudaSuccess ? "" : cudaGetErrorString(cudaGetLastError());
}
// Runs a kernel in several orders of warps and lanes.
template <class... Params, class... Args>
std::set<std::string> run_often(unsigned threads, unsigned bytes, void (*kernel)(Params...), Args... args) {
  std::set<std::string> all;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    emulator::set_seed(seed);
    all.insert(run(threads, bytes, kernel, args...));
  }
  emulator::set_seed(1);
  return all;
}
const std::set<std::string> kFine = {""};

testing::AssertionResult says(const std::set<std::string>& all, const char* what) {
  for (const std::string& one : all)
    if (one.find(what) == std::string::npos)
      return testing::AssertionFailure() << "\"" << one << "\" does not say \"" << what << "\"";
  return testing::AssertionSuccess();
}

}  // namespace
}  // namespace kda::test

// What the rest of the library asks about GPUs. No CUDA type leaves src/cuda. Operators: declarations.h of each folder.
#pragma once
#include <string>

namespace kda::cuda {

// Why kernels for Blackwell are not preferred, for which the environment can ask; or nullptr.
const char* blackwell_unsuited();
// Whether the library has kernels. Without CUDA it has all but those: it answers for an assumed GPU.
bool is_built();
// For explain and workspace of this thread: see kda_assume_gpu.
void assume_gpu(int capability, int multiprocessors);
bool gpu_is_assumed();
std::string info();  // toolkit, architectures, driver, devices

}  // namespace kda::cuda

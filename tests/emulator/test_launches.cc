// Kernels that are launched before the one in front of them has ended, and touch what that may still write or hold.
#include <vector>

#include "cuda/ptx/sm100.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

template <class... Params, class... Args>
std::string run_early(void (*kernel)(Params...), Args... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = 1, config.blockDim = 32, config.dynamicSmemBytes = 1024, config.attrs = &early, config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  return error == cudaSuccess ? "" : cudaGetErrorString(cudaGetLastError());
}

// What a kernel does before it waits. Behind the wait it does all of that.
enum class Before { kNothing, kHints, kCopies, kBulkCopies, kReadsAFlag, kChangesAFlag, kAdds, kAllocates };
constexpr Before kAll[] = {Before::kCopies, Before::kBulkCopies, Before::kReadsAFlag, Before::kChangesAFlag,
                           Before::kAdds};

__device__ void touch(Before what, unsigned* memory) {
  const bool first = threadIdx.x == 0;
  if (what == Before::kHints) ptx::prefetch(memory), (void)ptx::peek(reinterpret_cast<int32_t*>(memory));
  if (what == Before::kCopies && first) ptx::copy16(shared() + 128, memory), ptx::wait_for_all_copies();
  if (what == Before::kBulkCopies && first) {
    ptx::arrive_expecting(shared(), 16), ptx::copy_bulk_to_shared(shared() + 256, memory, 16, shared());
    ptx::wait_barrier(shared(), 0);
  }
  if (what == Before::kReadsAFlag && first) (void)ptx::load_acquire(memory + 4);
  if (what == Before::kChangesAFlag && first) ptx::store_release(memory + 4, 1);
  if (what == Before::kAdds && first) atomicAdd(memory + 5, 1);
  if (what == Before::kAllocates) {
    ptx::tmem_alloc(shared() + 64, 32);
    __syncwarp();
    ptx::tmem_dealloc(ptx::load_shared(shared() + 64), 32);
  }
}
__global__ void start(Before before, unsigned* memory) {
  if (threadIdx.x == 0) ptx::init_barrier(shared(), 1);
  __syncwarp();
  touch(before, memory);
  ptx::wait_for_kernel_in_front();
  if (before != Before::kNothing) return;
  for (const Before what : kAll) touch(what, memory);
  touch(Before::kAllocates, memory);
}

// A GPU newer than all that have code of their own runs what the driver makes from the PTX of compute_80.
TEST(EmulatedLaunches, EarlyOnesNeedCodeThatWaits) {
  alignas(16) unsigned memory[8] = {};
  cudaFuncAttributes code;
  ASSERT_EQ(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(start)), cudaSuccess);
  EXPECT_EQ(code.binaryVersion, 10 * emulator::gpu().major + emulator::gpu().minor);
  const char* const fails = "is launched before the kernel in front has ended, and its code does not wait for that";
  EXPECT_EQ(run_early(start, Before::kNothing, memory), code.ptxVersion < 90 ? fails : "");
}

TEST(EmulatedLaunches, TouchNothingBeforeTheyWait) {
  alignas(16) unsigned memory[8] = {};
  if (emulator::gpu().ptx < 90) GTEST_SKIP() << "on this GPU none is early";
  const auto with = [&](Before before) { return std::set{run_early(start, before, memory)}; };
  EXPECT_EQ(with(Before::kNothing), kFine);
  EXPECT_EQ(with(Before::kHints), kFine) << "they change nothing, whatever they find";
  EXPECT_TRUE(says(with(Before::kCopies), "copies before it waits for the kernel in front"));
  EXPECT_TRUE(says(with(Before::kBulkCopies), "copies before it waits for the kernel in front"));
  EXPECT_TRUE(says(with(Before::kReadsAFlag), "reads a flag before it waits for the kernel in front"));
  EXPECT_TRUE(says(with(Before::kChangesAFlag), "changes a flag before it waits for the kernel in front"));
  EXPECT_TRUE(says(with(Before::kAdds), "adds to global memory before it waits for the kernel in front"));
  EXPECT_TRUE(says(with(Before::kAllocates), "allocates tensor memory before it waits for the kernel in front"));
  for (const Before before : {Before::kCopies, Before::kAdds, Before::kAllocates})
    EXPECT_EQ(run(32, 1024, start, before, static_cast<unsigned*>(memory)), "") << "not launched early";
}

// ---- shared memory of a fixed size ----

__global__ void copy_backwards_kernel(const float* from, float* to) {
  __shared__ float all[32 << 8];  // 32 KiB
  all[threadIdx.x] = from[threadIdx.x];
  __syncthreads();  // all are there
  to[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

TEST(EmulatedLaunches, StaticSharedMemoryCounts) {
  float from[64], to[64] = {};
  for (int i = 0; i < 64; ++i) from[i] = static_cast<float>(i);
  const auto with = [&](unsigned bytes) { return run(64, bytes, copy_backwards_kernel, &from[0], &to[0]); };
  cudaFuncAttributes code;
  ASSERT_EQ(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(copy_backwards_kernel)), cudaSuccess);
  EXPECT_EQ(code.sharedSizeBytes, 32u << 10);
  EXPECT_EQ(with(16 << 10), "");
  EXPECT_EQ(to[0], 63);
  EXPECT_NE(with((16 << 10) + 16), "") << "together they are more than 48 KiB, for which nobody has asked";
  const int most = emulator::gpu().shared_memory_of_block - (32 << 10);
  EXPECT_EQ(cudaFuncSetAttribute(copy_backwards_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 1),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(copy_backwards_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
            cudaSuccess);
  EXPECT_EQ(with(static_cast<unsigned>(most)), "");
  EXPECT_NE(with(static_cast<unsigned>(most) + 16), "");
  cudaGetLastError();
}

// Their sizes are those of the kernel's own variables, so no function that kernels call may have some.
TEST(EmulatedLaunches, KernelsDeclareTheirSharedMemory) { EXPECT_EQ(emulator::misplaced_variables(), ""); }

}  // namespace
}  // namespace kda::test

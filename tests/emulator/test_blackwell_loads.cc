// What the emulator finds where registers of a load from tensor memory are used before the load has been waited for.
#include <utility>
#include <vector>

#include "cuda/ptx/sm100.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr unsigned kColumns = 32, kBytes = 16, kThreads = 128, kBlocks = 2;

// Each thread stores two numbers, loads them, and says what it has: seen is [blocks][threads][2].
__global__ void use_loads(int how, float* seen) {
  if (threadIdx.x < 32) ptx::tmem_alloc(shared(), kColumns);
  __syncthreads();
  const unsigned tensor = ptx::load_shared(shared()), own = ptx::tmem_at(tensor, threadIdx.x / 32 * 32, 0);
  float given[2] = {1, 2}, first[1] = {}, second[1] = {};
  ptx::store_tmem(own, given);
  ptx::wait_for_tmem_stores();
  float sum[2] = {};
  ptx::load_tmem(first, own);
  if (how == 1) sum[0] = first[0];
  if (how == 2) first[0] = 0;
  if (how == 3) ptx::wait_for_tmem_loads(), sum[0] = first[0];
  ptx::load_tmem(second, own + 1);
  if (how == 4) sum[1] = second[0];
  ptx::wait_for_tmem_loads();
  if (how != 1) sum[0] = first[0];
  if (how != 4) sum[1] = second[0];
  float* const to = seen + (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  to[0] = sum[0], to[1] = sum[1];
  __syncthreads();
  if (threadIdx.x < 32) ptx::tmem_dealloc(tensor, kColumns);
}

// How many threads have seen the right numbers: the first, the second.
std::pair<int, int> right(int how) {
  std::vector<float> seen(kBlocks * kThreads * 2);
  EXPECT_EQ(run_often(kThreads, kBytes, use_loads, how, seen.data()), kFine);
  std::pair<int, int> count;
  for (size_t i = 0; i < seen.size(); i += 2) count.first += seen[i] == 1, count.second += seen[i + 1] == 2;
  return count;
}

TEST(EmulatorOfBlackwell, LoadsComeWhenTheyAreWaitedFor) {
  constexpr int kAll = kBlocks * kThreads;
  EXPECT_EQ(right(0), std::pair(kAll, kAll)) << "one wait for both";
  EXPECT_EQ(right(1), std::pair(0, kAll)) << "the first is used too early";
  EXPECT_EQ(right(3), std::pair(kAll, kAll)) << "a wait for each";
  EXPECT_EQ(right(4), std::pair(kAll, 0)) << "the second is used too early";
  std::vector<float> seen(kBlocks * kThreads * 2);
  EXPECT_TRUE(says(run_often(kThreads, kBytes, use_loads, 2, seen.data()),
                   "whose registers have been written, or given up, in between"));
}

}  // namespace
}  // namespace kda::test

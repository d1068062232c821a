// The same as test_blackwell.cc, of two blocks that act together.
#include "cuda/ptx/sm100.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr unsigned kA = 0, kB = 16384, kBarrier = 32768, kPlace = kBarrier + 16, kBytes = kPlace + 16;
unsigned barrier() { return shared() + kBarrier; }
unsigned place() { return shared() + kPlace; }
bool is_first_warp() { return threadIdx.x < 32; }

const auto often = [](const auto& kernel, int how) { return run_often(128, kBytes, kernel, how); };

// ---- columns ----

__global__ void allocate(int how) {
  const unsigned rank = ptx::rank();
  if (how == 1 && rank == 1) return ptx::sync_cluster();
  const unsigned columns = how == 2 && rank == 1 ? 32 : 64;
  if (is_first_warp()) {
    if (how == 3) ptx::tmem_alloc(place(), columns);
    else ptx::tmem_alloc<2>(place() + (how == 4 ? 4 * rank : 0), columns);
  }
  ptx::sync_cluster();
  const unsigned tensor = ptx::load_shared(place());
  if (how == 5 && is_first_warp()) ptx::tmem_dealloc<2>(tensor, columns);
  ptx::sync_cluster();
  if (is_first_warp()) ptx::tmem_dealloc<2>(tensor, columns);
}

TEST(EmulatorOfBlackwellPairs, AllocateTogether) {
  EXPECT_EQ(often(allocate, 0), kFine);
  EXPECT_TRUE(says(often(allocate, 1), "wait at tcgen05.alloc in test_blackwell_pairs.cc:")) << "one of two";
  EXPECT_TRUE(says(often(allocate, 2), "meets another block that is at tcgen05.alloc, for ")) << "other columns";
  EXPECT_TRUE(says(often(allocate, 3), "mixes tcgen05 of one block and of two"));
  EXPECT_TRUE(says(often(allocate, 4), "meets another block that is at tcgen05.alloc")) << "other places";
  EXPECT_TRUE(says(often(allocate, 5), "which were not allocated so")) << "twice";
}

// ---- products ----

constexpr unsigned kShape = ptx::umma_of<__half>({.M = 256, .N = 32});
uint64_t operand(unsigned at) { return ptx::operand_at(shared() + at, 0, 1024, ptx::Swizzling::k128); }

__global__ void multiply(int how) {
  const unsigned rank = ptx::rank();
  if (threadIdx.x == 0) ptx::init_barrier(barrier(), 1);
  if (is_first_warp()) ptx::tmem_alloc<2>(place(), 64);
  ptx::sync_cluster();
  const unsigned tensor = ptx::load_shared(place());
  for (unsigned i = threadIdx.x; i < kBarrier / 16; i += 128) ptx::store_shared4(shared() + i * 16, uint4{});
  if (!(how == 1 && rank == 1)) ptx::fence_shared_for_async();
  if (how == 2) __syncthreads();
  else ptx::sync_cluster();
  if (threadIdx.x == 0 && rank == 0) {
    ptx::umma_f16<2>(tensor, operand(kA), operand(kB), kShape, how == 3);
    if (how == 4) ptx::commit_umma<2>(barrier());
    else if (how == 5) ptx::commit_umma(barrier());
    else ptx::commit_umma_to<2>(3, barrier());
  }
  if (how != 6) ptx::wait_barrier(barrier(), 0);
  if (!(how == 7 && rank == 1)) ptx::fence_tmem_after_sync();
  float x[1];
  ptx::load_tmem(x, ptx::tmem_at(tensor, threadIdx.x / 32 * 32, 0));
  ptx::wait_for_tmem_loads();
  if (how == 8) ptx::store_shared(shared() + kA + threadIdx.x * 4, 1);
  if (how == 9) __syncthreads();
  else ptx::sync_cluster();
  if (is_first_warp()) ptx::tmem_dealloc<2>(tensor, 64);
}

TEST(EmulatorOfBlackwellPairs, MultiplyTogether) {
  EXPECT_EQ(often(multiply, 0), kFine);
  EXPECT_TRUE(says(often(multiply, 1), "without a fence for the async proxy")) << "in the other block";
  EXPECT_FALSE(often(multiply, 2).count("")) << "the other block's operands may not be there";
  EXPECT_TRUE(says(often(multiply, 3), "which nobody wrote"));
  EXPECT_TRUE(says(often(multiply, 4), "wait at the mbarrier at ")) << "the other block is not told";
  EXPECT_TRUE(says(often(multiply, 5), "mixes tcgen05 of one block and of two"));
  EXPECT_FALSE(often(multiply, 6).count("")) << "nothing waits";
  EXPECT_TRUE(says(often(multiply, 7), "without tcgen05.fence::after_thread_sync in between"));
  EXPECT_EQ(often(multiply, 8), kFine) << "the operands of both are free";
  EXPECT_TRUE(says(often(multiply, 9), "of which the end of a load from test_blackwell_pairs.cc:"));
}

__global__ void describe(unsigned shape) {
  ptx::rank();
  if (threadIdx.x == 0) ptx::umma_f16<2>(0, operand(kA), operand(kB), shape, false);
}

TEST(EmulatorOfBlackwellPairs, HaveShapesOfTheirOwn) {
  const auto said = [](unsigned M, unsigned N) {
    return run(32, kBytes, describe, ptx::umma_of<__half>({.M = M, .N = N}));
  };
  EXPECT_NE(said(64, 32).find("M = 64 by blocks: 2"), std::string::npos);
  EXPECT_NE(said(256, 24).find("N = 24 with M = 256"), std::string::npos);
  EXPECT_NE(said(256, 32).find("uses tensor memory, of which the block has none"), std::string::npos);
}

}  // namespace
}  // namespace kda::test
